"""Rounding up or down at random, so that what one step loses is not lost on average."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from ..core.numerics import saturating_cast

# Of two halves of 32 random bits, each rounds one number.
DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
_SIGN = np.uint32(0x80000000)


def first_place(seed: Any, step: Any, name: int) -> Array:
    """Where the random bits of a parameter start in a step, for :func:`random_bits`.

    Args:
        seed: an integer.
        step: an integer.
        name: an integer below ``2**32`` that tells the parameter from others.
    """
    return _mixed(_mixed(_mixed(_unsigned(seed)) ^ np.uint32(name)) ^ _unsigned(step))


def first_places_of_rows(start: Array, shape: tuple[int, ...]) -> Array:
    """The same for each row of an array: rows on their own get the bits they have in the whole."""
    return start + lax.iota(jnp.uint32, shape[0]) * np.uint32(math.prod(shape[1:]) % 2**32)


def random_bits(start: Array, shape: tuple[int, ...]) -> Array:
    """32 random bits for each element: a hash of its place, the same in every program.

    A generator of ``jax.random`` would take longer on a CPU than the update that it is for.

    Args:
        start: from :func:`first_place` or :func:`first_places_of_rows`.
        shape: of the array.
    """
    if shape[: start.ndim] != start.shape:  # it has no rows: one number for all of it
        start = jnp.sum(start, dtype=jnp.uint32)
    place = jnp.expand_dims(start, tuple(range(start.ndim, len(shape))))
    for axis in range(start.ndim, len(shape)):
        stride = np.uint32(math.prod(shape[axis + 1 :]) % 2**32)
        along = lax.iota(jnp.uint32, shape[axis]) * stride
        others = tuple(other for other in range(len(shape)) if other != axis)
        place = place + jnp.expand_dims(along, others)
    return _mixed(jnp.broadcast_to(place, shape))


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def round_at_random(a: Array, bits: Array, dtype: DTypeLike) -> Array:
    """To one of the two neighbours in ``dtype``, to the nearer one more often; in float32.

    The mean over the bits is ``a``. What ``dtype`` can represent stays as it is, what is finite
    stays finite, infinities and NaN pass.

    Its derivative is that of ``a``: it passes straight through the rounding.

    Args:
        a: floating point; float64 is taken in float32.
        bits: uint32, of which the lower 16 are used.
        dtype: bfloat16 or float16.
    """
    a, bits = a.astype(jnp.float32), bits & np.uint32(0xFFFF)
    if dtype == jnp.bfloat16:  # the upper half of a float32
        return _up(a, bits, dtype)
    # Below its least normal number float16 is spaced as next to it: add that for the while.
    least = np.float32(jnp.finfo(dtype).smallest_normal)
    added = jnp.where(jnp.abs(a) < least, jnp.copysign(least, a), 0)
    return saturating_cast(_up(a + added, bits >> np.uint32(3), dtype) - added, dtype).astype(
        jnp.float32
    )


@round_at_random.defjvp
def _(dtype, primals, tangents):
    a, bits = primals
    return round_at_random(a, bits, dtype), tangents[0].astype(jnp.float32)


def _up(a: Array, bits: Array, dtype: DTypeLike) -> Array:
    """Adds the bits to those that ``dtype`` has not, and drops these; both towards infinity."""
    info = jnp.finfo(dtype)
    dropped = np.uint32(2 ** (jnp.finfo(jnp.float32).nmant - info.nmant) - 1)
    top = np.float32(info.max).view(np.uint32)
    pattern = lax.bitcast_convert_type(a, jnp.uint32)
    # From the largest number on there is none above. (Of a NaN that arithmetic makes, the first
    # bit of the mantissa is set, so it stays one.)
    moves = (pattern & ~_SIGN) < top
    up = (pattern + jnp.where(moves, bits, np.uint32(0))) & ~dropped
    return lax.bitcast_convert_type(up, jnp.float32)


def _unsigned(n: Any) -> Array:
    return jnp.asarray(n).astype(jnp.uint32)


def _mixed(x: Array) -> Array:
    """A hash in which every bit depends on every other: of a row of numbers, as good as random."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x ^ (x >> np.uint32(15))
