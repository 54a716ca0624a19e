"""Which variable of TensorFlow 1 holds which array of the parameters and of the state."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from ...state.types import LeafwiseState
from .entries import (
    Count,
    NotFound,
    PendingNonSlot,
    Source,
    Unmapped,
    Vector,
    entries_of,
    is_swapped,
    slots_of,
    source_of,
)
from .names import (
    CENTER,
    CheckpointNames,
    Choices,
    Names,
    Parameter,
    Path,
    name_parameters,
)
from .nodes import Node, nodes


class Plan(NamedTuple):
    """The variable of each array of the parameters and of the state."""

    parameters: tuple[Source, ...]
    arrays: tuple[Source, ...]  # of the state
    vectors: tuple[Vector, ...]
    counts: tuple[Count, ...]
    unmapped: tuple[str, ...]  # paths of arrays that TensorFlow has no variables for
    not_found: tuple[str, ...]  # messages about slots that the checkpoint does not have


def make_plan(
    params: Any,
    state: Any,
    given: Mapping[str, np.ndarray] | None,
    names: Names,
    choices: Choices,
) -> Plan:
    """Finds the variable of every array.

    Args:
        params: the parameters.
        state: the state of their optimizer, its slots unpacked (:func:`unpack_state`).
        given: the variables of a checkpoint, to find there how slots are called; None to call
            them as TensorFlow does by default.
        names: what the caller says about the names of the parameters.
        choices: what the caller says about other names.

    Raises:
        TypeError: if ``names`` is none of its forms.
        ValueError: if a name is ambiguous, or unknown where there is no checkpoint to find it in.
    """
    owners = name_parameters(params, names)
    called = CheckpointNames(given, [owner.name for owner in owners.values()], choices)
    parts = tuple(nodes(state))
    entries = [entry for node in parts for entry in entries_of(owners, node, called)]
    of = lambda kind: [entry for entry in entries if isinstance(entry, kind)]
    variables = called.non_slots(entry.wanted for entry in of(PendingNonSlot))
    pairs = zip(of(PendingNonSlot), variables, strict=True)
    non_slots = [entry.incomplete._replace(variable=variable) for entry, variable in pairs]
    found = [*of(Source), *of(Vector), *non_slots]
    explicit = choices.variables
    is_left = lambda entry: entry.path not in explicit
    return Plan(
        tuple(_plan_parameters(owners, parts, called)),
        tuple(_plan_arrays(found, state, explicit)),
        tuple(vector for vector in found if isinstance(vector, Vector)),
        tuple(filter(is_left, of(Count))),
        tuple(entry.path for entry in filter(is_left, of(Unmapped))),
        tuple(entry.message for entry in of(NotFound)),
    )


def _plan_parameters(
    owners: Mapping[Path, Parameter], parts: Iterable[Node], names: CheckpointNames
) -> Iterator[Source]:
    """The variables of the parameters: of averages, if a saver swapped them."""
    averaged = {
        slot.owner
        for node in parts
        if isinstance(node.value, LeafwiseState) and is_swapped(node.value, names)
        for slot in slots_of(owners, node)[0]
    }
    for parameter in owners.values():
        name = parameter.name
        average, center = names.average(name), f"{CENTER}/{name}"
        if names.has(average):
            in_average = names.choices.swapped
        else:
            in_average = parameter in averaged and not names.choices.is_initial
        # Workers' own copies are in no checkpoint; they start at the center.
        in_center = names.has(center) and not names.has(name)
        variable = average if in_average else center if in_center else name
        dtype = parameter.dtype
        yield Source(parameter.path, variable, parameter.shape, dtype, dtype)


def _plan_arrays(
    found: Iterable[Source | Vector], state: Any, explicit: Mapping[str, str]
) -> Iterator[Source]:
    """The variables of the arrays of the state: those found, and those that the caller names."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    sources = {source.path: source for source in (source_of(path, x) for path, x in leaves)}
    sources |= {source.path: source for source in found if isinstance(source, Source)}
    of_arrays = explicit.keys() - {vector.path for vector in found if isinstance(vector, Vector)}
    if unknown := sorted(of_arrays - sources.keys()):
        raise ValueError(f"variables: the state has no arrays {unknown}; it has {sorted(sources)}")
    sources |= {path: sources[path]._replace(variable=explicit[path]) for path in of_arrays}
    slots = defaultdict[str, list[str]](list)
    for source in sources.values():
        if source.variable and source.owner is not None:
            slots[source.variable].append(source.path)
    if shared := {name: paths for name, paths in slots.items() if len(paths) > 1}:
        raise ValueError(
            f"several slots would share a variable: {shared}; say optimizer_name= or variables="
        )
    return (source for source in sources.values() if source.variable)
