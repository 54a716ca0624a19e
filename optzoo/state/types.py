"""The types of the states of this library."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array

# A field of a slots tuple: an initializer in the call of treewise, an array (or a tuple of some)
# in the rule, a params-shaped tree in the state.
Slot = Any


class NoSlots(NamedTuple):
    """What a stateless optimizer keeps: nothing."""


class LeafwiseState(NamedTuple):
    """The number of updates, a params-shaped tree for each slot, and optimizer-wide arrays."""

    count: Array
    slots: Any
    shared: dict[str, Array]


class ReplicaState(NamedTuple):
    """What is the same on all replicas, since it is computed from sums over them, and the rest."""

    shared: dict[str, Any]
    own: dict[str, Any]


def map_nodes(kind: Any, f: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """``f`` of every node of a type in a tree; everything else stays as it is."""
    is_node = lambda node: isinstance(node, kind)
    change = lambda node, *others: f(node, *others) if is_node(node) else node
    return jax.tree.map(change, tree, *rest, is_leaf=is_node)


def nodes_of(kind: Any, tree: Any) -> list[Any]:
    """The nodes of a type in a tree."""
    is_node = lambda node: isinstance(node, kind)
    return [node for node in jax.tree.leaves(tree, is_leaf=is_node) if is_node(node)]
