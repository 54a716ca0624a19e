"""FBGEMM's enums, given as members or strings, and definitions, given as objects or mappings."""

import difflib
import enum
from collections.abc import Iterable, Mapping
from typing import Any

DECAY_MODES = ("NONE", "L2", "DECOUPLE", "COUNTER", "COWCLIP", "DECOUPLE_GLOBAL")
COUNTER_DECAY_MODES: dict[str, Any] = {
    "NONE": "none",
    "L2": "l2",
    "DECOUPLE": "decoupled",
    "ADAGRADW": "adagradw",
}
RATE_MODES: dict[str, Any] = {
    "EQUAL": "equal",
    "TAIL_ID_LR_INCREASE": "tail_increase",
    "TAIL_ID_LR_DECREASE": "tail_decrease",
    "COUNTER_SGD": "counter_sgd",
}
STEP_MODES = ("NONE", "USE_COUNTER", "USE_ITER")

# The fields of FBGEMM's definitions with its defaults, by the arguments that take them.
_FIELDS: dict[str, dict[str, Any]] = {
    "counter_based_regularization": {
        "counter_weight_decay_mode": "NONE",
        "counter_halflife": -1,
        "adjustment_iter": -1,
        "adjustment_ub": 1.0,
        "learning_rate_mode": "EQUAL",
        "grad_sum_decay": "NO_DECAY",
        "tail_id_threshold": {},
        "max_counter_update_freq": 1000,
    },
    "tail_id_threshold": {"val": 0.0, "is_ratio": False},
    "cowclip_regularization": {
        "counter_weight_decay_mode": "NONE",
        "counter_halflife": -1,
        "weight_norm_coefficient": 0.0,
        "lower_bound": 0.0,
    },
    "emainplace_mode": {"step_ema": 10, "step_start": 0, "step_ema_coef": 0.6},
    "ensemble_mode": {
        "step_ema": 10000,
        "step_swap": 10000,
        "step_start": 0,
        "step_ema_coef": 0.6,
        "step_mode": "USE_ITER",
    },
    "global_weight_decay": {"start_iter": 0, "lower_bound": 0.0},
    "extra_optimizer_config": {
        "use_rowwise_bias_correction": False,
        "use_writeback_bwd_prehook": False,
        "writeback_first_feature_only": False,
        "precompute_writeback": False,
    },
}


def member(argument: str, value: Any, known: Iterable[str]) -> str:
    """The name of an enum's member, given as a name or as a member.

    Raises:
        TypeError: if the value is neither.
        ValueError: if the enum has no such member.
    """
    name = value.name if isinstance(value, enum.Enum) else value
    if not isinstance(name, str):
        raise TypeError(
            f"{argument} must be the name of a mode or a member of an enum, got {value!r}"
        )
    short = name.rpartition(".")[2].upper()
    if short not in known:
        raise ValueError(f"{argument} must be one of {', '.join(known)}, got {value!r}")
    return short


def definition(argument: str, value: Any) -> dict[str, Any]:
    """The fields of an FBGEMM definition, given as an object or a mapping; None for defaults.

    Raises:
        TypeError: if it has unknown fields, or is neither.
    """
    fields = _FIELDS[argument]
    value = {} if value is None else value
    given = value if isinstance(value, Mapping) else getattr(value, "__dict__", None)
    if given is None:
        raise TypeError(f"{argument} must be a mapping or a definition of FBGEMM, got {value!r}")
    for field in given:
        if field not in fields:
            near = difflib.get_close_matches(str(field), fields, n=1)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(
                f"{argument} has no field {field!r}{meant}; its fields are {', '.join(fields)}"
            )
    return {**fields, **given}
