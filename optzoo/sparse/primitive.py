"""The primitive of :func:`optzoo.lookup`: by it, the lookups of a loss are found in its jaxpr."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.dtypes import canonicalize_dtype

from ..core.compat import make_primitive
from ..core.rows import Shard


def bind_lookup(table: Array, ids: Array, batch_dims: int = 0, shard: Shard | None = None) -> Array:
    """The rows of a table; one equation in a jaxpr.

    Args:
        table: an array; its first axis after the batch axes is that of the rows.
        ids: integers, after the batch axes of any shape.
        batch_dims: how many leading axes table and ids share, each pair with its own lookup.
        shard: of which sharded table these are the rows of this device; its gradient knows it.
    """
    ids = ids.astype(canonicalize_dtype(jnp.promote_types(ids.dtype, jnp.int32)))
    return _lookup_p.bind(table, ids, batch_dims=batch_dims, shard=shard)


def is_lookup(eqn: Any) -> bool:
    """Whether an equation is a lookup; its inputs are the table and the ids."""
    return eqn.primitive is _lookup_p


def _read(
    table: Array, ids: Array, *, batch_dims: int, shard: Any, fill: float | None = None
) -> Array:
    del shard
    read = functools.partial(_read_one, fill=fill)
    for _ in range(batch_dims):
        read = jax.vmap(read)
    return read(table, ids)


def _read_one(table: Array, ids: Array, fill: float | None) -> Array:
    num_rows = table.shape[0]
    wrong = jnp.where(ids < 0, num_rows + 1, ids)
    rows = jnp.take(table, wrong, axis=0, mode="fill", fill_value=fill)
    is_padding = (ids == num_rows).reshape(ids.shape + (1,) * (table.ndim - 1))
    return jnp.where(is_padding, 0, rows)


def _tangent(tangent: Array, table: Array, ids: Array, *, batch_dims: int, shard: Any) -> Array:
    del table
    return _read(tangent, ids, batch_dims=batch_dims, shard=shard, fill=0)


def _batch(
    args: tuple[Array, Array], axes: Any, *, batch_dims: int, shard: Any
) -> tuple[Array, int]:
    (table, ids), (of_table, of_ids) = args, axes
    if of_table is None:
        # One lookup of the ids of all members.
        ids = jnp.moveaxis(ids, of_ids, batch_dims)
        return bind_lookup(table, ids, batch_dims, shard), batch_dims
    table = jnp.moveaxis(table, of_table, 0)
    if of_ids is None:
        ids = jnp.broadcast_to(ids, (len(table), *ids.shape))
    else:
        ids = jnp.moveaxis(ids, of_ids, 0)
    return bind_lookup(table, ids, batch_dims + 1, shard), 0


_lookup_p = make_primitive("optzoo_lookup", _read, _tangent, _batch)
