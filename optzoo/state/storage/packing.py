"""Packed slots in a state: two in one array, or 8-bit.

Two slots in one array are 16-bit slots in 32-bit words, or other slots side by side.

The structure of a state shows its storage: where two slots of a parameter are packed, the array of
both replaces the first, and a marker, an empty NamedTuple, the second.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from ...core.boxes import unboxed
from ...core.compat import custom_jvp
from ...core.lines import as_lines, is_lines, plain
from ...core.meshes import automatically, spec_of
from .at_random import DTYPES
from .codes import Codes, decoded, encoded, has_codes, is_beside, is_coded, stored


class UpperBfloat16(NamedTuple):
    """Marks a bfloat16 slot that is the upper half of the words of the previous slot."""


class UpperFloat16(NamedTuple):
    """Marks a float16 slot that is the upper half of the words of the previous slot."""


class SecondHalf(NamedTuple):
    """Marks a slot that is the second half of the last axis of the previous slot."""


_SIDE_BY_SIDE = jnp.dtype(jnp.float32), jnp.dtype(jnp.float64)
PACKABLE = (*DTYPES, *_SIDE_BY_SIDE)
_UPPER = dict(zip(DTYPES, (UpperBfloat16, UpperFloat16), strict=True))
_DTYPE_OF = {upper: dtype for dtype, upper in _UPPER.items()}
_MARKS = SecondHalf, *_DTYPE_OF
_OTHER_FORMS = *_MARKS, *Codes


# Of a named tuple of arrays, or of trees of arrays.


def pack(slots: Any, dtype: DTypeLike) -> Any:
    """Packs two slots into one if they have this dtype, one of ``PACKABLE``, and equal shapes.

    32- and 64-bit slots are packed if their rows have several elements.
    """
    dtype = jnp.dtype(dtype)
    upper = _UPPER.get(dtype, SecondHalf)
    fits = lambda a: upper is not SecondHalf or (a.ndim > 1 and a.size > len(a))
    mark = lambda a: upper() if fits(a) else a
    trees, free = list(slots), []
    for j, tree in enumerate(trees):
        dtypes = {jnp.dtype(a.dtype) for a in jax.tree.leaves(tree)}
        if dtypes != {dtype}:
            # The array of both is found as the last one before the marker.
            free = [] if upper is SecondHalf and any(map(_is_inexact, dtypes)) else free
            continue
        free = free[-1:] if upper is SecondHalf else free
        partners = [i for i in free if _avals(trees[i]) == _avals(tree)]
        if not partners:
            free.append(j)
            continue
        i = partners[-1]
        tree = unboxed(tree)  # what is packed has another type than the parameter
        trees[i], trees[j] = _packed(unboxed(trees[i]), tree, jax.tree.map(mark, tree))
        free = []  # no other words come between two that belong together
    return type(slots)._make(trees)


def unpack(slots: Any) -> Any:
    """Each slot in its own arrays, in a floating-point dtype: the inverse of :func:`pack`."""
    trees = list(map(_decoded, slots))
    for i, j in _pairs(slots):
        both, marks = slots[i], slots[j]
        trees[i], trees[j] = (
            jax.tree.map(lambda a, mark, n=n: _part(a, n, mark), both, marks) for n in (0, 1)
        )
    return type(slots)._make(trees)


def pack_like(packed: Any, slots: Any) -> Any:
    """Slots from :func:`unpack` in the storage of ``packed``.

    They may be float32 if every value is representable in the packed dtype. Slots that are 8-bit in
    ``packed`` are rounded to nearest, unless they are 8-bit already.
    """
    trees = list(map(_encoded_like, packed, slots))
    for i, j in _pairs(packed):
        trees[i], trees[j] = _packed(slots[i], slots[j], packed[j])
    return type(packed)._make(trees)


def is_packed(slots: Any) -> bool:
    """Whether the slots have arrays of two slots, or 8-bit arrays."""
    return any(map(_is_other_form, jax.tree.leaves(slots, is_leaf=_is_other_form)))


def _decoded(tree: Any) -> Any:
    f = lambda x: _of_arrays(_decode, x) if has_codes(x) else x
    return _map_stored(f, tree) if has_codes(tree) else tree


def _spec_of_decoded(_: Any, x: Any) -> PartitionSpec:
    entries = tuple(spec_of(x.codes))
    return PartitionSpec(*entries[:-1], None) if is_beside(x) else PartitionSpec(*entries)


_decode = automatically(decoded, _spec_of_decoded)


def _encoded_like(old: Any, new: Any) -> Any:
    def f(a, b):
        specs = lambda *_: jax.tree.map(spec_of, a)
        encode = automatically(lambda b: stored(encoded(type(a), b), a), specs)
        return _of_arrays(encode, b) if is_coded(a) and not is_coded(b) else b

    return _map_stored(f, old, new) if has_codes(old) else new


def _map_stored(f: Any, *trees: Any) -> Any:
    """Applies ``f`` to stored arrays; arrays of a table in lines are passed as if not in lines."""

    def of_each(*xs):
        if not is_lines(xs[0]):
            return f(*xs)
        return as_lines(f(*map(plain, xs)), xs[0].shape)

    return jax.tree.map(of_each, *trees, is_leaf=lambda x: is_coded(x) or is_lines(x))


def _of_arrays(f: Any, *args: Any) -> Any:
    """Applies ``f`` to arrays, which may be abstract."""
    is_abstract = any(isinstance(a, jax.ShapeDtypeStruct) for a in jax.tree.leaves(args))
    return jax.eval_shape(f, *args) if is_abstract else f(*args)


def _pairs(slots: Any) -> Iterator[tuple[int, int]]:
    """The positions of the arrays of two slots, and of the markers."""
    words = halves = 0
    for j, tree in enumerate(slots):
        leaves = jax.tree.leaves(tree, is_leaf=is_mark)
        dtypes = [jnp.dtype(a.dtype) for a in leaves if hasattr(a, "dtype")]
        if marks := [x for x in leaves if is_mark(x)]:
            yield (halves if type(marks[0]) is SecondHalf else words), j
        elif jnp.dtype(jnp.uint32) in dtypes:
            words = j
        elif any(map(_is_inexact, dtypes)):
            halves = j


def is_mark(x: Any) -> bool:
    """Whether ``x`` marks a slot that is packed into the previous one."""
    return isinstance(x, _MARKS)


def _is_other_form(x: Any) -> bool:
    return isinstance(x, _OTHER_FORMS)


def _is_inexact(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)


def _avals(tree: Any) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, [(a.shape, a.dtype) for a in leaves]


def _packed(firsts: Any, seconds: Any, marks: Any) -> tuple[Any, Any]:
    """The trees of two slots; leaves without a marker are unchanged."""
    joined = jax.tree.map(_joined, firsts, seconds, marks)
    kept = jax.tree.map(lambda b, mark: mark if is_mark(mark) else b, seconds, marks)
    return joined, kept


def _joined(first: Any, second: Any, mark: Any) -> Any:
    if not is_mark(mark):
        return first
    if type(mark) is SecondHalf:
        join = lambda *parts: lax.concatenate(list(map(jnp.asarray, parts)), first.ndim - 1)
    else:
        join = lambda *parts: _words(*parts, _DTYPE_OF[type(mark)])
    return _of_arrays(join, first, second)


@functools.partial(custom_jvp, nondiff_argnums=(2,))
def _words(lower: Array, upper: Array, dtype: Any) -> Array:
    def bits(a):
        if a.dtype == jnp.float32 and dtype == jnp.bfloat16:  # saves the CPU a slow conversion
            return lax.bitcast_convert_type(a, jnp.uint32) >> np.uint32(16)
        return lax.bitcast_convert_type(a.astype(dtype), jnp.uint16).astype(jnp.uint32)

    return bits(lower) | bits(upper) << np.uint32(16)


@_words.defjvp
def _(dtype, primals, tangents):
    raise TypeError(
        "packed 16-bit slots are integers, which have no derivative: to differentiate through an "
        "update use optzoo.slots_dtype(..., packed=False)"
    )


def _part(both: Any, n: int, mark: Any) -> Any:
    """One slot of an array of two; without a marker, the ``n``-th of the array and the marker."""
    if not is_mark(mark):
        return mark if n else both
    if type(mark) is SecondHalf:
        if jnp.issubdtype(both.dtype, jnp.complexfloating):
            raise ValueError(_COMPLEX)
        width = both.shape[-1] // 2
        cut = lambda a: lax.slice_in_dim(jnp.asarray(a), n * width, (n + 1) * width, axis=-1)
    else:
        half = lambda w: (jnp.asarray(w) >> np.uint32(16 * n)).astype(jnp.uint16)
        cut = lambda w: lax.bitcast_convert_type(half(w), _DTYPE_OF[type(mark)])
    return _of_arrays(cut, both)


_COMPLEX = (
    "the state has two slots in one complex array, as in older versions of "
    "optzoo.slots_dtype(..., packed=True): give the real and the imaginary parts to "
    "optzoo.set_slot(tx.init(params), name, parts)"
)
