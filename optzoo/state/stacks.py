"""Stacks: trees in which many arrays of equal shape are replaced by one."""

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from ..core.meshes import automatically, spec_of
from ..core.paths import is_masked, leaves_with_path, members_of, path_name, stacks_of
from ..core.rows import is_sparse_or_none

# Which leaves are stacked: for each stack the positions of its members in the flattened tree.
Layout = tuple[tuple[int, ...], ...]


class Stack(NamedTuple):
    """A stack; replaces its first member in the tree. ``optax.MaskedNode()`` replaces the others.

    A tree with stacks keeps the paths of the tree without. The members are a key, and thus part of
    the structure: they are known when an update is traced, and checkpoints of any format keep them
    and reject others.
    """

    # One array, or tuple of arrays. Its key is the positions of the members in the tree, ``0_2_3``.
    # Of matrices with owners it ends with the mesh axes that divide the first axis of an array,
    # ``0_2_3__data``; then there may be padding behind the last member.
    arrays: dict[str, Any]


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
    """The stacked leaves of a tree or of the trees of a state."""
    return tuple(sorted({members(node) for node in stacks_in(tree)}))


def stack(tree: Any, layout: Layout) -> Any:
    """The tree with stacks of its leaves, which may be abstract.

    Args:
        tree: a tree without stacks.
        layout: the leaves of each stack, which have the same shape and dtype.
    """
    nodes, treedef = flatten_with_stacks(tree)
    stacks = {each[0]: stack_of(each, _join([nodes[i] for i in each])) for each in layout}
    return treedef.unflatten(with_stacks(nodes, stacks))


def stack_of(positions: Sequence[int], array: Any, axes: Sequence[str] = ()) -> Stack:
    """A stack of the leaves at these positions.

    Args:
        positions: the indices of the members in the tree.
        array: the stacked members; or a tuple of such arrays.
        axes: the mesh axes of the owners, if any.
    """
    return Stack({"__".join(["_".join(map(str, positions)), *axes]): array})


def with_stacks(nodes: Sequence[Any], stacks: Mapping[int, Stack]) -> list[Any]:
    """The nodes of a tree with stacks in place of their first members."""
    rest = hidden(nodes, {i for node in stacks.values() for i in members(node)})
    return [stacks.get(i, node) for i, node in enumerate(rest)]


def hidden(nodes: Sequence[Any], positions: Container[int]) -> list[Any]:
    """The nodes of a tree with masked nodes at some indices."""
    return [optax.MaskedNode() if i in positions else node for i, node in enumerate(nodes)]


def unstack(tree: Any) -> Any:
    """The tree without stacks: the inverse of :func:`stack`."""
    nodes, treedef = flatten_with_stacks(tree)
    for node in filter(is_stack, list(nodes)):
        positions = members(node)
        for i, leaf in zip(positions, _split(value(node), len(positions)), strict=True):
            nodes[i] = leaf
    return treedef.unflatten(nodes)


def restack(tree: Any, like: Any) -> Any:
    """The inverse of :func:`unstack`: stacks as in another tree, with zeros for padding."""
    olds, treedef = flatten_with_stacks(like)
    news, stacks = treedef.flatten_up_to(tree), {}
    for i, old in enumerate(olds):
        if is_stack(old):
            join = lambda old, *news: _join(news, len(old))
            joined = jax.tree.map(join, value(old), *(news[k] for k in members(old)))
            stacks[i] = Stack(dict.fromkeys(old.arrays, joined))
    return treedef.unflatten(with_stacks(news, stacks))


def merged(stacked: Any, rest: Any) -> Any:
    """Merges a tree that contains only stacks with a tree of all other leaves, without stacks."""
    _, treedef = flatten_with_stacks(stacked)
    leaves = treedef.flatten_up_to(unstack(stacked))
    others = treedef.flatten_up_to(rest)
    pairs = zip(leaves, others, strict=True)
    return treedef.unflatten([b if is_masked(a) else a for a, b in pairs])


def parted(tree: Any, stacked: Any) -> tuple[Any, Any]:
    """Splits a tree into the two trees of :func:`merged`, with the stacks of another tree."""
    nodes, treedef = flatten_with_stacks(stacked)
    inside = {i for node in filter(is_stack, nodes) for i in members(node)}
    hide = lambda leaves, positions: treedef.unflatten(hidden(leaves, positions))
    leaves = treedef.flatten_up_to(tree)
    outside = {*range(len(nodes))} - inside
    return restack(hide(leaves, outside), stacked), hide(leaves, inside)


def resized(array: Any, length: int) -> Any:
    """An array of stacks with another size of padding after its members."""
    array = array[:length]
    missing = length - len(array)
    return jnp.pad(array, [(0, missing), *[(0, 0)] * (array.ndim - 1)]) if missing else array


def value(node: Stack) -> Any:
    """The array, or the tuple of arrays, of a stack."""
    [inside] = node.arrays.values()
    return inside


def members(node: Stack) -> tuple[int, ...]:
    """The indices of the members of a stack in the tree."""
    [key] = node.arrays
    return members_of(key)


def axes_of_owners(node: Stack) -> tuple[str, ...]:
    """The mesh axes over which the members of a stack are divided; () without owners."""
    [key] = node.arrays
    return _axes_in(key)


def _join(leaves: Sequence[Any], length: int | None = None) -> Any:
    length = len(leaves) if length is None else length
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        return jax.ShapeDtypeStruct((length, *leaves[0].shape), leaves[0].dtype)
    return resized(jnp.stack(leaves), length)


def _split(value: Any, number: int) -> Iterable[Any]:
    """Splits off the first members of a stack."""
    arrays, treedef = jax.tree.flatten(value)
    if not arrays:
        return [value] * number
    return map(treedef.unflatten, zip(*(_members_of(a, number) for a in arrays), strict=True))


def stacks_in(tree: Any) -> list[Stack]:
    """The stacks of a tree, or of the trees of a state."""
    return list(filter(is_stack, jax.tree.leaves(tree, is_leaf=is_stack)))


def owners_in(path: Any) -> tuple[str, ...]:
    """The mesh axes of owners in the path of an array; () without a stack with owners."""
    found = stacks_of(path)
    return _axes_in(path[found[-1] + 1].key) if found else ()


def _axes_in(key: str) -> tuple[str, ...]:
    return tuple(key.split("__")[1:])


def _members_of(array: Any, number: int) -> Sequence[Any]:
    if isinstance(array, jax.ShapeDtypeStruct):
        return [jax.ShapeDtypeStruct(array.shape[1:], array.dtype)] * number
    part = lambda a: [*jnp.unstack(a[:number])]
    return automatically(part, lambda _, a: [PartitionSpec(*spec_of(a)[1:])] * number)(array)
