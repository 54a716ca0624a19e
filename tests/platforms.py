"""Runs on the CPU what ``jax.lax.platform_dependent`` has for other platforms.

A choice by platform is in a jaxpr as the equation ``platform_index``, whose parameter names the
platforms of each branch, and a ``cond`` of its result with the same names. Where the names are
exchanged, JAX lowers another branch for the CPU. Nothing of JAX is replaced, but for the algorithm
of eigenvectors: the CPU has one only.
"""

import ast
import functools
import pathlib

import jax

import optzoo
from optzoo.jaxprs.equations import closed_jaxprs, evaluate, line_of, map_equations

HERE, OTHER = "cpu", "another"  # the platform of the tests, and one that no branch names
_NAMES = {"platform_index": "platforms", "cond": "branches_platforms"}  # of the parameters


def on_platform(f, platform):
    """``f`` with the branches for a platform; ``OTHER`` takes the default ones."""

    def call(*args):
        closed, shapes = jax.make_jaxpr(f, return_shape=True)(*args)
        jaxpr = map_equations(closed.jaxpr, functools.partial(_for_platform, platform))
        outputs = evaluate(jaxpr, closed.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return call


def on_all(f, *args):
    """By the names of all platforms that ``f`` distinguishes, ``f`` with their branches."""
    names = sorted({HERE, OTHER}.union(*(names for names, _ in choices(f, *args))))
    return {name: on_platform(f, name) for name in names}


def choices(f, *args):
    """For each choice that ``f`` makes the platforms that it names, and the line of it."""
    return list(_choices(jax.make_jaxpr(f)(*args).jaxpr))


def _choices(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "platform_index":
            branches = eqn.params["platforms"]
            yield {name for names in branches for name in names or ()}, line_of(eqn)
        for inner, _ in closed_jaxprs(eqn):
            yield from _choices(inner)


def _for_platform(platform, eqn):
    if eqn.primitive.name == "eigh":
        return eqn.replace(params={**eqn.params, **dict.fromkeys({"algorithm"} & {*eqn.params})})
    name = _NAMES.get(eqn.primitive.name)
    branches = eqn.params.get(name)
    if branches is None:
        return eqn
    chosen = next(k for k, names in enumerate(branches) if names is None or platform in names)
    new = tuple((HERE,) if k == chosen else (f"not {k}",) for k in range(len(branches)))
    return eqn.replace(params={**eqn.params, name: new})


def uses_in_sources():
    """The functions of optzoo that choose by platform: ``core/merge.py elect``."""
    root, found = pathlib.Path(optzoo.__file__).parent, set()
    for path in root.rglob("*.py"):
        text = path.read_text("utf-8")
        if "platform_dependent" in text or "platform_index" in text:
            where = path.relative_to(root).as_posix()
            found |= {f"{where} {name}" for name in _functions(ast.parse(text), "module")}
    return found


def _functions(node, inside):
    """The names of the innermost functions in which a choice is named."""
    inside = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else inside
    names = {getattr(node, key, None) for key in ("attr", "id")}
    if isinstance(node, ast.alias):
        names = {node.name.rpartition(".")[2]}
    if names & {"platform_dependent", "platform_index", "platform_index_p"}:
        yield inside
    for child in ast.iter_child_nodes(node):
        yield from _functions(child, inside)
