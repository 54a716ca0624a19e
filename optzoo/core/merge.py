"""Merges the rows that share an index: three ways, and the choice between them."""

import functools

import jax
import jax.numpy as jnp
from jax import Array


# Compiled even without a jit around it: a loop would be compiled anew by each call.
@functools.partial(jax.jit, static_argnames=("num_rows", "deterministic"))
def merge(places: Array, values: Array, num_rows: int, deterministic: bool) -> tuple[Array, Array]:
    """Sums the values of equal places; the positions left over become padding of zeros.

    Args:
        places: integers of shape ``(n,)`` in ``[0, num_rows]``; ``num_rows`` is padding.
        values: shape ``(n, *row_shape)``; those at padding count for nothing.
        num_rows: of the whole array.
        deterministic: sum in a fixed order on every backend.

    Returns:
        Places and values of the same shapes, in some order.
    """
    if places.shape[0] == 0:
        return places, values
    if deterministic:
        return _by_sort_and_scan(places, values, num_rows)
    # Measured on one core, 4,096 ids of a 1,000,000 x 64 table: 0.17 ms by hash, 0.61 with a
    # scratch word for each row of the table, 0.83 by jnp.unique, 0.91 by argsort. The hash needs
    # a loop that ends when its data say so, which accelerators do badly.
    return jax.lax.platform_dependent(
        places,
        values,
        cpu=functools.partial(_by_hash, num_rows=num_rows),
        default=functools.partial(_by_sort, num_rows=num_rows),
    )


def _by_hash(places: Array, values: Array, num_rows: int) -> tuple[Array, Array]:
    """Elects one position for each distinct index, then sums into the elected positions.

    Every undecided position writes itself into the bucket of its index. Whoever reads back a
    position with its own index is decided, for all its equals read the same one. Each round
    decides at least one index for each bucket in use, and hashes anew.
    """
    n = places.shape[0]
    own = jnp.arange(n, dtype=places.dtype)
    bits = max(4, (4 * n - 1).bit_length())

    def elect(carry):
        elected, round_number = carry
        factor = jnp.uint32(2654435761) + round_number * jnp.uint32(0x9E3779B2)  # stays odd
        bucket = (places.astype(jnp.uint32) * factor >> jnp.uint32(32 - bits)).astype(places.dtype)
        undecided = elected < 0
        scratch = jnp.zeros(1 << bits, places.dtype)
        scratch = scratch.at[jnp.where(undecided, bucket, 1 << bits)].set(own, mode="drop")
        seen = scratch[bucket]
        decided = undecided & (places[seen] == places)
        return jnp.where(decided, seen, elected), round_number + jnp.uint32(1)

    nobody = jnp.full_like(places, -1)
    elected, _ = jax.lax.while_loop(lambda c: jnp.any(c[0] < 0), elect, (nobody, jnp.uint32(0)))
    # Dropped here, padding need not be set to zero before, in a copy of the values.
    to = jnp.where(places < num_rows, elected, n)
    summed = jnp.zeros_like(values).at[to].add(values, mode="drop")
    # Not by jnp.where: XLA would make that anew for each element of the rows it is used for.
    return jnp.full_like(places, num_rows).at[elected].set(places), summed


def _by_sort(places: Array, values: Array, num_rows: int) -> tuple[Array, Array]:
    n = places.shape[0]
    merged, slot = jnp.unique(places, size=n, fill_value=num_rows, return_inverse=True)
    to = jnp.where(places < num_rows, slot.reshape(-1), n)
    summed = jax.ops.segment_sum(values, to, num_segments=n, mode="drop")
    return merged.astype(places.dtype), summed


def _by_sort_and_scan(places: Array, values: Array, num_rows: int) -> tuple[Array, Array]:
    """Sorts, then sums runs of equal indices by a scan: no scatter adds, so a fixed order."""
    order = jnp.argsort(places, stable=True)
    places, values = places[order], values[order]
    real = (places < num_rows).reshape(places.shape + (1,) * (values.ndim - 1))
    values = jnp.where(real, values, 0)
    starts = jnp.concatenate([jnp.ones(1, bool), places[1:] != places[:-1]])
    last = jnp.concatenate([starts[1:], jnp.ones(1, bool)])

    def join(left, right):
        (left_sum, left_start), (right_sum, right_start) = left, right
        cut = right_start.reshape(right_start.shape + (1,) * (values.ndim - 1))
        return jnp.where(cut, right_sum, left_sum + right_sum), left_start | right_start

    sums, _ = jax.lax.associative_scan(join, (values, starts))
    keep = last.reshape(last.shape + (1,) * (values.ndim - 1))
    return jnp.where(last, places, num_rows), jnp.where(keep, sums, 0)
