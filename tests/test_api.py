"""The public names, and who may import whom."""

import ast
import inspect
import pathlib

import pytest

import optzoo

PACKAGE = pathlib.Path(optzoo.__file__).parent
FAMILIES = ["first_order", "layerwise", "proximal", "second_order"]
NAMES = [n for n, v in vars(optzoo).items() if not n.startswith("_") and not inspect.ismodule(v)]


@pytest.mark.parametrize("name", NAMES)
def test_public_names_have_docstrings(name):
    thing = getattr(optzoo, name)
    if not isinstance(thing, dict):  # the tables are data
        assert inspect.getdoc(thing), name


@pytest.mark.parametrize("name", optzoo.CATALOG)
def test_catalogue_is_public(name):
    entry = optzoo.CATALOG[name]
    assert getattr(optzoo, name) is entry.factory
    assert entry.factory.__name__ == name
    assert callable(getattr(optzoo, entry.rows))


@pytest.mark.parametrize("name", optzoo.DISTRIBUTED)
def test_the_distributed_family_is_public(name):
    method = optzoo.DISTRIBUTED[name]
    assert getattr(optzoo, name) is method.factory
    assert method.make(optzoo.adam(), 8, axis_name="replica").init({})


@pytest.mark.parametrize("name", [*optzoo.WRAPPERS, *optzoo.DISTRIBUTED])
def test_docstrings_of_wrappers_are_complete(name):
    wrapper = getattr(optzoo, name)
    original = {**optzoo.WRAPPERS, **optzoo.DISTRIBUTED}[name].original
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
    [("wrappers", [*optzoo.WRAPPERS, "groups"]), ("distributed", optzoo.DISTRIBUTED)],
)
def test_no_docstring_of_a_wrapper_is_forgotten(folder, names):
    files = {path.stem for path in (PACKAGE / folder).glob("[a-z]*.py")}
    assert {getattr(optzoo, name).__module__.rsplit(".", 1)[1] for name in names} == files


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


@pytest.mark.parametrize("folder", ["core", "wrappers", "distributed", "processing", *FAMILIES])
def test_imports_go_one_way(folder):
    files = sorted((PACKAGE / folder).glob("**/*.py"))
    assert len(files) > 1
    found = [(f.name, m) for f in files for m in imports(f) if m.startswith("optzoo")]
    others = {
        "core": [],
        "wrappers": ["core"],
        "distributed": ["core"],
        "processing": ["core"],
    }.get(folder, ["core", "wrappers"])
    allowed = tuple(f"optzoo.{name}." for name in (folder, *others))
    assert found and [(name, m) for name, m in found if not m.startswith(allowed)] == []


def test_families_are_all_known():
    assert {entry.family for entry in optzoo.CATALOG.values()} <= set(FAMILIES)
