"""The parts of a state: what each transformation and what all replicas keep."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.tree_util import GetAttrKey

from ...state.resting import Resting
from ...state.types import LeafwiseState, ReplicaState, SharedParamsState
from .names import Path

HYPERPARAMS = "hyperparams"  # of optax.inject_hyperparams: the program gives them


class Node(NamedTuple):
    """A part of a state: of a transformation of this library, of replicas, or an array."""

    path: Path
    value: Any
    wrapper: Path | None  # as in Count
    replica_part: str = ""  # what it belongs to: a "worker", the "center", or all replicas


def nodes(
    x: Any, path: Path = (), wrapper: Path | None = None, replica_part: str = ""
) -> Iterator[Node]:
    """The transformations of this library in a state, the replicas, and all other arrays."""
    if isinstance(x, Resting):  # its clock follows from the count
        yield from nodes(x.inner, (*path, GetAttrKey("inner")), wrapper, replica_part)
        return
    if isinstance(x, LeafwiseState | ReplicaState) or jax.tree_util.all_leaves([x]):
        yield Node(path, x, wrapper, replica_part)
    if isinstance(x, ReplicaState):
        for fields, inner, part in _inside_replicas(x):
            inside = (*path, *map(GetAttrKey, fields))
            yield from nodes(inner, inside, wrapper, replica_part or part)
    elif not isinstance(x, LeafwiseState):
        inside = path if _may_skip_updates(x) else wrapper
        children = jax.tree_util.tree_leaves_with_path(x, is_leaf=lambda child: child is not x)
        for below, child in children:
            of_child = wrapper if below == (GetAttrKey("count"),) else inside
            if below:
                yield from nodes(child, (*path, *below), of_child, replica_part)


def _may_skip_updates(x: Any) -> bool:
    """Whether it counts steps and keeps arrays from one to the next, around a state with a count.

    Such as ``accumulate``: the optimizer in it counts its own updates, which may be fewer.
    """
    has_count = lambda x: "count" in getattr(x, "_fields", ())
    if not has_count(x):
        return False
    fields = [field for k, field in x._asdict().items() if k not in ("count", HYPERPARAMS)]
    leaves = [jax.tree.leaves(field, is_leaf=has_count) for field in fields]
    is_around = any(has_count(leaf) for of_field in leaves for leaf in of_field)
    return is_around and any(of_field and not any(map(has_count, of_field)) for of_field in leaves)


def _inside_replicas(state: ReplicaState) -> Iterator[tuple[tuple[str, ...], Any, str]]:
    """The states of optimizers, each with the fields that lead to it and what it belongs to."""
    if isinstance(state, SharedParamsState):
        yield ("replicated", "inner"), state.replicated.inner, ""
        return
    if hasattr(state.replicated.method, "center_inner"):  # of agn: the slots beside the center
        fields = ("replicated", "method", "center_inner")
        yield fields, state.replicated.method.center_inner, "center"
    yield ("per_replica", "inner"), state.per_replica.inner, "worker"
