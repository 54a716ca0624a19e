"""Temporary memory of native functions."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from .rows_groups import RowsGroup

CHUNK = 2048  # positions that one task puts into parts
SUMMED = 4096  # elements that are reduced one after the other
_PART = 256  # positions that a part has, about
_MOST_PARTS = 4096


def of_sums(sizes: Sequence[int], many: int) -> list[jax.ShapeDtypeStruct]:
    """The array of :mod:`sum_kernel`: ``many`` 8-byte numbers for each block of some arrays."""
    blocks = sum(-(-size // SUMMED) for size in sizes)
    return [jax.ShapeDtypeStruct((2 * blocks * many,), jnp.int32)]


def of_rows(rows: RowsGroup) -> list[jax.ShapeDtypeStruct]:
    """The arrays that :class:`merging.Parts` and :class:`merging.Sums` use."""
    if not rows.repeats:
        return []
    many = rows.ids.shape[0]
    parts = min(max(1, many // _PART), _MOST_PARTS)
    words = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    counts = words(-(-many // CHUNK) + 3, parts + 1)
    if rows.merged is None:
        return [counts, words(2, many)]
    sums = jax.ShapeDtypeStruct(rows.merged.shape, rows.merged.aval.dtype)
    return [counts, words(5, many), sums]
