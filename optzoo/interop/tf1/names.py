"""What TensorFlow 1 calls its variables."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...core.paths import path_name

Path = tuple[Any, ...]
Names = Callable[[str], str] | Mapping[str, str] | Sequence[tuple[str, str]] | None
OptimizerName = str | Mapping[str, str] | None

AVERAGE = "ExponentialMovingAverage"
CENTER = "global_center_variable"
GLOBAL_STEP = "global_step"


class Choices(NamedTuple):
    """The arguments that say how variables are called."""

    optimizer_name: OptimizerName = None
    scope: str | None = None
    variables: Mapping[str, str] = MappingProxyType({})
    swapped: bool = False
    from_start: bool = False  # whether the state is new: its powers are the betas themselves


def parameter_names(params: Any, names: Names) -> dict[Path, str]:
    """TensorFlow's names of the parameters by their paths.

    Raises:
        TypeError: if ``names`` is none of its forms.
        ValueError: if a name in a dict is no parameter's, or two parameters get the same name.
    """
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    rename = _renaming(names, {path_name(path) for path in paths})
    found = {path: rename(path_name(path)) for path in paths}
    if twice := [name for name, times in Counter(found.values()).items() if times > 1]:
        raise ValueError(f"names: several parameters get the names {sorted(twice)}")
    return found


def _renaming(names: Names, ours: set[str]) -> Callable[[str], str]:
    if names is None:
        return lambda name: name
    if callable(names):
        return names
    if isinstance(names, Mapping):
        if unknown := sorted(set(names) - ours):
            raise ValueError(f"names: no parameter is called {unknown}; there are {sorted(ours)}")
        return lambda name: names.get(name, name)
    is_pair = lambda pair: isinstance(pair, tuple | list) and len(pair) == 2
    if isinstance(names, str) or not all(map(is_pair, names)):
        raise TypeError(
            "names must be a function from our name of a parameter to TensorFlow's, a dict from "
            "one to the other, or a list of pairs (pattern, replacement) for re.sub, "
            f"got {names!r}"
        )

    def substitute(name):
        for pattern, replacement in names:
            name = re.sub(pattern, replacement, name)
        return name

    return substitute


class CheckpointNames:
    """Names as they are in a checkpoint, or by default where there is none to look at.

    Args:
        given: the variables of a checkpoint; None for the default names.
        parameters: the names of the parameters.
        choices: what the caller says about names.
    """

    def __init__(self, given: Mapping[str, np.ndarray] | None, parameters: Any, choices: Choices):
        self.given = given
        self.choices = choices
        self.problems: list[str] = []  # what was not found
        self._values = defaultdict[str, list[Any]](list)  # of the non-slots named so far
        self._children = defaultdict[str, set[str]](set)
        for name in set(given or ()) - set(parameters):
            parent, _, last = name.rpartition("/")
            self._children[parent].add(last)

    def has(self, name: str) -> bool:
        """Whether the checkpoint has it."""
        return self.given is not None and name in self.given

    def average(self, parameter: str) -> str:
        """The moving average of a parameter."""
        return join(self.choices.scope, parameter, AVERAGE)

    def slots(
        self, numbers: Mapping[str, set[int]], fixed: str | None = None, hint: str = ""
    ) -> dict[str, str]:
        """The name of the first slot of each parameter, ``scope/w/Adam``; others end in ``_1``, ...

        Args:
            numbers: of each parameter how many slots there may be.
            fixed: the last part of the name, if it is not the optimizer's.
            hint: what else to say if they are not to be found.

        Raises:
            ValueError: if several names fit, or if there is no checkpoint and no name is given.
        """
        groups = defaultdict[str | None, dict[str, set[int]]](dict)
        for owner, fitting in numbers.items():
            groups[fixed or self._optimizer_name(owner)][owner] = fitting
        if self.given is None and None in groups:
            raise ValueError(
                f"optimizer_name must be what TensorFlow calls the slots of {[*groups[None]]}, the "
                "name of the optimizer there, such as 'Adam' for w/Adam and w/Adam_1; or give "
                "like=, a checkpoint of the graph that is to go on"
            )
        first = {}
        for name, group in groups.items():
            found = (self.choices.scope, name) if self.given is None else self._find(group, name)
            if found is None:
                self._not_found(group, name, hint)
            else:
                first |= {owner: join(found[0], owner, found[1]) for owner in group}
        return first

    def _optimizer_name(self, owner: str) -> str | None:
        given = self.choices.optimizer_name
        if given is None or isinstance(given, str):
            return given
        return next((n for pattern, n in given.items() if re.fullmatch(pattern, owner)), None)

    def _find(self, numbers: Mapping[str, set[int]], name: str | None) -> tuple[str, str] | None:
        """The scope and the last part of the first slots of these parameters."""
        times = Counter[tuple[str, str]]()
        for owner, fitting in numbers.items():
            for scope, base, number in self._series_of(owner):
                if base == name if name else base != AVERAGE and number in fitting:
                    times[scope, base] += 1
        best = {found for found, n in times.items() if n == max(times.values())}
        if len({base for _, base in best}) == 1:
            best = {found for found in best if not found[0]} or best
        if len(best) > 1:
            raise ValueError(
                f"the slots of {[*numbers]} may be those of any of {sorted(map(tuple, best))}: "
                "say scope= (the first part) or optimizer_name= (the second)"
            )
        return best.pop() if best else None

    def _series_of(self, owner: str) -> list[tuple[str, str, int]]:
        """What lies below a parameter: the scope, the name, and how many there are of it."""
        found = []
        for parent, names in self._children.items():
            scope = parent.removesuffix(owner).removesuffix("/")
            if join(scope, owner) != parent or (scope and self.has(parent)):
                continue  # not below it, or below another parameter
            if self.choices.scope in (None, scope):
                found += [(scope, base, number) for base, number in _series(names).items()]
        return found

    def _not_found(self, numbers: Mapping[str, set[int]], name: str | None, hint: str) -> None:
        for owner, fitting in numbers.items():
            there = sorted(f"{base} ({n})" for _, base, n in self._series_of(owner))
            self.problems.append(
                f"{join(owner, name or '...')}: {' or '.join(map(str, sorted(fitting)))} slots, "
                f"where the checkpoint has {', '.join(there) or 'none'}{hint}"
            )

    def non_slot(self, name: str, array: str, value: Any = None, ndim: int = 0) -> str:
        """A variable that belongs to no parameter, such as ``beta1_power``.

        Args:
            name: its own name, to which TensorFlow may have added a scope and a number.
            array: the path of ours, for messages.
            value: ours.
            ndim: the number of its dimensions.

        Raises:
            ValueError: if several fit.
        """
        explicit = self.choices.variables
        if array in explicit:
            return explicit[array]
        before = self._values[name]
        default = join(self.choices.scope, name + suffix(len(before)))
        before.append(value)
        ambiguous = f"say which by variables={{{array!r}: ...}}"
        if self.given is None:
            if value is not None and float(value) != float(before[0]):
                raise ValueError(f"{array} of the state is one of several {name}: {ambiguous}")
            return default
        found = [n for n in self._called(name, ndim) if n not in explicit.values()]
        if len(found) < 2:
            return found[0] if found else default
        if len({self.given[n].tobytes() for n in found}) == 1 and len(before) <= len(found):
            return found[len(before) - 1]  # they are all the same
        if self.choices.from_start and value is not None:
            numbers = {n: exponent(self.given[n], value) for n in found}
            fitting = [n for n, number in numbers.items() if number and is_exponent(number)]
            if len(fitting) == 1:
                return fitting[0]
        raise ValueError(f"{array} of the state may be any of {found}: {ambiguous}")

    def step_of_ggt(self) -> str:
        """GGT's own count, a float; its name is taken where there is a global step, too."""
        floating = lambda name: jnp.issubdtype((self.given or {})[name].dtype, jnp.floating)
        found = [name for name in self._called(GLOBAL_STEP, 0) if floating(name)]
        return found[0] if len(found) == 1 else join(self.choices.scope, f"{GLOBAL_STEP}_1")

    def _called(self, name: str, ndim: int) -> list[str]:
        pattern = re.compile(rf"(?:(.*)/)?{name}(?:_\d+)?")
        matches = {n: pattern.fullmatch(n) for n, v in (self.given or {}).items() if v.ndim == ndim}
        scopes = {n: match[1] or "" for n, match in matches.items() if match}
        return sorted(n for n, scope in scopes.items() if self.choices.scope in (None, scope))


def exponent(power: Any, base: Any) -> float | None:
    """The ``n`` of ``power = base ** n``, both in float32; None if the power tells nothing."""
    power, base = float(power), float(base)
    if not (0 < base < 1 and np.finfo(np.float32).tiny < power <= 1):
        return None
    number = math.log(power) / math.log(base)
    return number if number < 1e5 else None


def is_exponent(number: float) -> bool:
    """Whether it is a whole number, but for the rounding of the power."""
    # Of 0.9999 it is off by 0.13 after 200,000 steps; of 0.999 by 0.01 before the power is zero.
    return number > 0.5 and abs(number - round(number)) < 1e-3 + 1e-6 * number


def join(*parts: str | None) -> str:
    """A name from its parts; an empty one is none."""
    return "/".join(part for part in parts if part)


def suffix(number: int) -> str:
    """What TensorFlow puts behind the name of the variable of this number."""
    return f"_{number}" if number else ""


def _series(names: set[str]) -> dict[str, int]:
    """How many there are of each of ``Adam``, ``Adam_1``, ``Adam_2``, ..."""
    series = {}
    for name in names:
        base, _, number = name.rpartition("_")
        if number.isdigit() and base in names:
            continue
        series[name] = 1
        while f"{name}_{series[name]}" in names:
            series[name] += 1
    return series
