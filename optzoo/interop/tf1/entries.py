"""The variables of one part of a state."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from ...core.paths import out_of_box, owner_of, path_name
from ...state.averages import MovingAverageSlots
from ...state.tf1_names import TF1Names, tf1_names
from ...state.types import LeafwiseState, LocalSGDState, ReplicaState, SharedParamsState
from .names import CENTER, GLOBAL_STEP, CheckpointNames, NonSlot, Parameter, Path, join, suffix
from .nodes import HYPERPARAMS, Node


# Arrays are called by the names of their paths: ``0/slots/m/w`` of the state, ``w`` of the params.
class Source(NamedTuple):
    """The variable that holds an array."""

    path: str
    variable: str  # "" if there is none
    shape: tuple[int, ...]
    dtype: Any  # here
    saved_dtype: Any  # in TensorFlow
    owner: str | None = None  # of a slot: TensorFlow's name of the parameter
    optional: bool = False  # whether the checkpoint may lack it


class Vector(NamedTuple):
    """The variable in which a slot of all parameters is concatenated along the last axis."""

    path: str  # of the slot
    variable: str
    parts: tuple[Source, ...]  # in this order; none of a vector that is not read again
    shape: tuple[int, ...]
    dtype: Any
    optional: bool = False


class Count(NamedTuple):
    """A number of updates that TensorFlow keeps once for all, as its global step."""

    path: str
    # The path of the wrapper around it that counts steps, and makes updates on some of them only.
    wrapper: str | None = None
    is_global_step: bool = False  # that of replicas, who count their own steps, too


class Unmapped(NamedTuple):
    """An array that TensorFlow has no variable for."""

    path: str


class NotFound(NamedTuple):
    """A message about slots that the checkpoint does not have."""

    message: str


class PendingNonSlot(NamedTuple):
    """An array or a vector whose variable is to be found beside the others of its name."""

    wanted: NonSlot
    incomplete: Source | Vector


class _Slot(NamedTuple):
    """One array of a slot of one parameter."""

    field: str
    below: Path  # the path within the field
    owner: Parameter
    source: Source


Entry = Source | Vector | Count | Unmapped | NotFound | PendingNonSlot


def entries_of(
    owners: Mapping[Path, Parameter], node: Node, names: CheckpointNames
) -> Iterator[Entry]:
    """What a part of a state adds to the plan."""
    if isinstance(node.value, ReplicaState):
        return _of_replicas(owners, node, names)
    if not isinstance(node.value, LeafwiseState):
        return _of_other_library(node)
    if node.replica_part == "center":  # its counts and powers are the workers'
        in_center = lambda owner: owner._replace(name=f"{CENTER}/{owner.name}")
        owners = {path: in_center(owner) for path, owner in owners.items()}
        node = node._replace(value=node.value._replace(shared={}))
    entries = _of_transformation(owners, node, names)
    return _optional(entries) if node.replica_part else entries


def _optional(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Of what may start again: workers' variables are local, so most are in no checkpoint."""
    for entry in entries:
        if isinstance(entry, Source | Vector):
            yield entry._replace(optional=True)
        elif isinstance(entry, PendingNonSlot):
            yield entry._replace(incomplete=entry.incomplete._replace(optional=True))
        elif not isinstance(entry, NotFound):
            yield entry


def _of_transformation(
    owners: Mapping[Path, Parameter], node: Node, names: CheckpointNames
) -> Iterator[Entry]:
    tf1, (slots, unmapped) = tf1_names(node.value.slots), slots_of(owners, node)
    yield from unmapped
    yield from (slot.source for slot in slots)
    if tf1.concatenated:
        yield from _vectors(slots, tf1, path_name(node.path))
    elif is_swapped(node.value, names):
        yield from (slot.source._replace(variable=slot.owner.name) for slot in slots)
    else:
        yield from _separate_slots(slots, tf1, names)
    path = (*node.path, GetAttrKey("count"))
    if tf1.count is None:
        yield _count(path, node.wrapper)
    else:
        variable, dtype = names.own_count(tf1.count), _common_dtype(slots)
        count = source_of(path, node.value.count)
        yield count._replace(variable=variable, saved_dtype=dtype)
    for name, value in node.value.shared.items():
        if name not in tf1.not_in_tf1:
            array = source_of((*node.path, GetAttrKey("shared"), DictKey(name)), value)
            yield PendingNonSlot(NonSlot(array.path, name, value), array)


def _of_replicas(
    owners: Mapping[Path, Parameter], node: Node, names: CheckpointNames
) -> Iterator[Entry]:
    state = node.value
    path = lambda *fields: (*node.path, *map(GetAttrKey, fields))
    yield _count(path("replicated", GLOBAL_STEP), node.wrapper)._replace(is_global_step=True)
    if isinstance(state, SharedParamsState):  # replicas read the parameters when they start
        yield _count(path("per_replica", "local_step"), node.wrapper)
    if hasattr(state.replicated, "stale_counter"):
        counter = path("replicated", "stale_counter")
        counter = source_of(counter, state.replicated.stale_counter)
        yield PendingNonSlot(NonSlot(counter.path, "stale_counter"), counter)
    center = state.replicated.center if isinstance(state, LocalSGDState) else ()
    for below, x in jax.tree_util.tree_leaves_with_path(center):
        owner = owners[out_of_box(below)]
        name = owner.name if names.choices.swapped else f"{CENTER}/{owner.name}"
        yield source_of((*path("replicated", "center"), *below), x, owner)._replace(variable=name)


def _of_other_library(node: Node) -> Iterator[Entry]:
    """An array of a transformation of optax's, or of another library."""
    attributes = {key.name for key in node.path if isinstance(key, GetAttrKey)}
    if out_of_box(node.path)[-1:] == (GetAttrKey("count"),) and np.ndim(node.value) == 0:
        yield _count(node.path, node.wrapper)
    elif HYPERPARAMS not in attributes:
        yield Unmapped(path_name(node.path))


def _count(path: Path, wrapper: Path | None) -> Count:
    return Count(path_name(path), None if wrapper is None else path_name(wrapper))


def source_of(path: Path, x: Any, owner: Parameter | None = None) -> Source:
    """An array without a variable yet. There, slots are of the parameters' dtype.

    All other variables are of float32, but for the global step.
    """
    name, dtype = (None, np.float32) if owner is None else (owner.name, owner.dtype)
    return Source(path_name(path), "", jnp.shape(x), jnp.result_type(x), dtype, name)


def slots_of(owners: Mapping[Path, Parameter], node: Node) -> tuple[list[_Slot], list[Unmapped]]:
    """The arrays beside each parameter, in the order of the slots' fields, and all others."""
    slots, found, others = node.value.slots, list[_Slot](), list[Unmapped]()
    for field in slots._fields:
        for below, x in jax.tree_util.tree_leaves_with_path(getattr(slots, field)):
            owner = owner_of(below, owners)
            path = (*node.path, GetAttrKey("slots"), GetAttrKey(field), *below)
            if owner is None:
                others.append(Unmapped(path_name(path)))
            else:
                found.append(_Slot(field, below, owner, source_of(path, x, owner)))
    return found, others


def is_swapped(state: LeafwiseState, names: CheckpointNames) -> bool:
    """Whether the slots have the names of the parameters."""
    return names.choices.swapped and isinstance(state.slots, MovingAverageSlots)


def _separate_slots(slots: list[_Slot], tf1: TF1Names, names: CheckpointNames) -> Iterator[Entry]:
    """Names slots as TensorFlow does, in the order of their creation: ``Adam``, ``Adam_1``, ..."""
    explicit = names.choices.variables
    all_slots = _by_owner(slots, tf1.order)
    without = {
        owner: [slot for slot in of_owner if slot.field not in tf1.optional]
        for owner, of_owner in all_slots.items()
    }
    possible = {
        owner: {len(without[owner]), len(of_owner)}
        for owner, of_owner in all_slots.items()
        if not all(slot.source.path in explicit for slot in without[owner])
    }
    found = names.slots(possible, tf1.slot, tf1.hint)
    yield from map(NotFound, found.not_found)
    for owner, first in found.first.items():
        has_more = names.has(first + suffix(len(without[owner])))
        for i, slot in enumerate((all_slots if has_more else without)[owner]):
            yield slot.source._replace(variable=first + suffix(i))


def _by_owner(
    slots: Iterable[_Slot], order: Iterable[str | tuple[str, ...]]
) -> dict[str, list[_Slot]]:
    """The slots of each parameter in the order in which TensorFlow creates them."""

    def position(slot):
        for i, group in enumerate(order):
            fields = (group,) if isinstance(group, str) else group
            if slot.field in fields:
                last = slot.below[-1] if slot.below else None
                takes_turns = len(fields) > 1 and isinstance(last, SequenceKey)
                return i, last.idx if takes_turns else 0, fields.index(slot.field)
        return 0, 0, 0  # in the order of the fields

    found = defaultdict[str, list[_Slot]](list)
    for slot in sorted(slots, key=position):
        found[slot.owner.name].append(slot)
    return dict(found)


def _vectors(slots: list[_Slot], tf1: TF1Names, path: str) -> Iterator[PendingNonSlot]:
    """The variables in which the slots of all parameters are concatenated."""
    fields = defaultdict[str, list[_Slot]](list)
    # TensorFlow sorts by the names of tensors: w1:0 comes before w:0.
    for slot in sorted(slots, key=lambda slot: f"{slot.owner.name}:0"):
        fields[slot.field].append(slot)
    dtype, size = _common_dtype(slots), 0
    for field, of_field in fields.items():
        size = sum(math.prod(slot.owner.shape) for slot in of_field)
        whole, part = of_field[0].source.shape, of_field[0].owner.shape
        shape = (*whole[: len(whole) - len(part)], size)
        parts = tuple(slot.source for slot in of_field)
        yield _vector(join(path, "slots", field), field, parts, shape, dtype)
    for name in tf1.unread:
        yield _vector(join(path, "slots", name), name, (), (size,), dtype)


def _vector(
    path: str, name: str, parts: tuple[Source, ...], shape: tuple[int, ...], dtype: Any
) -> PendingNonSlot:
    vector = Vector(path, "", parts, shape, dtype)
    return PendingNonSlot(NonSlot(path, name, ndim=len(shape)), vector)


def _common_dtype(slots: Iterable[_Slot]) -> Any:
    """That of the parameters."""
    return jnp.result_type(*([slot.owner.dtype for slot in slots] or [np.float32]))
