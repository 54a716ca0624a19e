"""Accumulators of gradients.

The rows of a table are accumulated in an array of the table's shape. Two more arrays store, for
each row, the number of its update and its number of gradients, so that the sums can be read as
rows. Sums are never cleared: a sum for an earlier update is treated as zero.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ...core.boxes import Boxes, map_parameters
from ...core.meshes import EVERYWHERE, mesh_of, placed, zeros_of_rows
from ...core.numerics import is_trainable, upcast
from ...core.rows import SparseRows, is_rows, map_rows, update_tree
from ...state.averages import wide_zeros_like
from .collectives import divide_gradients


class GradientAccumulator(NamedTuple):
    """Three trees like the parameters.

    The counts have one integer for each row of an array (for each element of its first axis). A
    parameter that cannot be trained, such as an integer one, has None.
    """

    sum: Any
    target_update: Any  # for which update each row was accumulated last, counted from 1
    row_counts: Any  # how many gradients are summed in each row


def init_accumulator(params: Any) -> GradientAccumulator:
    """An empty accumulator."""
    params = jax.tree.map(lambda x: x if is_trainable(x) else None, params)
    counts = (map_parameters(lambda x: zeros_of_rows(x, jnp.int32), params) for _ in range(2))
    return GradientAccumulator(wide_zeros_like(params), *counts)


def append_row_counts(updates: Any) -> Any:
    """SparseRows with their rows as vectors, each with a last element: one, zero at padding.

    They are at least float32, so that repeated rows are not rounded before they are summed.
    """

    def append(g):
        g = upcast(g).coalesce()
        is_real = (g.indices < g.num_rows).astype(g.dtype)
        return g.with_values(_append(g.values, is_real))

    return map_rows(append, updates)


def divide_counted(sums: Any, number: Array, like: Any, by_row_counts: bool) -> Any:
    """``divide_gradients`` for sums of :func:`append_row_counts`.

    Args:
        sums: the sums of the gradients.
        number: the number of gradients in the sums.
        like: a tree of gradients, for the shapes and the dtypes.
        by_row_counts: divide each row by its own count instead of ``number``.
    """

    def plain(total, g):
        if not is_rows(g):
            return total
        total = total.coalesce()
        values, counts = _take_off(total.values, g.values.shape[1:])
        if by_row_counts:
            values *= _per_row(number / jnp.maximum(counts, 1), values)
        return total.with_values(values)

    plain_sums = update_tree.map(plain, sums, like)
    return divide_gradients(plain_sums, number, like)


def accumulate_sums(
    accumulator: GradientAccumulator,
    sums: Any,
    like: Any,
    *,
    update: Array,
    accepted: Array,
    most: int,
) -> tuple[Any, GradientAccumulator]:
    """Adds sums of :func:`append_row_counts` to the accumulator, and reads the totals.

    Args:
        accumulator: the accumulator before this call.
        sums: the sums of the accepted gradients.
        like: a tree of gradients, for the shapes and the dtypes.
        update: the number of the update that uses the gradients, from 1.
        accepted: the number of gradients in ``sums``.
        most: the largest number of gradients in the accumulator.

    Returns:
        The totals in the form of :func:`append_row_counts`, an array where the gradient is None,
        and the new accumulator.
    """
    boxes = Boxes(like)
    trees = sums, *accumulator
    done = list[tuple[Any, ...]]()
    for g, total, before, target, counts in zip(
        boxes.contents, *map(boxes.slots, trees), strict=True
    ):
        if before is None:
            done.append((None, before, target, counts))
        elif g is None:
            is_kept = _per_row(target == update, before)
            done.append((jnp.where(is_kept, before, 0), before, target, counts))
        elif is_rows(g):
            kept = GradientAccumulator(before, target, counts)
            done.append(_accumulate_rows(total, kept, update, most * len(g.indices)))
        else:
            is_kept = target == update
            total += jnp.where(_per_row(is_kept, total), before, 0)
            counts = jnp.where(is_kept, counts, 0) + accepted
            target = jnp.where(accepted > 0, update, target)
            done.append((total, total.astype(before.dtype), target, counts))
    total, *after = (
        boxes.refilled(tree, [leaf[i] for leaf in done]) for i, tree in enumerate(trees)
    )
    return total, GradientAccumulator(*after)


def have_come(accumulator: GradientAccumulator, update: Array) -> Any:
    """Whether a gradient of each parameter was accumulated for an update."""
    return jax.tree.map(lambda target: jnp.any(target == update), accumulator.target_update)


def _accumulate_rows(
    total: SparseRows, kept: GradientAccumulator, update: Array, most: int
) -> tuple[SparseRows, Array, Array, Array]:
    """For one table: its total, and the three arrays of its accumulator."""
    before, target, counts = kept
    total = total.coalesce()
    values, new = _take_off(total.values, before.shape[1:])
    is_kept = total.gather(target) == update
    values += jnp.where(_per_row(is_kept, values), total.gather(before), 0)
    new = new.astype(jnp.int32) + jnp.where(is_kept, total.gather(counts), 0)
    after, counts = total.scatter(before, values), total.scatter(counts, new)
    target = total.scatter(target, jnp.full(is_kept.shape, update))

    # Enough, unless an earlier gradient listed more rows than this one; then the result is NaN.
    size = min(total.num_rows, most)
    is_new = placed(target == update, mesh_of(target), EVERYWHERE)
    [indices] = jnp.nonzero(is_new, size=size, fill_value=total.num_rows)
    found = total.with_rows(indices, indices, coalesced=True)
    fits = jnp.sum(is_new) <= size
    values = jnp.where(fits, _append(found.gather(after), found.gather(counts)), jnp.nan)
    return found.with_values(values).drop_padding(), after, target, counts


def _append(values: Array, last: Array) -> Array:
    """Rows as vectors with one more element."""
    flat = values.reshape(len(values), math.prod(values.shape[1:]))
    return jnp.concatenate([flat, last[:, None].astype(flat.dtype)], axis=1)


def _take_off(values: Array, row: tuple[int, ...]) -> tuple[Array, Array]:
    """The rows in their own shape, and their last elements."""
    return values[:, :-1].reshape(len(values), *row), values[:, -1]


def _per_row(a: Array, like: Array) -> Array:
    return a.reshape(a.shape + (1,) * (like.ndim - a.ndim))
