"""The public names, and who may import whom."""

import ast
import inspect
import pathlib

import pytest

import optzoo

PACKAGE = pathlib.Path(optzoo.__file__).parent
FAMILIES = ["first_order", "proximal"]
NAMES = [n for n, v in vars(optzoo).items() if not n.startswith("_") and not inspect.ismodule(v)]


@pytest.mark.parametrize("name", NAMES)
def test_public_names_have_docstrings(name):
    thing = getattr(optzoo, name)
    if not isinstance(thing, dict):  # the catalogue is data
        assert inspect.getdoc(thing), name


def test_catalogue_is_public(entry, request):
    name = request.node.callspec.params["entry"]
    assert getattr(optzoo, name) is entry.factory
    assert entry.factory.__name__ == name
    assert callable(getattr(optzoo, entry.rows))


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


@pytest.mark.parametrize("folder", ["core", *FAMILIES])
def test_families_import_only_the_core(folder):
    files = sorted((PACKAGE / folder).glob("**/*.py"))
    assert len(files) > 1
    found = [(f.name, m) for f in files for m in imports(f) if m.startswith("optzoo")]
    allowed = ("optzoo.core.",) if folder == "core" else ("optzoo.core.", f"optzoo.{folder}.")
    assert found and [(name, m) for name, m in found if not m.startswith(allowed)] == []


def test_families_are_all_known():
    assert {entry.family for entry in optzoo.CATALOG.values()} <= set(FAMILIES)
