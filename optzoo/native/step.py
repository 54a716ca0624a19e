"""A step of an optimizer, update and addition, by native loops."""

import functools
import graphlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from ..core.checks import check_transformation
from ..core.marks import marking
from ..core.paths import path_name

InPlace = Literal["all", "slots"]
_MOST_LEAVES = 16  # in a call; XLA takes long to compile calls of many arrays


def native_step(
    tx: optax.GradientTransformation, *, in_place: InPlace = "all", required: bool = False
) -> Callable[..., tuple[Any, Any]]:
    tx = optax.with_extra_args_support(tx)

    def step(params, state, grads, **extra_args):
        return apply_natively(tx, params, state, grads, extra_args, in_place, required)

    return step


def apply(
    tx: Any, params: Any, state: Any, grads: Any, extra_args: Mapping[str, Any]
) -> tuple[Any, Any]:
    """The parameters and the state after an update."""
    updates, state = tx.update(grads, state, params, **extra_args)
    return optax.apply_updates(params, updates), state


def apply_natively(
    tx: Any,
    params: Any,
    state: Any,
    grads: Any,
    extra_args: Mapping[str, Any],
    in_place: InPlace,
    required: bool,
) -> tuple[Any, Any]:
    leaves, treedef = jax.tree.flatten((params, state, grads))

    def traced(*leaves):
        params, state, grads = treedef.unflatten(leaves)
        with marking():
            return apply(tx, params, state, grads, extra_args)

    from .calls import Call
    from .program import read_program

    closed, shape = jax.make_jaxpr(traced, return_shape=True)(*leaves)
    program = read_program(closed.jaxpr)
    kept = jax.tree.leaves((params, state))
    of_params = len(jax.tree.leaves(params))
    inputs = program.inputs[len(closed.consts) :]
    reasons: dict[Any, str] = {}
    nodes = _plan(program, inputs[: len(kept)], of_params if in_place == "slots" else 0, reasons)
    if not any(isinstance(node, Call) for node in nodes):
        return apply(tx, params, state, grads, extra_args)
    known = dict(zip(program.inputs, [*closed.consts, *leaves], strict=True))
    for node in nodes:
        node.run(known)
    results = [known[v] if v.literal is None else jnp.asarray(v.literal) for v in program.results]
    return jax.tree.unflatten(jax.tree.structure(shape), results)


def _plan(program: Any, kept: list[Any], skip: int, reasons: dict[Any, str]) -> list[Any]:
    from . import groups
    from .calls import Call

    rows = groups.find_rows(program, set(kept), reasons.setdefault)
    made = {v for group in rows for v in group.outs}
    rest = [op for op in program.operations if not made.intersection(op.outs)]
    nodes = [*rest, *map(lambda g: Call([g]), rows)]
    places = {
        v: after
        for v, after in zip(kept, program.results, strict=True)
        if v.shape and after is not v and after not in made
    }
    order = groups.in_order(nodes, program.results)
    plain = [op for op in order if not isinstance(op, Call)]
    view = groups.Program(program.inputs, plain, program.results)
    leaves = groups.find_leaves(view, places, set(list(places)) - set(kept[:skip]), reasons.setdefault)
    calls: dict[Any, list[Any]] = {}
    for leaf in leaves:
        calls.setdefault((leaf.signature(), *leaf.scalars), []).append(leaf)
    native = [
        Call(same[i : i + _MOST_LEAVES])
        for same in calls.values()
        for i in range(0, len(same), _MOST_LEAVES)
    ]
    done = {v for call in native for v in call.outs}
    nodes = [node for node in order if not done.intersection(node.outs)]
    return groups.in_order([*nodes, *native], program.results)
