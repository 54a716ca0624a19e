"""Flags of parameters with a gradient in any of several steps, whose sum the last step applies.

A gradient of None is part of the structure of a step, but the sum must be applied even if the
gradient is None in the last step. For this, the state has a flag for each parameter. The optimizer
gets a sum for all parameters, and its results for parameters without a gradient are discarded.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..core.boxes import Boxes, content, map_parameters, refilled
from ..core.numerics import is_trainable
from ..core.rows import is_rows
from .slots import map_slot_trees


def none_came(params: Any) -> Any:
    """False for each parameter; None for parameters that cannot be trained, such as integers."""
    return map_parameters(lambda x: jnp.zeros([], bool) if is_trainable(x) else None, params)


def has_come(updates: Any, came: Any) -> Any:
    """The flags after a step with these gradients."""
    after = lambda g, c: None if c is None else c | (g is not None)
    return _map_came(after, updates, came)


def late(updates: Any, came: Any) -> Any:
    """The flags of parameters without a gradient in this step; None for all others."""
    return _map_came(lambda g, c: c if g is None else None, updates, came)


def _map_came(f: Any, updates: Any, came: Any) -> Any:
    """Applies ``f`` to each gradient and its flag."""
    boxes = Boxes(updates)
    return boxes.refilled(came, map(f, boxes.contents, boxes.slots(came)))


def leave_out(
    inner: optax.GradientTransformation, came: Any, updates: Any, new: Any, old: Any
) -> tuple[Any, Any]:
    """The updates and the state of ``inner``, unchanged for parameters without any gradient.

    Args:
        inner: the optimizer.
        came: the flags; None for a parameter whose results are used in any case.
        updates: the updates of ``inner`` for the sums.
        new: the state of ``inner`` after them.
        old: the state of ``inner`` before.

    Raises:
        ValueError: if ``optax.tree.map_params`` does not find the slots in the state.
    """
    boxes = Boxes(updates)
    flags, treedef = boxes.slots(came), boxes.treedef
    if all(c is None for c in flags):
        return updates, new

    def of_update(box, c):
        if c is None or (u := content(box)) is None:
            return box
        return refilled(box, u.rows_if(c) if is_rows(u) else jnp.where(c, u, 0))

    def of_slots(slots):
        parts = zip(flags, treedef.flatten_up_to(slots), strict=True)
        change = lambda c, part: jax.tree.map(lambda _: True if c is None else c, part)
        return treedef.unflatten([change(c, part) for c, part in parts])

    try:
        changes = map_slot_trees(inner, of_slots, new, lambda _: True)
    except ValueError as error:
        raise ValueError(
            "a gradient is None in the last of several steps, but optax.tree.map_params finds no "
            "slots of its parameter in the state: give zeros in its place"
        ) from error
    us = map(of_update, boxes.nodes, flags)
    choose = lambda c, new, old: new if c is True else jnp.where(c, new, old)
    return treedef.unflatten(us), jax.tree.map(choose, changes, new, old)
