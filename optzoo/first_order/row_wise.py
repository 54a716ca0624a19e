"""Sums over rows, and slots with one number for each row."""

import math
from typing import Any

import jax.numpy as jnp
from jax import Array

from ..core.meshes import zeros_of_rows
from ..core.numerics import sqrt
from ..rules.leafwise import zeros


def row_means(x: Array) -> Array:
    """The mean of each row."""
    return jnp.sum(x, axis=_inner_axes(x)) / max(1, math.prod(x.shape[1:])) if x.ndim > 1 else x


def row_norms(x: Array) -> Array:
    """The Euclidean norm of each row; its derivative at 0 is 0."""
    return sqrt(jnp.sum(x**2, axis=_inner_axes(x)))


def of_rows(a: Array, x: Array) -> Array:
    """Broadcasts one number for each row of ``x`` to the axes of ``x``."""
    return jnp.expand_dims(a, _inner_axes(x))


def zero_for_each_row(x: Any) -> Array:
    """A slot with one zero for each row of the parameter ``x``."""
    return zeros(zeros_of_rows(x, x.dtype))


def count_for_each_row(x: Any) -> Array:
    """A counter slot for each row, from 0; at least float32, as 16-bit floats count to 256 only."""
    wide = jnp.float64 if jnp.result_type(x) == jnp.float64 else jnp.float32
    return jnp.zeros_like(zero_for_each_row(x), wide)


def gap_since(prev_iter: Array, t: Array) -> Array:
    """The number of updates since the last one of a row; 1 at its first."""
    # At the end of their range counts return by one cycle, but the counts of rows do not.
    return jnp.where(prev_iter == 0, 1, jnp.maximum(t - prev_iter, 0))


def shrunk_and_moved(x: Array, kept: Array, rates: Array, g: Array) -> Array:
    """The update that gives ``kept * x - rates * g``; both factors have one number for each row.

    The new rows are computed first, so that ``x`` plus the update is rounded as they are.
    """
    return of_rows(kept, g) * x - of_rows(rates, g) * g - x


def _inner_axes(x: Any) -> tuple[int, ...]:
    """The axes within a row."""
    return tuple(range(1, jnp.ndim(x)))
