"""Slots side by side: two of 16 bits in a word of 32, two of 32 or 64 bits in a complex number.

Those of 16 bits may be rounded at random. What lies in the state says of itself whether it is
packed: where two slots of a parameter share words, the words are in the place of the first, and in
that of the second stands one of the empty tuples below.
"""

import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Literal
from jax.typing import DTypeLike

from ..core.numerics import saturating_cast, upcast
from ..core.paths import path_name
from ..core.rows import is_rows, is_sparse_or_none
from .stochastic_rounding import (
    DTYPES,
    first_place,
    first_places_of_rows,
    random_bits,
    round_at_random,
)

_STREAM = 0x9E3779B9  # far apart are the bits of one pair of slots and those of the next


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


class StoredSlots(NamedTuple):
    """The slots of a parameter as they lie in the state, with what rounds them.

    Both parts have the rows of the parameter, if its gradient is rows: they are gathered and
    scattered as one.
    """

    slots: Any  # a named tuple
    start: Array | None  # of the random bits; None to round to the nearest


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
    """Slots from :func:`unpack`, as they were before.

    They may be in float32, if the numbers are those of the dtype that was packed.
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
    def bits(a):
        if a.dtype == jnp.float32 and dtype == jnp.bfloat16:  # saves the CPU a slow conversion
            return lax.bitcast_convert_type(a, jnp.uint32) >> np.uint32(16)
        return lax.bitcast_convert_type(a.astype(dtype), jnp.uint16).astype(jnp.uint32)

    if dtype in _IN_COMPLEX:
        join = lambda a, b: lax.complex(jnp.asarray(a, dtype), jnp.asarray(b, dtype))
    else:
        join = lambda a, b: bits(a) | bits(b) << np.uint32(16)
    is_abstract = isinstance(lower, jax.ShapeDtypeStruct)
    return jax.eval_shape(join, lower, upper) if is_abstract else join(lower, upper)


def _part(words: Any, n: int, dtype: DTypeLike) -> Any:
    half = lambda w: (jnp.asarray(w) >> np.uint32(16 * n)).astype(jnp.uint16)
    cut = lambda w: lax.bitcast_convert_type(half(w), dtype)
    if dtype in _IN_COMPLEX:
        cut = jnp.imag if n else jnp.real
    return jax.eval_shape(cut, words) if isinstance(words, jax.ShapeDtypeStruct) else cut(words)


# In an update.


def store(rows: list[Any], updates: Any, gs: list[Any], seed: Any, step: Array) -> list[Any]:
    """The slots of each parameter with what rounds them; as given where there is nothing to do."""
    if seed is None:
        return [StoredSlots(row, None) if is_packed(row) else row for row in rows]
    paths = jax.tree_util.tree_leaves_with_path(updates, is_leaf=is_sparse_or_none)
    names = [zlib.crc32(path_name(path).encode()) for path, _ in paths]

    def start(g, name):
        first = first_place(seed, step, name)
        return first_places_of_rows(first, g.shape) if is_rows(g) else first

    return [StoredSlots(row, start(g, n)) for row, g, n in zip(rows, gs, names, strict=True)]


def load(s: Any) -> Any:
    """What a rule computes with."""
    return jax.tree.map(upcast, unpack(s.slots)) if isinstance(s, StoredSlots) else s


def save(s: Any, new: Any) -> Any:
    """New slots for those that were opened, ready for the state."""
    if not isinstance(s, StoredSlots):
        return new
    olds, treedef = jax.tree.flatten(unpack(s.slots))
    pairs = zip(olds, treedef.flatten_up_to(new), strict=True)
    news = [_rounded(old, a, s.start, k) for k, (old, a) in enumerate(pairs)]
    kept = pack_like(s.slots, treedef.unflatten(news))
    return StoredSlots(jax.tree.map(lambda old, a: a.astype(old.dtype), s.slots, kept), s.start)


def stored_arrays(s: Any) -> Any:
    """The slots alone, as the state has them."""
    return s.slots if isinstance(s, StoredSlots) else s


def by_kept_slots(step: Callable[..., tuple[Any, Any]], s: Any, *args: Any) -> tuple[Any, Any]:
    """``step(*args) -> (update, new_slots)``, with the slots closed and the update made of these.

    The update then reads the new words alone. If it came from the old ones, beside the new slots
    that take their place, XLA would have to copy them first. In float16, whose numbers end far
    from zero, a mean square could be lost that the update divides by: there it is made before.
    """
    if not isinstance(s, StoredSlots):
        return step(*args)
    halves = {jnp.dtype(a.dtype) for a in jax.tree.leaves(unpack(s.slots))}
    if jnp.dtype(jnp.float16) in halves:
        u, new = step(*args)
        return u, save(s, new)
    jaxpr, (u, new) = jax.make_jaxpr(step, return_shape=True)(*args)
    values, count = jax.tree.leaves(args), len(jax.tree.leaves(u))
    news = _evaluate(jaxpr, values, {})[count:]
    closed = save(s, jax.tree.unflatten(jax.tree.structure(new), news))
    kept = jax.tree.leaves(load(closed))
    names = jaxpr.jaxpr.outvars[count:]
    known = {v: a for v, a in zip(names, kept, strict=True) if not isinstance(v, Literal)}
    us = _evaluate(jaxpr, values, known)[:count]
    return jax.tree.unflatten(jax.tree.structure(u), us), closed


def _evaluate(jaxpr: Any, values: list[Any], known: dict[Any, Any]) -> list[Any]:
    """The results of a traced function, with what is known in the place of what it computes."""
    program = jaxpr.jaxpr
    program = program.replace(
        constvars=[*program.constvars, *known],
        eqns=[eqn for eqn in program.eqns if not set(eqn.outvars) <= known.keys()],
    )
    return jax.core.eval_jaxpr(program, [*jaxpr.consts, *known.values()], *values)


def _rounded(old: Array, new: Array, start: Array | None, k: int) -> Array:
    if start is None or jnp.dtype(old.dtype) not in DTYPES:
        return saturating_cast(new, old.dtype)
    start = start + np.uint32(k // 2 * _STREAM % 2**32)
    bits = random_bits(start, new.shape)
    return round_at_random(new, bits >> np.uint32(16 * (k % 2)), old.dtype)
