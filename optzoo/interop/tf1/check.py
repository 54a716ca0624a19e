"""Checks whether a plan fits a checkpoint, and reports all problems before anything is built."""

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...core.warn import warn
from .names import GLOBAL_STEP
from .parts import Regular
from .plan import Plan
from .steps import Steps, are_whole


def check_load(
    plan: Plan, steps: Steps, file: Regular, ignore: Sequence[str], *, partial: bool
) -> None:
    """Raises ``ValueError`` with all problems; warns of variables that ``partial`` ignores.

    Raises ``TypeError`` if ``ignore`` is a string.

    Args:
        plan: the plan of the arrays to load.
        steps: the counts.
        file: the checkpoint.
        ignore: patterns of variables that may be left over.
        partial: whether missing and left over variables are accepted.
    """
    if isinstance(ignore, str):
        raise TypeError(f"ignore must be a list of names, got {ignore!r}")
    given = file.variables
    wrong = [*_misfits(plan, file), *steps.wrong]
    lacks = lambda s: s.variable not in given and not s.optional
    missing = [f"{file.in_file(s.variable)}, for {s.path}" for s in plan.read if lacks(s)]
    missing += [*plan.not_found, *steps.missing]
    missing += [f"a variable for {path} of the state" for path in plan.unmapped]
    missing = [f"missing: {name}" for name in missing]
    used = {source.variable for source in plan.saved}
    left = {file.in_file(name) for name in given.keys() - used - set(steps.used)}
    left = [name for name in left | file.incomplete.keys() if not _matches_any(name, ignore)]
    left_over = [f"left over: {name}" for name in sorted(left)]
    if wrong or (not partial and (missing or left_over)):
        lines = wrong if partial else [*missing, *wrong, *left_over]
        which = "partial=True skips" if missing else "ignore and partial=True skip"
        hint = "" if wrong else f"; {which} these variables"
        raise ValueError(
            f"the checkpoint does not fit, and nothing was loaded{hint}:\n  " + "\n  ".join(lines)
        )
    # Scalars are no evidence of a match: every Adam has the same beta powers.
    arrays = [array for array in plan.arrays if array.shape]
    wanted = {source.variable for source in (*plan.parameters, *arrays, *plan.vectors)}
    if partial and wanted and wanted.isdisjoint(given):
        raise ValueError(
            "partial=True: the checkpoint has none of the parameters and slots; it has "
            f"{sorted(given)}, but tx needs {sorted(used)}: give the argument names"
        )
    if missing or left_over:
        text = (
            "partial=True: missing variables keep the values of params and tx.init, and variables "
        )
        text += "left over are not loaded:\n  " + "\n  ".join([*missing, *left_over])
        warn(text)


def _matches_any(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def check_save(plan: Plan, state: Mapping[str, Any], like: Mapping[str, np.ndarray]) -> None:
    """Raises ``ValueError`` if a state cannot be saved.

    Args:
        plan: the plan of the arrays to save.
        state: the arrays of the state by path.
        like: the variables of a checkpoint of the same graph; empty if there is none.
    """
    if plan.unmapped or plan.not_found:
        raise ValueError(
            f"TensorFlow has no variables for {[*plan.unmapped, *plan.not_found]}: optimizers of "
            "other libraries, and slots that the originals do not have, cannot be saved"
        )
    first = dict[str, str]()
    for source in plan.arrays:
        path, variable = source.path, source.variable
        other = first.setdefault(variable, path)  # several of ours may share a power
        if other != path and not np.array_equal(state[path], state[other]):
            raise ValueError(
                f"{other} and {path} of the state differ, but both are saved as {variable}"
            )
    shapes = [(source.variable, source.shape) for source in plan.saved]
    shapes += [(GLOBAL_STEP, ())] if plan.counts else []
    for variable, shape in shapes:
        if variable in like and like[variable].shape != shape:
            raise ValueError(
                f"{variable} has shape {like[variable].shape} in like, but {shape} in the state"
            )


def _misfits(plan: Plan, file: Regular) -> Iterator[str]:
    """Messages about variables with another shape or dtype."""
    for i, source in enumerate(plan.read):
        variable, shape, dtype = file.in_file(source.variable), source.shape, source.dtype
        new = file.variables.get(source.variable)
        if new is None:
            continue
        # Slots are converted: they may have another dtype, and a ``stale_counter`` is a float.
        converts = i >= len(plan.parameters) and jnp.issubdtype(new.dtype, jnp.floating)
        if new.shape != shape:
            has_more_rows = new.ndim > 1 and new.shape[1:] == shape[1:] and shape[0] > len(new)
            is_table = i < len(plan.parameters) and has_more_rows
            fix = f": load {len(new)} rows, and add more with optzoo.growing.resize_table"
            yield (
                f"shape: {variable} is {new.shape} in the checkpoint, but must be "
                f"{shape}{fix * is_table}"
            )
        elif new.dtype != dtype and not converts:
            yield f"dtype: {variable} is {new.dtype} in the checkpoint, but must be {dtype}"
        elif jnp.issubdtype(dtype, jnp.integer) and not are_whole(new, dtype):
            yield f"value: {variable} is {new} in the checkpoint, but must be {dtype}"
