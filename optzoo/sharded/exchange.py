"""Which rows a device asks of which owner, and the all-to-all between them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from ..core.merge import segment_sum
from ..core.numerics import rounding_cast
from .row_sharding import RowSharding


class Route(NamedTuple):
    """The distinct places of the ids of this device, in ascending order: owner after owner.

    With one owner nothing is sent: then they are the places of the ids, in their order.
    """

    places: Array  # (max(1, num_ids),), ``stored_rows`` in the positions that are left
    inverse: Array | None  # for each id the position of its place (out of range: of padding)
    starts: Array  # (num_shards + 1,), the first position of each owner

    def of_ids(self, of_places: Array) -> Array:
        """From what belongs to each place what belongs to each id; if there is none, to padding."""
        return of_places if self.inverse is None else jnp.take(of_places, self.inverse, axis=0)

    def of_places(self, of_ids: Array) -> Array:
        """The sum of what belongs to the ids of each place."""
        of_ids = _at_least_one(of_ids, 0)
        if self.inverse is None:
            return of_ids
        return segment_sum(of_ids, self.inverse, len(self.places))


def make_route(places: Array, s: RowSharding) -> Route:
    """The route of places of any shape; of none, that of padding."""
    flat = _at_least_one(jnp.minimum(places.reshape(-1), s.stored_rows), s.stored_rows)
    size = flat.shape[0]
    if s.num_shards == 1:
        return Route(flat, None, jnp.array([0, size], jnp.int32))
    distinct, inverse = jnp.unique(flat, size=size, fill_value=s.stored_rows, return_inverse=True)
    bounds = jnp.arange(s.num_shards + 1, dtype=distinct.dtype) * s.rows_per_shard
    starts = first_positions(distinct, bounds)
    return Route(distinct, inverse.reshape(-1), starts)


def _at_least_one(x: Array, padding: Any) -> Array:
    """What belongs to each id; if there is none, what belongs to padding."""
    return x if len(x) else jnp.pad(x, [(0, 1)] + [(0, 0)] * (x.ndim - 1), constant_values=padding)


def first_positions(places: Array, bounds: Array) -> Array:
    """The first positions in sorted places of what is not below each bound."""
    return jnp.searchsorted(places, bounds).astype(jnp.int32)


class Bucket(NamedTuple):
    """The rows that this device asks of each owner in one exchange."""

    positions: Array  # (num_shards, capacity), in ``route.places``; its length for padding
    local: Array  # the same shape: rows of the owner's shard, ``rows_per_shard`` for padding


def make_bucket(route: Route, first: Array, end: Array, capacity: int, s: RowSharding) -> Bucket:
    """The positions from ``first`` to ``end`` of each owner, at most ``capacity``."""
    size = route.places.shape[0]
    positions = first[:, None] + jnp.arange(capacity, dtype=first.dtype)[None]
    owner = jnp.arange(s.num_shards, dtype=route.places.dtype)[:, None]
    local = route.places[jnp.minimum(positions, size - 1)] - owner * s.rows_per_shard
    is_real = positions < end[:, None]
    local = jnp.where(is_real, local, s.rows_per_shard).astype(jnp.int32)
    return Bucket(jnp.where(is_real, positions, size), local)


def to_transport(x: Array, transport: DTypeLike | None) -> Array:
    """``x`` in the dtype in which it is sent."""
    return x if transport is None else rounding_cast(x, transport)


def exchange(parts: Sequence[Array], shardings: Sequence[RowSharding]) -> list[Array]:
    """The ``i``-th block of each part to the ``i``-th device: one all-to-all for each dtype.

    Args:
        parts: of shapes ``(num_shards, ...)``.
        shardings: for each of them.
    """
    groups = dict[Any, list[int]]()
    for i, (part, s) in enumerate(zip(parts, shardings, strict=True)):
        groups.setdefault((part.dtype, s.axes), []).append(i)
    done = list(parts)
    for (_, axes), group in groups.items():
        n = parts[group[0]].shape[0]
        if n == 1:
            continue
        # Rows of one shape stay rows: a TPU would change the layout of flat ones, and back.
        is_flat = len({parts[i].shape[2:] for i in group}) > 1
        blocks = [parts[i].reshape(n, -1) if is_flat else parts[i] for i in group]
        joined = jnp.concatenate(blocks, 1) if len(blocks) > 1 else blocks[0]
        arrived = lax.all_to_all(joined, axes if len(axes) > 1 else axes[0], 0, 0, tiled=True)
        at = 0
        for i, block in zip(group, blocks, strict=True):
            size = block.shape[1]
            done[i] = arrived[:, at : at + size].reshape(parts[i].shape)
            at += size
    return done
