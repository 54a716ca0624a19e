"""Sums of gradients that wait for more.

The rows of a table wait in an array like the table. Which of them do, and from how many gradients,
stands beside it, so that they leave as rows again. Nothing is ever cleared: what waits for an
earlier update than the present one counts as zero.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ...core.rows import SparseRows, is_rows, is_sparse_or_none, map_rows
from ...state.averages import zeros_of_average
from .collectives import divide_gradients


class GradientAccumulator(NamedTuple):
    """Trees like the parameters."""

    sum: Any
    held_for: Any  # for which update each row (of an array its first axis) was held last
    touches: Any  # in how many gradients it was


def init_accumulator(params: Any) -> GradientAccumulator:
    """At the start."""
    per_row = lambda x: jnp.zeros(jnp.shape(x)[:1], jnp.int32)
    counts = (jax.tree.map(per_row, params) for _ in range(2))
    return GradientAccumulator(zeros_of_average(params), *counts)


def with_touches(updates: Any) -> Any:
    """Each row of SparseRows once, as a vector whose last element says that it is there."""

    def append(g):
        g = g.coalesce()
        there = (g.indices < g.num_rows).astype(g.dtype)
        return g.with_values(_append(g.values, there))

    return map_rows(append, updates)


def divide_touched(sums: Any, number: Array, like: Any, by_touches: bool) -> Any:
    """As ``divide_gradients``, of sums of :func:`with_touches`; by touches each row has its own."""

    def plain(total, g):
        if not is_rows(g):
            return total
        total = total.coalesce()
        values, touches = _take_off(total.values, g.values.shape[1:])
        if by_touches:
            values *= _per_row(number / jnp.maximum(touches, 1), values)
        return total.with_values(values)

    return divide_gradients(
        jax.tree.map(plain, sums, like, is_leaf=is_sparse_or_none), number, like
    )


def add_to_held(
    held: GradientAccumulator, sums: Any, like: Any, *, update: Array, accepted: Array, most: int
):
    """Adds sums of :func:`with_touches` to what is held, and shows what there is.

    Args:
        held: what waits already.
        sums: of the accepted gradients.
        like: the gradients.
        update: which one they wait for, counted from 1.
        accepted: how many gradients were summed.
        most: how many gradients wait at most.

    Returns:
        What waits now as sums, as from :func:`with_touches`; and the new ``held``.
    """
    gs, treedef = jax.tree.flatten(like, is_leaf=is_sparse_or_none)
    columns = map(treedef.flatten_up_to, (sums, *held))
    done = list[tuple[Any, ...]]()
    for g, total, waits, held_for, touches in zip(gs, *columns, strict=True):
        if g is None:
            done.append((None, waits, held_for, touches))
        elif is_rows(g):
            done.append(_hold_rows(total, waits, held_for, touches, update, most * len(g.indices)))
        else:
            is_held = held_for == update
            total += jnp.where(_per_row(is_held, total), waits, 0)
            touches = jnp.where(is_held, touches, 0) + accepted
            done.append((total, total, jnp.where(accepted > 0, update, held_for), touches))
    trees = [treedef.unflatten([leaf[i] for leaf in done]) for i in range(4)]
    return trees[0], GradientAccumulator(*trees[1:])


def _hold_rows(total, waits, held_for, touches, update, most):
    total = total.coalesce()
    values, new = _take_off(total.values, waits.shape[1:])
    is_held = total.gather(held_for) == update
    values += jnp.where(_per_row(is_held, values), total.gather(waits), 0)
    new = new.astype(jnp.int32) + jnp.where(is_held, total.gather(touches), 0)
    waits, touches = total.scatter(waits, values), total.scatter(touches, new)
    held_for = total.scatter(held_for, jnp.full(is_held.shape, update))

    size = min(total.num_rows, most)  # if no earlier gradient listed more rows than this one
    [places] = jnp.nonzero(held_for == update, size=size, fill_value=total.num_rows)
    found = SparseRows(places, places, total.num_rows, coalesced=True)
    fits = jnp.sum(held_for == update) <= size
    values = jnp.where(fits, _append(found.gather(waits), found.gather(touches)), jnp.nan)
    return found.with_values(values).drop_padding(), waits, held_for, touches


def _append(values: Array, last: Array) -> Array:
    """Rows as vectors with one more element."""
    flat = values.reshape(len(values), math.prod(values.shape[1:]))
    return jnp.concatenate([flat, last[:, None].astype(flat.dtype)], axis=1)


def _take_off(values: Array, row: tuple[int, ...]) -> tuple[Array, Array]:
    """The rows in their own shape, and their last elements."""
    return values[:, :-1].reshape(len(values), *row), values[:, -1]


def _per_row(a: Array, like: Array) -> Array:
    return a.reshape(a.shape + (1,) * (like.ndim - a.ndim))
