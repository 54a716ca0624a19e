"""The mapping from arrays of the parameters and the state to variables of TensorFlow 1."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from ...core.paths import leaves_with_path, out_of_box, owner_of, path_name
from ...state.averages import MovingAverageSlots
from ...state.deferred import Deferred
from ...state.tf1_names import TF1Names, tf1_names
from ...state.types import (
    AccumulateState,
    LeafwiseState,
    LocalSGDState,
    ReplicaState,
    SharedParamsState,
)
from .names import (
    CENTER,
    GLOBAL_STEP,
    CheckpointNames,
    Choices,
    NonSlot,
    Parameter,
    Path,
    suffix,
)
from .parts import Regular, join

_HYPERPARAMS = "hyperparams"  # of optax.inject_hyperparams: the program gives them
_COUNT = GetAttrKey("count")


# Arrays are named by their paths: ``0/slots/m/w`` in the state, ``w`` in the params.
class Source(NamedTuple):
    """The variable of an array, or of a vector that contains the slots of all parameters."""

    path: str
    variable: str  # "" if there is none
    shape: tuple[int, ...]
    dtype: Any  # here
    saved_dtype: Any  # in TensorFlow
    owner: str | None = None  # of a slot: TensorFlow's name of the parameter
    optional: bool = False  # whether the checkpoint may lack it
    # Of a vector: what is concatenated along the last axis; none of one that is not read again.
    parts: tuple["Source", ...] = ()


class Count(NamedTuple):
    """A number of updates that TensorFlow stores only once, as its global step."""

    path: str
    # The path of the wrapper around it that counts steps, and makes updates on some of them only.
    wrapper: str | None = None
    is_global_step: bool = False  # that of replicas, which also count their own steps


class Plan(NamedTuple):
    """The variable of each array of the parameters and of the state."""

    parameters: list[Source]
    arrays: list[Source]  # of the state
    vectors: list[Source]
    counts: list[Count]
    unmapped: list[str]  # paths of arrays that TensorFlow has no variables for
    not_found: list[str]  # messages about slots that the checkpoint does not have

    @property
    def saved(self) -> list[Source]:
        """All variables that are written."""
        return [*self.parameters, *self.arrays, *self.vectors]

    @property
    def read(self) -> list[Source]:
        """All variables that are read, without the vectors that are not."""
        return [*self.parameters, *self.arrays, *(v for v in self.vectors if v.parts)]


class _Slot(NamedTuple):
    """One array of a slot of one parameter."""

    field: str
    below: Path  # the path within the field
    owner: Parameter
    source: Source


def make_plan(
    owners: Mapping[Path, Parameter], state: Any, file: Regular | None, choices: Choices
) -> Plan:
    """Finds the variable of every array.

    Args:
        owners: the parameters (:func:`name_parameters`).
        state: the state of their optimizer, with unpacked slots (:func:`unpack_state`).
        file: a checkpoint, in which the names of slots are found; None for TensorFlow's default
            names.
        choices: other names that the caller gives.

    Raises:
        ValueError: if a name is ambiguous, or unknown without a checkpoint.
    """
    called = CheckpointNames(file, [owner.name for owner in owners.values()], choices)
    planner = _Planner(owners, called)
    planner.add(state)
    variables = called.non_slots(wanted for wanted, _ in planner.non_slots)
    arrays, vectors = planner.arrays, list[Source]()
    for (wanted, source), variable in zip(planner.non_slots, variables, strict=True):
        (vectors if wanted.ndim else arrays).append(source._replace(variable=variable))
    is_left = lambda path: path not in choices.variables
    return Plan(
        list(planner.parameters()),
        _plan_arrays(arrays, vectors, state, choices.variables),
        vectors,
        [count for count in planner.counts if is_left(count.path)],
        list(filter(is_left, planner.unmapped)),
        planner.not_found,
    )


def _plan_arrays(
    found: Iterable[Source], vectors: Iterable[Source], state: Any, explicit: Mapping[str, str]
) -> list[Source]:
    """The variables of the arrays of the state: found ones, and ones that the caller names."""
    leaves = leaves_with_path(state)
    sources = {source.path: source for source in (_source(path, x) for path, x in leaves)}
    sources |= {source.path: source for source in found}
    of_arrays = explicit.keys() - {vector.path for vector in vectors}
    if unknown := sorted(of_arrays - sources.keys()):
        raise ValueError(f"variables: the state has no arrays {unknown}; it has {sorted(sources)}")
    sources |= {path: sources[path]._replace(variable=explicit[path]) for path in of_arrays}
    slots = defaultdict[str, list[str]](list)
    for source in sources.values():
        if source.variable and source.owner is not None:
            slots[source.variable].append(source.path)
    if shared := {name: paths for name, paths in slots.items() if len(paths) > 1}:
        raise ValueError(
            f"several slots would share a variable: {shared}; give the argument optimizer_name or "
            "variables"
        )
    return [source for source in sources.values() if source.variable]


class _Planner:
    """Collects the variables that the parts of a state need.

    Attributes:
        arrays: the variables by path; later ones replace earlier ones.
        non_slots: arrays and vectors whose variables have names shared with others.
    """

    def __init__(self, owners: Mapping[Path, Parameter], names: CheckpointNames):
        self.owners, self.names = owners, names
        self.arrays: list[Source] = []
        self.non_slots: list[tuple[NonSlot, Source]] = []
        self.counts: list[Count] = []
        self.unmapped: list[str] = []
        self.not_found: list[str] = []
        self._averaged: set[str] = set()  # paths of parameters

    def parameters(self) -> Iterator[Source]:
        """The variables of the parameters, or of their averages if a saver swapped them."""
        for path, name, shape, dtype in self.owners.values():
            average, center = self.names.average(name), f"{CENTER}/{name}"
            if self.names.has(average):
                in_average = self.names.choices.swapped
            else:
                in_average = path in self._averaged and not self.names.choices.is_initial
            # Workers' own copies are in no checkpoint; they start at the center.
            in_center = self.names.has(center) and not self.names.has(name)
            variable = average if in_average else center if in_center else name
            yield Source(path, variable, shape, dtype, dtype)

    def add(
        self, x: Any, path: Path = (), wrapper: Path | None = None, replica_part: str = ""
    ) -> None:
        """Adds the variables that a part of a state needs.

        Args:
            x: the part.
            path: the path of the part.
            wrapper: as in ``Count``.
            replica_part: the owner of the part: a "worker", the "center", or all replicas.
        """
        if isinstance(x, Deferred):  # its clock follows from the count
            self.add(x.inner, (*path, GetAttrKey("inner")), wrapper, replica_part)
        elif isinstance(x, LeafwiseState):
            self._add_transformation(x, path, wrapper, replica_part)
        elif isinstance(x, ReplicaState):
            self._add_replicas(x, path, wrapper)
            for fields, inner, part in _inside_replicas(x):
                inside = (*path, *map(GetAttrKey, fields))
                self.add(inner, inside, wrapper, replica_part or part)
        elif jax.tree_util.all_leaves([x]):  # of optax, or of another library
            if out_of_box(path)[-1:] == (_COUNT,) and np.ndim(x) == 0:
                self._add_count(path, wrapper)
            elif GetAttrKey(_HYPERPARAMS) not in path:
                self.unmapped.append(path_name(path))
        else:
            if isinstance(x, AccumulateState):  # a checkpoint has sums alone
                x = x._replace(came=())
            inside = path if _may_skip_updates(x) else wrapper
            children = leaves_with_path(x, is_leaf=lambda child: child is not x)
            for below, child in children:
                of_child = wrapper if below == (_COUNT,) else inside
                self.add(child, (*path, *below), of_child, replica_part)

    def _add_count(self, path: Path, wrapper: Path | None, is_global_step: bool = False) -> None:
        around = None if wrapper is None else path_name(wrapper)
        self.counts.append(Count(path_name(path), around, is_global_step))

    def _add_non_slot(self, name: str, source: Source, value: Any = None, ndim: int = 0) -> None:
        self.non_slots.append((NonSlot(source.path, name, value, ndim), source))

    def _add_replicas(self, state: Any, path: Path, wrapper: Path | None) -> None:
        of = lambda *fields: (*path, *map(GetAttrKey, fields))
        self._add_count(of("replicated", GLOBAL_STEP), wrapper, is_global_step=True)
        if isinstance(state, SharedParamsState):  # replicas read the parameters when they start
            self._add_count(of("per_replica", "local_step"), wrapper)
        if hasattr(state.replicated, "stale_counter"):
            counter = _source(of("replicated", "stale_counter"), state.replicated.stale_counter)
            self._add_non_slot("stale_counter", counter)
        center = state.replicated.center if isinstance(state, LocalSGDState) else ()
        for below, x in leaves_with_path(center):
            owner = self.owners[out_of_box(below)]
            name = owner.name if self.names.choices.swapped else f"{CENTER}/{owner.name}"
            source = _source((*of("replicated", "center"), *below), x, owner)
            self.arrays.append(source._replace(variable=name))

    def _add_transformation(
        self, state: LeafwiseState, path: Path, wrapper: Path | None, replica_part: str
    ) -> None:
        tf1, is_center = tf1_names(state.slots), replica_part == "center"
        # Workers' variables are local, so most are in no checkpoint: they may start again.
        optional = bool(replica_part)
        slots = list(self._slots(state.slots, path, is_center, optional))
        self.arrays += [slot.source for slot in slots]
        if tf1.concatenated:
            self._add_vectors(slots, tf1, path_name(path), optional)
        elif self.names.choices.swapped and isinstance(state.slots, MovingAverageSlots):
            self.arrays += [slot.source._replace(variable=slot.owner.name) for slot in slots]
            self._averaged |= {slot.owner.path for slot in slots}
        elif named := self._by_field(slots, tf1):
            self.arrays += named
        else:
            self._add_slots(slots, tf1, optional)
        if tf1.count is None:
            self._add_count((*path, _COUNT), wrapper)
        else:
            count = _source((*path, _COUNT), state.count, optional=optional)
            variable = self.names.own_count(tf1.count)
            self.arrays.append(count._replace(variable=variable, saved_dtype=_common_dtype(slots)))
        shared = {} if is_center else state.shared  # the center's powers are the workers'
        for name, value in shared.items():
            if name not in tf1.not_in_tf1:
                array = (*path, GetAttrKey("shared"), DictKey(name))
                self._add_non_slot(name, _source(array, value, optional=optional), value)

    def _slots(self, slots: Any, path: Path, is_center: bool, optional: bool) -> Iterator[_Slot]:
        """The slots of each parameter, in the order of their fields."""
        for field, tree in slots._asdict().items():
            for below, x in leaves_with_path(tree):
                here = (*path, GetAttrKey("slots"), GetAttrKey(field), *below)
                owner = owner_of(below, self.owners)
                if owner is None:
                    self.unmapped.append(path_name(here))
                    continue
                if is_center:
                    owner = owner._replace(name=f"{CENTER}/{owner.name}")
                yield _Slot(field, below, owner, _source(here, x, owner, optional))

    def _by_field(self, slots: list[_Slot], tf1: TF1Names) -> list[Source]:
        """Slots whose variables have the names of their fields; empty if they are numbered."""
        if not tf1.by_field:
            return []
        named = [
            slot.source._replace(
                variable=self.names.of_field(slot.owner.name, tf1.by_field, slot.field),
                saved_dtype=np.float32,
            )
            for slot in slots
        ]
        if tf1.also_numbered and self.names.are_numbered(source.variable for source in named):
            return []
        return named

    def _add_slots(self, slots: list[_Slot], tf1: TF1Names, optional: bool) -> None:
        """Names slots as TensorFlow does, in order of creation: ``Adam``, ``Adam_1``, ..."""
        explicit = self.names.choices.variables
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
        first, not_found = self.names.slots(possible, tf1.slot, tf1.hint)
        self.not_found += [] if optional else not_found
        for owner, name in first.items():
            has_more = self.names.has(name + suffix(len(without[owner])))
            for i, slot in enumerate((all_slots if has_more else without)[owner]):
                self.arrays.append(slot.source._replace(variable=name + suffix(i)))

    def _add_vectors(self, slots: list[_Slot], tf1: TF1Names, path: str, optional: bool) -> None:
        """The variables in which the slots of all parameters are concatenated."""
        fields = defaultdict[str, list[_Slot]](list)
        # TensorFlow sorts by the names of tensors: w1:0 comes before w:0.
        for slot in sorted(slots, key=lambda slot: f"{slot.owner.name}:0"):
            fields[slot.field].append(slot)
        dtype, size = _common_dtype(slots), 0

        def add(name, parts, shape):
            path_here = join(path, "slots", name)
            vector = Source(path_here, "", shape, dtype, dtype, None, optional, parts)
            self._add_non_slot(name, vector, ndim=len(shape))

        for field, of_field in fields.items():
            size = sum(math.prod(slot.owner.shape) for slot in of_field)
            whole, part = of_field[0].source.shape, of_field[0].owner.shape
            shape = (*whole[: len(whole) - len(part)], size)
            add(field, tuple(slot.source for slot in of_field), shape)
        for name in tf1.unread:
            add(name, (), (size,))


def _source(path: Path, x: Any, owner: Parameter | None = None, optional: bool = False) -> Source:
    """An array without a variable yet.

    TensorFlow's slots have the dtype of the parameters, other variables except the global step
    float32.
    """
    name, dtype = (None, np.float32) if owner is None else (owner.name, owner.dtype)
    return Source(path_name(path), "", jnp.shape(x), jnp.result_type(x), dtype, name, optional)


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


def _common_dtype(slots: Iterable[_Slot]) -> Any:
    """The dtype that all parameters share."""
    return jnp.result_type(*([slot.owner.dtype for slot in slots] or [np.float32]))


def _may_skip_updates(x: Any) -> bool:
    """Whether a wrapper counts steps and stores arrays between them, around a state with a count.

    An example is ``accumulate``, whose inner optimizer may make fewer updates than steps.
    """
    has_count = lambda x: "count" in getattr(x, "_fields", ())
    if not has_count(x):
        return False
    fields = [field for k, field in x._asdict().items() if k not in ("count", _HYPERPARAMS)]
    leaves = [jax.tree.leaves(field, is_leaf=has_count) for field in fields]
    is_around = any(has_count(leaf) for of_field in leaves for leaf in of_field)
    return is_around and any(of_field and not any(map(has_count, of_field)) for of_field in leaves)


def _inside_replicas(state: ReplicaState) -> Iterator[tuple[tuple[str, ...], Any, str]]:
    """The states of optimizers, each with its fields in the path and its owner."""
    if isinstance(state, SharedParamsState):
        yield ("replicated", "inner"), state.replicated.inner, ""
        return
    if hasattr(state.replicated.method, "center_inner"):  # of agn: the slots beside the center
        fields = ("replicated", "method", "center_inner")
        yield fields, state.replicated.method.center_inner, "center"
    yield ("per_replica", "inner"), state.per_replica.inner, "worker"
