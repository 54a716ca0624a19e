"""The public names of optzoo and their objects, the single list of them."""

import ast
import functools
import importlib
import inspect
import pathlib
from typing import Any

import optzoo

ROOT = pathlib.Path(optzoo.__file__).parents[1]
# The modules beside optzoo itself that users import from.
MODULES = tuple(
    f"optzoo.{name}"
    for name in (
        *("catalog", "compiled", "growing", "host"),
        *("interop.fbgemm", "interop.keras", "interop.returnn"),
        *("interop.optax", "interop.sparsecore", "interop.tf1", "interop.torch", "race"),
        *(
            "registry",
            "replicas",
            "rows",
            "rules",
            "schedules",
            "sharded",
            "state",
            "testing",
            "transforms",
        ),
    )
)


@functools.cache
def names() -> dict[str, Any]:
    """The object of each public name, such as ``optzoo.adam`` or ``optzoo.rules.RowsRule``.

    A name of another module for the same object as a name of optzoo has no entry.
    """
    found = _of(optzoo)
    known = {id(thing) for thing in found.values()}
    for module in map(importlib.import_module, MODULES):
        found |= {n: thing for n, thing in _of(module).items() if id(thing) not in known}
    return found


@functools.cache
def by_last_part() -> dict[str, str]:
    """The full name of the last part of each public name; names in optzoo itself have priority."""
    return {n.rpartition(".")[2]: n for n in sorted(names(), key=lambda n: -n.count("."))}


def _of(module: Any) -> dict[str, Any]:
    """The names in ``__all__`` of a module, and its explicit re-exports."""
    nodes = ast.walk(ast.parse(inspect.getsource(module)))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    aliases = {a.name for node in imports for a in node.names if a.asname == a.name}
    listed = sorted({*getattr(module, "__all__", ()), *aliases})
    found = {f"{module.__name__}.{name}": getattr(module, name) for name in listed}
    return {name: thing for name, thing in found.items() if not inspect.ismodule(thing)}


def home(thing: Any) -> str | None:
    """The module that defines an object; None for data."""
    module = getattr(thing, "__module__", None)
    return module if isinstance(module, str) and module.startswith("optzoo") else None
