"""Checks the keys of a RETURNN config: options, unsupported options, and near misses."""

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from .values import PARAM_READERS, STEP_READERS

# Read by LearningRateControl.
EPOCH_OPTIONS = (
    "learning_rates", "min_learning_rate", "learning_rate_control",
    "learning_rate_control_error_measure", "learning_rate_control_min_num_epochs_per_new_lr",
    "learning_rate_control_relative_error_relative_lr", "learning_rate_decay",
    "learning_rate_growth", "newbob_error_threshold", "newbob_learning_rate_decay",
    "newbob_learning_rate_growth", "newbob_multi_num_epochs", "newbob_multi_update_interval",
    "newbob_relative_error_div_by_old", "newbob_relative_error_grow_threshold",
    "newbob_relative_error_threshold",
)  # fmt: skip
_OLD_SWITCHES = ("adam", "nadam", "adadelta", "adagrad", "rmsprop", "momentum")
# They do not change values: the state is an argument, and nothing is updated in parallel.
_WITHOUT_EFFECT = (
    "optimizer_use_locking", "debug_save_updater_vars", "debug_add_check_numerics_on_output",
)  # fmt: skip
# They resemble options of the updater, but are options of the engine or the data, or arguments of
# RETURNN's LearningRateControl that are not options.
UNREAD = (
    "newbob_relative_error_threshold_div_by_old", "relative_error_div_by_old",
    "relative_error_threshold",
)  # fmt: skip
_OF_OTHERS = (
    "horovod_dataset_distribution", "learning_rate_file", "pretrain_learning_rate",
    "use_learning_rate_control_always", *UNREAD,
)  # fmt: skip
_THEANO = (
    "adadelta_decay", "adadelta_offset", "adamdelta", "adasecant", "ena", "eve",
    "gradient_noise_decay", "max_norm", "mean_normalized_sgd", "nadam_decay", "smorms3",
    "update_clip", "weight_clip",
)  # fmt: skip
_REFUSED = {
    "grad_clip": "RETURNN refuses it, too: use gradient_clip or gradient_clip_global_norm",
    "reset_updater_vars_mod_step": "call init of the updater again to reset the state",
    "num_allowed_consec_invalid_gradient_steps": "wrap the updater in optax.apply_if_finite",
    "grad_scaler": "scale the loss and its gradients outside",
    "horovod_param_sync_step": "use optzoo.model_average around the updater",
    "horovod_param_sync_time_diff": "use optzoo.model_average around the updater",
    **dict.fromkeys(_THEANO, "it existed in RETURNN's old Theano backend only; remove it"),
}
_KNOWN = {
    *PARAM_READERS,
    *STEP_READERS,
    *EPOCH_OPTIONS,
    *_OLD_SWITCHES,
    *_WITHOUT_EFFECT,
    "backend",
    "optimizer",
    "optimizer_epsilon",
    "horovod_reduce_type",
} - {"tags"}


def refuse_unknown(
    config: Mapping[str, Any], backend: str = "", ignored: Mapping[str, str] | None = None
) -> None:
    """Raises ``ValueError`` with all keys that are unsupported options or resemble an option.

    Other keys are ignored: a config is a Python file, and may have variables of its own.

    Args:
        config: the config.
        backend: the name of the backend.
        ignored: for a backend other than TensorFlow, the options that it ignores, with the
            alternatives; the old switches are not options of these backends.
    """
    if wrong := [key for key in config if not isinstance(key, str)]:
        raise TypeError(f"config: names of options must be strings, got {wrong[0]!r}")
    reduce_type = config.get("horovod_reduce_type") or "grad"
    problems = [
        f"{key} is not supported: {why}" for key, why in _REFUSED.items() if config.get(key)
    ]
    if reduce_type != "grad":
        problems.append(
            f"horovod_reduce_type must be 'grad', got {reduce_type!r}; to average parameters "
            "periodically use optzoo.model_average around the updater"
        )
    problems += [
        f"{key} is ignored by RETURNN's {backend} backend: {why}"
        for key, why in (ignored or {}).items()
        if config.get(key)
    ]
    known = _KNOWN if ignored is None else _KNOWN.difference(_OLD_SWITCHES)
    problems += near_misses(config, known, (*_OLD_SWITCHES, *_REFUSED, *_OF_OTHERS))
    if problems:
        raise ValueError("config: " + "; ".join(problems))


def near_misses(
    config: Mapping[str, Any], known: Collection[str], others: Collection[str] = ()
) -> list[str]:
    """An error for each key that resembles a known option and is not one of ``others``."""
    unknown = [key for key in config if key not in known and key not in others]
    near = [key for key in unknown if not key.startswith("_") and _nearest(key, known, 0.85)]
    return [f"there is no option {hint(key, known)}" for key in near]


def hint(key: str, known: Iterable[str]) -> str:
    """A name and the nearest known one, for an error."""
    return f"{key!r}" + "".join(f" (the nearest is {near!r})" for near in _nearest(key, known, 0))


def _nearest(key: str, known: Iterable[str], cutoff: float) -> list[str]:
    return difflib.get_close_matches(key, sorted(known), n=1, cutoff=cutoff)
