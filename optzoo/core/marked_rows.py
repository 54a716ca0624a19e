"""Operations on rows, marked for a compiler of whole programs."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from .marks import marked
from .merge import add, kept, merge, merge_in_place
from .meshes import automatically, like_first, spec_of, spec_of_rows

_of_rows = lambda rows, dense, ids: spec_of_rows(dense, ids)
_DROP = {"mode": "drop", "wrap_negative_indices": False}


@marked("rows_gather")
def gather_rows(dense: Array, ids: Array) -> Array:
    """Rows of an array; arbitrary rows for ids out of range."""
    take = lambda dense, ids: jnp.take(dense, kept(ids, len(dense)), axis=0, mode="clip")
    return automatically(take, _of_rows)(dense, ids)


@marked("rows_scatter")
def scatter_rows(dense: Array, ids: Array, rows: Array) -> Array:
    """An array with other rows at distinct ids; ids out of range are ignored."""
    put = lambda dense, ids, rows: _at(dense, ids).set(rows, **_DROP, unique_indices=True)
    return like_first(put)(dense, ids, rows)


@marked("rows_scatter_equal")
def scatter_equal_rows(dense: Array, ids: Array, rows: Array) -> Array:
    """Like :func:`scatter_rows`, for ids that may repeat, with equal rows.

    Applying the computation of the rows again must not change them.
    """
    put = lambda dense, ids, rows: _at(dense, ids).set(rows, **_DROP)
    return like_first(put)(dense, ids, rows)


@marked("rows_add")
def add_rows_to(dense: Array, ids: Array, rows: Array, *, unique: bool) -> Array:
    """An array with rows added; ids out of range are ignored."""
    put = lambda dense, ids, rows: _at(dense, ids).add(rows, **_DROP, unique_indices=True)
    add_each = lambda dense, ids, rows: add(dense, kept(ids, len(dense)), rows)
    return like_first(put if unique else add_each)(dense, ids, rows)


@marked("rows_distinct")
def distinct(ids: Array) -> Array:
    """The ids without duplicates, except for ids out of range."""
    return ids


@marked("rows_merge")
def merge_rows(
    ids: Array, values: Array, num_rows: int, deterministic: bool
) -> tuple[Array, Array]:
    """:func:`merge`, marked."""
    f = functools.partial(merge, num_rows=num_rows, deterministic=deterministic)
    return automatically(f, _merged)(ids, values)


@marked("rows_merge_in_place")
def merge_rows_in_place(ids: Array, values: Array, num_rows: int) -> tuple[Array, Array]:
    """:func:`merge_in_place`, marked."""
    f = functools.partial(merge_in_place, num_rows=num_rows)
    return automatically(f, _merged)(ids, values)


def _at(dense: Array, ids: Array) -> Any:
    return jnp.asarray(dense).at[kept(ids, len(dense))]


def _merged(merged: Any, ids: Array, values: Array) -> tuple[Any, Any]:
    """Each device gets all merged rows: dividing them would gather them for each array of rows."""
    del merged, ids
    return PartitionSpec(None), PartitionSpec(None, *spec_of(values)[1:])
