"""Checks of arguments, at construction and in updates; for traced values, of types only."""

from __future__ import annotations

import difflib
import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np

from .compat import NO_PARAMS_MSG
from .numerics import has_16_bits

_P = ParamSpec("_P")
_T = TypeVar("_T")


def check(
    must: str,
    ok: Callable[[float], bool],
    *,
    schedule: bool = False,
    none: bool = False,
    infinite: bool = False,
    on_device: bool = True,
    fix: str = "",
    **arguments: Any,
) -> None:
    """Checks real numbers by name: Python numbers, NumPy scalars and arrays without axes.

    A traced array (inside of ``optax.inject_hyperparams``) passes, since its value is unknown.

    Args:
        must: the requirement on the values, for the error.
        ok: a function that tests a value.
        schedule: whether a schedule (a callable) passes.
        none: whether None passes.
        infinite: whether infinity may pass.
        on_device: whether values of JAX arrays are read, which waits for the device.
        fix: the end of the errors, after a colon.
        **arguments: the values by name.

    Raises:
        TypeError: if an argument is not a number.
        ValueError: if an argument has axes, is not finite or is not ``ok``.
    """
    kinds = " or a schedule (a function of the step)" * schedule + " or None" * none
    end = f": {fix}" if fix else ""
    for name, value in arguments.items():
        if (schedule and callable(value)) or (none and value is None):
            continue
        if not _is_real(value):
            if callable(value) and not fix:
                end = ": use optax.inject_hyperparams for a schedule"
            raise TypeError(f"{name} must be a number{kinds}, got {value!r}{end}")
        if np.shape(value):
            raise ValueError(f"{name} must be a scalar, got shape {np.shape(value)}{end}")
        number = _known(value) if on_device or not isinstance(value, jax.Array) else None
        if number is None:
            continue
        if not ok(number) or not (infinite or math.isfinite(number)):
            wanted = "a finite number" if ok(number) else must
            raise ValueError(f"{name} must be {wanted}, got {value!r}{end}")


def _is_real(value: Any) -> bool:
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return any(jnp.issubdtype(value.dtype, kind) for kind in (jnp.floating, jnp.integer))
    return isinstance(value, int | float) and not isinstance(value, bool)


def _known(value: Any) -> float | None:
    """The value of a real scalar; None if it is traced or on devices of other processes."""
    if isinstance(value, jax.core.Tracer):
        return None
    if isinstance(value, jax.Array) and not value.is_fully_replicated:
        return None
    try:
        return float(value)
    except OverflowError:  # a large Python int
        return math.inf if value > 0 else -math.inf


def check_decays(**arguments: Any) -> list[Any]:
    """Checks decay rates, in [0, 1), and returns the values to use.

    ``optax.inject_hyperparams`` converts them to the dtype of the parameters. In 16 bits 0.999 is
    rounded to 1, with which a mean would never change: it is replaced by the largest value below 1.
    """
    is_short = lambda v: hasattr(v, "dtype") and has_16_bits(v.dtype)
    below_one = lambda v: jnp.minimum(v.astype(jnp.float32), 1 - float(jnp.finfo(v.dtype).epsneg))
    check_fraction(**{name: v for name, v in arguments.items() if is_short(v)})
    longer = {name: v for name, v in arguments.items() if not is_short(v)}
    check("in [0, 1)", lambda v: 0 <= v < 1, **longer)
    return [below_one(v) if is_short(v) else v for v in arguments.values()]


def check_finite(**arguments: Any) -> None:
    """Checks that values are finite, with the options of :func:`check`."""
    check("a finite number", math.isfinite, **arguments)


def check_positive(**arguments: Any) -> None:
    """Checks that values are positive and finite, with the options of :func:`check`."""
    check("positive", lambda v: v > 0, **arguments)


def check_not_negative(**arguments: Any) -> None:
    """Checks that values are at least zero and finite, with the options of :func:`check`."""
    check("zero or positive", lambda v: v >= 0, **arguments)


def check_fraction(**arguments: Any) -> None:
    """Checks that values are from zero to one, with the options of :func:`check`."""
    check("in [0, 1]", lambda v: 0 <= v <= 1, **arguments)


def check_size(least: int = 0, **arguments: Any) -> int:
    """Checks a size, or another integer that determines shapes, and returns it as an int."""
    [(name, value)] = arguments.items()
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError("a bool is not a size")
        size = operator.index(value)
    except (TypeError, jax.errors.ConcretizationTypeError) as error:
        fix = "; shapes depend on it, so list it in the static_args of optax.inject_hyperparams"
        is_array = isinstance(value, jax.Array)
        raise TypeError(f"{name} must be an int, got {value!r}{fix * is_array}") from error
    if size < least:
        raise ValueError(f"{name} must be at least {least}, got {size}")
    return size


def check_choice(choices: Any, **arguments: Any) -> None:
    """Raises ``ValueError`` unless each argument is one of these values, or of a Literal type."""
    known = get_args(choices) or tuple(choices)
    for name, value in arguments.items():
        if value not in known:
            names = ", ".join(map(str, known))
            raise ValueError(f"{name} must be one of {names}, got {value!r}")


def check_flags(**arguments: Any) -> None:
    """Raises ``TypeError`` unless each argument is True or False, or 1 or 0."""
    for name, value in arguments.items():
        if not isinstance(value, int | float | np.bool_) or value not in (True, False):
            raise TypeError(f"{name} must be True or False, got {value!r}")


def check_floating(more: str = "", **arguments: Any) -> None:
    """Raises ``TypeError`` unless each argument is a real dtype; ``more`` extends the error."""
    for name, dtype in arguments.items():
        try:
            is_floating = jnp.issubdtype(dtype, jnp.floating)
        except TypeError:  # no dtype at all
            is_floating = False
        if not is_floating:
            raise TypeError(f"{name} must be a floating-point dtype{more}, got {dtype!r}")


def check_function(what: str = "a function", **arguments: Any) -> None:
    """Raises ``TypeError`` unless each argument is a function; ``what`` describes it."""
    for name, value in arguments.items():
        if not callable(value):
            raise TypeError(f"{name} must be {what}, got {value!r}")


def check_transformation(**arguments: Any) -> None:
    """Raises ``TypeError`` unless each argument has the ``init`` and ``update`` of optax."""
    for name, value in arguments.items():
        functions = [getattr(value, part, None) for part in ("init", "update")]
        if isinstance(value, type) or not all(map(callable, functions)):
            must = f"{name} must be an optax transformation such as optax.adam(1e-3)"
            raise TypeError(f"{must}, got {value!r}")


def is_array(x: Any) -> bool:
    """Whether ``x`` is an array, possibly abstract, or a number.

    A leaf that describes an array, such as a ``ParameterSpec`` of AXLearn, is not an array.
    """
    if not (hasattr(x, "dtype") and hasattr(x, "shape")):
        return isinstance(x, int | float | complex)
    is_known = isinstance(x, jax.Array | jax.core.Tracer | jax.ShapeDtypeStruct)
    is_like_one = hasattr(x, "__array__") or hasattr(x, "__jax_array__")
    return is_known or is_like_one or not jax.tree_util.all_leaves([x])


def check_params(params: Any) -> None:
    """Raises optax's ``ValueError`` if ``update`` needs the parameters and they are missing."""
    if params is None:
        raise ValueError(NO_PARAMS_MSG)


def check_rate(learning_rate: Any, *, positive: bool = False) -> None:
    """:func:`check` of a learning rate: a schedule or a finite number, optionally ``positive``."""
    check_value = check_positive if positive else check_finite
    check_value(schedule=True, learning_rate=learning_rate)


def with_decay_per_step(factory: Callable[_P, _T]) -> Callable[_P, _T]:
    """Refuses ``weight_decay=`` for a factory whose ``weight_decay_per_step`` ignores the rate."""

    @functools.wraps(factory)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if "weight_decay" in kwargs:
            raise TypeError(
                f"{getattr(factory, '__name__', factory)} has no weight_decay, got "
                f"{kwargs['weight_decay']!r}: give weight_decay_per_step, which is weight_decay * "
                "learning_rate of optax.adamw and optzoo.sparse_adamw"
            )
        return factory(*args, **kwargs)

    return checked


# The keywords of an update that several transformations of this library read.
_OF_UPDATE = {
    name.replace("_", ""): name for name in ("learning_rate", "global_step", "rounding_seed")
}


def check_update_arguments(extra_args: Mapping[str, Any]) -> None:
    """Checks the keyword arguments of ``update``; does not read values of JAX arrays.

    A transformation must ignore unknown arguments, which another one may use. But a name similar to
    one of this library is a typing error.
    """
    for name in extra_args:
        right = right_name(name)
        if right != name:
            raise TypeError(f"update has no argument {name!r}: it must be {right!r}")
    rate, step = extra_args.get("learning_rate"), extra_args.get("global_step")
    if rate is not None:
        fix = (
            "it is the rate of this update for all parameters; for several, use optzoo.param_groups"
        )
        check_finite(on_device=False, fix=fix, learning_rate=rate)
    if step is not None:
        fix = "it is the number of updates before this one"
        check_not_negative(on_device=False, fix=fix, global_step=step)
        if not jnp.issubdtype(jnp.result_type(step), jnp.integer):
            raise TypeError(f"global_step must be an integer, got {step!r}: {fix}")


@functools.cache
def right_name(name: str) -> str:
    """The keyword of this library that equals or resembles a name; otherwise the name itself."""
    plain = name.lower().replace("_", "")
    if plain == "lr":
        return "learning_rate"
    near = [_OF_UPDATE[n] for n in difflib.get_close_matches(plain, _OF_UPDATE, n=1, cutoff=0.9)]
    # learning_rate_fn is another argument.
    return near[0] if near and not name.startswith(f"{near[0]}_") else name
