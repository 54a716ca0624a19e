"""Reads rows from their owners, and sends gradients to the owners, in one or several rounds.

A round sends at most ``capacity`` rows of each table between each pair of devices. The number of
rounds is computed at run time, and is the same on all devices. Memory does not depend on the ids,
and no id is dropped.

The first round is outside of a loop, so that a compiler can overlap its messages with other
operations. The other rounds are a loop, without iterations if all rows fit into the first round.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from ..core.compat import gather_invarying
from ..core.numerics import upcast
from ..core.rows import Shard, SparseRows
from .exchange import Bucket, Route, exchange, first_positions, make_bucket, to_transport
from .lookup import Read, ask_owners
from .row_sharding import RowSharding


class Part(NamedTuple):
    """The requests of this device to one table for a part of its batch."""

    sharding: RowSharding
    capacity: int
    places: Array  # of each id, in one dimension
    route: Route
    replicas: tuple[str, ...]  # mesh axes along which there are copies of the table

    @property
    def always_fits(self) -> bool:
        """Whether one round is sufficient for any ids."""
        return self.capacity >= min(self.route.places.shape[0], self.sharding.rows_per_shard)

    def rows(self, local: Array, values: Array, is_round: bool) -> SparseRows:
        """Rows that have arrived at their owner."""
        shard = self.shard(is_round)
        return SparseRows(local, values, self.sharding.rows_per_shard, shard=shard)

    def shard(self, is_round: bool) -> Shard:
        """The ``Shard`` of rows at their owner."""
        return self.sharding.shard._replace(is_round=is_round)

    @property
    def starts(self) -> Array:
        """The first index of each owner in ``route.places``."""
        return self.route.starts[:-1]

    @property
    def ends(self) -> Array:
        """The index after the last one of each owner."""
        return self.route.starts[1:]

    def bucket(self, first: Array, end: Array) -> Bucket:
        """A bucket of the indices ``first`` to ``end`` of each owner, at most ``capacity``."""
        return make_bucket(self.route, first, end, self.capacity, self.sharding)

    def first_positions(self, rows: Array) -> Array:
        """For each owner, the first index whose row is not below its entry in ``rows``."""
        places = self.route.places
        return first_positions(places, self._first_places() + rows.astype(places.dtype))

    def row_beyond(self, first: Array) -> Array:
        """For each owner, the first row that exceeds the capacity of a message from ``first``."""
        beyond = first + self.capacity
        places, most = self.route.places, self.sharding.rows_per_shard
        local = places[jnp.minimum(beyond, places.shape[0] - 1)] - self._first_places()
        return jnp.where(beyond < self.ends, local, most).astype(jnp.int32)

    def _first_places(self) -> Array:
        s = self.sharding
        return jnp.arange(s.num_shards, dtype=self.route.places.dtype) * s.rows_per_shard


class Asked(NamedTuple):
    """The requests of the first round to all tables for a part of the batch."""

    parts: Sequence[Part]
    buckets: Sequence[Bucket]
    local: Sequence[Array]  # (num_shards, capacity): the rows that all devices ask of this one
    rows: Sequence[Array]  # of the ids of each table


def read_first(parts: Sequence[Part], reads: Sequence[Read], transport: Any) -> Asked:
    """Reads rows in the first round.

    As in a lookup, padding reads zeros and ids out of range read NaN. Ids that exceed the capacity
    read NaN, too.

    Args:
        parts: the requests to each table.
        reads: for each table, a function that reads rows of this device.
        transport: the dtype to send rows in, or None.
    """
    buckets = [p.bucket(p.starts, p.ends) for p in parts]
    local, replies = ask_owners(reads, buckets, [p.sharding for p in parts], transport)
    rows = [b.of_ids(x)[: p.places.size] for p, b, x in zip(parts, buckets, replies, strict=True)]
    return Asked(parts, buckets, local, rows)


def read_further(
    asked: Asked, reads: Sequence[Read], axes: tuple[str, ...], transport: Any
) -> list[Array]:
    """All rows: those of the first round, and those that exceeded its capacity.

    Args:
        asked: the requests of the first round.
        reads: as in :func:`read_first`.
        axes: the axes of the mesh.
        transport: the dtype to send rows in, or None.
    """
    waiting = [k for k, p in enumerate(asked.parts) if not p.always_fits]
    if not waiting:
        return list(asked.rows)
    pick = lambda items: [items[k] for k in waiting]
    parts = pick(asked.parts)

    def one_round(number, rows):
        buckets = [
            p.bucket(jnp.minimum(p.starts + number * p.capacity, p.ends), p.ends) for p in parts
        ]
        _, replies = ask_owners(pick(reads), buckets, [p.sharding for p in parts], transport)
        return [_with_replies(*of_part) for of_part in zip(rows, buckets, replies, strict=True)]

    needed = [jnp.max(-(-(p.ends - p.starts) // p.capacity)) for p in parts]
    rounds = lax.pmax(functools.reduce(jnp.maximum, needed), axes)
    body = lambda carry: (carry[0] + 1, one_round(*carry))
    start = jnp.ones_like(rounds), pick(asked.rows)
    found = lax.while_loop(lambda c: c[0] < rounds, body, start)[1]
    return [dict(zip(waiting, found, strict=True)).get(k, x) for k, x in enumerate(asked.rows)]


def _with_replies(rows: Array, bucket: Bucket, replies: Array) -> Array:
    """The rows of ids, with those that have arrived in this round."""
    assert bucket.at is not None  # one owner needs one round
    is_here = bucket.at < bucket.local.size
    return jnp.where(is_here.reshape(-1, *(1,) * (rows.ndim - 1)), bucket.of_ids(replies), rows)


class Arrived(NamedTuple):
    """The gradients of the rows of each table, from all devices, at their owners.

    All gradients of a row arrive in one round, as repeated rows. Several rounds need an update that
    treats each row by itself.

    Attributes:
        first: the rows of each table in the first round.
        further: ``further(update, carry)`` is the last ``carry = update(rows, carry)`` with the
            rows of the other rounds.
    """

    first: list[SparseRows]
    further: Callable[[Callable[[list[SparseRows], Any], Any], Any], Any]


def send_gradients(
    asked: Sequence[Asked],
    gradients: Sequence[Sequence[Array]],
    divisor: int,
    axes: tuple[str, ...],
    transport: Any,
) -> Arrived:
    """The gradients of rows at their owners.

    Args:
        asked: the requests of each part of the batch.
        gradients: for each part of the batch, the gradients of the ids of each table. The sum of
            the gradients of a row is divided by ``divisor`` before it is rounded to their dtype.
        divisor: the divisor of the sums.
        axes: the axes of the mesh.
        transport: the dtype to send gradients in, or None.
    """
    of_tables = [*zip(*(a.parts for a in asked), strict=True)]
    waiting = [t for t, parts in enumerate(of_tables) if not all(p.always_fits for p in parts)]

    def rows_of(tables: Sequence[int], local: Any, buckets: Any) -> list[SparseRows]:
        """The rows of some tables; the other arguments have an entry per part of the batch."""
        arrived = []
        for of_buckets, of_part in zip(buckets, gradients, strict=True):
            sent = []
            for bucket, t in zip(of_buckets, tables, strict=True):
                mean = bucket.of_rows(upcast(of_part[t])) / divisor
                sent.append(to_transport(mean.astype(of_part[t].dtype), transport))
            arrived.append(exchange(sent, [of_tables[t][0].sharding for t in tables]))
        found = []
        of_parts = zip(*local, strict=True), zip(*arrived, strict=True)
        for t, local_rows, values in zip(tables, *of_parts, strict=True):
            part, dtype = of_tables[t][0], gradients[0][t].dtype
            ids, values = _joined(local_rows), _joined(values).astype(dtype)
            if part.replicas:
                ids, values = gather_invarying((ids, values), part.replicas)
            found.append(part.rows(ids, values, bool(waiting)))
        return found

    def agreed(firsts: Sequence[Sequence[Array]]) -> list[Array]:
        """For each waiting table and owner, the row at which all devices end this round.

        The rows before it fit into the messages, which begin at these indices, of all devices and
        all parts of the batch.
        """
        ends = []
        for t, of_table in zip(waiting, firsts, strict=True):
            beyond = [p.row_beyond(first) for p, first in zip(of_tables[t], of_table, strict=True)]
            ends.append(lax.pmin(functools.reduce(jnp.minimum, beyond), axes))
        return ends

    ends = agreed([[p.starts for p in of_tables[t]] for t in waiting])
    local = [list(a.local) for a in asked]
    for t, end in zip(waiting, ends, strict=True):
        s = of_tables[t][0].sharding
        here = end[lax.axis_index(s.axes)]
        for of_part in local:
            of_part[t] = jnp.where(of_part[t] < here, of_part[t], s.rows_per_shard)
    first = rows_of(range(len(of_tables)), local, [a.buckets for a in asked])

    def further(update, carry):
        if not waiting:
            return carry
        # Of tables all of whose rows were in the first round.
        padding = [
            g.with_rows(jnp.full_like(g.indices[:1], g.num_rows), jnp.zeros_like(g.values[:1]))
            for g in first
        ]

        def one_round(lows, carry):
            firsts = [
                [p.first_positions(low) for p in of_tables[t]]
                for t, low in zip(waiting, lows, strict=True)
            ]
            ends = agreed(firsts)
            buckets = [
                [
                    p.bucket(first, jnp.minimum(p.first_positions(end), p.ends))
                    for p, first in zip(of_tables[t], of_table, strict=True)
                ]
                for t, of_table, end in zip(waiting, firsts, ends, strict=True)
            ]
            buckets = [*zip(*buckets, strict=True)]
            shardings = [of_tables[t][0].sharding for t in waiting]
            local = [exchange([b.local for b in of_part], shardings) for of_part in buckets]
            rows = list(padding)
            for t, found in zip(waiting, rows_of(waiting, local, buckets), strict=True):
                rows[t] = found
            return ends, update(rows, carry)

        def is_left(state):
            most = [of_tables[t][0].sharding.rows_per_shard for t in waiting]
            left = [jnp.any(low < n) for low, n in zip(state[0], most, strict=True)]
            return functools.reduce(jnp.logical_or, left)

        return lax.while_loop(is_left, lambda state: one_round(*state), (ends, carry))[1]

    return Arrived(first, further)


def _joined(of_parts: Sequence[Array]) -> Array:
    """Joins the rows that have arrived, of shape ``(num_shards, capacity, ...)``, of all parts."""
    flat = [x.reshape(-1, *x.shape[2:]) for x in of_parts]
    return flat[0] if len(flat) == 1 else jnp.concatenate(flat)
