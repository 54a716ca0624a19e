"""Arrays of equal shape kept as one: a tree like the parameters, with a stack for many of them."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..core.paths import is_masked, leaves_with_path, members_of, path_name
from ..core.rows import is_sparse_or_none

# Which leaves are stacked: for each stack the positions of its members in the flattened tree.
Layout = tuple[tuple[int, ...], ...]


class Stack(NamedTuple):
    """Replaces its first member in the tree; ``optax.MaskedNode()`` replaces the others.

    So a tree with stacks has the paths of the tree without. Its members are a key, and so a part of
    its structure: they are known when an update is traced, and every format of checkpoints keeps
    them and refuses others.
    """

    arrays: dict[str, Any]  # one; its key is the positions of the members in the tree, ``0_2_3``


def is_stack(x: Any) -> bool:
    """Whether ``x`` is a stack."""
    return isinstance(x, Stack)


def flatten_with_stacks(tree: Any) -> tuple[list[Any], Any]:
    """The nodes and the structure of a tree; stacks, masked and missing leaves are nodes, too."""
    return jax.tree.flatten(
        tree, is_leaf=lambda x: is_stack(x) or is_masked(x) or is_sparse_or_none(x)
    )


def name_at(tree: Any, position: int) -> str:
    """The path of a node of :func:`flatten_with_stacks`, such as ``layers/0/bias``."""
    nodes, treedef = flatten_with_stacks(tree)
    path, _ = leaves_with_path(treedef.unflatten(range(len(nodes))))[position]
    return path_name(path)


def layout_of(tree: Any) -> Layout:
    """Which leaves are stacked in a tree or in the trees of a state."""
    nodes = filter(is_stack, jax.tree.leaves(tree, is_leaf=is_stack))
    return tuple(sorted({_members(node) for node in nodes}))


def stack(tree: Any, layout: Layout) -> Any:
    """The tree with stacks of its leaves; they may be abstract.

    Args:
        tree: without stacks.
        layout: the leaves of each stack have the same shape and dtype.
    """
    nodes, treedef = flatten_with_stacks(tree)
    for members in layout:
        first, *others = members
        array = _join([nodes[i] for i in members])
        nodes[first] = Stack({"_".join(map(str, members)): array})
        for i in others:
            nodes[i] = optax.MaskedNode()
    return treedef.unflatten(nodes)


def unstack(tree: Any) -> Any:
    """The tree without stacks: what :func:`stack` was given."""
    nodes, treedef = flatten_with_stacks(tree)
    for node in filter(is_stack, list(nodes)):
        members = _members(node)
        for i, leaf in zip(members, _split(_array(node), len(members)), strict=True):
            nodes[i] = leaf
    return treedef.unflatten(nodes)


def _array(node: Stack) -> Any:
    [array] = node.arrays.values()
    return array


def _members(node: Stack) -> tuple[int, ...]:
    [key] = node.arrays
    return members_of(key)


def _join(leaves: Sequence[Any]) -> Any:
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        return jax.ShapeDtypeStruct((len(leaves), *leaves[0].shape), leaves[0].dtype)
    return jnp.stack(leaves)


def _split(array: Any, number: int) -> Iterable[Any]:
    if isinstance(array, jax.ShapeDtypeStruct):
        return [jax.ShapeDtypeStruct(array.shape[1:], array.dtype)] * number
    return jnp.unstack(array)
