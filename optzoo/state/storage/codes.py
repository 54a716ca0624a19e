"""8-bit slots: codes of the elements, and a 16-bit scale for each group of elements.

A kind of codes is a named tuple of ``codes`` and ``scales`` with two elementwise functions:
``encode(x, scale, bits)`` returns 8-bit codes, ``decode(codes, scale)`` float32 elements. The scale
of a group is its largest magnitude, or with ``is_root`` its square root, in which case no element
is negative. ``bits``, a uint32 with 16 random bits, round a code stochastically; None rounds to
nearest.
"""

import functools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding

from ...core.compat import custom_jvp, traced_once
from ...core.meshes import whole_along_last
from ...core.warn import warn
from . import eight_bits, float8

GROUP = 32  # consecutive elements of the last axis that share a scale
_NARROW = 128  # columns of a matrix whose rows have their scales beside them
_LEAST_WIDTH = 8  # of the last axis: scales of fewer elements would take more than they save

# A scale is a float32 without sign whose exponent has 6 bits and whose mantissa 10, those of
# float16: it has the precision of float16, but down to 2**-46. Zero is 0, NaN the greatest.
_DROPPED = np.uint32(13)
_BASE = np.uint32((127 - 47) << 10)
_NAN = np.uint32(0xFFFF)
_GREATEST = np.float32(2.0**17 - 2.0**7)  # the next one would be NaN

# Scales are uint16, of shape (..., number of groups). Those of a matrix with few columns, which may
# be a table, are further columns of its codes: first the lower bytes, then the upper ones, and ()
# in the place of scales. A TPU stores a row of two scales in 128 lanes, and XLA changes the layout
# of all of them for the few that a loop reads. Beside their codes they are read with them.


# By the name of the dtype that stands for them.
KINDS: dict[str, dict[Any, Any]] = {"int8": eight_bits.KINDS, "float8_e4m3fn": float8.KINDS}
Codes = tuple(kind for kinds in KINDS.values() for kind in kinds.values())


def is_coded(x: object) -> bool:
    """Whether ``x`` is an 8-bit slot."""
    return isinstance(x, Codes)


def has_codes(tree: Any) -> bool:
    """Whether an array of a tree is an 8-bit slot."""
    return any(map(is_coded, jax.tree.leaves(tree, is_leaf=is_coded)))


def takes_codes(x: Any) -> bool:
    """Whether an array can be 8-bit: it is real, with two axes, the last of length 8 or more."""
    return jnp.issubdtype(x.dtype, jnp.floating) and x.ndim > 1 and x.shape[-1] >= _LEAST_WIDTH


def nbytes_of_codes(shape: tuple[int, ...]) -> int:
    """The bytes of an 8-bit array: codes and scales."""
    return math.prod(shape[:-1]) * (shape[-1] + 2 * _number_of_groups(shape[-1]))


@functools.partial(custom_jvp, nondiff_argnums=(0,))
def encoded(kind: Any, x: Array, bits: Array | None = None) -> Any:
    """Encodes an array in 8 bits, with scales in a separate array.

    Infinities become the largest number that a scale can represent.

    Args:
        kind: the kind of codes. With roots, the code of a positive number is never rounded to zero,
            since updates are divided by the root of such a slot.
        x: floating point; not negative with roots.
        bits: uint32, whose lower 16 bits are used; None to round to nearest.
    """
    low, high = (0, _GREATEST**2) if kind.is_root else (-_GREATEST, _GREATEST)
    groups = _grouped(jnp.clip(x.astype(jnp.float32), low, high))
    scale = _greatest(groups)
    scale = jnp.sqrt(scale) if kind.is_root else scale
    of_groups = None if bits is None else _grouped(bits & np.uint32(0xFFFF))
    codes = _ungrouped(kind.encode(groups, scale, of_groups), x.shape)
    return kind(codes, _to_scale(jnp.squeeze(scale, -1)))


@encoded.defjvp
def _(kind, primals, tangents):
    raise TypeError(
        "8-bit slots are integers, which have no derivative: to differentiate through an update "
        "use optzoo.slots_dtype with a floating-point dtype"
    )


@traced_once
def decoded(x: Any) -> Array:
    """Decodes an array, to float32."""
    codes, scales = apart(x)
    return _ungrouped(x.decode(_grouped(codes), _from_scale(scales)[..., None]), codes.shape)


def _greatest(groups: Array) -> Array:
    """The largest magnitude of each group, or NaN.

    It is computed from the bit patterns, which have the same order: XLA fuses cheap integer
    operations into the loop of the reduction, but stores floating-point numbers first.
    """
    pattern = lax.bitcast_convert_type(jnp.abs(groups), jnp.int32)
    return lax.bitcast_convert_type(jnp.max(pattern, axis=-1, keepdims=True), jnp.float32)


def _grouped(x: Array) -> Array:
    """The groups along a new axis, the last one padded with zeros."""
    *rest, width = x.shape
    number = _number_of_groups(width)
    if missing := number * GROUP - width:  # not by a pad, which could move rows
        x = jnp.concatenate([x, jnp.zeros((*rest, missing), x.dtype)], axis=-1)
    return x.reshape(*rest, number, GROUP)


def _ungrouped(x: Array, shape: tuple[int, ...]) -> Array:
    # The columns are named, not -1: of an array without rows no division says how many there are.
    return x.reshape(*shape[:-1], _number_of_groups(shape[-1]) * GROUP)[..., : shape[-1]]


def stored(x: Any, like: Any = None) -> Any:
    """Codes with separate scales in the layout of another slot, or of a new slot."""
    is_narrow = x.codes.ndim == 2 and x.codes.shape[-1] <= _NARROW
    if not (is_narrow if like is None else is_beside(like)):
        return x
    halves = [x.scales & np.uint16(255), x.scales >> np.uint16(8)]
    in_bytes = [lax.bitcast_convert_type(a.astype(jnp.uint8), x.codes.dtype) for a in halves]
    return type(x)(jnp.concatenate([x.codes, *in_bytes], axis=-1), ())


def apart(x: Any) -> tuple[Array, Array]:
    """The codes of the elements and the scales of the groups, as separate arrays."""
    if not is_beside(x):
        return x.codes, x.scales
    width = shape_of(x)[-1]
    codes, low, high = jnp.split(x.codes, [width, width + _number_of_groups(width)], axis=-1)
    low, high = (lax.bitcast_convert_type(a, jnp.uint8).astype(jnp.uint16) for a in (low, high))
    return codes, low | high << np.uint16(8)


def is_beside(x: Any) -> bool:
    """Whether the scales are additional columns of the codes."""
    return isinstance(x.scales, tuple)


def shape_of(x: Any) -> tuple[int, ...]:
    """The shape of the slot."""
    *rest, columns = x.codes.shape
    number = -(-columns // (GROUP + 2)) if is_beside(x) else 0
    return (*rest, columns - 2 * number)


def sharding_of_codes(whole: Any, x: Any) -> Any:
    """The shardings of the arrays of an 8-bit slot, from the sharding of the slot.

    A last axis that is too short, or has scales beside codes, is not divided.
    """
    if not isinstance(whole, NamedSharding):
        return jax.tree.map(lambda _: whole, x)

    def place(a):
        try:
            whole.shard_shape(a.shape)
            is_whole = is_beside(x)
        except ValueError:
            is_whole = True
        return whole_along_last(whole, a.ndim) if is_whole else whole

    return jax.tree.map(place, x)


def warn_of_whole(names: Iterable[str]) -> None:
    """Warns of 8-bit slots that are not divided along mesh axes that divide their parameters."""
    if names := list(names):
        warn(
            f"8-bit slots of {', '.join(names)} are not divided along the last axis like their "
            f"parameters, because this would split groups of {GROUP} elements or their scales: "
            "each device has all of them, always or within each step. Divide another axis of "
            "these parameters, or use slots_dtype 'bfloat16' for them (optzoo.param_groups)",
        )


def divides_groups(whole: Any, x: Any) -> bool:
    """Whether the sharding of a slot splits groups, or elements stored beside their scales.

    In this case codes are not divided, or XLA gathers the slot to decode and encode it.
    """
    shape = shape_of(x)
    width = whole.shard_shape(shape)[-1] if isinstance(whole, NamedSharding) else shape[-1]
    return width < shape[-1] and (is_beside(x) or width % GROUP > 0)


def _number_of_groups(width: int) -> int:
    return -(-width // GROUP)


def _to_scale(scale: Array) -> Array:
    """Rounds to nearest, ties to even."""
    pattern = lax.bitcast_convert_type(scale, jnp.uint32)
    half = np.uint32((1 << 12) - 1) + ((pattern >> _DROPPED) & np.uint32(1))
    # Signed: older compilers for TPUs have no greatest of unsigned integers in kernels.
    kept = ((pattern + half) >> _DROPPED).astype(jnp.int32)
    code = jnp.clip(kept - np.int32(_BASE), 0, np.int32(_NAN - 1))
    return jnp.where(jnp.isnan(scale), np.int32(_NAN), code).astype(jnp.uint16)


def _from_scale(code: Array) -> Array:
    wide = code.astype(jnp.uint32)
    scale = lax.bitcast_convert_type((wide + _BASE) << _DROPPED, jnp.float32)
    return jnp.where(wide == _NAN, jnp.nan, jnp.where(wide == 0, 0, scale))
