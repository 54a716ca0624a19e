"""8-bit integer codes: of elements, or of their roots."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..types import NotNegative, Signed


class SignedCodes(NamedTuple):
    """An 8-bit slot: ``round(127 y)`` of ``y = 2 x / (1 + |x|)`` for elements ``scale * x``."""

    codes: Array  # int8, of the shape of the slot, or with scales beside them
    scales: Any  # uint16, the greatest magnitudes of the groups; or ()

    is_root = False

    @staticmethod
    def encode(x: Array, scale: Array, bits: Array | None) -> Array:
        """Encodes elements."""
        y = 254 * x / (jnp.where(scale > 0, scale, 1) + jnp.abs(x))
        return _to_integer(y, 127, bits).astype(jnp.int8)

    @staticmethod
    def decode(codes: Array, scale: Array) -> Array:
        """Decodes codes."""
        y = codes.astype(jnp.float32)
        return scale * (y * np.float32(1 / 254)) * _inverse(1 - jnp.abs(y) * np.float32(1 / 254))


class RootCodes(NamedTuple):
    """A non-negative 8-bit slot: ``round(255 x)`` for elements ``(scale * x)**2``."""

    codes: Array  # uint8, of the shape of the slot, or with scales beside them
    scales: Any  # uint16, the roots of the greatest elements of the groups; or ()

    is_root = True

    @staticmethod
    def encode(x: Array, scale: Array, bits: Array | None) -> Array:
        """Encodes elements; the code of a positive element is not zero."""
        y = jnp.sqrt(x) * (255 / jnp.where(scale > 0, scale, 1))
        y = jnp.where(x > 0, jnp.maximum(y, 1), y)
        return _to_integer(y, 255, bits).astype(jnp.uint8)

    @staticmethod
    def decode(codes: Array, scale: Array) -> Array:
        """Decodes codes."""
        return jnp.square(scale * (codes.astype(jnp.float32) * np.float32(1 / 255)))


# By what a slot holds.
KINDS = {Signed: SignedCodes, NotNegative: RootCodes}


def _to_integer(x: Array, top: int, bits: Array | None) -> Array:
    """The nearest integer below 2**15, ties to even; unspecified for NaN.

    With ``bits``, one of the two integers next to ``x``, at most ``top``.
    """
    if bits is not None:
        x = jnp.floor(jnp.minimum(x, top) + bits.astype(jnp.float32) / 2**16)
    # In 2**23 + 2**22 + x the last place is 1. XLA's conversion also clips, in several operations.
    return lax.bitcast_convert_type(x + np.float32(3 * 2**22), jnp.int32)


def _inverse(x: Array) -> Array:
    """``1 / x`` for x in [1/2, 1] without a division, whose results XLA would store."""
    y = np.float32(48 / 17) - np.float32(32 / 17) * x
    for _ in range(3):
        y = y * (2 - x * y)
    return y
