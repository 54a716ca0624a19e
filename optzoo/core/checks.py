"""Checks of arguments at construction: of plain numbers, since traced ones have no value."""

import numbers
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from optax._src.base import NO_PARAMS_MSG  # no public name, and the message users know


def check(must: str, ok: Callable[[Any], bool], **arguments: Any) -> None:
    """Raises ``ValueError`` naming the argument if a plain number among them is not ``ok``.

    Schedules and arrays (from ``optax.inject_hyperparams``) pass: their values come later.
    """
    for name, value in arguments.items():
        if isinstance(value, numbers.Real) and not ok(value):
            raise ValueError(f"{name} must be {must}, got {value!r}")


def check_decays(**arguments: Any) -> list[Any]:
    """Checks decay rates, in [0, 1), and returns the values to compute with.

    ``optax.inject_hyperparams`` gives them in the dtype of the parameters. In 16 bits 0.999 is
    rounded to one, and a mean would never change: it is replaced by the largest value below one.
    With its ``hyperparam_dtype=jnp.float32`` nothing is rounded.
    """
    check("in [0, 1)", lambda v: 0 <= v < 1, **arguments)
    return [_below_one(value) for value in arguments.values()]


def _below_one(decay: Any) -> Any:
    dtype = getattr(decay, "dtype", None)
    if dtype is None or jnp.finfo(dtype).bits != 16:
        return decay
    return jnp.minimum(jnp.asarray(decay, jnp.float32), 1 - float(jnp.finfo(dtype).epsneg))


def check_positive(**arguments: Any) -> None:
    """Raises ``ValueError`` for a plain number that is not above zero."""
    check("positive", lambda v: v > 0, **arguments)


def check_not_negative(**arguments: Any) -> None:
    """Raises ``ValueError`` for a plain number below zero."""
    check("zero or positive", lambda v: v >= 0, **arguments)


def check_size(least: int = 0, **arguments: Any) -> int:
    """Checks a size, or another whole number on which shapes depend, and returns it as an int."""
    [(name, value)] = arguments.items()
    try:
        size = operator.index(value)
    except (TypeError, jax.errors.ConcretizationTypeError) as error:
        raise TypeError(
            f"{name} must be an int, got {value!r}; shapes depend on it, so "
            f"list it in the static_args of optax.inject_hyperparams"
        ) from error
    check(f"at least {least}", lambda v: v >= least, **{name: size})
    return size


def check_params(params: Any) -> None:
    """Raises optax's ``ValueError`` if ``update`` needs the parameters and got none."""
    if params is None:
        raise ValueError(NO_PARAMS_MSG)


def check_rate(learning_rate: Any) -> None:
    """Raises unless a learning rate is a finite real number, a scalar array or a schedule."""
    if callable(learning_rate):
        return
    if not isinstance(learning_rate, numbers.Real | np.ndarray | jax.Array):
        raise TypeError(
            "learning_rate must be a number or a schedule (a function of the step), "
            f"got {learning_rate!r}"
        )
    check("a finite number", lambda v: bool(np.isfinite(v)), learning_rate=learning_rate)
