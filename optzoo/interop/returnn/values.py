"""Readers of the values of RETURNN's options: each takes an option's name and its value."""

import inspect
import numbers
from collections.abc import Callable, Mapping
from typing import Any

from ...core.checks import check_not_negative


def number(name: str, value: Any) -> float:
    """A number; RETURNN also takes strings such as "0.5" and "inf" for some."""
    try:
        if isinstance(value, str | numbers.Real):
            return float(value)
    except ValueError:
        pass
    raise TypeError(f"{name} must be a number, got {value!r}")


def not_negative(name: str, value: Any) -> float:
    """A number of at least zero, which means off."""
    parsed = number(name, value)
    check_not_negative(infinite=True, **{name: parsed})
    return parsed


def whole(name: str, value: Any) -> int:
    """An int of at least zero."""
    if isinstance(value, str) and value.strip().lstrip("-").isdigit():
        value = int(value)
    if not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an int, got {value!r}")
    check_not_negative(**{name: value})
    return int(value)


def flag(name: str, value: Any) -> bool:
    """True or False, or 1 or 0."""
    if value not in (True, False):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def _tag(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError(f"{name} must be the name of a tag, got {value!r}")
    return value


def _tags(name: str, value: Any) -> tuple[str, ...]:
    is_list = isinstance(value, list | tuple | set | frozenset)
    if not is_list or not all(isinstance(tag, str) for tag in value):
        raise TypeError(f"{name} must be a list of strings, got {value!r}")
    return tuple(value)


def _norm_order(name: str, value: Any) -> bool:
    if not value or value is True or value == 2:
        return bool(value)
    raise ValueError(f"{name} must be True or 2, the only norm there is, got {value!r}")


def _extra_updates(name: str, value: Any) -> Mapping[str, Callable[..., Any]]:
    if not isinstance(value, Mapping) or not all(map(callable, value.values())):
        raise TypeError(f"{name} must be a dict of functions by the paths of parameters")
    for path, function in value.items():
        parameters = inspect.signature(function).parameters
        if unknown := parameters.keys() - {"var", "grad"}:
            raise ValueError(
                f"{name}: the function of {path!r} needs {sorted(unknown)}; there are only var, "
                "the parameter after its update, and grad; it returns the new value"
            )
    return value


def _dynamic_learning_rate(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        if value.keys() != {"interval", "decay"}:
            raise ValueError(f"{name} must have the keys interval and decay, got {value!r}")
        return {"interval": whole(name, value["interval"]), "decay": number(name, value["decay"])}
    if not callable(value):
        raise TypeError(f"{name} must be a dict or a function, got {value!r}")
    parameters = inspect.signature(value).parameters
    if not any(p.kind == p.VAR_KEYWORD for p in parameters.values()):
        raise TypeError(f"{name} must take **kwargs, as RETURNN requires")
    if missing := {"network", "epoch", "epoch_continuous"} & parameters.keys():
        raise ValueError(
            f"{name} needs {sorted(missing)}, unknown inside of a step; it gets global_train_step "
            "and learning_rate. What depends on the epoch belongs into update(learning_rate=)"
        )
    return value


PARAM_READERS: dict[str, Callable[[str, Any], Any]] = {
    "accum_grad_multiple_step": whole,
    "gradient_noise": not_negative,
    "gradient_clip": not_negative,
    "gradient_clip_norm": not_negative,
    "gradient_clip_avg_norm": not_negative,
    "gradient_clip_global_norm": not_negative,
    "gradient_clip_global_norm_tag": _tag,
    "global_norm_tag": _tag,
    "gradient_nan_inf_filter": flag,
    "grad_norm_to_clip_to_zero": not_negative,
    "maximize_grad_norm": number,
    "debug_grad_summaries": flag,
    "tags": _tags,
}
STEP_READERS: dict[str, Callable[[str, Any], Any]] = {
    "learning_rate": not_negative,
    "dynamic_learning_rate": _dynamic_learning_rate,
    "decouple_constraints": flag,
    "decouple_constraints_factor": number,
    "extra_updates": _extra_updates,
    "use_horovod": flag,
    "horovod_scale_lr": flag,
    "horovod_avg_grad": flag,
    "log_grad_norm": _norm_order,
    "debug_add_check_numerics_ops": flag,
    "deterministic_train": flag,
    "random_seed": whole,
}
