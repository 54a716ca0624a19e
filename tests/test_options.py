"""Each option of a factory changes what is computed: the program, the state, or it is an error.

The options are those of the signatures, so one that is not passed on fails, and so does a new one
that has no value here.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo.testing import samples

from .public import BY_LAST
from .public import NAMES as BY_NAME

ADAM, MOMENTUM = optzoo.adam(0.1), optzoo.momentum(0.1, 0.9)
TRANSFORMS = [name for name in vars(optzoo.transforms) if name.startswith("scale")]
NAMES = [
    *optzoo.CATALOG,
    *optzoo.catalog.WRAPPERS,
    *optzoo.catalog.DISTRIBUTED,
    *TRANSFORMS,
    *("zero_if_norm_exceeds", "clip_by_norm", "clip_by_average_norm", "clip_by_global_norm"),
    *("check_numerics", "on_rows", "caught_up"),
    *("cosine_sign_decay", "linear_sign_decay", "restart_sign_decay"),
    *(name.rpartition(".")[2] for name in BY_NAME if name.startswith("optzoo.schedules.")),
]
REQUIRED = {
    "average_decay": 0.9,
    "boundaries": [2, 4],
    "decay_rate": 0.8,
    "decay_steps": 6,
    "dims": {"table": (0,)},
    "dtype": "bfloat16",
    "every": 2,
    "first_decay_steps": 6,
    "inner": ADAM,
    "learning_rate": 0.1,
    "lookahead": 0.5,
    "max_norm": 0.5,
    "model_dim": 16,
    "momentum": 0.9,
    "rates": [0.1, 0.2, 0.3],
    "staleness": 3,
    "step_size": 0.1,
    "step_size_fn": optax.linear_schedule(0.1, 0.2, 3),
    "total_steps": 20,
    "values": [0.1, 0.2, 0.3],
    "warmup_steps": 3,
    "weight_decay_per_step": 0.1,
}
# Another value of each option; of flags it is the contrary, and of others the number at the end.
OTHERS = {
    **dict.fromkeys(("block_size", "max_matrix_size", "max_members", "max_size"), 2),
    **dict.fromkeys(("bucket_bytes", "min_dim_size_to_factor"), 4),
    **dict.fromkeys(("communication_period", "every", "interval_steps", "swap_every"), 7),
    **dict.fromkeys(("decay_steps", "preconditioner_interval", "statistics_interval"), 7),
    **dict.fromkeys(("half_life", "max_counter_every", "seed", "staleness", "start_step"), 7),
    **dict.fromkeys(("first_decay_steps", "model_dim", "total_steps", "warmup_steps"), 7),
    **dict.fromkeys(("burnin_steps", "hold_base_rate_steps", "min_values", "window"), 7),
    **dict.fromkeys(("exchange_dtype", "window_dtype"), "bfloat16"),
    **dict.fromkeys(("mask", "skip"), "kernel"),
    **dict.fromkeys(("fragments", "min_arrived"), 2),
    **dict.fromkeys(("num_workers", "replicas_to_aggregate", "total_num_replicas"), 3),
    "adjust_lr": "match_rms_adamw",
    "alpha": 0.25,
    "axes": ("", "o", "oi", "oii"),
    "axis_name": "another",
    "bits": 32,
    "boundaries": [1, 3],
    "correction": 0,
    "dims": {"table": (1,)},
    "dtype": "int8",
    "grafting": "sgd",
    "horizon": 64,
    "inner": MOMENTUM,
    "iteration_dtype": "float32",
    "learning_rate_mode": "counter_sgd",
    "learning_rate_power": -0.25,
    "max_rows": {"table": 4},
    "ns_coefficients": (1.5, -0.5, 0.0),
    "ns_steps": 7,
    "num_periods": 7,
    "num_updates": "count",
    "on": "norm",
    "order": "round_robin",
    "outer": MOMENTUM,
    "owners": "replica",
    "overlap_steps": 1,
    "placement": "pinned_host",
    "rates": [0.3, 0.2, 0.1],
    "root": "newton",
    "rows_divisor": "touches",
    "sign_decay": optzoo.linear_sign_decay(5),
    "slots": "average",
    "step_size_fn": optax.linear_schedule(0.1, 0.3, 3),
    "values": [0.3, 0.2, 0.1],
    "weight_decay_mode": "decoupled",
    "zero_after": 0.5,
}
NUMBER = 0.3
# What an option needs beside it: only then does it do something.
BESIDE = {
    "adjustment_ub": {"learning_rate_mode": "tail_increase"},
    "error_feedback": {"exchange_dtype": "bfloat16"},
    "grafting_b2": {"grafting": "adam"},
    "grafting_eps": {"grafting": "adam"},
    "is_ratio": {"learning_rate_mode": "tail_increase"},
    "max_counter_every": {"learning_rate_mode": "tail_increase"},
    "merge_dims": {"block_size": 8},
    "min_shrinkage": {"weight_decay": 0.1},
    "nesterov": {"momentum": 0.9},
    "seed": {"stochastic": True},
    "stagger": {"preconditioner_interval": 3},
    "tail_threshold": {"learning_rate_mode": "tail_increase"},
    "weight_decay": {"weight_decay_mode": "l2", "half_life": 7},
    "weight_decay_mode": {"half_life": 7},
}
# Of one factory.
OF_MUON = ("momentum", "nesterov", "ns_coefficients", "ns_steps", "eps", "adjust_lr")
OF_MUON += ("learning_rate", "weight_decay", "mask", "iteration_dtype", "owners")
BESIDE_THERE = {
    **{
        (name, option): dict(optzoo.CATALOG["muon"].required)
        for name in ("muon", "scale_by_muon")
        for option in OF_MUON
    },
    **{(name, "mask"): {"weight_decay": 0.1} for name in ("shampoo", "blocked_shampoo", "soap")},
    ("caught_up", "dense"): {"mask": "table", "inner": optzoo.nadam(0.1)},
    ("caught_up", "horizon"): {"mask": "table"},
    ("caught_up", "inner"): {"mask": "table", "dense": True},
    ("on_rows", "check"): {"inner": optzoo.lamb(0.1)},
    **{
        ("skip_spikes", option): {"on": "norm"}
        for option in ("window", "deviations", "min_values", "correction", "inner", "axis_name")
    },
    ("stacked", "check"): {"inner": optzoo.transforms.graft(MOMENTUM, ADAM)},
}
# Where another value is an error, which says that the option arrives.
REFUSED = {
    **dict.fromkeys(("num_workers", "total_num_replicas"), "the size of the axis"),
    "replicas_to_aggregate": "the size of the axis",
    "owners": "needs a mesh with these axes",
}
OF_MATRICES = ("muon", "soap", "shampoo", "blocked_shampoo")
# By rows of ``tests/entrances``: the text of an error of a callback, and what needs a mesh.
ELSEWHERE = {
    ("check_numerics", "what"),
    *(
        (f"{prefix}{name}", "exchange_dtype")
        for name in OF_MATRICES
        for prefix in ("", "scale_by_")
    ),
}


def arguments(factory):
    parameters = inspect.signature(BY_LAST[factory]).parameters.items()
    return {name: p for name, p in parameters if p.kind is not p.VAR_KEYWORD}


def observed(factory, **given):
    """What is observed of a factory with some options."""
    required = {k: REQUIRED[k] for k, p in arguments(factory).items() if p.default is p.empty}
    params = {**samples.params(), "kernel": jnp.ones((3, 4)), "cube": jnp.ones((2, 3, 2))}
    params |= {f"kernel {i}": jnp.ones((3, 4)) for i in range(2)}
    if factory == "ema_in_place":  # which halves rows, and this one has three elements
        del params["one_row"]
    if factory == "master_weights":
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    return program(functools.partial(BY_LAST[factory], **{**required, **given}), params)


def program(make, params):
    """The program of a transformation with its constants, or the text of an error."""

    def run(params, grads):
        tx = make()
        if not isinstance(tx, optax.GradientTransformation):
            return tx(jnp.int32(2))
        tx, state = optax.with_extra_args_support(tx), tx.init(params)
        updates, state = tx.update(grads, state, params, global_step=jnp.int32(3))
        return samples.plain(updates), state

    axes, grads = [("replica", 2), ("another", 3)], samples.row_grads(params)
    try:
        jaxpr, shapes = jax.make_jaxpr(run, axis_env=axes, return_shape=True)(params, grads)
    except ValueError as error:
        return str(error)
    return str(jaxpr), str(shapes), [np.asarray(c).tobytes() for c in jaxpr.consts]


@pytest.mark.parametrize("factory", NAMES)
def test_each_option_has_an_effect(factory):
    seen = {}
    for option, p in arguments(factory).items():
        if (factory, option) in ELSEWHERE:
            continue
        value = not p.default if isinstance(p.default, bool) else OTHERS.get(option, NUMBER)
        beside = BESIDE_THERE.get((factory, option), BESIDE.get(option, {}))
        beside = {k: v for k, v in beside.items() if k in arguments(factory)}
        if (names := tuple(beside)) not in seen:
            seen[names] = observed(factory, **beside)
        got = observed(factory, **beside, **{option: value})
        assert got != seen[names], f"{option}={value!r} does nothing"
        if option in REFUSED:
            assert REFUSED[option] in got
        else:
            assert isinstance(got, tuple), got
