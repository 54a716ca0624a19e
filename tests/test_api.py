"""The public names, their arguments and defaults, and who may import whom.

``python -m tests.test_api`` writes ``signatures.txt`` anew.
"""

import ast
import graphlib
import importlib
import inspect
import pathlib
import re

import optax
import pytest

import optzoo
from tests.public import BY_LAST, MODULES, NAMES

PACKAGE = pathlib.Path(optzoo.__file__).parent
FAMILIES = ["first_order", "proximal", "second_order"]


@pytest.mark.parametrize("module", ["optzoo", *MODULES])
def test_public_names_are_those_that_are_imported_as_themselves(module):
    """Type checkers know these as public."""
    module = importlib.import_module(module)
    nodes = list(ast.walk(ast.parse(inspect.getsource(module))))
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    public = [a for node in froms for a in node.names if a.asname]
    assert all(alias.asname == alias.name for alias in public)
    assert {alias.name for alias in public} <= {*dir(module)}


def test_the_root_has_what_a_training_script_needs():
    """About a hundred names; others are in modules that say what they are about."""
    assert len(optzoo.__all__) <= 100
    assert {f"optzoo.{name}" for name in optzoo.__all__} == {n for n in NAMES if n.count(".") == 1}


def test_an_unknown_name_is_refused():
    with pytest.raises(AttributeError, match="'optzoo' has no attribute 'addam'"):
        _ = optzoo.addam


@pytest.mark.parametrize("name", NAMES)
def test_public_names_have_docstrings(name):
    thing = NAMES[name]
    if not isinstance(thing, dict):  # the tables are data
        assert inspect.getdoc(thing), name


@pytest.mark.parametrize("name", sorted(n for n in optzoo.__all__ if hasattr(optax, n)))
def test_names_of_optax_say_how_they_differ(name):
    assert f"``optax.{name}``" in inspect.getdoc(getattr(optzoo, name))


@pytest.mark.parametrize("name", optzoo.CATALOG)
def test_catalogue_is_public(name):
    entry = optzoo.CATALOG[name]
    assert BY_LAST[name] is entry.factory
    assert entry.factory.__name__ == name
    assert callable(getattr(optzoo.rules, entry.rows))


@pytest.mark.parametrize("name", optzoo.catalog.DISTRIBUTED)
def test_the_distributed_family_is_public(name):
    method = optzoo.catalog.DISTRIBUTED[name]
    assert BY_LAST[name] is method.factory
    assert method.make(optzoo.adam(), 8, axis_name="replica").init({})


@pytest.mark.parametrize("name", [*optzoo.catalog.WRAPPERS, *optzoo.catalog.DISTRIBUTED])
def test_docstrings_of_wrappers_are_complete(name):
    wrapper = BY_LAST[name]
    original = {**optzoo.catalog.WRAPPERS, **optzoo.catalog.DISTRIBUTED}[name].original
    doc = inspect.getdoc(wrapper)
    parts = [".. math::", "Args:", "References:"]
    if name == "stacked":  # which changes no number
        parts = ["Args:", "Raises:"]
    if original is not None:
        assert f"as in ``{original}``" in doc.splitlines()[0]
        parts.append("Differences from the original:")
    for part in parts:
        assert part in doc, part
    described = doc.split("Args:")[1]
    assert all(f"{argument}:" in described for argument in inspect.signature(wrapper).parameters)


@pytest.mark.parametrize(
    ("folder", "names"),
    [
        ("wrappers", [*optzoo.catalog.WRAPPERS, "divide_states", "param_groups"]),
        ("distributed", optzoo.catalog.DISTRIBUTED),
    ],
)
def test_no_docstring_of_a_wrapper_is_forgotten(folder, names):
    files = {path.stem for path in (PACKAGE / folder).glob("[a-z]*.py")}
    assert {BY_LAST[name].__module__.rsplit(".", 1)[1] for name in names} == files


@pytest.mark.parametrize("name", [n for n, thing in NAMES.items() if inspect.isfunction(thing)])
def test_signatures_read_well(name):
    """``help`` shows annotations as they are written, without what they stand for."""
    shown = str(inspect.signature(NAMES[name]))
    assert not re.search(r"Union\[|collections\.abc|jax\._src|optax\._src", shown), shown


SIGNATURES = pathlib.Path(__file__).with_name("signatures.txt")


def signatures():
    """The arguments and defaults of all that is public, and what the tables say."""
    things = {name.removeprefix("optzoo."): thing for name, thing in NAMES.items()}
    others = ("sgd", "nadam_keras", "EmbOptimType.ADAM")  # all modes of FBGEMM have the same
    things |= {f"create({n!r})": optzoo.registry.factory_of(n) for n in others}
    takes = lambda thing: inspect.isfunction(thing) or hasattr(thing, "_fields")
    lines = [f"{name}{signature(thing)}" for name, thing in sorted(things.items()) if takes(thing)]
    tables = {**optzoo.CATALOG, **optzoo.catalog.DISTRIBUTED, **optzoo.catalog.WRAPPERS}
    for name, entry in sorted(tables.items()):
        if not entry.factory.__module__.startswith("optzoo."):
            continue  # registered by another test
        fields = entry._replace(factory=entry.factory.__name__)._asdict()
        if "sized" in fields:  # arguments by a function of the number of replicas
            fields["sized"] = list(fields["sized"])
        lines.append(f"{type(entry).__name__} {name}: {fields}")
    return "\n".join(lines) + "\n"


def signature(thing):
    """Without annotations; a default that is a function by its name."""
    empty = inspect.Parameter.empty
    parameters = []
    for parameter in inspect.signature(thing).parameters.values():
        default = parameter.default
        if default is not empty:
            default = getattr(default, "__name__", default)
        parameters.append(parameter.replace(annotation=empty, default=default))
    return inspect.Signature(parameters)


def test_arguments_and_defaults_are_those_that_are_promised():
    """A change of a line is a change for users: it belongs in the changelog."""
    assert signatures().splitlines() == SIGNATURES.read_text().splitlines()


def imports(path):
    """The modules that a file imports, by their absolute names."""
    package = ["optzoo", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


# docs/architecture.md: a room imports from those before it, and none from its own line.
ROOMS = [
    ["core"],
    ["jaxprs"],
    ["native", "compiled"],
    ["state"],
    ["rules", "distributed"],
    ["deferred"],
    ["sparse"],
    ["sharded"],
    ["train"],
    ["wrappers"],
    ["growing"],
    ["host"],
    FAMILIES,
    ["transforms"],
    ["rows", "replicas"],
    ["catalog", "schedules"],
    ["registry", "describe"],
    ["cite"],
    ["interop"],
    ["race"],
    ["__init__"],
    ["testing", "__main__"],
]


def room(module):
    """The place in ``ROOMS`` and the name of the room of a module of the library."""
    name = module.split(".")[1] if "." in module else "__init__"
    known = {other: i for i, rooms in enumerate(ROOMS) for other in rooms}
    return known.get(name, known["__init__"]), name  # optzoo.__version__, optzoo.adam


def files():
    """Every file of the library with its module's name."""
    for path in sorted(PACKAGE.glob("**/*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        yield path, ".".join(["optzoo", *parts])


@pytest.mark.every_value
@pytest.mark.parametrize("name", [name for rooms in ROOMS for name in rooms])
def test_imports_go_one_way(name):
    arrows = [
        (module, imported)
        for path, module in files()
        if room(module)[1] == name
        for imported in imports(path)
        if imported.startswith("optzoo")
    ]
    assert name == "core" or arrows
    upward = [
        (module, imported)
        for module, imported in arrows
        if room(imported)[1] != name and room(imported)[0] >= room(module)[0]
    ]
    assert upward == []


def test_all_rooms_are_known():
    assert {room(module)[1] for _, module in files()} == {n for rooms in ROOMS for n in rooms}


@pytest.mark.unique
def test_no_file_imports_itself_by_others():
    modules = {module.removesuffix(".__init__") for _, module in files()}
    nearest = lambda name: name if name in modules else name.rpartition(".")[0]
    arrows = {
        module: {nearest(name) for name in imports(path) if name.startswith("optzoo.")} - {module}
        for path, module in files()
    }
    list(graphlib.TopologicalSorter(arrows).static_order())  # raises at a circle


def test_families_are_all_known():
    assert {entry.family for entry in optzoo.CATALOG.values()} <= set(FAMILIES)


if __name__ == "__main__":
    SIGNATURES.write_text(signatures())
