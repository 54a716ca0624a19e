"""Stochastic rounding: up or down at random, such that the expected rounding error is zero."""

import functools
import math
import zlib
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from ...core.compat import custom_jvp

# 32 random bits round two values, 16 bits each.
DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
_SIGN = np.uint32(0x80000000)


def first_place(seed: Any, step: Any, name: str) -> Array:
    """The start of the random bits of a parameter in a step, for :func:`random_bits`.

    Args:
        seed: an integer.
        step: an integer.
        name: the name of the parameter, which is the same in a group and in all parameters.
    """
    number = np.uint32(zlib.crc32(name.encode()))
    return _mixed(_mixed(_mixed(_unsigned(seed)) ^ number) ^ _unsigned(step))


def first_places_of_rows(start: Array, shape: tuple[int, ...]) -> Array:
    """The start for each row of an array; it does not depend on the other rows."""
    return places_of_rows(start, lax.iota(jnp.uint32, shape[0]), shape)


def places_of_rows(start: Array, ids: Array, shape: tuple[int, ...]) -> Array:
    """The starts for the rows of these ids."""
    return start + ids.astype(jnp.uint32) * np.uint32(math.prod(shape[1:]) % 2**32)


def first_place_in_shard(start: Array, axes: tuple[str, ...], shape: tuple[int, ...]) -> Array:
    """The start for the part of an array on this device; it differs between parts.

    Args:
        start: the start of the whole array, from :func:`first_place`.
        axes: the mesh axes over which its rows are divided; empty for an array in one part.
        shape: the shape of the part.
    """
    if not axes:
        return start
    size = np.uint32(math.prod(shape) % 2**32)
    return start + lax.axis_index(axes).astype(jnp.uint32) * size


def random_bits(start: Array, shape: tuple[int, ...]) -> Array:
    """32 random bits for each element: a hash of its position, equal in every program.

    On a CPU, a generator of ``jax.random`` would take longer than the update itself.

    Args:
        start: a result of :func:`first_place` or :func:`first_places_of_rows`.
        shape: the shape of the array.
    """
    if shape[: start.ndim] != start.shape:  # it has no rows: one start for all of it
        start = jnp.sum(start, dtype=jnp.uint32)
    place = jnp.expand_dims(start, tuple(range(start.ndim, len(shape))))
    for axis in range(start.ndim, len(shape)):
        stride = np.uint32(math.prod(shape[axis + 1 :]) % 2**32)
        along = lax.iota(jnp.uint32, shape[axis]) * stride
        others = tuple(other for other in range(len(shape)) if other != axis)
        place = place + jnp.expand_dims(along, others)
    return _mixed(jnp.broadcast_to(place, shape))


@functools.partial(custom_jvp, nondiff_argnums=(2,))
def round_at_random(a: Array, bits: Array, dtype: DTypeLike) -> Array:
    """Rounds stochastically to one of the two neighbours in ``dtype``; the result is in float32.

    The mean over the bits is ``a``. Values that ``dtype`` can represent are unchanged, finite
    values stay finite, infinities and NaN are kept.

    The derivative passes straight through the rounding.

    Args:
        a: floating point; float64 is converted to float32.
        bits: uint32, whose lower 16 bits are used.
        dtype: a dtype of at most 16 bits.
    """
    a, bits = a.astype(jnp.float32), bits & np.uint32(0xFFFF)
    if dtype == jnp.bfloat16:  # the upper half of a float32
        return _up(a, bits, dtype)
    # Below its least normal number a dtype is spaced as just above it: add it, round, subtract it.
    least = np.float32(jnp.finfo(dtype).smallest_normal)
    added = jnp.where(jnp.abs(a) < least, jnp.copysign(least, a), 0)
    rounded, top = _up(a + added, bits, dtype) - added, np.float32(jnp.finfo(dtype).max)
    return jnp.where(jnp.isfinite(rounded), jnp.clip(rounded, -top, top), rounded)


@round_at_random.defjvp
def _(dtype, primals, tangents):
    a, bits = primals
    return round_at_random(a, bits, dtype), tangents[0].astype(jnp.float32)


def _up(a: Array, bits: Array, dtype: DTypeLike) -> Array:
    """Adds ``bits`` to the mantissa bits that ``dtype`` lacks, then drops them."""
    info = jnp.finfo(dtype)
    number = jnp.finfo(jnp.float32).nmant - info.nmant
    dropped = np.uint32(2**number - 1)
    if number != 16:
        bits = bits << np.uint32(number - 16) if number > 16 else bits >> np.uint32(16 - number)
    top = np.float32(info.max).view(np.uint32)
    pattern = lax.bitcast_convert_type(a, jnp.uint32)
    # Above the largest value there is none to round to. (A NaN that arithmetic makes has the first
    # bit of its mantissa set, so it remains a NaN.)
    moves = (pattern & ~_SIGN) < top
    up = (pattern + jnp.where(moves, bits, np.uint32(0))) & ~dropped
    return lax.bitcast_convert_type(up, jnp.float32)


def _unsigned(n: Any) -> Array:
    return jnp.asarray(n).astype(jnp.uint32)


def _mixed(x: Array) -> Array:
    """A hash in which every bit depends on all others; hashes of a sequence serve as random bits.

    A function of the type ``lowbias32`` of Wellons' hash-prospector, with the constants of
    https://github.com/skeeto/hash-prospector/issues/19 (by TheIronBorn and others).
    """
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x ^ (x >> np.uint32(15))
