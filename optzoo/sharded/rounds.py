"""Reads rows from their owners, and sends gradients to them, in as many rounds as are needed.

A round has room for ``capacity`` rows of each table for each pair of devices. How many rounds there
are is decided when the program runs, the same on all devices. So memory does not depend on the
ids, and no id is ever lost.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from ..core.compat import gather_invarying, vary
from ..core.rows import Shard, SparseRows
from .exchange import Route, exchange, first_positions, make_bucket, to_transport
from .lookup import Read, ask_owners
from .row_sharding import RowSharding


class Part(NamedTuple):
    """What this device asks of one table in a step."""

    sharding: RowSharding
    capacity: int
    places: Array  # of each id
    route: Route
    replicas: tuple[str, ...]  # mesh axes along which there are copies of the table

    @property
    def always_fits(self) -> bool:
        """Whether one round is enough for any ids."""
        return self.capacity >= min(self.route.places.shape[0], self.sharding.rows_per_shard)

    def shard(self, is_round: bool) -> Shard:
        """What is known of the rows that come to an owner."""
        return self.sharding.shard._replace(is_round=is_round)


def read_rows(
    parts: Sequence[Part],
    shards: Sequence[Array],
    reads: Sequence[Read],
    axes: tuple[str, ...],
    transport: Any,
) -> list[Array]:
    """The rows of the distinct places of each part, in the order of its route.

    Args:
        parts: of each table.
        shards: of this device, for their shapes.
        reads: how to read each of them.
        axes: of the mesh.
        transport: the dtype to send rows in, or None.
    """
    shardings = [p.sharding for p in parts]

    def one_round(number, rows):
        buckets = []
        for p in parts:
            start, end = p.route.starts[:-1], p.route.starts[1:]
            first = jnp.minimum(start + number * p.capacity, end)
            buckets.append(make_bucket(p.route, first, end, p.capacity, p.sharding))
        replies = ask_owners(reads, buckets, shardings, transport)
        if all(p.route.inverse is None for p in parts):
            return [x[0] for x in replies]  # in the order of the places
        return [
            r.at[b.positions.reshape(-1)].set(x.reshape(-1, *x.shape[2:]), mode="drop")
            for r, b, x in zip(rows, buckets, replies, strict=True)
        ]

    sizes = [(p.route.places.shape[0], *x.shape[1:]) for p, x in zip(parts, shards, strict=True)]
    rows = [vary(jnp.zeros(n, x.dtype), axes) for n, x in zip(sizes, shards, strict=True)]
    if all(p.always_fits for p in parts):
        return one_round(0, rows)
    needed = [jnp.max(-(-(p.route.starts[1:] - p.route.starts[:-1]) // p.capacity)) for p in parts]
    rounds = lax.pmax(functools.reduce(jnp.maximum, needed), axes)
    body = lambda carry: (carry[0] + 1, one_round(*carry))
    return lax.while_loop(lambda c: c[0] < rounds, body, (jnp.zeros_like(rounds), rows))[1]


def update_in_rounds(
    parts: Sequence[Part],
    gradients: Sequence[Array],
    update: Callable[[list[SparseRows], Any], Any],
    carry: Any,
    axes: tuple[str, ...],
    transport: Any,
) -> tuple[Any, Array]:
    """``carry = update(rows, carry)`` with the gradients of some rows at their owners, in turn.

    All gradients of a row, of all devices, come in one round: ``update`` gets them as repeated
    rows. Several rounds need an ``update`` that treats each row by itself.

    Args:
        parts: of each table.
        gradients: of the distinct places of each part, in the order of its route.
        update: gets the rows of each table.
        carry: what ``update`` changes.
        axes: of the mesh.
        transport: the dtype to send gradients in, or None.

    Returns:
        The last ``carry``, and the number of rounds.
    """
    shardings = [p.sharding for p in parts]
    is_round = not all(p.always_fits for p in parts)

    def one_round(lows, carry):
        buckets, sent, highs = [], [], []
        for p, gradient, low in zip(parts, gradients, lows, strict=True):
            bucket, high = _rows_of_round(p, low, axes)
            values = jnp.take(gradient, bucket.positions, axis=0, mode="fill", fill_value=0)
            buckets.append(bucket.local)
            sent.append(to_transport(values, transport))
            highs.append(high)
        local, values = exchange(buckets, shardings), exchange(sent, shardings)
        rows = []
        for p, g, i, v in zip(parts, gradients, local, values, strict=True):
            i, v = i.reshape(-1), v.reshape(-1, *v.shape[2:]).astype(g.dtype)
            if p.replicas:
                i, v = gather_invarying((i, v), p.replicas)
            rows.append(SparseRows(i, v, p.sharding.rows_per_shard, shard=p.shard(is_round)))
        return highs, update(rows, carry)

    lows = [jnp.zeros(p.sharding.num_shards, jnp.int32) for p in parts]
    if not is_round:
        return one_round(lows, carry)[1], jnp.ones([], jnp.int32)

    def is_left(state):
        number, lows, _ = state
        left = [
            jnp.any(low < p.sharding.rows_per_shard) for p, low in zip(parts, lows, strict=True)
        ]
        return (number == 0) | functools.reduce(jnp.logical_or, left)

    body = lambda state: (state[0] + 1, *one_round(*state[1:]))
    number, _, carry = lax.while_loop(is_left, body, (jnp.zeros([], jnp.int32), lows, carry))
    return carry, number


def _rows_of_round(p: Part, low: Array, axes: tuple[str, ...]) -> tuple[Any, Array]:
    """The rows from ``low`` to ``high`` of each owner, and ``high``.

    ``high`` is agreed on by all devices: the most rows of which none has more than ``capacity``.
    """
    s, places, size = p.sharding, p.route.places, p.route.places.shape[0]
    start, end = p.route.starts[:-1], p.route.starts[1:]
    if p.always_fits:  # all of them are in the first round
        first, high = jnp.where(low == 0, start, end), jnp.full_like(low, s.rows_per_shard)
        return make_bucket(p.route, first, end, p.capacity, s), high
    base = jnp.arange(s.num_shards, dtype=places.dtype) * s.rows_per_shard
    first = first_positions(places, base + low.astype(places.dtype))
    beyond = first + p.capacity  # the first position without room
    local = places[jnp.minimum(beyond, size - 1)] - base
    high = lax.pmin(jnp.where(beyond < end, local, s.rows_per_shard), axes).astype(low.dtype)
    last = first_positions(places, base + high.astype(places.dtype))
    return make_bucket(p.route, first, jnp.minimum(last, end), p.capacity, s), high
