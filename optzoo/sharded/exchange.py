"""The rows that a device requests from each owner, and the all-to-all between them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from ..core.merge import segment_sum, take_inside
from ..core.numerics import rounding_cast
from .row_sharding import RowSharding


class Route(NamedTuple):
    """The distinct places of the ids of this device, in ascending order, grouped by owner.

    Padding and ids out of range have the places ``stored_rows`` and ``stored_rows + 1``. With one
    owner nothing is sent, and these are the places of the ids in their order.
    """

    places: Array  # (max(1, num_ids),), ``stored_rows + 1`` in the positions that are left
    inverse: Array | None  # for each id the position of its place
    starts: Array  # (num_shards + 1,), the first position of each owner


def make_route(places: Array, s: RowSharding) -> Route:
    """The route of places of any shape; without places, the route of padding."""
    flat = _at_least_one(places.reshape(-1), s.stored_rows)
    size = flat.shape[0]
    if s.num_shards == 1:
        return Route(flat, None, jnp.array([0, size], jnp.int32))
    # What stands for nothing is last, as what is out of range.
    fill = s.stored_rows + 1
    distinct, inverse = jnp.unique(flat, size=size, fill_value=fill, return_inverse=True)
    bounds = jnp.arange(s.num_shards + 1, dtype=distinct.dtype) * s.rows_per_shard
    starts = first_positions(distinct, bounds)
    return Route(distinct, inverse.reshape(-1), starts)


def _at_least_one(x: Array, padding: Any) -> Array:
    """Pads the values of ids to at least one."""
    return x if len(x) else jnp.pad(x, [(0, 1)] + [(0, 0)] * (x.ndim - 1), constant_values=padding)


def first_positions(places: Array, bounds: Array) -> Array:
    """The first indices in sorted places whose values are not below each bound."""
    return jnp.searchsorted(places, bounds).astype(jnp.int32)


class Bucket(NamedTuple):
    """The rows that this device requests from each owner in one exchange."""

    local: Array  # (num_shards, capacity), of the owner's shard; ``rows_per_shard`` for padding
    # For each id the position of its row among those of all owners; for one without a row their
    # number, and for padding one more. None: they are in the order of the ids.
    at: Array | None

    def of_ids(self, rows: Array) -> Array:
        """The row of each id: zeros for padding, NaN for ids without a row.

        Without ids, one row of padding.
        """
        flat = rows.reshape(-1, *rows.shape[2:])
        if self.at is None:
            return flat
        # Two more rows: a TPU takes longer to choose between rows and what is none.
        none = jnp.nan if jnp.issubdtype(flat.dtype, jnp.inexact) else jnp.iinfo(flat.dtype).min
        others = jnp.stack([jnp.full_like(flat[0], none), jnp.zeros_like(flat[0])])
        return take_inside(jnp.concatenate([flat, others]), self.at)

    def of_rows(self, of_ids: Array) -> Array:
        """For each row, the sum of the values of its ids."""
        of_ids = _at_least_one(of_ids, 0)
        total = of_ids if self.at is None else segment_sum(of_ids, self.at, self.local.size)
        return total.reshape(*self.local.shape, *of_ids.shape[1:])


def make_bucket(route: Route, first: Array, end: Array, capacity: int, s: RowSharding) -> Bucket:
    """A bucket of the indices ``first`` to ``end`` of each owner, at most ``capacity``."""
    places, size = route.places, route.places.shape[0]
    positions = first[:, None] + jnp.arange(capacity, dtype=first.dtype)[None]
    owners = jnp.arange(s.num_shards, dtype=places.dtype)
    local = places[jnp.minimum(positions, size - 1)] - owners[:, None] * s.rows_per_shard
    local = jnp.where(positions < end[:, None], local, s.rows_per_shard).astype(jnp.int32)
    if route.inverse is None:
        return Bucket(local, None)
    owner = jnp.minimum(places // s.rows_per_shard, s.num_shards - 1).astype(jnp.int32)
    position = jnp.arange(size, dtype=jnp.int32)
    nth = position - first[owner]
    is_sent = (nth >= 0) & (nth < capacity) & (position < end[owner])
    at = jnp.where(is_sent, owner * capacity + nth, local.size)
    at = jnp.where(places == s.stored_rows, local.size + 1, at)
    return Bucket(local, at[route.inverse])


def to_transport(x: Array, transport: DTypeLike | None) -> Array:
    """``x`` in the dtype in which it is sent."""
    return x if transport is None else rounding_cast(x, transport)


def exchange(parts: Sequence[Array], shardings: Sequence[RowSharding]) -> list[Array]:
    """Sends the ``i``-th block of each part to the ``i``-th device: one all-to-all per dtype.

    Args:
        parts: arrays of shapes ``(num_shards, ...)``.
        shardings: their shardings.
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
