"""RETURNN's options, each with a reader, a function of its name and value."""

import dataclasses
import inspect
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, get_origin, get_type_hints

from ...core.checks import check_flags, check_function, check_not_negative


def number(name: str, value: Any) -> float:
    """A number; RETURNN also accepts strings such as "0.5" and "inf" for some options."""
    try:
        if isinstance(value, str | numbers.Real):
            return float(value)
    except ValueError:
        pass
    raise TypeError(f"{name} must be a number, got {value!r}")


def not_negative(name: str, value: Any) -> float:
    """A number of at least zero; zero disables the option."""
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
    check_flags(**{name: value})
    return bool(value)


def mapping(name: str, value: Any) -> dict[str, Any]:
    """A dict."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dict, got {value!r}")
    return dict(value)


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
    raise ValueError(f"{name} must be True or 2, the only supported norm, got {value!r}")


def _extra_updates(name: str, value: Any) -> Mapping[str, Callable[..., Any]]:
    if not isinstance(value, Mapping) or not all(map(callable, value.values())):
        raise TypeError(f"{name} must be a dict of functions by the paths of parameters")
    for path, function in value.items():
        parameters = inspect.signature(function).parameters
        if unknown := parameters.keys() - {"var", "grad"}:
            raise ValueError(
                f"{name}: the function of {path!r} needs {sorted(unknown)}, which are not "
                "available: its arguments may be var, the parameter after its update, and grad, "
                "and it must return the new value"
            )
    return value


def schedule(name: str, value: Any, lacks: Iterable[str], why: str) -> Any:
    """A dict of interval and decay, or a function; ``why`` explains arguments in ``lacks``."""
    if isinstance(value, Mapping):
        if value.keys() != {"interval", "decay"}:
            raise ValueError(f"{name} must have the keys interval and decay, got {value!r}")
        return {"interval": whole(name, value["interval"]), "decay": number(name, value["decay"])}
    check_function("a dict or a function", **{name: value})
    parameters = inspect.signature(value).parameters
    if not any(p.kind == p.VAR_KEYWORD for p in parameters.values()):
        raise TypeError(f"{name} must take **kwargs, as RETURNN requires, got {value!r}")
    if missing := sorted(parameters.keys() & lacks):
        raise ValueError(f"{name} needs {missing}, {why}")
    return value


def _dynamic_learning_rate(name: str, value: Any) -> Any:
    why = (
        "which are not available in a step; use global_train_step and learning_rate, or pass a "
        "rate that depends on the epoch by update(learning_rate=)"
    )
    return schedule(name, value, {"network", "epoch", "epoch_continuous"}, why)


Flag = Annotated[bool, flag]
NotNegative = Annotated[float, not_negative]
Number = Annotated[float, number]
Tag = Annotated[str | None, _tag]
Whole = Annotated[int, whole]


@dataclasses.dataclass(frozen=True)
class ParamOptions:
    """The options that may differ between layers, by RETURNN's names."""

    optimizer: Any = None  # a dict as `create` takes it
    accum_grad_multiple_step: Whole = 0
    gradient_noise: NotNegative = 0.0
    gradient_clip: NotNegative = 0.0
    gradient_clip_norm: NotNegative = 0.0
    gradient_clip_avg_norm: NotNegative = 0.0
    gradient_clip_global_norm: NotNegative = 0.0
    gradient_clip_global_norm_tag: Tag = None
    global_norm_tag: Tag = None
    gradient_nan_inf_filter: Flag = False
    grad_norm_to_clip_to_zero: NotNegative = 0.0
    maximize_grad_norm: Number = 0.0
    debug_grad_summaries: Flag = False
    tags: Annotated[tuple[str, ...], _tags] = ()
    L2: float = 0.0


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """The options that apply to all parameters, by RETURNN's names."""

    learning_rate: NotNegative = 1.0
    dynamic_learning_rate: Annotated[Any, _dynamic_learning_rate] = None
    decouple_constraints: Flag = False
    decouple_constraints_factor: Number = 0.025
    extra_updates: Annotated[Mapping[str, Callable[..., Any]], _extra_updates] = dataclasses.field(
        default_factory=dict
    )
    use_horovod: Flag = False
    horovod_scale_lr: Flag = False
    horovod_avg_grad: Flag = False
    log_grad_norm: Annotated[bool, _norm_order] = False
    debug_add_check_numerics_ops: Flag = False
    deterministic_train: Flag = False
    random_seed: Whole = 0


Readers = Mapping[str, Callable[[str, Any], Any]]


def _readers(options: type) -> Readers:
    """The reader of each option that has one."""
    hints = get_type_hints(options, include_extras=True).items()
    return {name: hint.__metadata__[0] for name, hint in hints if get_origin(hint) is Annotated}


PARAM_READERS, STEP_READERS = _readers(ParamOptions), _readers(StepOptions)
