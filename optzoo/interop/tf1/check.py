"""Whether a plan fits a checkpoint: all problems at once, before anything is made."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from .entries import Source, Vector
from .names import GLOBAL_STEP
from .plan import Plan
from .steps import Steps, are_whole


def check_load(plan: Plan, steps: Steps, given: Mapping[str, np.ndarray], *, partial: bool) -> None:
    """Raises ``ValueError`` with all that does not fit.

    Args:
        plan: of what is to be loaded.
        steps: of the counts.
        given: the variables of the checkpoint.
        partial: whether missing and left over variables are accepted.
    """
    lines = [*_misfits(plan, given), *steps.wrong]
    hint = "" if lines else "; partial=True passes over it"
    if not partial:
        missing = [*_missing(plan, given), *steps.missing]
        missing += [f"a variable for {path} of the state" for path in plan.unmapped]
        lines = [f"missing: {name}" for name in missing] + lines
        left_over = sorted(given.keys() - _used(plan, steps))
        lines += [f"left over: {name}" for name in left_over]
    elif not lines and not _finds_something(plan, given):
        raise ValueError(
            "partial=True: the checkpoint has none of the parameters and slots; it has "
            f"{sorted(given)}, wanted are {sorted(_used(plan, Steps()))}: see names="
        )
    if lines:
        raise ValueError(
            f"the checkpoint does not fit, nothing is loaded{hint}:\n  " + "\n  ".join(lines)
        )


def check_save(plan: Plan, state: Mapping[str, Any], like: Mapping[str, np.ndarray]) -> None:
    """Raises ``ValueError`` if a state cannot be saved.

    Args:
        plan: of what is to be saved.
        state: the arrays of the state by path.
        like: the variables of a checkpoint of the same graph; none if there is no such.
    """
    if plan.unmapped or plan.not_found:
        raise ValueError(
            f"TensorFlow has no variables for {[*plan.unmapped, *plan.not_found]}: optimizers of "
            "other libraries, and what ours keep beyond the originals, cannot be saved"
        )
    first = dict[str, str]()
    for source in plan.arrays:
        path, variable = source.path, source.variable
        other = first.setdefault(variable, path)  # several of ours may share a power
        if other != path and not np.array_equal(state[path], state[other]):
            raise ValueError(f"{other} and {path} of the state differ, and both are {variable}")
    entries = (*plan.parameters, *plan.arrays, *plan.vectors)
    shapes = [(entry.variable, entry.shape) for entry in entries]
    shapes += [(GLOBAL_STEP, ())] if plan.counts else []
    for variable, shape in shapes:
        if variable in like and like[variable].shape != shape:
            raise ValueError(f"{variable} is {like[variable].shape} in like, {shape} here")


def _misfits(plan: Plan, given: Mapping[str, np.ndarray]) -> Iterator[str]:
    """What has another shape or dtype."""
    for source in plan.parameters:
        yield from _misfit(source, given, converts=False)
    for entry in (*plan.arrays, *_read(plan)):
        yield from _misfit(entry, given, converts=True)


def _misfit(
    entry: Source | Vector, given: Mapping[str, np.ndarray], converts: bool
) -> Iterator[str]:
    new = given.get(entry.variable)
    if new is None:
        return
    if new.shape != entry.shape:
        yield f"shape: {entry.variable} is {new.shape} in the checkpoint, {entry.shape} here"
    elif not _fits(new.dtype, entry.dtype, converts):
        yield f"dtype: {entry.variable} is {new.dtype} in the checkpoint, {entry.dtype} here"
    elif jnp.issubdtype(entry.dtype, jnp.integer) and not are_whole(new, entry.dtype):
        yield f"value: {entry.variable} is {new} in the checkpoint, {entry.dtype} here"


def _fits(given: Any, wanted: Any, converts: bool) -> bool:
    """Slots are converted, for they may have another dtype, and a ``stale_counter`` is a float."""
    return given == wanted or (converts and jnp.issubdtype(given, jnp.floating))


def _missing(plan: Plan, given: Mapping[str, np.ndarray]) -> Iterator[str]:
    lacks = lambda entry: entry.variable not in given and not entry.optional
    yield from (f"{s.variable}, for {s.path}" for s in plan.parameters if lacks(s))
    yield from plan.not_found
    for entry in (*plan.arrays, *_read(plan)):
        if lacks(entry):
            yield f"{entry.variable}, for {entry.path}"


def _finds_something(plan: Plan, given: Mapping[str, np.ndarray]) -> bool:
    """Whether the checkpoint has a parameter or a slot of the plan, unless that needs none.

    Scalars of the state do not count: every Adam has the same beta powers.
    """
    arrays = (array for array in plan.arrays if array.shape)
    wanted = {entry.variable for entry in (*plan.parameters, *arrays, *plan.vectors)}
    return not wanted or not wanted.isdisjoint(given)


def _used(plan: Plan, steps: Steps) -> set[str]:
    entries = (*plan.parameters, *plan.arrays, *plan.vectors)
    return {entry.variable for entry in entries} | set(steps.used)


def _read(plan: Plan) -> list[Vector]:
    """Without the vectors that are not read again."""
    return [vector for vector in plan.vectors if vector.parts]
