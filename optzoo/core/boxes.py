"""Boxes: nodes of a tree with a single array, often with metadata of its axes.

Flax's ``Partitioned`` and variables, haliax' ``NamedArray`` and modules with one array, such as
``equinox.nn.Embedding``, are boxes. Any pytree class with one child that is an array is a box,
except dicts, lists and tuples.

A slot with the shape of its parameter is in the box of the parameter. A slot with other axes is in
a box that names them if the class of the box has names of axes, otherwise in no box.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from .lines import Lines, is_lines, shape_of_lines
from .optimizer import Optimizer, about_of
from .rows import SparseRows, is_sparse_or_none, update_tree

_VALUE = GetAttrKey("value")
_NO_BOXES = (
    *(jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, int, float, complex, str),
    *(type(None), dict, list, tuple, Lines, SparseRows),
)


@dataclasses.dataclass(frozen=True)
class BoxKey:
    """The last key of the path of an array in a box: the field of the box."""

    field: Any

    @property
    def is_name(self) -> bool:
        """Whether the key is part of the name of the parameter, like ``weight`` in a module."""
        return isinstance(self.field, GetAttrKey) and self.field != _VALUE


def is_box(x: Any, is_leaf: Callable[[Any], bool] = is_sparse_or_none) -> bool:
    """Whether a node of a tree is a box: its only child is an array or another leaf.

    Args:
        x: the node.
        is_leaf: whether an object that is not an array is a leaf.
    """
    child = _only_child(x)
    return child is not None and (is_leaf(child[1]) or jax.tree_util.all_leaves([child[1]]))


def _only_child(x: Any) -> tuple[Any, Any] | None:
    """The key and the child of a node that may be a box; None for all others."""
    if isinstance(x, _NO_BOXES):
        return None
    children = jax.tree_util.tree_leaves_with_path(x, is_leaf=lambda child: child is not x)
    if len(children) != 1 or len(path := children[0][0]) != 1:
        return None
    is_container = isinstance(path[0], DictKey | SequenceKey)
    return None if is_container else (path[0], children[0][1])


def content(x: Any) -> Any:
    """The content of a box; any other object unchanged.

    It may have several arrays: states of old versions have tuples in boxes.
    """
    child = _only_child(x)
    return x if child is None else child[1]


def refilled(x: Any, value: Any) -> Any:
    """The box with another content; the content itself if there is no box."""
    if _only_child(x) is None:
        return value
    return jax.tree.structure(x, is_leaf=lambda child: child is not x).unflatten([value])


# Trees with boxes


def unboxed(tree: Any) -> Any:
    """The tree with arrays in place of boxes."""
    return jax.tree.map(content, tree, is_leaf=_is_leaf)


def marks_of_boxes(marks: Any) -> Any:
    """A mask with the mark of an array in place of its box, so that ``optax.masked`` hides both.

    This leaves no box without an array. Boxes that are part of the name of a parameter remain.
    """

    def of_each(x):
        child = _only_child(x)
        return x if child is None or child[1] is None or BoxKey(child[0]).is_name else child[1]

    return jax.tree.map(of_each, marks, is_leaf=_is_leaf)


class Boxes:
    """The boxes of a tree of gradients or parameters, also for their slots.

    A state keeps each slot in a box of the same class, or without one.

    Args:
        updates: the tree. SparseRows are leaves.
        none: whether None, also in a box, is a leaf: a missing gradient. Otherwise there is no slot
            in its place in other trees, but None, or ``optax.MaskedNode`` in a group.
    """

    def __init__(self, updates: Any, *, none: bool = True):
        nodes, self.treedef = jax.tree.flatten(updates, is_leaf=_is_leaf)
        self._kept = [i for i, x in enumerate(nodes) if none or content(x) is not None]
        self.nodes = [nodes[i] for i in self._kept]
        self.contents = list(map(content, self.nodes))  # the gradients
        # The class of the box of each; None for others.
        self._types = [
            None if x is g else type(x) for x, g in zip(self.nodes, self.contents, strict=True)
        ]

    def slots(self, tree: Any) -> list[Any]:
        """The slots of a tree, without boxes; ``ValueError`` if the parameters differ."""
        found = self._found(tree)
        pairs = [(found[i], box) for i, box in zip(self._kept, self._types, strict=True)]
        return [content(x) if type(x) is box else x for x, box in pairs]

    def refilled(self, tree: Any, values: Any) -> Any:
        """The tree with other slots."""
        found = self._found(tree)
        for i, box, value in zip(self._kept, self._types, values, strict=True):
            # A slot is in a box of the same class, or alone.
            found[i] = refilled(found[i], value) if type(found[i]) is box else value
        return self.treedef.unflatten(found)

    def _found(self, tree: Any) -> list[Any]:
        """The part of a tree for each node."""
        found = self.treedef.flatten_up_to(tree)
        for i in set(range(len(found))).difference(self._kept):
            if content(found[i]) is not None and not isinstance(found[i], optax.MaskedNode):
                raise ValueError("a parameter that is None has a slot")
        return found


def _is_leaf(x: Any) -> bool:
    return is_sparse_or_none(x) or is_box(x)


def map_parameters(f: Callable[..., Any], params: Any, *rest: Any, lines: bool = False) -> Any:
    """Applies ``f`` to each parameter; puts the resulting slot in a box where possible.

    Args:
        f: a function of an array.
        params: the parameters.
        *rest: trees like the parameters; their leaves are further arguments of ``f``.
        lines: whether ``f`` supports :class:`Lines`. Otherwise it gets the array, and its result is
            put in lines.
    """

    def of_each(box, *others):
        x = content(box)
        if x is None:
            return box
        make = lambda x: f(x, *map(content, others))
        return _in_box(box, make(x), make) if is_box(box) else make(x)

    is_leaf = lambda x: (lines and is_lines(x)) or is_box(x)
    return jax.tree.map(of_each, params, *rest, is_leaf=is_leaf)


def without_boxes(tx: optax.GradientTransformation) -> Optimizer:
    """The same transformation, applied to arrays in place of boxes.

    Its state has no boxes. Use it for states with several arrays for one parameter.
    """
    about, tx = about_of(tx), optax.with_extra_args_support(tx)

    def update(updates, state, params=None, **extra_args):
        boxes = update_tree.structure(updates)
        new, state = tx.update(unboxed(updates), state, unboxed(params), **extra_args)
        return boxes.unflatten(update_tree.leaves(new)), state

    return Optimizer(lambda params: tx.init(unboxed(params)), update, about)


# Boxes of slots


def _in_box(box: Any, slot: Any, make: Callable[[Any], Any]) -> Any:
    """Puts a slot in the box of its parameter, in a box that names its axes, or in no box."""
    if not hasattr(slot, "shape"):
        return slot
    x = jax.eval_shape(jnp.asarray, content(box))  # it may be a number
    if jnp.issubdtype(x.dtype, jnp.inexact) and slot.shape == x.shape:
        return refilled(box, slot)
    rename = _renamer(box)
    if rename is None:
        return slot
    longer = [jax.eval_shape(make, lengthened(x, i)).shape for i in range(x.ndim)]
    axes = axes_of(slot.shape, x.shape, longer)
    return slot if axes is None else rename(box, slot, axes)


def with_sizes(tree: Any) -> Any:
    """A tree whose arrays have changed sizes, with the sizes in its boxes updated."""

    def of_each(x):
        if not is_box(x) or _renamer(x) is not _renamed_array:
            return x
        array = content(x)
        return _renamed_array(x, array, tuple(range(array.ndim)))

    return jax.tree.map(of_each, tree, is_leaf=is_box)


def _renamer(box: Any) -> Callable[..., Any] | None:
    names = [f"{c.__module__}.{c.__qualname__}" for c in type(box).__mro__]
    return next((_RENAME[name] for name in names if name in _RENAME), None)


def lengthened(x: Any, axis: int | None) -> Any:
    """The shape of a parameter, or of a table in lines, with one axis lengthened."""
    shape = tuple(2 * n + 1 if i == axis else n for i, n in enumerate(x.shape))
    if is_lines(x):
        return Lines(jax.ShapeDtypeStruct(shape_of_lines(shape), x.dtype), shape)
    return jax.ShapeDtypeStruct(shape, x.dtype)


def axes_of(
    slot: tuple[int, ...], x: tuple[int, ...], longer: Sequence[tuple[int, ...]]
) -> tuple[int | None, ...] | None:
    """Maps the axes of a slot to axes of its parameter; None for other axes.

    Axes correspond if lengthening one lengthens the other. Shapes alone would not distinguish the
    columns of a square matrix from its rows.

    Args:
        slot: the shape of the slot.
        x: the shape of the parameter.
        longer: for each axis of the parameter, the shape of the slot after this axis is
            :func:`lengthened`.

    Returns:
        For each axis of the slot, the axis of the parameter. None if the lengths do not match.
    """
    found: list[int | None] = [None] * len(slot)
    for i, (n, other) in enumerate(zip(x, longer, strict=True)):
        if len(other) != len(slot):
            return None
        changed = [k for k, size in enumerate(slot) if size != other[k]]
        if len(changed) > 1:
            return None
        for k in changed:
            if (slot[k], other[k]) != (n, 2 * n + 1) or found[k] is not None:
                return None
            found[k] = i
    return tuple(found)


def _renamed_partitioned(box: Any, slot: Any, axes: tuple[int | None, ...]) -> Any:
    return box.replace(value=slot, names=taken(box.names, axes))


def _renamed_variable(box: Any, slot: Any, axes: tuple[int | None, ...]) -> Any:
    box = refilled(box, slot)
    metadata = box.get_metadata()
    # Flax has had three keys. An old one that is left would replace the new one in nnx.Optimizer.
    found = [metadata.pop(k, None) for k in ("out_sharding", "sharding_names", "sharding")]
    keys = {"out_sharding": next((x for x in found if x is not None), None)}
    keys["optimizer_sharding"] = metadata.pop("optimizer_sharding", None)
    for key, names in keys.items():
        if isinstance(names, PartitionSpec):
            metadata[key] = PartitionSpec(*taken(names, axes))
        elif isinstance(names, tuple | list):
            metadata[key] = taken(names, axes)
        elif names is not None:
            return slot
    box.set_metadata(metadata)
    return box


def _renamed_array(box: Any, slot: Any, axes: tuple[int | None, ...]) -> Any:
    names = taken(box.axes, axes)
    if None in names:
        return slot
    sized = [axis.resize(size) for axis, size in zip(names, slot.shape, strict=True)]
    return type(box)(slot, tuple(sized))


def taken(names: Any, axes: tuple[int | None, ...]) -> tuple[Any, ...]:
    """The names of a slot's axes, from those of the parameter; None for others."""
    of = dict(enumerate(names))  # a specification may have fewer than there are axes
    return tuple(None if axis is None else of.get(axis) for axis in axes)


# How a class of boxes names other axes. Only their names are here, so that none is imported.
_RENAME: dict[str, Callable[[Any, Any, tuple[int | None, ...]], Any]] = {
    "flax.core.meta.Partitioned": _renamed_partitioned,
    "flax.nnx.variablelib.Variable": _renamed_variable,
    "haliax.core.NamedArray": _renamed_array,
}
