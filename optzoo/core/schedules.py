"""Hyper-parameters that are numbers, or schedules: functions of the step."""

from typing import Any

import jax
import numpy as np


def at_step(name: str, step: Any, value: Any, override: Any = None) -> Any:
    """A hyper-parameter at ``step``, unless it is overridden for this update.

    Args:
        name: the name of the hyper-parameter, for errors.
        step: the number of previous steps.
        value: a number, or a function of ``step``.
        override: the value given to ``update(..., name=)``, or None.

    Raises:
        TypeError: if the value is not a number.
        ValueError: if the value is an array with axes, which would be broadcast with parameters.
    """
    if override is not None:
        return _checked(f"update(..., {name}=) must be", override)
    if callable(value):
        return _checked(f"the schedule of {name} must return", value(step))
    return _checked(f"{name} must be", value)


def _checked(must: str, value: Any) -> Any:
    if not isinstance(value, jax.Array | np.ndarray | np.generic | float | int):
        raise TypeError(f"{must} a number, got {value!r}")
    if shape := np.shape(value):
        raise ValueError(
            f"{must} a scalar, got an array of shape {shape}: the value applies to all elements "
            "of all parameters in this step"
        )
    return value
