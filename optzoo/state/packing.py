"""Two slots in one array: 16-bit slots in words of 32 bits, others in complex numbers.

A state shows its storage: where two slots of a parameter are packed, the words take the place of
the first, and a marker, an empty NamedTuple, replaces the second.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from .stochastic_rounding import DTYPES


class UpperBfloat16(NamedTuple):
    """In the place of a slot in bfloat16 that is the upper half of the words before it."""


class UpperFloat16(NamedTuple):
    """In the place of a slot in float16 that is the upper half of the words before it."""


class ImaginaryFloat32(NamedTuple):
    """In the place of a slot in float32 that is the imaginary part of the words before it."""


class ImaginaryFloat64(NamedTuple):
    """In the place of a slot in float64 that is the imaginary part of the words before it."""


_IN_COMPLEX = jnp.dtype(jnp.float32), jnp.dtype(jnp.float64)
PACKABLE = (*DTYPES, *_IN_COMPLEX)
_UPPER = dict(
    zip(PACKABLE, (UpperBfloat16, UpperFloat16, ImaginaryFloat32, ImaginaryFloat64), strict=True)
)
_DTYPE_OF = {upper: dtype for dtype, upper in _UPPER.items()}
_WORDS = tuple(map(jnp.dtype, (jnp.uint32, jnp.complex64, jnp.complex128)))


# Of a named tuple of arrays, or of trees of arrays.


def pack(slots: Any, dtype: DTypeLike) -> Any:
    """Two slots in one where they have this dtype, one of ``PACKABLE``, and the same shapes."""
    trees, free = list(slots), []
    for j, tree in enumerate(trees):
        if {jnp.dtype(a.dtype) for a in jax.tree.leaves(tree)} != {jnp.dtype(dtype)}:
            continue
        partners = [i for i in free if _avals(trees[i]) == _avals(tree)]
        if not partners:
            free.append(j)
            continue
        i, upper = partners[-1], _UPPER[jnp.dtype(dtype)]
        trees[i] = jax.tree.map(lambda a, b: _words(a, b, a.dtype), trees[i], tree)
        trees[j] = jax.tree.map(lambda _, upper=upper: upper(), tree)
        free = []  # no other words come between two that belong together
    return type(slots)._make(trees)


def unpack(slots: Any) -> Any:
    """The opposite: each slot in its own arrays."""
    trees = list(slots)
    for i, j in _pairs(slots):
        words, uppers = slots[i], slots[j]
        trees[i], trees[j] = (
            jax.tree.map(lambda w, u, n=n: _part(w, n, _DTYPE_OF[type(u)]), words, uppers)
            for n in (0, 1)
        )
    return type(slots)._make(trees)


def pack_like(packed: Any, slots: Any) -> Any:
    """Slots from :func:`unpack` in the storage of ``packed``.

    They may be in float32 if every value is one of the dtype that was packed.
    """
    trees = list(slots)
    for i, j in _pairs(packed):
        join = lambda a, b, upper: _words(a, b, _DTYPE_OF[type(upper)])
        trees[i], trees[j] = jax.tree.map(join, slots[i], slots[j], packed[j]), packed[j]
    return type(packed)._make(trees)


def is_packed(slots: Any) -> bool:
    """Whether there are words of two slots among them."""
    return any(True for _ in _pairs(slots))


def _pairs(slots: Any) -> Iterator[tuple[int, int]]:
    """The places of the words and of what stands for their upper halves."""
    words = 0
    for j, tree in enumerate(slots):
        if any(map(_is_upper, jax.tree.leaves(tree, is_leaf=_is_upper))):
            yield words, j
        elif any(getattr(a, "dtype", None) in _WORDS for a in jax.tree.leaves(tree)):
            words = j


def _is_upper(x: Any) -> bool:
    return type(x) in _DTYPE_OF


def _avals(tree: Any) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, [(a.shape, a.dtype) for a in leaves]


def _words(lower: Any, upper: Any, dtype: DTypeLike) -> Any:
    join = lambda a, b: _joined(a, b, jnp.dtype(dtype))
    is_abstract = isinstance(lower, jax.ShapeDtypeStruct)
    return jax.eval_shape(join, lower, upper) if is_abstract else join(lower, upper)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _joined(lower: Array, upper: Array, dtype: Any) -> Array:
    def bits(a):
        if a.dtype == jnp.float32 and dtype == jnp.bfloat16:  # saves the CPU a slow conversion
            return lax.bitcast_convert_type(a, jnp.uint32) >> np.uint32(16)
        return lax.bitcast_convert_type(a.astype(dtype), jnp.uint16).astype(jnp.uint32)

    if dtype in _IN_COMPLEX:
        return lax.complex(jnp.asarray(lower, dtype), jnp.asarray(upper, dtype))
    return bits(lower) | bits(upper) << np.uint32(16)


@_joined.defjvp
def _(dtype, primals, tangents):
    if dtype not in _IN_COMPLEX:
        raise TypeError(
            "slots packed in 16 bits are integers, which have no derivative: to differentiate "
            "through an update use optzoo.slots_dtype(..., packed=False)"
        )
    return tuple(_joined(*parts, dtype) for parts in (primals, tangents))


def _part(words: Any, n: int, dtype: DTypeLike) -> Any:
    half = lambda w: (jnp.asarray(w) >> np.uint32(16 * n)).astype(jnp.uint16)
    cut = lambda w: lax.bitcast_convert_type(half(w), dtype)
    if dtype in _IN_COMPLEX:
        cut = jnp.imag if n else jnp.real
    return jax.eval_shape(cut, words) if isinstance(words, jax.ShapeDtypeStruct) else cut(words)
