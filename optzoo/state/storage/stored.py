"""How slots are stored: in their dtypes, packed, in 8 bits, or rounded at random.

:func:`load` gives the slots that a rule computes with, :func:`save` the slots of the state again.
Only ``rules/on_stored.py`` calls them: rules and rows policies do not know the storage.
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
    """How an update rounds slots in 16 bits at random."""

    seed: Array
    notes: Notes  # one for each part of a state whose slots the update has loaded


class StoredSlots(NamedTuple):
    """The slots of a parameter as they lie in the state, and the start of its random bits.

    Both parts have the rows of the parameter if its gradient is SparseRows, so a rows policy
    gathers and scatters them with ``jax.tree.map``, whatever the storage.
    """

    slots: Any  # a named tuple
    start: Array | None  # None to round to the nearest

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"slots that are packed or rounded at random have no field {name!r} here: compute with "
            "them in the rule, or gather rows of all with jax.tree.map(g.gather, slots)"
        )


def stored_slots(
    rounding: Rounding | None,
    rows: list[Any],
    updates: Any,
    gs: list[Any],
    step: Array,
    gathered: Mapping[str, SparseRows] | None = None,
) -> Any:
    """The slots of each parameter with what their storage needs; plain slots as they are.

    Args:
        rounding: at random; None to round to the nearest.
        rows: for each parameter the named tuple of its slots.
        updates: the tree of gradients.
        gs: its leaves.
        step: the number of this update.
        gathered: by the paths of parameters whose gradients and slots are arrays of some rows of a
            table, these rows. Each is rounded by the random bits that it has in its table, and not
            by those of its place in the array, which a row of another shard may have too.
    """
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
    """The slots alone, as the state has them."""
    return s.slots if isinstance(s, StoredSlots) else s


def load(s: Any) -> Any:
    """Slots as a rule computes with them: each in its own array."""
    return jax.tree.map(upcast, unpack(s.slots)) if isinstance(s, StoredSlots) else s


def save(old: Any, new: Any) -> Any:
    """New slots in the storage of the old ones, each in its dtype."""
    if not isinstance(old, StoredSlots):
        return jax.tree.map(saturating_cast_like, old, new)
    olds, treedef = jax.tree.flatten(unpack(old.slots))
    if has_codes(old.slots):
        olds = jax.tree.leaves(old.slots, is_leaf=is_coded)
    pairs = zip(olds, treedef.flatten_up_to(new), strict=True)
    news = [rounded(a, b, old.start, k) for k, (a, b) in enumerate(pairs)]
    kept = pack_like(old.slots, treedef.unflatten(news))
    return StoredSlots(jax.tree.map(lambda a, b: b.astype(a.dtype), old.slots, kept), old.start)


def read_back(saved: Any, new: Any) -> Any:
    """The slots from which the update is computed, given :func:`save`'s result.

    An update is computed from packed or randomly rounded slots as they are stored: it then reads
    the new words alone. If it read the old ones too, XLA would have to copy them before the new
    ones take their place. Float16 has few exponents: there a mean square that the update divides by
    may be rounded to zero, so the update is computed from the slots before they are rounded; and so
    it is from slots in 8 bits, as in their publication.
    """
    if not isinstance(saved, StoredSlots) or has_codes(saved.slots):
        return new
    dtypes = {jnp.dtype(a.dtype) for a in jax.tree.leaves(unpack(saved.slots))}
    return new if jnp.dtype(jnp.float16) in dtypes else load(saved)


def rounded(old: Any, new: Array, start: Array | None, k: int) -> Any:
    """The new value of the k-th slot in the dtype of the old one, or representable in it.

    Args:
        old: the slot as it was, an array or codes.
        new: in at least float32.
        start: of the random bits; None to round to the nearest.
        k: the position of the slot.
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
    """A state with its slots stored as in another one: their dtypes, packing, 8 bits and owners.

    It takes the place of the given state: arrays that do not change are the same. Matrices with
    owners (:func:`optzoo.soap`) may come from a state with owners along other axes, of another
    number of devices, or without owners, and become one without.

    Example:
        >>> import jax, jax.numpy as jnp, optzoo
        >>> params, plain = jnp.ones((4, 8)), optzoo.adam(0.1)
        >>> short = optzoo.slots_dtype(plain, "int8")
        >>> state = optzoo.state.slots_like(plain.init(params), jax.eval_shape(short.init, params))
        >>> print(state[0].slots.m.codes.dtype)
        int8

    Args:
        state: of an optimizer of this library, alone or within optax's chains and wrappers.
        like: the state of the same optimizer and parameters in the other storage; abstract arrays
            are enough.

    Raises:
        ValueError: if the states are not of the same optimizer and parameters.
    """
    is_node = lambda node: isinstance(node, LeafwiseState | OwnersState)
    (nodes, news), (wanted, olds) = (jax.tree.flatten(tree, is_node) for tree in (state, like))
    if olds != news:
        raise StateError(f"like must be a state of the same transformation: {news} and {olds}")
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
    """A state with every slot in arrays of its own, and without owners."""
    if isinstance(state, LeafwiseState):
        return state._replace(slots=unpack(state.slots))
    parts = [unpack(part.slots) for part in (state.matrices, state.others)]
    slots = type(parts[0])._make(map(merged, *parts))
    # Those of an optimizer with owners are counts.
    add = lambda a, b: a if isinstance(a, jax.ShapeDtypeStruct) else a + b
    shared = jax.tree.map(add, state.matrices.shared, state.others.shared)
    return LeafwiseState(state.matrices.count, slots, shared)


def unpack_state(state: Any) -> Any:
    """The state with every slot in arrays of its own, without stacks and packed pairs."""
    unpacked = lambda slots: type(slots)._make(map(unstack, unpack(slots)))
    return map_nodes(LeafwiseState, lambda x: x._replace(slots=unpacked(x.slots)), state)


def pack_state_like(packed: Any, state: Any) -> Any:
    """An unpacked state in the form of another one."""

    def packed_like(x, old):
        pairs = zip(unpack(old.slots), x.slots, strict=True)
        stacked = [restack(new, tree) for tree, new in pairs]
        return x._replace(slots=pack_like(old.slots, type(x.slots)._make(stacked)))

    return map_nodes(LeafwiseState, packed_like, state, packed)
