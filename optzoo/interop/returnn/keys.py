"""Which keys of a RETURNN config are options of the updater, and which only look like it."""

import difflib
from collections.abc import Iterable, Mapping
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
# They have no effect here: the state is an argument, and nothing is updated in parallel.
_WITHOUT_EFFECT = ("optimizer_use_locking", "debug_save_updater_vars")
# They look like options of the updater, but belong to the engine or to the data.
_OF_OTHERS = (
    "horovod_dataset_distribution", "learning_rate_file", "pretrain_learning_rate",
    "use_learning_rate_control_always",
)  # fmt: skip
_THEANO = (
    "adadelta_decay", "adadelta_offset", "adamdelta", "adasecant", "ena", "eve",
    "gradient_noise_decay", "max_norm", "mean_normalized_sgd", "nadam_decay", "smorms3",
    "update_clip", "weight_clip",
)  # fmt: skip
_REFUSED = {
    "tags": "it is an option of a layer, in its updater_opts",
    "L2": "it is an option of a layer",
    "darc1": "it depends on the output of a layer: add it to the loss",
    "spatial_smoothing": "it depends on the output of a layer: add it to the loss",
    "updater_opts": "it is an option of a layer",
    "learning_rate_multiplier": "it belongs in the dict of the optimizer",
    "debug_add_check_numerics_on_output": "the updater sees no layers: use jax.debug_nans",
    "reset_updater_vars_mod_step": "call init of the updater again to reset the state",
    "num_allowed_consec_invalid_gradient_steps": "wrap the updater in optax.apply_if_finite",
    "param_groups_custom": "give the groups as layers=",
    "weight_decay": "it belongs in the dict of the optimizer ({'class': 'adamw', ...})",
    "weight_decay_modules_blacklist": "the updater sees no modules: use adamw's mask",
    "weight_decay_custom_include_check": "use adamw's mask",
    "grad_scaler": "scale the loss and its gradients outside",
    "horovod_param_sync_step": "use optzoo.model_average around the updater",
    "horovod_param_sync_time_diff": "use optzoo.model_average around the updater",
    **dict.fromkeys(_THEANO, "only RETURNN's old Theano backend had it; remove it"),
}
_KNOWN = {
    *PARAM_READERS,
    *STEP_READERS,
    *EPOCH_OPTIONS,
    *_OLD_SWITCHES,
    *_WITHOUT_EFFECT,
    "optimizer",
    "optimizer_epsilon",
    "horovod_reduce_type",
} - {"tags"}
_PREFIXES = (
    "accum_grad", "clip_", "decouple_", "decoupled_", "grad_", "gradient_", "gradients_",
    "horovod_", "newbob_", "optimizer_", "updater_",
)  # fmt: skip


def refuse_unknown(config: Mapping[str, Any]) -> None:
    """Raises if a key looks like an option of the updater but is none, or is not supported."""
    reduce_type = config.get("horovod_reduce_type") or "grad"
    if reduce_type != "grad":
        raise ValueError(
            f"horovod_reduce_type must be 'grad', got {reduce_type!r}; to average "
            "parameters periodically use optzoo.model_average around the updater"
        )
    for key, value in config.items():
        if not isinstance(key, str):
            raise TypeError(f"config: names of options must be strings, got {key!r}")
        if key in _REFUSED and value:
            raise ValueError(f"{key} is not supported: {_REFUSED[key]}")
        if key in _KNOWN or key in _REFUSED or key in _OF_OTHERS or key.startswith("_"):
            continue
        if key.startswith(_PREFIXES) or _nearest(key, _KNOWN, 0.85):
            raise ValueError(f"config: the updater has no option {hint(key, _KNOWN)}")


def hint(key: str, known: Iterable[str]) -> str:
    """A name and the nearest known one, for an error."""
    return f"{key!r}" + "".join(f" (the nearest is {near!r})" for near in _nearest(key, known, 0))


def _nearest(key: str, known: Iterable[str], cutoff: float) -> list[str]:
    return difflib.get_close_matches(key, sorted(known), n=1, cutoff=cutoff)
