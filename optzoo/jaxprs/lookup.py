"""The primitive of :func:`optzoo.lookup`, by which lookups are found in the jaxpr of a loss."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.dtypes import canonicalize_dtype
from jax.sharding import PartitionSpec

from ..core.compat import make_primitive, vary_as
from ..core.lines import take_rows
from ..core.meshes import automatically, spec_of_rows
from ..core.numerics import promote_types, upcast
from ..core.rows import Shard
from .graph import Operation


def bind_lookup(
    table: Array,
    ids: Array,
    batch_dims: int = 0,
    shard: Shard | None = None,
    in_lines: tuple[int, ...] | None = None,
    spec: PartitionSpec | None = None,
) -> Array:
    """The rows of a table, as one equation in a jaxpr.

    Args:
        table: an array whose first axis after the batch axes is the axis of rows.
        ids: integers, of any shape after the batch axes.
        batch_dims: the number of leading axes that table and ids share; each pair is a lookup of
            its own.
        shard: the sharded table of which these are the rows of this device, for its gradient.
        in_lines: the shape of the table if the array is its lines (``core/lines.py``).
        spec: the partition spec of the rows; None to divide them like the ids and the rows of the
            table.
    """
    ids = ids.astype(canonicalize_dtype(promote_types(ids.dtype, jnp.int32)))
    return _lookup_p.bind(
        table, ids, batch_dims=batch_dims, shard=shard, in_lines=in_lines, spec=spec
    )


def is_lookup(op: Operation) -> bool:
    """Whether an operation is a lookup; its operands are the table and the ids."""
    return op.eqn.primitive is _lookup_p


def shape_of_table(op: Operation) -> tuple[int, ...]:
    """The shape of the table of a lookup."""
    return op.params["in_lines"] or op.ins[0].shape


def _read(
    table: Array,
    ids: Array,
    *,
    batch_dims: int,
    shard: Any,
    in_lines: Any,
    spec: Any,
    fill: float | None = None,
) -> Array:
    del shard
    read = functools.partial(_read_one, fill=fill, in_lines=in_lines, spec=spec)
    for _ in range(batch_dims):
        read = jax.vmap(read)
    return read(table, ids)


def _read_one(table: Array, ids: Array, fill: float | None, in_lines: Any, spec: Any) -> Array:
    read = functools.partial(_read_automatically, fill=fill, in_lines=in_lines)
    specs = lambda rows, table, ids: spec_of_rows(table, ids) if spec is None else spec
    return automatically(read, specs)(table, ids)


def _read_automatically(table: Array, ids: Array, fill: float | None, in_lines: Any) -> Array:
    num_rows = (in_lines or table.shape)[0]
    # JAX makes ids of 64 bits 32 bits before it looks whether they are in range.
    is_wrong = ids < 0 if ids.dtype.itemsize < 8 else (ids < 0) | (ids > num_rows)
    wrong = jnp.where(is_wrong, num_rows + 1, ids)
    if in_lines:
        rows = _rows_in_lines(table, wrong, fill, in_lines)
    else:
        rows = jnp.take(table, wrong, axis=0, mode="fill", fill_value=fill)
    wide = lambda which: which.reshape(ids.shape + (1,) * (rows.ndim - ids.ndim))
    rows = jnp.where(wide(ids == num_rows), 0, rows)
    return vary_as(rows, (table, ids))  # those of no ids are a constant


def _rows_in_lines(lines: Array, ids: Array, fill: float | None, shape: tuple[int, ...]) -> Array:
    rows = take_rows(lines, ids.reshape(-1), shape).reshape(*ids.shape, *shape[1:])
    is_out = (ids > shape[0]).reshape(ids.shape + (1,) * len(shape[1:]))
    return jnp.where(is_out, jnp.nan if fill is None else fill, rows)


def _tangent(tangent: Array, table: Array, ids: Array, **about: Any) -> Array:
    del table
    # Its transposition adds the gradients of an id: in float32 at least.
    return _read(upcast(tangent), ids, **about, fill=0).astype(tangent.dtype)


def _batch(
    args: tuple[Array, Array], axes: Any, *, batch_dims: int, **about: Any
) -> tuple[Array, int]:
    (table, ids), (of_table, of_ids) = args, axes
    if of_table is None:
        # One lookup of the ids of all members.
        ids = jnp.moveaxis(ids, of_ids, batch_dims)
        return bind_lookup(table, ids, batch_dims, **about), batch_dims
    table = jnp.moveaxis(table, of_table, 0)
    if of_ids is None:
        ids = jnp.broadcast_to(ids, (len(table), *ids.shape))
    else:
        ids = jnp.moveaxis(ids, of_ids, 0)
    return bind_lookup(table, ids, batch_dims + 1, **about), 0


_lookup_p = make_primitive("optzoo_lookup", _read, _tangent, _batch)
