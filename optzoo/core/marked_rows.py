"""The operations on rows, marked for a compiler of whole programs."""

import jax.numpy as jnp
from jax import Array

from .marks import marked
from .merge import add, merge, merge_in_place

_DROP = {"mode": "drop", "wrap_negative_indices": False}


@marked("rows_gather")
def gather_rows(dense: Array, ids: Array) -> Array:
    """Rows of an array; of ids out of range, some rows."""
    return jnp.take(dense, ids, axis=0, mode="clip")


@marked("rows_scatter")
def scatter_rows(dense: Array, ids: Array, rows: Array) -> Array:
    """An array with other rows, of ids that differ; those out of range are ignored."""
    return dense.at[ids].set(rows, **_DROP, unique_indices=True)


@marked("rows_scatter_equal")
def scatter_equal_rows(dense: Array, ids: Array, rows: Array) -> Array:
    """As :func:`scatter_rows`, of ids that may repeat, with equal rows.

    To change a row again, as the rows of an id were computed, must not change it.
    """
    return dense.at[ids].set(rows, **_DROP)


@marked("rows_add")
def add_rows_to(dense: Array, ids: Array, rows: Array, *, unique: bool) -> Array:
    """An array with rows added; ids out of range are ignored."""
    return (
        dense.at[ids].add(rows, **_DROP, unique_indices=True) if unique else add(dense, ids, rows)
    )


@marked("rows_distinct")
def distinct(ids: Array) -> Array:
    """The ids, of which no two are equal, but for those out of range."""
    return ids


merge_rows = marked("rows_merge")(merge)
merge_rows_in_place = marked("rows_merge_in_place")(merge_in_place)
