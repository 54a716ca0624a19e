"""The names of variables in TensorFlow 1."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp

from ...core.paths import leaves_with_path, matching, out_of_box, path_name
from ...state.tf1_names import AVERAGE
from .parts import UNKNOWN, Regular, Stored, join, make_regular, may_be, slot_variable
from .powers import estimate_exponent, is_integer_exponent

Path = tuple[Any, ...]
Names = Callable[[str], str] | Mapping[str, str] | Sequence[tuple[str, str]] | None
OptimizerName = str | Mapping[str, str] | None

CENTER = "global_center_variable"
GLOBAL_STEP = "global_step"


class Choices(NamedTuple):
    """The arguments that determine the names of variables."""

    optimizer_name: OptimizerName = None
    scope: str | None = None
    variables: Mapping[str, str] = MappingProxyType({})
    swapped: bool = False
    is_initial: bool = False  # whether the state is new: its powers are the betas themselves


class Parameter(NamedTuple):
    """A parameter: its path, its name in TensorFlow, and its shape and dtype."""

    path: str
    name: str
    shape: tuple[int, ...]
    dtype: Any


class NonSlot(NamedTuple):
    """An array that belongs to no parameter, such as ``beta1_power``."""

    path: str  # in the state
    name: str  # to which TensorFlow may have added a scope and a number
    value: Any = None  # of a power: ours
    ndim: int = 0


def name_parameters(params: Any, names: Names) -> dict[Path, Parameter]:
    """The parameters with TensorFlow's names, by path.

    Raises:
        TypeError: if ``names`` has another form.
        ValueError: if a name in a dict is not that of a parameter, or if two parameters have the
            same name.
    """
    leaves = leaves_with_path(params)
    rename = _renaming(names, {path_name(path) for path, _ in leaves})
    found = {}
    for path, x in leaves:
        here = path_name(path)
        found[out_of_box(path)] = Parameter(here, rename(here), jnp.shape(x), jnp.result_type(x))
    times = Counter(parameter.name for parameter in found.values())
    if twice := [name for name, number in times.items() if number > 1]:
        raise ValueError(f"names: the names {sorted(twice)} are given to several parameters")
    return found


def regular(
    stored: Mapping[str, Stored], owners: Mapping[Path, Parameter], choices: Choices
) -> Regular:
    """The variables of a checkpoint, with parts merged.

    Raises:
        ValueError: if a variable may be the slot of several parameters.
    """
    names = [owner.name for owner in owners.values()]
    return make_regular(stored, names, choices.scope, choices.variables.values())


def _renaming(names: Names, paths: set[str]) -> Callable[[str], str]:
    if names is None:
        return lambda name: name
    if callable(names):
        return names
    if isinstance(names, Mapping):
        if unknown := sorted(set(names) - paths):
            raise ValueError(
                f"names: no parameter is called {unknown}; the parameters are {sorted(paths)}"
            )
        return lambda name: names.get(name, name)
    is_pair = lambda pair: isinstance(pair, tuple | list) and len(pair) == 2
    if isinstance(names, str) or not all(map(is_pair, names)):
        raise TypeError(
            "names must be a function or a dict from the name of a parameter to TensorFlow's, or "
            f"a list of pairs (pattern, replacement) for re.sub, got {names!r}"
        )

    def substitute(name):
        for pattern, replacement in names:
            name = re.sub(pattern, replacement, name)
        return name

    return substitute


class CheckpointNames:
    """Names in a checkpoint, or default names without a checkpoint.

    Args:
        file: a checkpoint; None for the default names.
        parameters: the names of the parameters.
        choices: the names that the caller gives.
    """

    def __init__(
        self,
        file: Regular | None,
        parameters: Iterable[str],
        choices: Choices,
    ):
        self.file = file or Regular({}, {}, {})
        self.given = None if file is None else file.variables
        self.choices = choices
        self._parameters = list(parameters)
        self._children = defaultdict[str, set[str]](set)
        for name in set(self.given or ()).difference(self._parameters):
            parent, _, last = name.rpartition("/")
            self._children[parent].add(last)

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a variable."""
        return self.given is not None and name in self.given

    def average(self, parameter: str) -> str:
        """The moving average of a parameter."""
        return join(self.choices.scope, parameter, AVERAGE)

    def of_field(self, parameter: str, between: str, field: str) -> str:
        """The slot of a parameter that is named by its field, such as ``w/adam_m``."""
        return join(self.choices.scope, f"{parameter}{between}{field}")

    def are_numbered(self, by_field: Iterable[str]) -> bool:
        """Whether slots are called ``w/Adam``, ``w/Adam_1``, ... instead of these names."""
        if self.given is None:
            return self.choices.optimizer_name is not None
        return not any(map(self.has, by_field))

    def slots(
        self, possible: Mapping[str, set[int]], last: str | None = None, hint: str = ""
    ) -> tuple[dict[str, str], list[str]]:
        """The name of the first slot of each parameter, such as ``scope/w/Adam``.

        The names of the other slots end in ``_1``, ``_2``, and so on.

        Args:
            possible: the possible numbers of slots of each parameter.
            last: the last part of the names, if it is not the optimizer's name.
            hint: text added to the message if slots are not found.

        Returns:
            The names by those of the parameters, and messages about parameters without slots.

        Raises:
            ValueError: if several names fit, or if there is no checkpoint and no name is given.
        """
        groups = defaultdict[str | None, dict[str, set[int]]](dict)
        for owner, numbers in possible.items():
            groups[last or self._optimizer_name(owner)][owner] = numbers
        if self.given is None and None in groups:
            raise ValueError(
                f"optimizer_name must be given for the slots of {[*groups[None]]}: the name of "
                "the optimizer in TensorFlow, such as 'Adam' for w/Adam and w/Adam_1; or give "
                "like, a checkpoint of the graph that will continue"
            )
        first, not_found = dict[str, str](), list[str]()
        for name, group in groups.items():
            if self.given is None:
                scope, slot = self.choices.scope or "", name or ""
                found = {owner: slot_variable(scope, owner, slot) for owner in group}
            else:
                found = self._find(group, name)
            first |= found
            not_found += [] if found else self._not_found(group, name, hint)
        return first, not_found

    def _optimizer_name(self, owner: str) -> str | None:
        given = self.choices.optimizer_name
        if given is None or isinstance(given, str):
            return given
        return next((given[p] for p in matching(given, self._parameters)[owner]), None)

    def _find(self, possible: Mapping[str, set[int]], name: str | None) -> dict[str, str]:
        """The names of the first slots of these parameters; none if there are no slots."""
        fits = lambda base, n, numbers: base == name if name else base != AVERAGE and n in numbers
        there = {
            owner: [(s, base) for s, base, n in self._series_of(owner) if fits(base, n, numbers)]
            for owner, numbers in possible.items()
        }
        candidates = {found for of_owner in there.values() for found in of_owner}
        unknown = lambda found: found[0].count(UNKNOWN)
        is_same = lambda found, other: found[1] == other[1] and may_be(found[0], other[0])
        hides = lambda found, other: is_same(found, other) and unknown(found) > unknown(other)
        candidates = {f for f in candidates if not any(hides(f, other) for other in candidates)}
        variables = {
            found: {
                owner: [
                    join(other[0], owner, other[1]) for other in others if is_same(other, found)
                ]
                for owner, others in there.items()
            }
            for found in candidates
        }
        times = {found: sum(map(bool, of.values())) for found, of in variables.items()}
        best = {found for found, n in times.items() if n == max(times.values())}
        if len({base for _, base in best}) == 1:
            best = {found for found in best if not found[0]} or best
        if len(best) > 1:
            hidden = f", where {UNKNOWN} is any character" if any(map(unknown, best)) else ""
            raise ValueError(
                f"the slots of {[*possible]} are ambiguous, they may be any of "
                f"{sorted(best)}{hidden}: give scope (the first part) or optimizer_name (the "
                "second)"
            )
        names = dict[str, str]()
        for scope, base in best:
            for owner, of_owner in variables[scope, base].items():
                if len(of_owner) > 1:
                    both = " and ".join(sorted(map(self.file.in_file, of_owner)))
                    raise ValueError(
                        f"a slot of {owner} is ambiguous, it may be any of {both}: give the "
                        "argument variables"
                    )
                part = 0 if UNKNOWN in scope else None
                names[owner] = of_owner[0] if of_owner else slot_variable(scope, owner, base, part)
        return names

    def _series_of(self, owner: str) -> list[tuple[str, str, int]]:
        """The series of names below a parameter: the scope, the name, and their number."""
        found = []
        for parent, names in self._children.items():
            scope = parent.removesuffix(owner).removesuffix("/")
            if join(scope, owner) != parent or (scope and self.has(parent)):
                continue  # not below it, or below another parameter
            if self.choices.scope is None or may_be(scope, self.choices.scope):
                found += [(scope, base, number) for base, number in _series(names).items()]
        return found

    def _not_found(
        self, possible: Mapping[str, set[int]], name: str | None, hint: str
    ) -> Iterable[str]:
        for owner, numbers in possible.items():
            there = sorted(f"{base} ({n})" for _, base, n in self._series_of(owner))
            yield (
                f"{join(owner, name or '...')}: {' or '.join(map(str, sorted(numbers)))} slots "
                f"are needed, the checkpoint has {', '.join(there) or 'none'}{hint}"
            )

    def non_slots(self, arrays: Iterable[NonSlot]) -> list[str]:
        """The variables of arrays that belong to no parameter, in the order of the state.

        Raises:
            ValueError: if several fit.
        """
        before = defaultdict[str, list[NonSlot]](list)
        found = []
        for array in arrays:
            explicit = self.choices.variables.get(array.path)
            found.append(explicit or self._non_slot(array, before[array.name]))
            if not explicit:
                before[array.name].append(array)
        return found

    def _non_slot(self, array: NonSlot, before: list[NonSlot]) -> str:
        """The variable of an array after others of the same name."""
        default = join(self.choices.scope, array.name + suffix(len(before)))
        ambiguous = f"give it by variables={{{array.path!r}: ...}}"
        if self.given is None:
            first = before[0] if before else array
            if array.value is not None and float(array.value) != float(first.value):
                raise ValueError(
                    f"{array.path} of the state is one of several {array.name}: {ambiguous}"
                )
            return default
        explicit = self.choices.variables.values()
        found = [name for name in self._called(array.name, array.ndim) if name not in explicit]
        if len(found) < 2:
            return found[0] if found else default
        if len({self.given[n].tobytes() for n in found}) == 1 and len(before) < len(found):
            return found[len(before)]  # they are all the same
        if self.choices.is_initial and array.value is not None:
            exponents = {n: estimate_exponent(self.given[n], array.value) for n in found}
            fitting = [n for n, e in exponents.items() if e and is_integer_exponent(e)]
            if len(fitting) == 1:
                return fitting[0]
        raise ValueError(
            f"{array.path} of the state is ambiguous, it may be any of {found}: {ambiguous}"
        )

    def own_count(self, name: str) -> str:
        """The variable of an optimizer's own number of updates, a float.

        If it is called ``global_step`` and there is also a global step, its name has a suffix.
        """
        floating = lambda name: jnp.issubdtype((self.given or {})[name].dtype, jnp.floating)
        found = [n for n in self._called(name, 0) if floating(n)]
        default = f"{name}_1" if name == GLOBAL_STEP else name
        return found[0] if len(found) == 1 else join(self.choices.scope, default)

    def _called(self, name: str, ndim: int) -> list[str]:
        pattern = re.compile(rf"(?:(.*)/)?{name}(?:_\d+)?")
        matches = {n: pattern.fullmatch(n) for n, v in (self.given or {}).items() if v.ndim == ndim}
        scopes = {n: match[1] or "" for n, match in matches.items() if match}
        return sorted(n for n, scope in scopes.items() if self.choices.scope in (None, scope))


def suffix(number: int) -> str:
    """The suffix that TensorFlow appends to the name of the variable with this number."""
    return f"_{number}" if number else ""


def _series(names: set[str]) -> dict[str, int]:
    """The length of each series of names ``Adam``, ``Adam_1``, ``Adam_2``, ..."""
    series = {}
    for name in names:
        base, _, number = name.rpartition("_")
        if number.isdigit() and base in names:
            continue
        series[name] = 1
        while f"{name}_{series[name]}" in names:
            series[name] += 1
    return series
