"""The memory that the native function of rows needs besides its arrays."""

import jax
import jax.numpy as jnp

from .groups import RowsGroup

CHUNK = 2048  # positions that one task puts into parts
_PART = 256  # positions that a part has, about
_MOST_PARTS = 4096


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
    sums = (max(1, many // 2), *rows.merged.shape[1:])
    return [counts, words(5, many), jax.ShapeDtypeStruct(sums, rows.merged.aval.dtype)]
