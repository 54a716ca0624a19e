"""Merges rows of equal ids by one of four algorithms; elects one position for each id.

On GPUs nothing is added at repeated indices: jaxlib before 0.11.1 compiles this to compare-and-swap
loops, which are up to 5,000 times slower if many ids are equal.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from .compat import custom_jvp
from .numerics import has_16_bits, upcast

# Multiplicative hashing: Knuth, The Art of Computer Programming, vol. 3, section 6.4. The factor of
# the first round is his 2654435761, a prime near 2^32 divided by the golden ratio.
_FACTOR = 2654435761
# Added to the factor in each round. It is even, so that factors stay odd and no bit of an id is
# lost; and near 2^32 divided by the golden ratio, too, which spreads the factors evenly.
_STEP = _FACTOR + 1


# Compiled even without a jit around it: a loop would be compiled anew by each call.
@functools.partial(jax.jit, static_argnames=("num_rows", "deterministic"))
def merge(ids: Array, values: Array, num_rows: int, deterministic: bool) -> tuple[Array, Array]:
    """Sums the values of equal ids; the remaining positions become padding with zeros.

    Args:
        ids: integers of shape ``(n,)`` in ``[0, num_rows]``; ``num_rows`` is padding.
        values: an array of shape ``(n, *row_shape)``; values of padding are ignored.
        num_rows: the number of rows of the whole array.
        deterministic: whether to sum in a fixed order on every backend.

    Returns:
        Ids and values of the same shapes, in any order.
    """
    if ids.shape[0] == 0:
        return ids, values
    if deterministic:
        return _by_sort_and_scan(ids, values, num_rows)
    # Measured on one core, 4,096 ids of a 1,000,000 x 64 table: 0.17 ms by hash, 0.61 with a
    # scratch word for each row of the table, 0.83 by jnp.unique, 0.91 by argsort. The number of
    # rounds of the hash depends on the ids, for which accelerators are slow.
    return jax.lax.platform_dependent(
        ids,
        values,
        cpu=functools.partial(_by_hash, num_rows=num_rows),
        cuda=functools.partial(_by_sort_and_doubling, num_rows=num_rows),
        rocm=functools.partial(_by_sort_and_doubling, num_rows=num_rows),
        default=functools.partial(_by_sort, num_rows=num_rows),
    )


# Compiled even without a jit around it, as above.
@jax.jit
def add(dense: Array, ids: Array, rows: Array) -> Array:
    """``dense`` with rows added; ids may repeat, and those out of range are ignored.

    The sum is computed in the dtype of ``dense``.
    """

    def plain(dense, ids, rows, **unique):
        options = {"mode": "drop", "wrap_negative_indices": False}
        return dense.at[ids].add(rows.astype(dense.dtype), **options, **unique)

    def merged(dense, ids, rows):
        ids, rows = _by_sort_and_doubling(in_range(ids, len(dense)), upcast(rows), len(dense))
        return plain(dense, ids, rows, unique_indices=True)

    if len(ids) < 2:
        return plain(dense, ids, rows)
    return jax.lax.platform_dependent(dense, ids, rows, cuda=merged, rocm=merged, default=plain)


@functools.partial(custom_jvp, nondiff_argnums=(2,))
@functools.partial(jax.jit, static_argnums=2)
def segment_sum(values: Array, places: Array, number: int) -> Array:
    """``jax.ops.segment_sum``, with sums of 16-bit numbers in float32, rounded once."""
    plain = functools.partial(_segment_sum, number=number)

    def merged(values, places):
        places, sums = _by_sort_and_doubling(in_range(places, number), upcast(values), number)
        zeros = jnp.zeros_like(values, shape=(number, *values.shape[1:]))
        options = {"mode": "drop", "unique_indices": True}
        return zeros.at[places].set(sums.astype(values.dtype), **options)

    if len(places) < 2:
        return plain(values, places)
    return jax.lax.platform_dependent(values, places, cuda=merged, rocm=merged, default=plain)


@segment_sum.defjvp
def _(number, primals, tangents):
    values, places = primals
    # Its transposition is a gather, whatever has computed the sums.
    tangent = _segment_sum(tangents[0], places, number)
    return segment_sum(values, places, number), tangent


def _segment_sum(values: Array, places: Array, number: int) -> Array:
    if number == 0:  # JAX cannot transpose it
        return jnp.zeros_like(values, shape=(0, *values.shape[1:]))
    wide = upcast(values) if has_16_bits(values.dtype) else values
    return jax.ops.segment_sum(wide, places, num_segments=number).astype(values.dtype)


def take(x: Array, places: Array) -> Array:
    """The rows at some indices, NaN out of range; sums gradients of 16-bit rows in float32."""
    return _take_16_bits(x, places) if has_16_bits(x.dtype) else _take(x, places)


def take_inside(x: Array, places: Array) -> Array:
    """Like :func:`take`, at indices that are all in range."""
    take = _take_inside_16_bits if has_16_bits(x.dtype) else _take_inside
    return take(x, places)


def _take(x: Array, places: Array, fill: float | None = None) -> Array:
    return jnp.take(x, places, axis=0, mode="fill", fill_value=fill)


def _take_inside(x: Array, places: Array) -> Array:
    return jnp.take(x, places, axis=0, mode="clip")


_take_16_bits, _take_inside_16_bits = custom_jvp(_take), custom_jvp(_take_inside)


@_take_16_bits.defjvp
def _(primals, tangents):
    x, places = primals
    return _take_16_bits(x, places), _take(upcast(tangents[0]), places, 0).astype(x.dtype)


@_take_inside_16_bits.defjvp
def _(primals, tangents):
    x, places = primals
    tangent = _take_inside(upcast(tangents[0]), places).astype(x.dtype)
    return _take_inside_16_bits(x, places), tangent


def merge_in_place(ids: Array, values: Array, num_rows: int) -> tuple[Array, Array]:
    """Like :func:`merge`, for any ids; each sum is at one of the positions of its id."""
    ids = in_range(ids, num_rows)
    elected = elect(ids)
    is_elected = elected == jnp.arange(len(ids), dtype=ids.dtype)
    return jnp.where(is_elected, ids, num_rows), segment_sum(values, elected, len(ids))


def kept(ids: Array, number: int) -> Array:
    """The ids; for 64-bit ids, with ``number`` in place of ids out of range.

    JAX truncates ids of gathers and scatters to 32 bits before it checks their range.
    """
    return ids if ids.dtype.itemsize < 8 else in_range(ids, number)


def elect(ids: Array) -> Array:
    """For each position, one position of the same id, shared by all positions of this id."""
    return jax.lax.platform_dependent(ids, cpu=_elect_by_hash, default=_elect_by_sort)


def in_range(ids: Array, number: int) -> Array:
    """The ids, with ``number`` in place of ids out of ``[0, number)``."""
    return jnp.where((ids >= 0) & (ids < number), ids, number)


def _elect_by_hash(ids: Array) -> Array:
    """Elects one position for each distinct id.

    Each undecided position writes its index to the bucket of its id, and reads the bucket. If the
    position read has the same id, it is elected; all positions with this id read the same index.
    Each round decides at least one id for each used bucket; the next round hashes the remaining ids
    with another factor.
    """
    n = ids.shape[0]
    positions = jnp.arange(n, dtype=ids.dtype)
    bits = max(4, (4 * n - 1).bit_length())

    def elect(carry):
        elected, round_number = carry
        factor = jnp.uint32(_FACTOR) + round_number * jnp.uint32(_STEP)
        bucket = (ids.astype(jnp.uint32) * factor >> jnp.uint32(32 - bits)).astype(ids.dtype)
        undecided = elected < 0
        buckets = jnp.zeros(1 << bits, ids.dtype)
        buckets = buckets.at[jnp.where(undecided, bucket, 1 << bits)].set(positions, mode="drop")
        seen = buckets[bucket]
        decided = undecided & (ids[seen] == ids)
        return jnp.where(decided, seen, elected), round_number + jnp.uint32(1)

    none = jnp.full_like(ids, -1)
    elected, _ = jax.lax.while_loop(lambda c: jnp.any(c[0] < 0), elect, (none, jnp.uint32(0)))
    return elected


def _elect_by_sort(ids: Array) -> Array:
    """Elects the first position of each distinct id."""
    order = jnp.argsort(ids, stable=True)
    ordered = ids[order]
    starts = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]])
    positions = jnp.arange(ids.shape[0], dtype=ids.dtype)
    first = jax.lax.cummax(jnp.where(starts, positions, 0))
    return jnp.zeros_like(ids).at[order].set(order[first].astype(ids.dtype))


def _by_hash(ids: Array, values: Array, num_rows: int) -> tuple[Array, Array]:
    elected = _elect_by_hash(ids)
    # Not by jnp.where: XLA would recompute it for each element of the rows it is used for.
    merged = jnp.full_like(ids, num_rows).at[elected].set(ids)
    return merged, _sum_into(elected, ids, values, num_rows)


def _by_sort(ids: Array, values: Array, num_rows: int) -> tuple[Array, Array]:
    elected = _elect_by_sort(ids)
    is_elected = elected == jnp.arange(ids.shape[0], dtype=ids.dtype)
    return jnp.where(is_elected, ids, num_rows), _sum_into(elected, ids, values, num_rows)


def _sum_into(elected: Array, ids: Array, values: Array, num_rows: int) -> Array:
    """The sum of the values of each id at its elected position, zeros at all others."""
    # Padding is dropped here, which saves a copy of the values with zeros in its place.
    to = jnp.where(ids < num_rows, elected, ids.shape[0])
    return jnp.zeros_like(values).at[to].add(values, mode="drop")


def _by_sort_and_doubling(ids: Array, values: Array, num_rows: int) -> tuple[Array, Array]:
    """Sorts, then adds to each row the sum of the next 1, 2, 4, ... rows.

    It needs more additions than a scan, but fewer kernels, which compile in a tenth of the time.
    """
    order = jnp.argsort(ids, stable=True)
    ids, values = ids[order], values[order]
    wide = lambda mask: mask.reshape(mask.shape + (1,) * (values.ndim - 1))
    sums, distance = jnp.where(wide(ids < num_rows), values, 0), 1
    while distance < len(ids):
        # Where the id is the same, all rows between have it, too.
        same = wide(ids[distance:] == ids[:-distance])
        behind = jnp.where(same, sums[distance:], 0)
        sums = sums + jnp.concatenate([behind, jnp.zeros_like(sums[:distance])])
        distance *= 2
    starts = jnp.concatenate([jnp.ones(1, bool), ids[1:] != ids[:-1]])
    return jnp.where(starts, ids, num_rows), jnp.where(wide(starts), sums, 0)


def _by_sort_and_scan(ids: Array, values: Array, num_rows: int) -> tuple[Array, Array]:
    """Sorts, then sums runs of equal ids by a scan without scatter-adds: the order is fixed."""
    order = jnp.argsort(ids, stable=True)
    ids, values = ids[order], values[order]
    real = (ids < num_rows).reshape(ids.shape + (1,) * (values.ndim - 1))
    values = jnp.where(real, values, 0)
    starts = jnp.concatenate([jnp.ones(1, bool), ids[1:] != ids[:-1]])
    last = jnp.concatenate([starts[1:], jnp.ones(1, bool)])

    def join(left, right):
        (left_sum, left_start), (right_sum, right_start) = left, right
        cut = right_start.reshape(right_start.shape + (1,) * (values.ndim - 1))
        return jnp.where(cut, right_sum, left_sum + right_sum), left_start | right_start

    sums, _ = jax.lax.associative_scan(join, (values, starts))
    keep = last.reshape(last.shape + (1,) * (values.ndim - 1))
    return jnp.where(last, ids, num_rows), jnp.where(keep, sums, 0)
