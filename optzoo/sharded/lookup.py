"""Lookups in tables that are sharded by rows, in one round of messages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from ..core.checks import check_positive
from ..core.compat import varying
from ..core.paths import flatten_with_path, path_name
from ..core.row_ids import integer_ids
from ..jaxprs.lookup import bind_lookup
from .exchange import Bucket, exchange, make_bucket, make_route, to_transport
from .row_sharding import RowSharding

Read = Callable[[Array], Array]  # the rows of some ids of a shard, zeros for padding


def lookup(
    table: Any,
    ids: Any,
    sharding: Any,
    *,
    capacity_factor: float | None = None,
    transport: DTypeLike | None = None,
) -> Any:
    """``table[ids]`` of a table sharded by rows, inside ``jax.shard_map``.

    Each device requests the row of each of its distinct ids from the owner, by two all-to-alls.
    Under :func:`optzoo.value_and_grad` gradients are sent to the owners, and the gradient of a
    shard is the :class:`optzoo.SparseRows` of its rows, from all devices, for any optimizer.

    Several tables, of any widths, can share the messages: pass trees of tables, ids and shardings.

    The gradient is that of the **sum** of the losses of all devices. For their mean, end the loss
    with ``jax.lax.pmean(loss, axis_name)``.

    The id ``num_rows`` is padding: it reads zeros and has no gradient. If your ids are padded with
    -1, replace it: ``ids = jnp.where(ids < 0, sharding.num_rows, ids)``. Ids out of range,
    including all negative ids, read NaN.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np, optzoo
        >>> mesh = jax.make_mesh((1,), ("shard",))
        >>> sharding = optzoo.sharded.RowSharding(4, 1, multiple=1)
        >>> read = lambda table, ids: optzoo.sharded.lookup(table, ids, sharding)
        >>> spec = jax.sharding.PartitionSpec("shard")
        >>> read = jax.shard_map(read, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
        >>> place = lambda x: jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
        >>> print(read(place(jnp.arange(4.0)[:, None]), place(jnp.array([3, 1]))).ravel())
        [3. 1.]

    Args:
        table: the rows of this device, of shape ``(rows_per_shard, *row_shape)``; or a tree.
        ids: the ids of this device, integers of any shape; or a tree like ``table``.
        sharding: the :class:`optzoo.sharded.RowSharding` of the table; or a tree like ``table``.
        capacity_factor: the capacity of a message, as a multiple of the average number of ids per
            owner, with a margin (:meth:`optzoo.sharded.RowSharding.capacity`). Ids that exceed it
            read NaN. None: the capacity for any ids, ``num_shards`` times as large.
        transport: the dtype in which rows and gradients are sent, such as ``jnp.bfloat16``; None
            for that of the table.

    Returns:
        Rows of shape ``ids.shape + row_shape``; or a tree of them.

    Raises:
        TypeError: if the ids are not integers, or ``sharding`` contains another type.
        ValueError: if the number of rows of a shard differs from its sharding, if
            ``capacity_factor`` is not positive, or outside of a ``shard_map`` over the axis that
            checks replication (without the check, gradients would be wrong by a factor).
    """
    check_positive(capacity_factor=1 if capacity_factor is None else capacity_factor)
    paths, treedef = flatten_with_path(table)
    names, shards = [path_name(path) for path, _ in paths], [x for _, x in paths]
    all_ids = [integer_ids(i) for i in treedef.flatten_up_to(ids)]
    shardings = (
        [sharding] * len(shards)
        if isinstance(sharding, RowSharding)
        else treedef.flatten_up_to(sharding)
    )
    for name, shard, s in zip(names, shards, shardings, strict=True):
        check_shard(name, shard, s)
    places = [s.places_of(i) for s, i in zip(shardings, all_ids, strict=True)]
    routes = [make_route(p, s) for p, s in zip(places, shardings, strict=True)]
    capacities = [
        s.capacity(p.size, capacity_factor) for s, p in zip(shardings, places, strict=True)
    ]
    buckets = [
        make_bucket(r, r.starts[:-1], r.starts[1:], c, s)
        for r, c, s in zip(routes, capacities, shardings, strict=True)
    ]
    reads = [
        functools.partial(bind_lookup, shard, shard=s.shard)
        for shard, s in zip(shards, shardings, strict=True)
    ]
    _, replies = ask_owners(reads, buckets, shardings, transport)
    out = [
        bucket.of_ids(reply)[: p.size].reshape(*p.shape, *shard.shape[1:])
        for reply, bucket, p, shard in zip(replies, buckets, places, shards, strict=True)
    ]
    return treedef.unflatten(out)


def ask_owners(
    reads: Sequence[Read], buckets: Sequence[Bucket], shardings: Any, transport: Any
) -> tuple[list[Array], list[Array]]:
    """The ids of rows requested from this device, and the rows that this device requested.

    The shapes are ``(num_shards, capacity)`` and ``(num_shards, capacity, *row_shape)`` per bucket.
    """
    asked = exchange([b.local for b in buckets], shardings)
    flat = [_as_read(read(a.reshape(-1))) for read, a in zip(reads, asked, strict=True)]
    rows = [r.reshape(*a.shape, *r.shape[1:]) for r, a in zip(flat, asked, strict=True)]
    arrived = exchange([to_transport(r, transport) for r in rows], shardings)
    return asked, [a.astype(r.dtype) for a, r in zip(arrived, rows, strict=True)]


def _as_read(rows: Array) -> Array:
    """The same rows, behind a barrier.

    If a model only multiplies rows, XLA for TPUs would convert the whole shard to bfloat16, in
    which it multiplies. With the barrier it converts only the rows, before sending them.
    """
    return lax.reduce_precision(rows, 8, 23) if rows.dtype == jnp.float32 else rows


def check_shard(name: str, shard: Any, s: Any) -> None:
    """Raises an error unless ``shard`` is a shard of ``s`` where replication is checked."""
    where = f"of table '{name}'" if name else "of the table"
    if not isinstance(s, RowSharding):
        raise TypeError(f"sharding {where} must be an optzoo.sharded.RowSharding, got {s!r}")
    if jnp.shape(shard)[:1] != (s.rows_per_shard,):
        raise ValueError(
            f"the shard {where} must have {s.rows_per_shard} rows, got shape {jnp.shape(shard)}: "
            f"use shard_map with in_specs={s.spec} and an array of {s.stored_rows} rows "
            "(optzoo.sharded.create_table)"
        )
    if missing := set(s.axes) - varying(shard):
        raise ValueError(
            f"the shard {where} does not vary over the mesh axes {sorted(missing)}: call "
            "optzoo.sharded.lookup inside jax.shard_map(..., check_vma=True) with "
            f"in_specs={s.spec} for the table. Without check_vma the gradients of dense "
            "parameters would be wrong by a factor, without an error"
        )
