"""Which variable of TensorFlow 1 belongs to which array of ours."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey, SequenceKey

from ...core.paths import owner_of, path_name
from ...first_order.amsgrad import AMSGradSlots
from ...second_order.ggt import GGTSlots
from ...second_order.shampoo.api import ShampooSlots
from ...state.averages import MovingAverageSlots
from ...state.types import LeafwiseState, LocalSGDState, ReplicaState, SharedParamsState
from .names import AVERAGE, CENTER, GLOBAL_STEP, CheckpointNames, Choices, Path, join, suffix

# What we keep in ``shared`` and TensorFlow does not: GGT's Gram matrix follows from its window.
_NOT_OF_TF = ("gram", "num_failed_roots")
_OF_CENTER = "center_inner"  # of agn: the slots beside the center
_NAMELESS = (
    "; RETURNN's AMSGrad gives its variables no names: say which is which by "
    "variables={'0/slots/m/w': 'Variable_1', ...}"
)


class FlatVariables(NamedTuple):
    """GGT's variables, in which all parameters lie in a row."""

    path: str  # of the link in the state
    parameters: dict[str, str]  # ours by TensorFlow's names, in their order along the row
    moment1: str
    grad_buffer: str
    flat_grad: str
    step: str


class Plan(NamedTuple):
    """What is where. Arrays of the state go by the names of their paths: ``0/slots/m/w``."""

    parameters: dict[str, str]  # by our name, the variable
    arrays: dict[str, str]  # by path in the state, the variable
    owners: dict[str, str]  # of slots by path in the state, the parameter
    steps: list[str]  # paths of the counts that are the global step
    flats: list[FlatVariables]
    unmapped: list[str]  # paths of arrays that TensorFlow has no variables for
    problems: list[str]  # what is not in the checkpoint
    optional: set[str]  # paths of arrays that need not be there


def plan_parameters(owners: Mapping[Path, str], given: Any, choices: Choices) -> dict[str, str]:
    """The variables of the parameters, by our names.

    Args:
        owners: TensorFlow's names of the parameters by their paths.
        given: the variables of a checkpoint; None if there is none to look at.
        choices: what the caller says about names.
    """
    names = CheckpointNames(given, owners.values(), choices)

    def variable(name):
        if choices.swapped and names.has(names.average(name)):
            return names.average(name)
        # Workers' own copies are in no checkpoint; they begin at the center.
        center = f"{CENTER}/{name}"
        return center if names.has(center) and not names.has(name) else name

    return {path_name(path): variable(name) for path, name in owners.items()}


def plan(owners: Mapping[Path, str], state: Any, given: Any, choices: Choices) -> Plan:
    """Finds the variable of every array.

    Args:
        owners: TensorFlow's names of the parameters by their paths.
        state: the state of an optimizer of theirs.
        given: the variables of a checkpoint, to find there how slots are called; None to call them
            as TensorFlow does by default.
        choices: what the caller says about names.

    Raises:
        ValueError: if a name is ambiguous, or unknown where there is no checkpoint to find it in.
    """
    names = CheckpointNames(given, owners.values(), choices)
    done = Plan(plan_parameters(owners, given, choices), {}, {}, [], [], [], names.problems, set())
    for path, node in _nodes(state):
        if isinstance(node, LeafwiseState) and _is_for_itself(path):
            _plan_optional(done, names, owners, path, node)
        elif isinstance(node, LeafwiseState):
            _plan_link(done, names, owners, path, node)
        elif isinstance(node, ReplicaState):
            _plan_replicas(done, names, owners, path, node)
        else:
            _plan_foreign(done, path, node)
    _override(done, choices.variables)
    return done


def _nodes(state: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The links of this library in a state, the replicas around them, and all other arrays."""
    is_ours = lambda node: isinstance(node, LeafwiseState | ReplicaState)
    for below, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_ours):
        yield (*path, *below), node
        if isinstance(node, ReplicaState):
            for names, inner in _inners(node):
                yield from _nodes(inner, (*path, *below, *map(GetAttrKey, names)))


def _inners(node: ReplicaState) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The states of inner optimizers, with the fields that lead to them."""
    if isinstance(node, SharedParamsState):
        yield ("replicated", "inner"), node.replicated.inner
        return
    if hasattr(node.replicated.method, _OF_CENTER):
        yield ("replicated", "method", _OF_CENTER), getattr(node.replicated.method, _OF_CENTER)
    yield ("per_replica", "inner"), node.per_replica.inner


def _is_for_itself(path: Path) -> bool:
    """Whether it is part of what a worker has for itself, or what its center has."""
    of_worker = GetAttrKey("per_replica"), GetAttrKey("inner")
    return GetAttrKey(_OF_CENTER) in path or of_worker in itertools.pairwise(path)


def _plan_optional(
    done: Plan, names: CheckpointNames, owners: Mapping[Path, str], path: Path, link: LeafwiseState
) -> None:
    """A link that may begin anew: workers' variables are local, so most are in no checkpoint."""
    if GetAttrKey(_OF_CENTER) in path:  # its counts and powers are the workers'
        owners = {below: f"{CENTER}/{name}" for below, name in owners.items()}
        link = link._replace(shared={})
    before, problems = set(done.arrays), len(done.problems)
    _plan_link(done, names, owners, path, link)
    done.optional.update(done.arrays.keys() - before)
    del done.problems[problems:]


def _plan_link(
    done: Plan, names: CheckpointNames, owners: Mapping[Path, str], path: Path, link: LeafwiseState
) -> None:
    columns = _columns(done, owners, path, link.slots)
    if isinstance(link.slots, GGTSlots):
        done.flats.append(_flat(names, owners, path, columns))
        return
    done.steps.append(_within(path, "count"))
    if isinstance(link.slots, ShampooSlots):
        in_order = {owner: _in_order_of_creation(arrays) for owner, arrays in columns.items()}
        is_root = lambda array: array[len(path) + 1] == GetAttrKey("H")
        without = {o: [a for a in arrays if not is_root(a)] for o, arrays in in_order.items()}
        _plan_slots(done, names, without, or_else=in_order)
    elif isinstance(link.slots, MovingAverageSlots):
        if names.choices.swapped:
            _plan_swapped(done, names, owners, columns)
        else:
            _plan_slots(done, names, columns, fixed=AVERAGE)
    else:
        hint = _NAMELESS if isinstance(link.slots, AMSGradSlots) else ""
        _plan_slots(done, names, columns, hint=hint)
    for name, value in link.shared.items():
        if name not in _NOT_OF_TF:
            array = _within(path, "shared", name)
            done.arrays[array] = names.non_slot(name, array, value)


def _columns(done: Plan, owners: Mapping[Path, str], path: Path, slots: Any):
    """The paths of the arrays beside each parameter, in the order of the slots' fields."""
    columns = defaultdict[str, list[Path]](list)
    for field in slots._fields:
        for below, _ in jax.tree_util.tree_leaves_with_path(getattr(slots, field)):
            array = (*path, GetAttrKey("slots"), GetAttrKey(field), *below)
            owner = owner_of(below, owners)
            if owner is None:
                done.unmapped.append(path_name(array))
            else:
                done.owners[path_name(array)] = owner
                columns[owner].append(array)
    return columns


def _plan_slots(
    done: Plan,
    names: CheckpointNames,
    columns: Mapping[str, list[Path]],
    or_else: Mapping[str, list[Path]] | None = None,
    fixed: str | None = None,
    hint: str = "",
) -> None:
    """Names slots as TensorFlow does, in the order of their creation: ``Adam``, ``Adam_1``, ..."""
    or_else = or_else or columns
    explicit = names.choices.variables
    numbers = {
        owner: {len(arrays), len(or_else[owner])}
        for owner, arrays in columns.items()
        if not all(path_name(array) in explicit for array in arrays)
    }
    for owner, first in names.slots(numbers, fixed, hint).items():
        arrays = columns[owner]
        if names.has(first + suffix(len(arrays))):
            arrays = or_else[owner]
        for i, array in enumerate(arrays):
            done.arrays[path_name(array)] = first + suffix(i)


def _plan_swapped(
    done: Plan,
    names: CheckpointNames,
    owners: Mapping[Path, str],
    columns: Mapping[str, list[Path]],
) -> None:
    """Averages under the names of the parameters, and the other way round."""
    for owner, [array] in columns.items():
        done.arrays[path_name(array)] = owner
    for path, owner in owners.items():
        if owner in columns:
            done.parameters[path_name(path)] = names.average(owner)


def _in_order_of_creation(arrays: list[Path]) -> list[Path]:
    """Shampoo's slots of a parameter: ``gbar``, then ``H_i`` and ``Gbar_i`` for each i."""

    def place(array):
        field = next(key.name for key in reversed(array) if isinstance(key, GetAttrKey))
        if field not in ("H", "Gbar"):
            return (0, 0, 0) if field == "gbar" else (2, 0, 0)
        [number] = [array[-1].idx] if isinstance(array[-1], SequenceKey) else [0]
        return 1, number, field == "Gbar"

    return sorted(arrays, key=place)


def _flat(
    names: CheckpointNames, owners: Mapping[Path, str], path: Path, columns: Mapping[str, Any]
) -> FlatVariables:
    # TensorFlow sorts by the names of tensors: w1:0 comes before w:0.
    ours = {name: path_name(below) for below, name in owners.items()}
    parameters = {name: ours[name] for name in sorted(columns, key=lambda name: f"{name}:0")}
    vector = lambda name, ndim=1: names.non_slot(name, path_name(path), ndim=ndim)
    return FlatVariables(
        path_name(path),
        parameters,
        moment1=vector("moment1"),
        grad_buffer=vector("grad_buffer", 2),
        flat_grad=vector("flat_grad"),
        step=names.step_of_ggt(),
    )


def _plan_replicas(
    done: Plan, names: CheckpointNames, owners: Mapping[Path, str], path: Path, node: ReplicaState
) -> None:
    done.steps.append(_within(path, "replicated", GLOBAL_STEP))
    if isinstance(node, SharedParamsState):  # replicas read the parameters when they start
        done.steps.append(_within(path, "per_replica", "local_step"))
    if hasattr(node.replicated, "stale_counter"):
        counter = _within(path, "replicated", "stale_counter")
        done.arrays[counter] = names.non_slot("stale_counter", counter)
    center = node.replicated.center if isinstance(node, LocalSGDState) else ()
    for below, _ in jax.tree_util.tree_leaves_with_path(center):
        owner = owners[below]
        array = path_name((*path, GetAttrKey("replicated"), GetAttrKey("center"), *below))
        done.arrays[array] = owner if names.choices.swapped else f"{CENTER}/{owner}"
        done.owners[array] = owner


def _plan_foreign(done: Plan, path: Path, value: Any) -> None:
    """An array of a transformation of optax's, or of another library."""
    attributes = {key.name for key in path if isinstance(key, GetAttrKey)}
    if path and path[-1] == GetAttrKey("count") and np.ndim(value) == 0:
        done.steps.append(path_name(path))
    elif "hyperparams" not in attributes:  # of optax.inject_hyperparams: the program gives them
        done.unmapped.append(path_name(path))


def _override(done: Plan, explicit: Mapping[str, str]) -> None:
    """What the caller says about single arrays."""
    known = {*done.arrays, *done.owners, *done.steps, *done.unmapped}
    if unknown := sorted(set(explicit) - known):
        raise ValueError(f"variables: the state has no arrays {unknown}; it has {sorted(known)}")
    done.arrays.update(explicit)
    for paths in (done.steps, done.unmapped):
        paths[:] = [path for path in paths if path not in explicit]
    slots = {array: name for array, name in done.arrays.items() if array in done.owners}
    if twice := [name for name, times in Counter(slots.values()).items() if times > 1]:
        places = {name: [a for a, n in slots.items() if n == name] for name in twice}
        raise ValueError(
            f"several slots would share a variable: {places}; say optimizer_name= or variables="
        )


def _within(path: Path, *names: str) -> str:
    """The name of what is below a path."""
    return join(path_name(path), *names)


# ------------------------------------------------------------------- GGT's vectors
def split(
    flat: FlatVariables, arrays: Mapping[str, Any], given: Mapping[str, np.ndarray]
) -> tuple[dict[str, Any], list[str]]:
    """GGT's arrays from its vectors, by path; and what does not fit."""
    shapes = vector_shapes(flat, arrays)
    wrong = [
        f"shape: {name} is {given[name].shape} in the checkpoint, {shape} here"
        for name, shape in shapes.items()
        if name in given and given[name].shape != shape
    ]
    if wrong or not shapes.keys() <= given.keys():
        return {}, wrong
    moment1, rows = given[flat.moment1], given[flat.grad_buffer]
    values: dict[str, Any] = {join(flat.path, "count"): int(given[flat.step])}
    start = 0
    for name in flat.parameters.values():
        at = join(flat.path, "slots", "moment1", name)
        shape, part = jnp.shape(arrays[at]), slice(start, start + np.size(arrays[at]))
        start = part.stop
        values[at] = moment1[part].reshape(shape)
        buffer = join(flat.path, "slots", "grad_buffer", name)
        values[buffer] = rows[:, part].reshape(len(rows), *shape)
    exact = rows.astype(np.float64)
    values[join(flat.path, "shared", "gram")] = exact @ exact.T
    return values, []


def vector_shapes(flat: FlatVariables, arrays: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of GGT's variables, but for ``flat_grad``, which nobody reads again."""
    at = lambda name: arrays[join(flat.path, "slots", "moment1", name)]
    size = sum(np.size(at(name)) for name in flat.parameters.values())
    window = len(arrays[join(flat.path, "shared", "gram")])
    return {flat.moment1: (size,), flat.grad_buffer: (window, size), flat.step: ()}


def concatenate(flat: FlatVariables, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """GGT's vectors from its arrays, by name."""
    window = len(arrays[join(flat.path, "shared", "gram")])
    at = lambda slot, name: arrays[join(flat.path, "slots", slot, name)]
    ours = list(flat.parameters.values())
    moment1 = np.concatenate([at("moment1", name).ravel() for name in ours])
    rows = [at("grad_buffer", name).reshape(window, -1) for name in ours]
    return {
        flat.moment1: moment1,
        flat.grad_buffer: np.concatenate(rows, axis=1).astype(moment1.dtype),
        flat.flat_grad: np.zeros_like(moment1),
        flat.step: np.asarray(arrays[join(flat.path, "count")], moment1.dtype),
    }
