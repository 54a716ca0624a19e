"""8-bit floating-point codes (float8 e4m3): of elements, or of their roots."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ...core.platforms import first_on_gpus
from ..types import NotNegative, Signed
from .at_random import round_at_random

_DTYPE = jnp.float8_e4m3fn
_TOP = np.float32(448)
_LEAST = np.float32(2.0**-9)  # above zero

# The arrays are of bits, in int8: XLA scatters rows of float8 through copies in float32.


class Float8Codes(NamedTuple):
    """An 8-bit slot: the nearest float8 of ``448 x`` for elements ``scale * x``."""

    codes: Array  # int8, the bits; of the shape of the slot, or with scales beside them
    scales: Any  # uint16, the greatest magnitudes of the groups; or ()

    is_root = False

    @staticmethod
    def encode(x: Array, scale: Array, bits: Array | None) -> Array:
        """Encodes elements."""
        return _to_bits(x * (_TOP / jnp.where(scale > 0, scale, 1)), bits)

    @staticmethod
    def decode(codes: Array, scale: Array) -> Array:
        """Decodes codes."""
        return scale * (_from_bits(codes) * np.float32(1 / _TOP))


class Float8RootCodes(NamedTuple):
    """A non-negative 8-bit slot: the float8 of ``448 x`` for ``(scale * x)**2``."""

    codes: Array  # int8, the bits; of the shape of the slot, or with scales beside them
    scales: Any  # uint16, the roots of the greatest elements of the groups; or ()

    is_root = True

    @staticmethod
    def encode(x: Array, scale: Array, bits: Array | None) -> Array:
        """Encodes elements; the code of a positive element is not zero."""
        y = jnp.sqrt(x) * (_TOP / jnp.where(scale > 0, scale, 1))
        return _to_bits(jnp.where(x > 0, jnp.maximum(y, _LEAST), y), bits)

    @staticmethod
    def decode(codes: Array, scale: Array) -> Array:
        """Decodes codes."""
        return jnp.square(scale * (_from_bits(codes) * np.float32(1 / _TOP)))


# By what a slot holds.
KINDS = {Signed: Float8Codes, NotNegative: Float8RootCodes}


def _to_bits(y: Array, bits: Array | None) -> Array:
    y = y if bits is None else round_at_random(y, bits, _DTYPE)
    codes = lax.bitcast_convert_type(y.astype(_DTYPE), jnp.int8)
    return codes if bits is None else first_on_gpus(codes)


def _from_bits(codes: Array) -> Array:
    return lax.bitcast_convert_type(codes, _DTYPE).astype(jnp.float32)
