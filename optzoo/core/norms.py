"""Norms of gradients, including row-sparse ones and those of sharded tables.

Rows are not merged: merge rows with repeated indices first.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from .gradients import check_arrays
from .numerics import sqrt, upcast, wide_dtype
from .rows import SparseRows, is_rows, map_rows, rows_tree


def norm(g: Any) -> Array:
    """The Euclidean norm of an array or of rows; in float32 at least."""
    [squares] = sums_of_squares([g])
    return sqrt(squares)


def global_norm(gradients: Iterable[Any]) -> Array:
    """The Euclidean norm of all gradients together; in float32 at least."""
    squares = sums_of_squares(g for g in gradients if g is not None)
    dtype = wide_dtype(*squares)
    return sqrt(sum((x.astype(dtype) for x in squares), jnp.zeros([], dtype)))


def clipping_factor(norm: Any, max_norm: Any) -> Array:
    """The factor by which a gradient is scaled so that its norm is at most ``max_norm``.

    The derivative is 0 if nothing is clipped, also at a norm of zero.
    """
    fits = norm <= max_norm
    return jnp.where(fits, 1, max_norm / jnp.where(fits, 1, norm))


def clipped_by_global_norm(updates: Any, max_norm: Any) -> Any:
    """A tree of gradients, in which rows are merged, whose global norm is at most ``max_norm``."""
    check_arrays(updates)
    updates = map_rows(SparseRows.coalesce, updates)
    gradients = rows_tree.leaves(updates)
    factor = clipping_factor(global_norm(gradients), max_norm)
    return rows_tree.map(lambda g: times(factor, g), updates)


def times(factor: Any, g: Any) -> Any:
    """An array or rows times a number, in their dtype; multiplied in float32 at least."""
    g = g if is_rows(g) else jnp.asarray(g)
    return (upcast(g) * factor).astype(g.dtype)


def sums_of_squares(gradients: Iterable[Any]) -> list[Array]:
    """The sum of squares of the elements of each gradient, array or rows.

    It is computed in float32 at least. Rows are not merged: merge repeated ones first. For a
    sharded table it is the sum over all shards.

    Raises:
        ValueError: if rows of the gradient arrive in other rounds, so that the sum is unknown.
    """
    gs = list(gradients)
    sums = [g.squares if _is_known(g) else squares_of_device(g) for g in gs]
    # Sums of all tables over the same axes together.
    return over_shards([None if _is_known(g) else g for g in gs], sums, lax.psum)


def squares_of_device(g: Any) -> Array:
    """The sum of squares of the elements on this device; in float32 at least."""
    x = upcast(g.values if is_rows(g) else jnp.asarray(g))
    is_complex = jnp.issubdtype(x.dtype, jnp.complexfloating)
    return jnp.sum(sum(map(jnp.square, (x.real, x.imag))) if is_complex else jnp.square(x))


def _is_known(g: Any) -> bool:
    return is_rows(g) and g.squares is not None


def over_shards(
    gradients: Sequence[Any], values: Sequence[Array], combine: Callable[..., Any]
) -> list[Array]:
    """Combines values of the shards of each gradient into a value of all its elements.

    Args:
        gradients: arrays, rows or None.
        values: a scalar of the rows of this device, for each gradient.
        combine: ``jax.lax.psum``, ``pmax`` or ``pmin``.

    Raises:
        ValueError: if rows of a gradient arrive in other rounds.
    """
    values, by_axes = list(values), dict[tuple[str, ...], list[int]]()
    for i, g in enumerate(gradients):
        if is_rows(g) and g.shard is not None:
            if g.shard.is_round:
                raise ValueError(
                    "a value of all rows of a gradient is unknown in one of several rounds of "
                    "optzoo.sharded_minimize: use capacity_factor=None, or put the norm first in "
                    "the chain"
                )
            by_axes.setdefault(g.shard.axes, []).append(i)
    for axes, which in by_axes.items():
        for i, value in zip(which, combine([values[i] for i in which], axes), strict=True):
            values[i] = value
    return values
