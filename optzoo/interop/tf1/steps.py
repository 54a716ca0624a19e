"""The number of updates: the counts of a state, and the global step of TensorFlow 1."""

import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .names import GLOBAL_STEP
from .plan import Count, Plan, Source
from .powers import can_be_power, estimate_exponent, is_integer_exponent, is_lost_before


class Steps(NamedTuple):
    """The counts of a loaded state, from a checkpoint or from the caller."""

    values: dict[str, int]  # by path
    used: tuple[str, ...]  # variables
    missing: list[str]  # messages
    wrong: list[str]


class _Power(NamedTuple):
    """A variable such as ``beta1_power`` that belongs to an optimizer of the state."""

    source: Source  # optional if it is a worker's, which counts its own steps
    value: Any
    base: Any

    @property
    def updates(self) -> int | None:
        """The ``n`` of ``beta1 ** (n + 1)``."""
        exponent = estimate_exponent(self.value, self.base)
        is_known = exponent is not None and is_integer_exponent(exponent)
        return round(exponent) - 1 if is_known else None


def plan_steps(
    plan: Plan,
    state: Mapping[str, Any],
    given: Mapping[str, np.ndarray],
    global_step: int | str | None,
) -> Steps:
    """Finds the counts of a state.

    They are the global step, except inside a wrapper that does not update in every step, such as
    ``accumulate``: there they are computed from the beta powers.

    Args:
        plan: the plan of the other arrays.
        state: the arrays of the initial state by path, in which powers equal the betas.
        given: the variables of the checkpoint.
        global_step: the argument of the caller.

    Raises:
        TypeError: if the global step is not an int.
        ValueError: if the global step is out of range or ambiguous, or its variable is missing.
    """
    powers = [
        _Power(source, value, state[source.path])
        for source in plan.arrays
        if source.path.endswith("_power")
        and (value := given.get(source.variable)) is not None
        and value.ndim == 0
    ]
    wrong = [
        f"betas: {source.variable} is {value}, which is not a power of {base}, the beta of tx; "
        "load with the checkpoint's betas, and continue with others if needed, as the state does "
        "not depend on them"
        for source, value, base in powers
        if not can_be_power(value, base)
    ]
    if not plan.counts:
        return Steps({}, (), [], wrong)
    step, used = _find_global_step(global_step, given)
    is_saved = global_step is None or isinstance(global_step, str)
    values, missing = dict[str, int](), list[str]()
    wrappers = dict.fromkeys(count.wrapper for count in plan.counts)
    for wrapper in wrappers:
        counts = [count.path for count in plan.counts if count.wrapper == wrapper]
        inside = [power for power in powers if _wrapper_of(power.source.path, wrappers) == wrapper]
        is_outermost = wrapper is None
        wrong += _contradictions(inside, step if is_outermost and is_saved else None)
        told = [_of_powers(inside)]
        if is_outermost:
            told = [step, *told, _own_count(plan.arrays, given)]
        number = next((number for number in told if number is not None), None)
        if number is not None:
            values |= dict.fromkeys(counts, number)
        elif is_outermost:
            missing.append("the number of updates: give the argument global_step")
        else:
            missing.append(
                f"the number of updates at {counts}, which may be fewer than the steps: name "
                "their variable in the argument variables"
            )
    return Steps(values, used, missing, wrong)


def _contradictions(powers: Iterable[_Power], step: int | None) -> Iterator[str]:
    """Messages about contradictions between the powers of one wrapper and the checkpoint's step.

    A step that the caller gives is not compared, since the powers may have another.
    """
    powers = [power for power in powers if not power.source.optional]
    told = _of_powers(powers)
    updates = step if told is None else told
    for power in powers:
        is_ = f"{power.source.variable} is {power.value}"
        if power.updates is not None and step is not None and power.updates != step:
            yield (
                f"global_step: the checkpoint has {step}, but {is_}, as after {power.updates} "
                "updates; give the number of updates as global_step"
            )
        elif updates is not None and is_lost_before(power.value, power.base, updates + 1):
            yield f"betas: {is_}, which is impossible after {updates} updates"


def _wrapper_of(path: str, wrappers: Iterable[str | None]) -> str | None:
    """The innermost wrapper around an array."""
    around = [w for w in wrappers if w is not None and path.startswith(f"{w}/" if w else "")]
    return max(around, key=len, default=None)


def _of_powers(powers: Iterable[_Power]) -> int | None:
    """The number of updates from ``beta1_power = beta1 ** (n + 1)``, if all powers agree."""
    steps = {power.updates for power in powers} - {None}
    return steps.pop() if len(steps) == 1 else None


def _own_count(arrays: Iterable[Source], given: Mapping[str, np.ndarray]) -> int | None:
    """The number of updates that an optimizer stores itself, as GGT does."""
    is_count = lambda path: path.split("/")[-1] == "count"
    own = [given[s.variable] for s in arrays if is_count(s.path) and s.variable in given]
    return next((int(value) for value in own if value.ndim == 0 and are_whole(value)), None)


def are_whole(values: np.ndarray, dtype: Any = np.int32) -> bool:
    """Whether an integer dtype can represent these values."""
    limits, wide = np.iinfo(dtype), np.asarray(values, np.float64)
    return bool(np.all((wide == np.round(wide)) & (limits.min <= wide) & (wide <= limits.max)))


def _find_global_step(
    wanted: int | str | None, given: Mapping[str, np.ndarray]
) -> tuple[int | None, tuple[str, ...]]:
    """The global step and its variables, if the caller or the checkpoint has it."""
    if wanted is not None and not isinstance(wanted, str):
        return check_step(wanted), tuple(name for name in given if name == GLOBAL_STEP)
    is_step = lambda n: given[n].shape == () and jnp.issubdtype(given[n].dtype, jnp.integer)
    name = GLOBAL_STEP if wanted is None else wanted
    found = [n for n in given if (n == name or n.endswith(f"/{name}")) and is_step(n)]
    found = [name] if name in found else found
    if wanted is not None and not found:
        raise ValueError(f"global_step: the checkpoint has no integer variable {wanted!r}")
    if len(found) > 1:
        raise ValueError(
            f"global_step is ambiguous, it may be any of {found}: give the name of one as "
            "global_step"
        )
    return (check_step(int(given[found[0]])) if found else None), tuple(found)


def check_step(step: Any) -> int:
    """The global step, if TensorFlow and the state can represent it.

    Raises:
        TypeError: if it is not an int.
        ValueError: if it is out of range.
    """
    try:
        number = operator.index(step)
    except TypeError as error:
        raise TypeError(f"global_step must be an int, got {step!r}") from error
    if isinstance(step, bool | np.bool_) or not 0 <= number < 2**31:
        raise ValueError(f"global_step must be in [0, 2**31), got {step}")
    return number


def step_of_state(counts: Iterable[Count], state: Mapping[str, Any]) -> int:
    """The global step of a state that is saved; 0 if it has no count.

    It is the global step of replicas, which also count their own steps, or otherwise the count. A
    wrapper such as ``accumulate`` counts steps, and its inner optimizer updates, which may be fewer
    and are not compared.

    Raises:
        ValueError: if there are several counts, for example of parallel optimizers, that differ.
    """
    outermost = [count for count in counts if count.wrapper is None]
    of_replicas = [count for count in outermost if count.is_global_step]
    steps = {count.path: int(state[count.path]) for count in of_replicas[:1] or outermost}
    if len(set(steps.values())) > 1:
        raise ValueError(f"the counts of the state differ: {steps}; give the argument global_step")
    return next(iter(steps.values()), 0)
