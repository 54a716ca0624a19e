"""Each argument of each optimizer of FBGEMM, and each field of its definitions, has its effect.

It changes what is computed, or there is a warning that the optimizer ignores it, as FBGEMM does.
"""

import functools
import inspect

import pytest

from optzoo.interop.fbgemm import fbgemm_optimizer
from optzoo.interop.fbgemm.definitions import definition
from optzoo.testing import samples

from ...test_options import program

TABLE = {"table": samples.params()["table"]}
ALL = {
    "learning_rate",
    "gradient_clipping",
    "max_gradient",
    "stochastic_rounding",
    "extra_optimizer_config",
}
ADAM = {"eps", "beta1", "beta2", "weight_decay"}
ROW_WISE = {"eps", "max_norm", "weight_decay", "weight_decay_mode"}
# What the kernels of FBGEMM read. ``max_norm`` is of row-wise Adagrad, and ``momentum`` and ``eta``
# are of LARS; ``EXACT_ADAGRAD`` and ``EXACT_SGD`` have no decay.
READ = {
    "EXACT_SGD": set(),
    "EXACT_ADAGRAD": {"eps"},
    "EXACT_ROWWISE_ADAGRAD": ROW_WISE
    | {"counter_based_regularization", "cowclip_regularization", "global_weight_decay"},
    "EMAINPLACE_ROWWISE_ADAGRAD": ROW_WISE | {"emainplace_mode"},
    "ENSEMBLE_ROWWISE_ADAGRAD": ROW_WISE | {"ensemble_mode"},
    "ADAM": ADAM,
    "PARTIAL_ROWWISE_ADAM": ADAM,
    "LAMB": ADAM,
    "PARTIAL_ROWWISE_LAMB": ADAM,
    "LARS_SGD": {"momentum", "weight_decay", "eta"},
    "ROWWISE_RMSPROP_AR": {"eps", "ar_alpha", "ema_beta", "min_shrinkage"},
}
COUNTER = {"weight_decay_mode": "COUNTER"}
COWCLIP = {"weight_decay_mode": "COWCLIP"}
GLOBAL = {"weight_decay_mode": "DECOUPLE_GLOBAL", "weight_decay": 0.1}
CLIPS = {"weight_norm_coefficient": 0.5}
# Another value of each argument; of others a number.
VALUES = {
    "counter_based_regularization": {"adjustment_iter": 5},
    "cowclip_regularization": {**CLIPS, "lower_bound": 0.25},
    "emainplace_mode": {"step_ema": 5},
    "ensemble_mode": {"step_ema": 5},
    "extra_optimizer_config": {"use_rowwise_bias_correction": True},
    "global_weight_decay": {"start_iter": 5},
    "gradient_clipping": True,
    "stochastic_rounding": True,
    "weight_decay_mode": "DECOUPLE",
}
# What an argument needs beside it, and what is there in its place.
BESIDE = {
    "counter_based_regularization": {**COUNTER, "counter_based_regularization": {}},
    "cowclip_regularization": {**COWCLIP, "cowclip_regularization": CLIPS},
    "global_weight_decay": {**GLOBAL, "global_weight_decay": {}},
    "max_gradient": {"gradient_clipping": True},
    "min_shrinkage": {"ar_alpha": 0.1},
    "weight_decay": {"weight_decay_mode": "L2"},
    "weight_decay_mode": {"weight_decay": 0.1, "weight_decay_mode": "L2"},
}
CORRECTION = "extra_optimizer_config: use_rowwise_bias_correction needs the optimizer ADAM, got "
# The text of the error or the warning, where an argument has no other effect.
REFUSED = {
    **{(name, "stochastic_rounding"): "stochastic_rounding has no effect" for name in READ},
    **{(n, "extra_optimizer_config"): f"{CORRECTION}{n}" for n in READ if n != "ADAM"},
}


def observed(optimizer, **given):
    """The program, or the text of a warning or an error."""
    try:
        return program(functools.partial(fbgemm_optimizer, optimizer, **given), TABLE)
    except UserWarning as warning:
        return str(warning)


@pytest.mark.parametrize("optimizer", READ)
def test_each_argument(optimizer):
    seen = {}
    read = READ[optimizer] | ALL
    for option in list(inspect.signature(fbgemm_optimizer).parameters)[1:]:
        value = VALUES.get(option, 0.3)
        if option not in read:
            got = observed(optimizer, **{option: value})
            assert got == f"{optimizer} ignores {option}={value!r}, as in FBGEMM"
            continue
        beside = {k: v for k, v in BESIDE.get(option, {}).items() if k in read}
        if (names := str(beside)) not in seen:
            seen[names] = observed(optimizer, **beside)
            assert isinstance(seen[names], tuple), seen[names]
        got = observed(optimizer, **{**beside, option: value})
        assert got != seen[names], f"{option}={value!r} does nothing"
        if (optimizer, option) in REFUSED:
            assert got.startswith(REFUSED[optimizer, option])
        else:
            assert isinstance(got, tuple), got


TAIL = {"learning_rate_mode": "TAIL_ID_LR_INCREASE"}
RATIO = {"tail_id_threshold": {"val": 0.5, "is_ratio": True}}
HALVED = {"counter_weight_decay_mode": "L2", "counter_halflife": 5}
# By the argument that takes a definition, and its field: two values, and the other fields.
FIELDS = {
    "counter_based_regularization": {
        "counter_weight_decay_mode": ("L2", "DECOUPLE", {"counter_halflife": 5}),
        "counter_halflife": (5, 7, HALVED),
        "adjustment_iter": (-1, 5, {}),
        "adjustment_ub": (1.0, 2.0, TAIL),
        "learning_rate_mode": ("EQUAL", "COUNTER_SGD", {}),
        "grad_sum_decay": ("NO_DECAY", "CTR_DECAY", {}),
        "tail_id_threshold": ({"val": 0.5}, RATIO["tail_id_threshold"], TAIL),
        "max_counter_update_freq": (1000, 7, {**TAIL, **RATIO}),
    },
    "cowclip_regularization": {
        "counter_weight_decay_mode": ("L2", "DECOUPLE", {**CLIPS, "counter_halflife": 5}),
        "counter_halflife": (5, 7, {**CLIPS, **HALVED}),
        "weight_norm_coefficient": (0.5, 0.25, {}),
        "lower_bound": (0.5, 0.25, {}),
    },
    "emainplace_mode": {
        "step_ema": (10, 5, {}),
        "step_start": (0, 5, {}),
        "step_ema_coef": (0.6, 0.25, {}),
    },
    "ensemble_mode": {
        "step_ema": (10000, 5, {}),
        "step_swap": (10000, 5, {}),
        "step_start": (0, 5, {}),
        "step_ema_coef": (0.6, 0.25, {}),
        "step_mode": ("USE_ITER", "NONE", {}),
    },
    "global_weight_decay": {"start_iter": (0, 5, {}), "lower_bound": (0.0, 0.5, {})},
    "extra_optimizer_config": {
        "use_rowwise_bias_correction": (False, True, {}),
        "use_writeback_bwd_prehook": (False, True, {}),
        "writeback_first_feature_only": (False, True, {}),
        "precompute_writeback": (False, True, {}),
    },
}
OF = {
    "counter_based_regularization": ("EXACT_ROWWISE_ADAGRAD", {**COUNTER, "weight_decay": 0.1}),
    "cowclip_regularization": ("EXACT_ROWWISE_ADAGRAD", {**COWCLIP, "weight_decay": 0.1}),
    "emainplace_mode": ("EMAINPLACE_ROWWISE_ADAGRAD", {}),
    "ensemble_mode": ("ENSEMBLE_ROWWISE_ADAGRAD", {}),
    "global_weight_decay": ("EXACT_ROWWISE_ADAGRAD", GLOBAL),
    "extra_optimizer_config": ("ADAM", {}),
}
# The text where a field is refused, or warned of.
REFUSED_FIELDS = {
    "grad_sum_decay": "grad_sum_decay has no effect: FBGEMM does not read it",
    **{
        field: f"extra_optimizer_config: {field} changes lookups, not the optimizer"
        for field in FIELDS["extra_optimizer_config"]
        if field != "use_rowwise_bias_correction"
    },
}


@pytest.mark.parametrize("argument", FIELDS)
def test_each_field_of_a_definition(argument):
    optimizer, beside = OF[argument]
    for field, (usual, other, fields) in FIELDS[argument].items():
        of = lambda value, field=field, fields=fields: observed(
            optimizer, **{**beside, argument: {**fields, field: value}}
        )
        first, second = of(usual), of(other)
        assert isinstance(first, tuple), (field, first)
        assert first != second, f"{field}={other!r} does nothing"
        if field in REFUSED_FIELDS:
            assert second == REFUSED_FIELDS[field]
        else:
            assert isinstance(second, tuple), (field, second)


def test_each_field_has_values():
    for argument, fields in FIELDS.items():
        assert fields.keys() == definition(argument, None).keys()
