"""What is used of JAX beyond its public API is what docs/reliability.md says."""

import ast
import pathlib
import re

import optzoo

ROOT = pathlib.Path(__file__).parents[2]
FILES = {
    path: ast.parse(path.read_text()) for path in pathlib.Path(optzoo.__file__).parent.rglob("*.py")
}
TITLE = "## What is used of JAX beyond its public API\n"
ROWS = (ROOT / "docs" / "reliability.md").read_text().split(TITLE)[1].split("\n## ")[0]
ROWS = [line.strip("| ").split(" | ") for line in ROWS.splitlines() if line.startswith("| `")]
NAMED_TUPLES = {"_asdict", "_field_defaults", "_fields", "_make", "_replace"}


def is_private(module):
    """Jaxlib is private as a whole; it promises nothing."""
    library, *parts = module.split(".")
    return library == "jaxlib" or any(part.startswith("_") for part in parts)


def imported():
    """The private modules that are imported, and the names from them."""
    for tree in FILES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for name in names:
                if name.split(".")[0] in ("jax", "jaxlib", "optax") and is_private(name):
                    yield name


def is_attribute(name):
    return name.startswith("_") and not name.startswith("__") and name not in NAMED_TUPLES


def attributes():
    """Those with private names that nothing in optzoo has; of Keras there are others."""
    nodes = [
        node
        for path, tree in FILES.items()
        if not path.stem.startswith("keras")
        for node in ast.walk(tree)
    ]
    own = {getattr(node, "name", None) or getattr(node, "id", None) for node in nodes}
    own |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and is_stored(node)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr not in own and is_attribute(node.attr):
            yield node.attr
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            name = getattr(node.args[1], "value", "")
            if isinstance(name, str) and is_attribute(name):
                yield name


def is_stored(node):
    return isinstance(node.ctx, ast.Store)


def test_all_of_it_is_in_the_table():
    names = [row[0].strip("`") for row in ROWS]
    of_python = [name for name in names if "/" not in name]
    modules = {name for name in of_python if is_private(name) and name[0].islower()}
    assert {*imported()} - {"jaxlib"} == modules  # the package has the header
    assert {*attributes()} - {"_getframe"} == {  # of sys
        name.rpartition(".")[2] for name in of_python if name not in modules
    }
    assert [name for name in names if "/" in name] == ["jaxlib/include/xla/ffi/api/c_api.h"]


def test_the_table_says_what_each_is_for():
    """It names the public functions of core/compat.py that have it."""
    text = (ROOT / "optzoo" / "core" / "compat.py").read_text()
    head, *parts = re.split(r"^(?=def )", text, flags=re.MULTILINE)
    functions = {re.match(r"def (\w+)", part)[1]: part for part in parts}
    for name, why, versions, gone in ROWS:
        last = name.strip("`").rpartition(".")[2]
        alias = re.search(rf"import {last} as (\w+)", head)
        pattern = rf"\b{alias[1] if alias else last}\b"
        users = {f for f, part in functions.items() if f[0] != "_" and re.search(pattern, part)}
        said = functions.keys() & set(re.findall(r"`(\w+)`", why))
        is_value = "/" in name or last in ("version", "NO_PARAMS_MSG")
        assert users <= said and bool(said) != is_value, name
        assert re.search(r"0\.\d+", versions) and gone
