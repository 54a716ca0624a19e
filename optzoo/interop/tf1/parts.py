"""Variables in parts: their files, and the names of their slots.

TensorFlow 1 calls the parts of a variable ``w`` with a partitioner ``w/part_0``, ``w/part_1``, and
so on; a checkpoint has them as slices of one variable ``w``. The same holds for slots, unless the
optimizer was created in a variable scope: ``slot_variable`` then returns their names.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

Slice = tuple[tuple[int, int], ...]  # for each axis where it starts, and how long it is
# The location of a variable in a file: names and slices, None for the whole variable.
Pieces = list[tuple[str, Slice | None]]
UNKNOWN = "?"  # a character of a scope that is missing in the names of its slots


class Parts(NamedTuple):
    """Slices of a variable, in order of position; a file may lack some of them."""

    shape: tuple[int, ...]  # of the whole
    values: dict[Slice, np.ndarray]

    @property
    def is_complete(self) -> bool:
        """Whether the slices cover the whole variable."""
        sizes = (math.prod(length for _, length in part) for part in self.values)
        return sum(sizes) == math.prod(self.shape)


Stored = np.ndarray | Parts


def put_together(parts: Parts) -> np.ndarray:
    """The whole array, from its slices."""
    whole = np.empty(parts.shape, next(iter(parts.values.values())).dtype)
    for part, value in parts.values.items():
        whole[_index(part)] = value
    return whole


def _index(part: Slice) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in part)


def join(*parts: str | None) -> str:
    """A name from its parts; empty parts are omitted."""
    return "/".join(part for part in parts if part)


def slot_variable(scope: str, parameter: str, slot: str, part: int | None = None) -> str:
    """The name in a checkpoint of a slot of a parameter, or of a part of it.

    The name of the slot's variable consists of the optimizer's scope, the parameter and the slot.
    If the parameter is a part, the checkpoint has the name of the whole parameter, followed by the
    name of the slot's variable without as many leading characters as the part's name has. Without a
    scope, the rest is the name of the slot. With a scope, it also contains the last characters of
    the part's name, as many as the scope has: ``w/t_0/Adam`` for ``dnn``, ``w/part_0/Adam`` for
    ``linear``. If the scope is longer than the part's name, its own last characters precede these.

    Source: ``_create_slot_var`` in ``tensorflow/python/training/slot_creator.py`` of TensorFlow
    1.15.5.

    Args:
        scope: the variable scope in which the optimizer was created, ``""`` for none.
        parameter: the name of the whole parameter.
        slot: the last part of the slot's name, such as ``Adam_1``.
        part: the number of the part; None for a parameter without a partitioner.
    """
    if part is None:
        return join(scope, parameter, slot)
    primary = f"{parameter}/part_{part}"
    return f"{parameter}/{join(scope, primary, slot)[len(primary) + 1 :]}"


def _scope_of(parameter: str, part: int, between: str) -> str | None:
    """The scope, from the characters that ``slot_variable`` leaves before the slot's last part.

    Lost characters are ``UNKNOWN``. None if ``slot_variable`` does not give this name.
    """
    primary = f"{parameter}/part_{part}"
    if between.endswith(f"/{primary}"):
        return UNKNOWN * (len(primary) + 1) + between.removesuffix(f"/{primary}")
    return UNKNOWN * len(between) if primary.endswith(between) else None


def may_be(scope: str, other: str) -> bool:
    """Whether two scopes may be equal: their known characters are."""
    pairs = zip(scope, other, strict=False)
    return len(scope) == len(other) and all(UNKNOWN in (a, b) or a == b for a, b in pairs)


class Regular(NamedTuple):
    """The variables of a checkpoint, named as if no parameter had a partitioner.

    A slot in a scope is called ``scope/w/Adam``, with ``UNKNOWN`` characters in the scope.
    """

    variables: dict[str, np.ndarray]
    pieces: dict[str, Pieces]
    incomplete: dict[str, Parts]  # parts that are no whole together

    def in_file(self, variable: str) -> str:
        """The name of a variable in the checkpoint."""
        return ", ".join(dict.fromkeys(name for name, _ in self._pieces(variable)))

    def _pieces(self, variable: str) -> Pieces:
        return self.pieces.get(variable, [(variable, None)])

    def as_stored(self, variables: Mapping[str, np.ndarray]) -> dict[str, Stored]:
        """Variables with the names, parts and dtypes of the checkpoint."""
        stored = dict[str, Stored](self.incomplete)
        for variable, value in variables.items():
            for name, part in self._pieces(variable):
                if part is None:
                    stored[name] = value
                else:
                    others = stored.get(name)
                    others = others.values if isinstance(others, Parts) else {}
                    stored[name] = Parts(value.shape, others | {part: value[_index(part)]})
        return stored


class _Reading(NamedTuple):
    """An interpretation of a variable as a slot of parts of a parameter."""

    parameter: str
    scope: str
    slot: str
    parts: dict[int, Slice | None]  # by their numbers their slices; None for all of the variable


def make_regular(
    stored: Mapping[str, Stored],
    parameters: Collection[str],
    scope: str | None = None,
    keep: Collection[str] = (),
) -> Regular:
    """Finds the variables of a checkpoint that are slots of parts, and merges parts.

    Args:
        stored: the variables of the checkpoint.
        parameters: TensorFlow's names of the parameters.
        scope: the scope of the optimizer; None for any.
        keep: variables that are not slots of parts.

    Raises:
        ValueError: if a variable may be the slot of several parameters.
    """
    is_whole = lambda value: not isinstance(value, Parts) or value.is_complete
    owners = {name for name in parameters if name in stored and is_whole(stored[name])}
    others = sorted(stored.keys() - set(parameters) - set(keep))
    pieces = _slots_of_parts(others, stored, owners, scope)
    moved = {name for of_variable in pieces.values() for name, _ in of_variable}
    incomplete = dict[str, Parts]()
    for name in stored.keys() - moved:
        value = stored[name]
        if isinstance(value, Parts) and not value.is_complete:
            incomplete[name] = value
        else:
            pieces[name] = [(name, part) for part in _slices(value)]
    variables = {variable: _gather(pieces[variable], stored) for variable in sorted(pieces)}
    return Regular(variables, pieces, incomplete)


def _slots_of_parts(
    names: Iterable[str], stored: Mapping[str, Stored], owners: Collection[str], scope: str | None
) -> dict[str, Pieces]:
    """The slots with all parts among these names, by their names in ``Regular``."""
    found = defaultdict[tuple[str, str, str], dict[int, tuple[str, Slice | None]]](dict)
    for name in names:
        readings = list(_readings(name, stored, owners, scope))
        possible = {reading.parameter for reading in readings}
        if readings and len(possible := possible | _plain(name, owners, scope)) > 1:
            raise ValueError(
                f"{name} is ambiguous, it may be a slot of any of {sorted(possible)}, as named by "
                "an optimizer that was created in a variable scope: give the argument scope"
            )
        for parameter, left, slot, parts in readings:
            of_slot = found[parameter, left, slot]
            of_slot |= {number: (name, part) for number, part in parts.items()}
    return {
        join(left, parameter, slot): [of_slot[number] for number in sorted(of_slot)]
        for (parameter, left, slot), of_slot in found.items()
        if len(of_slot) == len(_slices(stored[parameter]))
    }


def _slices(value: Stored) -> list[Slice | None]:
    """The slices of a variable by the numbers of its parts; None for all of it."""
    return [*sorted(value.values)] if isinstance(value, Parts) else [None]


def _readings(
    name: str, stored: Mapping[str, Stored], owners: Collection[str], scope: str | None
) -> Iterator[_Reading]:
    """The interpretations of a variable as a slot of parts, for each possible parameter."""
    own = set(_slices(stored[name]))
    for at in (at for at, letter in enumerate(name) if letter == "/" and name[:at] in owners):
        parameter, (between, _, slot) = name[:at], name[at + 1 :].rpartition("/")
        slices = _slices(stored[parameter])
        parts = {number: part for number, part in enumerate(slices) if part in own}
        scopes = [_scope_of(parameter, number, between) for number in parts]
        if between and set(parts.values()) == own and None not in scopes:
            # For a part with a longer number, one more character is unknown.
            left = _hide(scopes[0] or "", len(f"{parameter}/part_{len(slices) - 1}/"))
            if scope is None or may_be(scope, left):
                yield _Reading(parameter, left, slot, parts)


def _hide(scope: str, number: int) -> str:
    return UNKNOWN * min(number, len(scope)) + scope[number:]


def _plain(name: str, owners: Collection[str], scope: str | None) -> set[str]:
    """The parameters without parts of which a variable may be a slot."""
    parent = name.rpartition("/")[0]
    starts = [0, *(at + 1 for at, letter in enumerate(parent) if letter == "/")]
    before = {parent[at:]: parent[: max(at - 1, 0)] for at in starts}
    return {owner for owner, s in before.items() if owner in owners and scope in (None, s)}


def _gather(pieces: Pieces, stored: Mapping[str, Stored]) -> np.ndarray:
    """A whole variable, merged from its parts in the file."""
    first, values = stored[pieces[0][0]], dict[Slice, np.ndarray]()
    for name, part in pieces:
        value = stored[name]
        if isinstance(value, Parts) and part is not None:
            values[part] = value.values[part]
    return put_together(Parts(first.shape, values)) if isinstance(first, Parts) else first
