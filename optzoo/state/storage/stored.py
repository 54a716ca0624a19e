"""Stored slots: in their dtypes, packed, 8-bit, or stochastically rounded.

:func:`load` returns the slots with which a rule computes, :func:`save` the slots of the state. Only
``rules/on_stored.py`` calls them: rules and rows policies do not depend on the storage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...core.numerics import saturating_cast_like, upcast
from ...core.optimizer import Notes
from ...core.paths import leaves_with_path, path_name
from ...core.rows import SparseRows, axes_of_rows, is_rows, is_sparse_or_none
from ..fit import StateError, misfit, slots_words
from ..stacks import merged, parted, restack, unstack
from ..types import LeafwiseState, OwnersState, map_nodes
from .at_random import (
    DTYPES,
    first_place,
    first_place_in_shard,
    first_places_of_rows,
    places_of_rows,
    random_bits,
    round_at_random,
)
from .codes import encoded, has_codes, is_coded, stored
from .packing import is_packed, pack_like, unpack

# The argument by which ``caught_up`` gives an update the rows that its arrays are of.
GATHERED = "gathered_rows"
# The argument by which ``slots_dtype`` gives an update the ``Rounding`` of its 16-bit slots.
ROUNDING = "random_rounding"
# Keeps the bits of one pair of slots, or of one device, apart from those of the next.
STREAM = 0x9E3779B9


class Rounding(NamedTuple):
    """How an update rounds 16-bit slots stochastically."""

    seed: Array
    notes: Notes  # one for each part of a state whose slots the update has loaded


class StoredSlots(NamedTuple):
    """The stored slots of a parameter, and the start of its random bits.

    Both parts have the rows of the parameter if its gradient is SparseRows, so a rows policy
    gathers and scatters them with ``jax.tree.map``, for any storage.
    """

    slots: Any  # a named tuple
    start: Array | None  # None to round to the nearest

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"stored slots that are packed or stochastically rounded have no field {name!r}: "
            "compute with them in the rule, or gather rows of all slots with "
            "jax.tree.map(g.gather, slots)"
        )


def stored_slots(
    rounding: Rounding | None,
    rows: list[Any],
    updates: Any,
    gs: list[Any],
    step: Array,
    gathered: Mapping[str, SparseRows] | None = None,
) -> Any:
    """The slots of each parameter with the data for their storage; plain slots are unchanged.

    Args:
        rounding: stochastic rounding; None to round to nearest.
        rows: the named tuple of slots of each parameter.
        updates: the tree of gradients.
        gs: the leaves of ``updates``.
        step: the number of this update.
        gathered: for parameters whose gradients and slots are arrays of some rows of a table, these
            rows, by path. Each row is rounded by the random bits of its position in the table, not
            in the array, which may equal that of a row of another shard.
    """
    if rounding is None and not is_packed(rows):
        return rows
    if rounding is None:
        return [StoredSlots(row, None) if is_packed(row) else row for row in rows]
    rounding.notes.of.append(rows)
    paths = leaves_with_path(updates, is_leaf=is_sparse_or_none)
    names, tables = [path_name(path) for path, _ in paths], gathered or {}

    def start(g, name):
        first = first_place(rounding.seed, step, name)
        table = g if is_rows(g) else tables.get(name)
        if table is None:
            return first
        first = first_place_in_shard(first, axes_of_rows(table), table.shape)
        if is_rows(g):
            return first_places_of_rows(first, table.shape)
        return places_of_rows(first, table.indices, table.shape)

    return [StoredSlots(row, start(g, n)) for row, g, n in zip(rows, gs, names, strict=True)]


def stored_arrays(s: Any) -> Any:
    """The slots without further data, as in the state."""
    return s.slots if isinstance(s, StoredSlots) else s


def load(s: Any) -> Any:
    """The slots with which a rule computes: each in its own array."""
    return jax.tree.map(upcast, unpack(s.slots)) if isinstance(s, StoredSlots) else s


def save(old: Any, new: Any) -> Any:
    """New slots in the storage of the old ones, each in its dtype."""
    if not isinstance(old, StoredSlots):
        return jax.tree.map(saturating_cast_like, old, new)
    kept = old.slots if has_codes(old.slots) else unpack(old.slots)
    olds, treedef = jax.tree.flatten(kept, is_leaf=is_coded)
    pairs = zip(olds, treedef.flatten_up_to(new), strict=True)
    news = [rounded(a, b, old.start, k) for k, (a, b) in enumerate(pairs)]
    packed = pack_like(old.slots, treedef.unflatten(news))
    return StoredSlots(jax.tree.map(lambda a, b: b.astype(a.dtype), old.slots, packed), old.start)


def read_back(saved: Any, new: Any) -> Any:
    """The slots from which the update is computed, given :func:`save`'s result.

    An update is computed from packed or stochastically rounded slots in stored form, so that it
    reads only the new words. If it also read the old words, XLA would have to copy them before
    overwriting them. With float16, whose exponent range is small, a mean square in the denominator
    of the update may be rounded to zero, so the update is computed from the slots before rounding;
    and so it is with 8-bit slots, as in their publication.
    """
    if not isinstance(saved, StoredSlots) or has_codes(saved.slots):
        return new
    dtypes = {jnp.dtype(a.dtype) for a in jax.tree.leaves(unpack(saved.slots))}
    return new if jnp.dtype(jnp.float16) in dtypes else load(saved)


def rounded(old: Any, new: Array, start: Array | None, k: int) -> Any:
    """The new value of the k-th slot in the dtype of the old one, or representable in it.

    Args:
        old: the old slot, an array or codes.
        new: the new values, in at least float32.
        start: the start of the random bits; None to round to nearest.
        k: the index of the slot.
    """
    bits = None
    if start is not None and (is_coded(old) or jnp.dtype(old.dtype) in DTYPES):
        start = start + np.uint32(k // 2 * STREAM % 2**32)
        bits = random_bits(start, new.shape) >> np.uint32(16 * (k % 2))
    if is_coded(old):
        return stored(encoded(type(old), new, bits), old)
    if bits is None:
        return saturating_cast_like(old, new)
    return round_at_random(new, bits, old.dtype)


def slots_like(state: Any, like: Any) -> Any:
    """Converts a state to the storage of another one: dtypes, packing, 8-bit codes and owners.

    Unchanged arrays are shared with the given state. Matrices with owners (:func:`optzoo.soap`) may
    be converted from owners along other axes or of another number of devices, and from or to a
    state without owners.

    Example:
        >>> import jax, jax.numpy as jnp, optzoo
        >>> params, plain = jnp.ones((4, 8)), optzoo.adam(0.1)
        >>> short = optzoo.slots_dtype(plain, "int8")
        >>> state = optzoo.state.slots_like(plain.init(params), jax.eval_shape(short.init, params))
        >>> print(state[0].slots.m.codes.dtype)
        int8

    Args:
        state: the state of an optimizer of this library, also in chains and wrappers of optax.
        like: the state of the same optimizer and parameters in the other storage; it may be
            abstract.

    Raises:
        ValueError: if the states are not of the same optimizer and parameters.
    """
    is_node = lambda node: isinstance(node, LeafwiseState | OwnersState)
    (nodes, news), (wanted, olds) = (jax.tree.flatten(tree, is_node) for tree in (state, like))
    if olds != news:
        raise StateError(f"like must be a state of the same transformation, got {news} and {olds}")
    pairs = zip(nodes, wanted, strict=True)
    return olds.unflatten([_slots_like(a, b) if is_node(a) and is_node(b) else a for a, b in pairs])


def _slots_like(state: Any, like: Any) -> Any:
    given, wanted = _whole(state), _whole(like)
    kinds = [[a.shape for a in jax.tree.leaves(x.slots)] for x in (given, wanted)]
    structures = [jax.tree.structure(x.slots) for x in (given, wanted)]
    if kinds[0] != kinds[1] or structures[0] != structures[1]:
        raise misfit(slots_words(wanted.slots), slots_words(given.slots))
    slots = jax.tree.map(saturating_cast_like, wanted.slots, given.slots)
    if isinstance(like, LeafwiseState):
        return given._replace(slots=pack_like(like.slots, slots))
    trees = [parted(*pair) for pair in zip(slots, unpack(like.matrices.slots), strict=True)]
    of_matrices, of_others = map(type(slots)._make, zip(*trees, strict=True))
    none = jax.tree.map(jnp.zeros_like, given.shared)
    count = jnp.copy(given.count)  # a step that donates the state needs two
    return OwnersState(
        given._replace(slots=pack_like(like.matrices.slots, of_matrices)),
        LeafwiseState(count, pack_like(like.others.slots, of_others), none),
    )


def _whole(state: LeafwiseState | OwnersState) -> LeafwiseState:
    """A state with every slot in its own array, and without owners."""
    if isinstance(state, LeafwiseState):
        return state._replace(slots=unpack(state.slots))
    parts = [unpack(part.slots) for part in (state.matrices, state.others)]
    slots = type(parts[0])._make(map(merged, *parts))
    # Those of an optimizer with owners are counts.
    add = lambda a, b: a if isinstance(a, jax.ShapeDtypeStruct) else a + b
    shared = jax.tree.map(add, state.matrices.shared, state.others.shared)
    return LeafwiseState(state.matrices.count, slots, shared)


def unpack_state(state: Any) -> Any:
    """The state with every slot in its own array, without stacks and packed pairs."""
    unpacked = lambda slots: type(slots)._make(map(unstack, unpack(slots)))
    return map_nodes(LeafwiseState, lambda x: x._replace(slots=unpacked(x.slots)), state)


def pack_state_like(packed: Any, state: Any) -> Any:
    """An unpacked state in the storage of another one."""

    def packed_like(x, old):
        pairs = zip(unpack(old.slots), x.slots, strict=True)
        stacked = [restack(new, tree) for tree, new in pairs]
        return x._replace(slots=pack_like(old.slots, type(x.slots)._make(stacked)))

    return map_nodes(LeafwiseState, packed_like, state, packed)
