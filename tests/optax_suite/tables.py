"""Settings for our optimizers in optax's tests, and the excluded tests with reasons."""

import jax.numpy as jnp

from optzoo import CATALOG

ROOT = 2.0**50
ADAM_AS_SGD = {"learning_rate": ROOT, "b1": 0.0, "b2": 0.0, "eps": ROOT}
ADAGRAD_AS_SGD = {"learning_rate": ROOT, "initial_accumulator_value": ROOT**2}

# Settings with which an optimizer is gradient descent at rate 1, as optax's tests of wrappers
# expect. An optimizer that divides by the size of the gradient divides by a large power of two.
AS_SGD = {
    "adadelta": {"learning_rate": 1.0, "eps": ROOT**2},
    "adagrad": ADAGRAD_AS_SGD,
    "adagrad_eps": {"learning_rate": ROOT, "eps": ROOT},
    "adagrad_da": {
        "learning_rate": ROOT,
        "initial_accumulator_value": ROOT**2,
    },
    "adam": ADAM_AS_SGD,
    "adam_weight_decay": ADAM_AS_SGD,
    "adam_gs": ADAM_AS_SGD,
    "adamax": ADAM_AS_SGD,
    "adamw": {**ADAM_AS_SGD, "weight_decay_per_step": 0.0},
    "add_sign": {"learning_rate": 1.0, "sign_decay": lambda k: 0.0},
    "amsgrad": ADAM_AS_SGD,
    "blocked_shampoo": {
        "learning_rate": 1.0,
        "b1": 0.0,
        "preconditioner_interval": 10**9,
        "grafting": None,
    },
    "counter_row_wise_adagrad": {"learning_rate": ROOT, "eps": ROOT},
    "cowclip_row_wise_adagrad": {"learning_rate": ROOT, "eps": ROOT, "lower_bound": ROOT},
    "custom_adam": ADAM_AS_SGD,
    "ftrl": {"learning_rate": 1.0, "learning_rate_power": 0.0},
    "ggt": {"learning_rate": ROOT, "b1": 0.0, "svd_eps": ROOT**2},
    "global_decay_row_wise_adagrad": {"learning_rate": ROOT, "eps": ROOT},
    "grad_variance_scaled": {"learning_rate": 1.0, "b2": 0.0, "eps": 0.0},
    "gradient_descent": {"learning_rate": 1.0},
    "lars": {"learning_rate": 1.0, "momentum": 0.0, "skip": ".*"},
    "lazy_adam": ADAM_AS_SGD,
    "lazy_adam_gs": ADAM_AS_SGD,
    "sparse_adamw": ADAM_AS_SGD,
    "momentum": {"learning_rate": 1.0, "momentum": 0.0},
    "momentumw": {"learning_rate": 1.0, "momentum": 0.0, "weight_decay_per_step": 0.0},
    "muon": {  # for a scalar
        **CATALOG["muon"].required,
        "learning_rate": ROOT,
        "momentum": 0.0,
        "ns_coefficients": (1.0, 0.0, 0.0),
        "eps": ROOT,
        "weight_decay": 0.0,
        "iteration_dtype": "float32",
    },
    "nadam": ADAM_AS_SGD,
    "neural_optimizer1": {"learning_rate": 1.0, "decrease_factor": 1.0},
    "normalized_sgd": {"learning_rate": 1.0},  # for a scalar gradient of one
    "partial_row_wise_adam": ADAM_AS_SGD,
    "power_sign": {"learning_rate": 1.0, "sign_decay": lambda k: 0.0},
    "proximal_adagrad": ADAGRAD_AS_SGD,
    "proximal_gradient_descent": {"learning_rate": 1.0},
    "reg_adagrad": ADAGRAD_AS_SGD,
    "rmsprop": {"learning_rate": ROOT, "b2": 0.0, "eps": ROOT**2},
    "row_wise_adagrad": {"learning_rate": ROOT, "eps": ROOT},
    "row_wise_rmsprop": {"learning_rate": ROOT, "eps": ROOT},
    "shampoo": {"learning_rate": 1.0, "preconditioner_interval": 10**9},
    "soap": {**ADAM_AS_SGD, "max_matrix_size": 0},
}


def falling(rate):
    """A rate halved every 2000 steps."""
    return lambda k: rate * 0.5 ** (k / 2000)


def uneven(rate):
    """One long step after two short ones: the fastest stable rates on the Rosenbrock function."""
    return lambda k: rate * jnp.where(k % 3 == 2, 4, 1)


# Settings that reach the optima of optax's test functions in time, if those of the catalogue do
# not.
DESCENT = {
    "adadelta": {"learning_rate": falling(1.0), "eps": 1e-6},
    "adafactor": {"learning_rate": falling(0.02)},
    "adagrad": {"learning_rate": 0.5},
    "adagrad_da": {"learning_rate": 1.0},
    "adagrad_eps": {"learning_rate": 0.5},
    "add_sign": {"learning_rate": 7e-4},
    "amsgrad": {"learning_rate": 0.05},
    "counter_row_wise_adagrad": {"learning_rate": 0.6},
    "cowclip_row_wise_adagrad": {"learning_rate": 0.5},
    "ftrl": {"learning_rate": 0.5},
    "ggt": {"learning_rate": falling(0.05)},
    "global_decay_row_wise_adagrad": {"learning_rate": 0.6},
    # 1 - b2 is exact in float32, the dtype of the injected b2.
    "grad_variance_scaled": {"learning_rate": 1.6e-3, "b2": 1 - 2.0**-10},
    "gradient_descent": {"learning_rate": uneven(7e-4)},
    "lamb": {"learning_rate": falling(0.02)},
    "lars": {"learning_rate": 0.3},
    "momentum": {"learning_rate": 5e-4, "nesterov": True},
    "momentumw": {"learning_rate": 2e-3},
    "muon": {"learning_rate": falling(0.05), "weight_decay": 0.0},
    "neural_optimizer1": {"learning_rate": uneven(7e-4)},
    "normalized_sgd": {"learning_rate": falling(0.05)},
    "power_sign": {"learning_rate": 5.5e-4},
    "proximal_adagrad": {"learning_rate": 0.5},
    "proximal_gradient_descent": {"learning_rate": uneven(7e-4)},
    "reg_adagrad": {"learning_rate": 0.5},
    "rmsprop": {"learning_rate": 1e-3, "momentum": 0.9, "centered": True},
    "row_wise_adagrad": {"learning_rate": 0.5},
    "row_wise_rmsprop": {"learning_rate": falling(0.01)},
    "shampoo": {"learning_rate": 0.4},
}

# Settings for optax's test of SAM. Faster ones reach the optimum, where the gradient is zero and
# optax's SAM divides by its norm.
SLOW = {
    **{name: {**sgd, "learning_rate": 1e-3 * sgd["learning_rate"]} for name, sgd in AS_SGD.items()},
    "adafactor": {"learning_rate": 0.05},
    "adagrad_da": {"learning_rate": 1.0},
    "lamb": {"learning_rate": 0.02},
}

# Wrappers of optax: their arguments, and the factor for the rate of the inner optimizer.
WRAPPERS = {
    None: ({}, 1),
    "mechanize": ({"weight_decay": 0.0}, 10),
    "reduce_on_plateau": ({"patience": 1000}, 1),
    "schedule_free": ({"learning_rate": 1e-2}, 1),
}


def times(factor, rate):
    return (lambda k: factor * rate(k)) if callable(rate) else factor * rate


# `make test` runs the suite on the first of these: one for each kind of state and of need for
# parameters.
QUICK = ("adam", "counter_row_wise_adagrad", "ftrl", "ggt", "lars", "shampoo")

ALL = list(CATALOG)
NEED_PARAMS = [
    "adafactor", "adagrad_da", "adam_weight_decay", "adamw",
    "cowclip_row_wise_adagrad", "ftrl", "global_decay_row_wise_adagrad",
    "row_wise_lamb", "lamb", "lars", "momentumw", "partial_row_wise_lamb", "proximal_adagrad",
    "proximal_gradient_descent", "row_wise_lars",
]  # fmt: skip
# Their steps are as long as parameters are.
OF_NORMS = ["row_wise_lamb", "partial_row_wise_lamb", "row_wise_lars"]
# Their steps are as long as the whole parameter is.
OF_WHOLE = ["adafactor", "lamb"]
# Arguments that are ints, or choose the slots.
WITH_STATIC = [
    "adafactor", "counter_row_wise_adagrad", "cowclip_row_wise_adagrad",
    "global_decay_row_wise_adagrad", "muon",
]  # fmt: skip

SHAMPOO = ["blocked_shampoo", "shampoo", "soap"]

# Tests that are not run: a pattern of their names, for which optimizers, why.
EXCLUDED = [
    ("LBFGSTest.*", ALL, "of L-BFGS only"),
    ("AliasTest.test_explicit_dtype_*", ALL, "of arguments of optax.sgd and optax.adam"),
    ("AliasTest.*_complex*_real*", ALL, "complex gradients are an error: see the tests with split"),
    ("AliasTest.*float*_split*", ALL, "only complex gradients need the split"),
    ("AliasTest.test_optimizers_*_split*", ALL, "only complex gradients need the split"),
    ("ContribTest.*_annotated_as_such_*", ALL, "leaves out the wrapper: the same as without"),
    ("ContribTest.*_stability_*_[mrs]*", ALL, "leaves out the wrapper: the same as without"),
    ("ContribTest.*_no_wrap*", ALL, "leaves out the wrapper: the same as without"),
    ("ContribTest.*_inject_hyperparams_reduce_on_plateau", ALL, "optax skips it for this wrapper"),
    ("ShardingTest.test_microbatch_*", ALL, "no optimizer in it"),
    ("AccumulationTest.test_ema*", ALL, "no optimizer in it"),
    ("AccumulationTest.test_skip_*", ALL, "no optimizer in it"),
    ("AccumulationTest.test_multi_steps_computes_mean", ALL, "no optimizer in it"),
    ("MaskedTest.test_tree_map_params", ALL, "no optimizer in it"),
    ("MaskedTest.test_update_requires_params", ALL, "no optimizer in it"),
    ("MaskedTest.test_mask_fn", ALL, "no optimizer in it"),
    ("MaskedTest.test_masked_state_structure", ALL, "reads a field of the state of optax.sgd"),
    ("ConditionallyTransformTest.*", ALL, "no optimizer in it"),
    ("ConditionallyMaskTest.*", ALL, "no optimizer in it"),
    (
        "MaskedTest.*_stateful_sgd*",
        ALL,
        "ours replaces plain and stateful sgd: the same test twice",
    ),
    (
        "ConditionalityTest.*_stateful_sgd",
        ALL,
        "ours replaces plain and stateful sgd: the same test twice",
    ),
    (
        "AliasTest.*_inject_hyperparams_real",
        [*SHAMPOO, *WITH_STATIC, "ggt"],
        "without static_args: our tests of injection have them",
    ),
    (
        "ContribTest.*_inject_hyperparams",
        [*SHAMPOO, *WITH_STATIC, "ggt"],
        "without static_args: our tests of injection have them",
    ),
    (
        "ShardingTest.test_state_sharding_*",
        SHAMPOO,
        "explicit sharding: XLA chooses that of the matrices of sharded parameters",
    ),
    ("ContribTest.*_annotated_as_such", ["adafactor"], "optax skips it: the rate may be None"),
    ("MaskedTest.test_mask_compatible_callable_pytree", NEED_PARAMS, "gives no params"),
    ("MaskedTest.test_empty*", NEED_PARAMS, "gives no params"),
    ("MaskedTest.test_masked_s*", NEED_PARAMS, "gives no params"),
    ("MaskedTest.test_prefix_mask_*", NEED_PARAMS, "gives no params"),
    (
        "AliasTest.test_optimization_complex64_split_rosenbrock",
        ["normalized_sgd"],
        "separately normalized real and imaginary parts are slow in the valley: 200,000 steps",
    ),
    (
        "ContribTest.test_optimizers_float32_parabola_mechanize",
        ["lars"],
        "does not converge at any rate; optax has the same note for its LARS",
    ),
    *(
        (pattern, [*OF_NORMS, *OF_WHOLE], "never gradient descent at rate 1")
        for pattern in (
            "AccumulationTest.test_multi_steps_skip_not_finite",
            "ConditionalityTest.test_apply_if_finite_sgd*",
        )
    ),
    *(
        (pattern, OF_NORMS, "an element of a vector is a row: it keeps its sign, and zero is zero")
        for pattern in (
            "AliasTest.test_optimization_*",
            "ContribTest.test_optimizers_float32_*",
            "SAMTest.test_optimization_*",
        )
    ),
    ("MaskedTest.test_masked_s*", ["muon", "normalized_sgd"], "never gradient descent at rate 1"),
    (
        "MaskedTest.test_nested_mask_*",
        ["muon", "normalized_sgd", *OF_NORMS, *OF_WHOLE],
        "never gradient descent at rate 1",
    ),
    (
        "MaskedTest.test_prefix_mask_*",
        ["muon", "normalized_sgd"],
        "never gradient descent at rate 1",
    ),
]
