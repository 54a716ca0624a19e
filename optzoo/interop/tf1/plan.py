"""Which variable of TensorFlow 1 holds which array of the parameters and of the state."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from ...core.paths import owner_of, path_name
from ...state.tf1_names import AVERAGE, TF1Names, tf1_names
from ...state.types import LeafwiseState, ReplicaState
from .names import (
    CENTER,
    GLOBAL_STEP,
    CheckpointNames,
    NonSlot,
    Parameter,
    Path,
    join,
    suffix,
)

_OF_CENTER = "center_inner"  # of agn: the slots beside the center
_HYPERPARAMS = "hyperparams"  # of optax.inject_hyperparams: the program gives them


# ------------------------------------------------- what a plan consists of
# Arrays are called by the names of their paths: ``0/slots/m/w`` of the state, ``w`` of the params.
class Source(NamedTuple):
    """The variable that holds an array."""

    path: str
    variable: str | None  # None if there is none
    shape: tuple[int, ...]
    dtype: Any  # here
    saved_dtype: Any  # in TensorFlow
    owner: str | None = None  # of a slot: TensorFlow's name of the parameter
    optional: bool = False  # whether the checkpoint may lack it


class Vector(NamedTuple):
    """The variable in which a slot of all parameters is concatenated along the last axis."""

    path: str  # of the slot
    variable: str | None
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


class Plan(NamedTuple):
    """Where each array is."""

    parameters: tuple[Source, ...]
    arrays: tuple[Source, ...]
    vectors: tuple[Vector, ...]
    counts: tuple[Count, ...]
    unmapped: tuple[str, ...]
    not_found: tuple[str, ...]


class _NonSlot(NamedTuple):
    """An array or a vector whose variable is to be found beside the others of its name."""

    wanted: NonSlot
    incomplete: Source | Vector


class _Slot(NamedTuple):
    """One array of a slot of one parameter."""

    field: str
    below: Path  # the path within the field
    owner: Parameter | None
    source: Source


class _Node(NamedTuple):
    """A part of a state: of a transformation of this library, of replicas, or an array."""

    path: Path
    value: Any
    wrapper: Path | None  # as in Count
    replica_part: str = ""  # what it belongs to: a "worker", the "center", or all replicas


_Entry = Source | Vector | Count | Unmapped | NotFound | _NonSlot


# ------------------------------------------------------------------------ planning
def make_plan(owners: Mapping[Path, Parameter], state: Any, names: CheckpointNames) -> Plan:
    """Finds the variable of every array.

    Args:
        owners: the parameters by their paths.
        state: the state of their optimizer, its slots unpacked (:func:`unpack_state`).
        names: how the variables are called in the checkpoint, or by default.

    Raises:
        ValueError: if a name is ambiguous, or unknown where there is no checkpoint to find it in.
    """
    nodes = tuple(_nodes(state))
    entries = [entry for node in nodes for entry in _entries(owners, node, names)]
    of = lambda kind: [entry for entry in entries if isinstance(entry, kind)]
    variables = names.non_slots(entry.wanted for entry in of(_NonSlot))
    pairs = zip(of(_NonSlot), variables, strict=True)
    non_slots = [entry.incomplete._replace(variable=variable) for entry, variable in pairs]
    found = [*of(Source), *of(Vector), *non_slots]
    explicit = names.choices.variables
    is_left = lambda entry: entry.path not in explicit
    return Plan(
        tuple(_plan_parameters(owners, nodes, names)),
        tuple(_plan_arrays(found, state, explicit)),
        tuple(vector for vector in found if isinstance(vector, Vector)),
        tuple(filter(is_left, of(Count))),
        tuple(entry.path for entry in filter(is_left, of(Unmapped))),
        tuple(entry.message for entry in of(NotFound)),
    )


def _plan_parameters(
    owners: Mapping[Path, Parameter], nodes: Iterable[_Node], names: CheckpointNames
) -> Iterator[Source]:
    """The variables of the parameters: of averages, if a saver swapped them."""
    averaged = {
        slot.owner
        for node in nodes
        if isinstance(node.value, LeafwiseState) and _is_swapped(node.value, names)
        for slot in _slots(owners, node)
    }
    for parameter in owners.values():
        name = parameter.name
        average, center = names.average(name), f"{CENTER}/{name}"
        if names.has(average):
            is_swapped = names.choices.swapped
        else:
            is_swapped = parameter in averaged and not names.choices.is_initial
        # Workers' own copies are in no checkpoint; they begin at the center.
        from_center = names.has(center) and not names.has(name)
        variable = average if is_swapped else center if from_center else name
        dtype = parameter.dtype
        yield Source(parameter.path, variable, parameter.shape, dtype, dtype)


def _plan_arrays(
    found: Iterable[Source | Vector], state: Any, explicit: Mapping[str, str]
) -> Iterator[Source]:
    """The variables of the arrays of the state: those found, and those that the caller names."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    sources = {source.path: source for source in (_source(path, x) for path, x in leaves)}
    sources |= {source.path: source for source in found if isinstance(source, Source)}
    of_arrays = explicit.keys() - {vector.path for vector in found if isinstance(vector, Vector)}
    if unknown := sorted(of_arrays - sources.keys()):
        raise ValueError(f"variables: the state has no arrays {unknown}; it has {sorted(sources)}")
    sources |= {path: sources[path]._replace(variable=explicit[path]) for path in of_arrays}
    slots = defaultdict[str, list[str]](list)
    for source in sources.values():
        if source.variable is not None and source.owner is not None:
            slots[source.variable].append(source.path)
    if shared := {name: paths for name, paths in slots.items() if len(paths) > 1}:
        raise ValueError(
            f"several slots would share a variable: {shared}; say optimizer_name= or variables="
        )
    return (source for source in sources.values() if source.variable is not None)


# ------------------------------------------------------------------ parts of a state
def _nodes(
    x: Any, path: Path = (), wrapper: Path | None = None, replica_part: str = ""
) -> Iterator[_Node]:
    """The transformations of this library in a state, the replicas, and all other arrays."""
    if isinstance(x, LeafwiseState | ReplicaState) or jax.tree_util.all_leaves([x]):
        yield _Node(path, x, wrapper, replica_part)
    if isinstance(x, ReplicaState):
        for below, inner, part in _inside_replicas(x):
            yield from _nodes(inner, (*path, *below), wrapper, replica_part or part)
    elif not isinstance(x, LeafwiseState):
        inside = path if _may_skip_updates(x) else wrapper
        children = jax.tree_util.tree_leaves_with_path(x, is_leaf=lambda child: child is not x)
        for below, child in children:
            of_child = wrapper if below == (GetAttrKey("count"),) else inside
            if below:
                yield from _nodes(child, (*path, *below), of_child, replica_part)


def _may_skip_updates(x: Any) -> bool:
    """Whether it counts steps and keeps arrays from one to the next, around a state with a count.

    Such as ``accumulate``: the optimizer in it counts its own updates, which may be fewer.
    """
    has_count = lambda x: "count" in getattr(x, "_fields", ())
    if not has_count(x):
        return False
    fields = {k: v for k, v in x._asdict().items() if k not in ("count", _HYPERPARAMS)}
    leaves = [jax.tree.leaves(field, is_leaf=has_count) for field in fields.values()]
    with_count = [any(map(has_count, of_field)) for of_field in leaves]
    keeps = [bool(of_field) for of_field in leaves]
    return any(with_count) and with_count != keeps


def _entries(
    owners: Mapping[Path, Parameter], node: _Node, names: CheckpointNames
) -> Iterator[_Entry]:
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


def _optional(entries: Iterable[_Entry]) -> Iterator[_Entry]:
    """Of what may start again: workers' variables are local, so most are in no checkpoint."""
    for entry in entries:
        if isinstance(entry, Source | Vector):
            yield entry._replace(optional=True)
        elif isinstance(entry, _NonSlot):
            yield entry._replace(incomplete=entry.incomplete._replace(optional=True))
        elif not isinstance(entry, NotFound):
            yield entry


def _of_transformation(
    owners: Mapping[Path, Parameter], node: _Node, names: CheckpointNames
) -> Iterator[_Entry]:
    tf1, slots = tf1_names(node.value.slots), _slots(owners, node)
    yield from (slot.source for slot in slots)
    yield from (Unmapped(slot.source.path) for slot in slots if slot.owner is None)
    slots = [slot for slot in slots if slot.owner is not None]
    if tf1.concatenated:
        yield from _vectors(slots, tf1, path_name(node.path))
    elif _is_swapped(node.value, names):
        yield from (slot.source._replace(variable=slot.owner.name) for slot in slots)
    else:
        yield from _separate_slots(slots, tf1, names)
    path = (*node.path, GetAttrKey("count"))
    if tf1.count is None:
        yield _count(path, node.wrapper)
    else:
        variable, dtype = names.own_count(tf1.count), _common_dtype(slots)
        count = _source(path, node.value.count)
        yield count._replace(variable=variable, saved_dtype=dtype)
    for name, value in node.value.shared.items():
        if name not in tf1.not_in_tf1:
            array = _source((*node.path, GetAttrKey("shared"), DictKey(name)), value)
            yield _NonSlot(NonSlot(array.path, name, value), array)


def _of_replicas(
    owners: Mapping[Path, Parameter], node: _Node, names: CheckpointNames
) -> Iterator[_Entry]:
    shared = node.value.shared
    below = lambda *keys: (*node.path, *keys)
    in_shared = lambda name: below(GetAttrKey("shared"), DictKey(name))
    yield _count(in_shared(GLOBAL_STEP), node.wrapper)._replace(is_global_step=True)
    if "inner" in shared:  # one for all: replicas read the parameters when they start
        yield _count(below(GetAttrKey("own"), DictKey("local_step")), node.wrapper)
    if "stale_counter" in shared:
        counter = _source(in_shared("stale_counter"), shared["stale_counter"])
        yield _NonSlot(NonSlot(counter.path, "stale_counter"), counter)
    for path, x in jax.tree_util.tree_leaves_with_path(shared.get("center", ())):
        owner = owners[path]
        name = owner.name if names.choices.swapped else f"{CENTER}/{owner.name}"
        yield _source((*in_shared("center"), *path), x, owner)._replace(variable=name)


def _inside_replicas(x: ReplicaState) -> Iterator[tuple[Path, Any, str]]:
    """The states of optimizers in a state of replicas, and what each belongs to."""
    for field, part in x._asdict().items():
        for key in part.keys() & {"inner", _OF_CENTER}:
            of = "center" if key == _OF_CENTER else "worker" if field == "own" else ""
            yield (GetAttrKey(field), DictKey(key)), part[key], of


def _of_other_library(node: _Node) -> Iterator[_Entry]:
    """An array of a transformation of optax's, or of another library."""
    attributes = {key.name for key in node.path if isinstance(key, GetAttrKey)}
    if node.path and node.path[-1] == GetAttrKey("count") and np.ndim(node.value) == 0:
        yield _count(node.path, node.wrapper)
    elif _HYPERPARAMS not in attributes:
        yield Unmapped(path_name(node.path))


def _count(path: Path, wrapper: Path | None) -> Count:
    return Count(path_name(path), None if wrapper is None else path_name(wrapper))


def _source(path: Path, x: Any, owner: Parameter | None = None) -> Source:
    """An array without a variable yet. There, slots are of the parameters' dtype.

    All other variables are of float32, but for the global step.
    """
    name, dtype = (None, np.float32) if owner is None else (owner.name, owner.dtype)
    return Source(path_name(path), None, jnp.shape(x), jnp.result_type(x), dtype, name)


# ------------------------------------------------------------------------- slots
def _slots(owners: Mapping[Path, Parameter], node: _Node) -> list[_Slot]:
    """The arrays beside each parameter, in the order of the slots' fields."""
    slots = node.value.slots
    found = []
    for field in slots._fields:
        for below, x in jax.tree_util.tree_leaves_with_path(getattr(slots, field)):
            owner = owner_of(below, owners)
            path = (*node.path, GetAttrKey("slots"), GetAttrKey(field), *below)
            found.append(_Slot(field, below, owner, _source(path, x, owner)))
    return found


def _is_swapped(state: LeafwiseState, names: CheckpointNames) -> bool:
    """Whether the slots have the names of the parameters."""
    return names.choices.swapped and tf1_names(state.slots).slot == AVERAGE


def _separate_slots(
    slots: list[_Slot], tf1: TF1Names, names: CheckpointNames
) -> Iterator[_Entry]:
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
                takes_turns = len(fields) > 1 and isinstance(slot.below[-1], SequenceKey)
                turn = slot.below[-1].idx if takes_turns else 0
                return i, turn, fields.index(slot.field)
        return 0, 0, 0  # in the order of the fields

    found = defaultdict[str, list[_Slot]](list)
    for slot in sorted(slots, key=position):
        found[slot.owner.name].append(slot)
    return dict(found)


def _vectors(slots: list[_Slot], tf1: TF1Names, path: Path) -> Iterator[_NonSlot]:
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
) -> _NonSlot:
    vector = Vector(path, None, parts, shape, dtype)
    return _NonSlot(NonSlot(path, name, ndim=len(shape)), vector)


def _common_dtype(slots: Iterable[_Slot]) -> Any:
    """That of the parameters."""
    return jnp.result_type(*([slot.owner.dtype for slot in slots] or [np.float32]))
