"""What the catalogue says of its optimizers, and what their arguments may be."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optzoo
from optzoo import CATALOG
from optzoo.testing import samples

READS_PARAMS = {
    "adafactor",
    "adam_weight_decay",
    "adamw",
    "cowclip_row_wise_adagrad",
    "global_decay_row_wise_adagrad",
    "row_wise_lamb",
    "lamb",
    "lars",
    "momentumw",
    "muon",
    "partial_row_wise_lamb",
    "row_wise_lars",
    *(name for name, entry in CATALOG.items() if entry.family == "proximal"),
}


def test_params_are_needed_only_where_they_are_read(entry):
    tx, params = entry.make(), samples.params()
    without = lambda: tx.update(samples.dense_grads(params), tx.init(params))
    if entry.factory.__name__ in READS_PARAMS:
        with pytest.raises(ValueError, match="requires the current value of parameters"):
            without()
    else:
        assert without()


def test_rates_are_those_of_small_problems(entry):
    """A first step by a gradient of ones; the race begins with these rates."""
    # Dual averaging forgets where it begins: the first step from elsewhere is to there.
    begins_at_zero = entry.factory in (optzoo.adagrad_da, optzoo.ftrl)
    params = {"w": jnp.full((2, 2), 0.0 if begins_at_zero else 1.0)}
    with jax.disable_jit():
        tx = entry.make()
        state = tx.init(params)
        for _ in range(2):  # the first step of SOAP is none
            updates, state = tx.update({"w": jnp.ones((2, 2))}, state, params)
    assert 1e-3 < np.max(np.abs(updates["w"])) < 0.3


NAN = float("nan")
OF_FRACTIONS, OF_SIZES, OF_POSITIVES = (1, 1.5, -0.1, NAN), (-1e-8, NAN), (0, -1.0, NAN)
OF_CLOSED_FRACTIONS, OF_INTERVALS = (1.1, -0.1, NAN), (0, 0.5, -1, NAN)
# What each argument may not be, whichever optimizer has it.
OUT_OF_RANGE = {
    "adjust_lr": ("rms", None),
    "adjustment_ub": OF_POSITIVES,
    "axes": ("i", "hwio", (), ("io", "oi"), ("io", "iio", "oii")),
    "b1": OF_FRACTIONS,
    "b2": OF_FRACTIONS,
    "base": OF_POSITIVES,
    "block_size": (0, -1),
    "clipping_threshold": OF_POSITIVES,
    "decay_rate": OF_FRACTIONS,
    "trust_coefficient": OF_SIZES,
    "eps": OF_SIZES,
    "gbar_decay": OF_CLOSED_FRACTIONS,
    "gbar_weight": OF_POSITIVES,
    "grafting_b2": OF_FRACTIONS,
    "grafting_eps": OF_SIZES,
    "initial_accumulator_value": OF_POSITIVES,
    "iteration_dtype": ("float16",),
    "l1_regularization_strength": OF_SIZES,
    "l2_regularization_strength": OF_SIZES,
    "l2_shrinkage_regularization_strength": OF_SIZES,
    "exchange_dtype": ("bfloat16",),  # of matrices without owners
    "half_life": (-3,),
    "learning_rate_mode": ("tail", None),
    "learning_rate_power": (0.5, NAN),
    "lower_bound": OF_SIZES,
    "mat_gbar_decay": OF_CLOSED_FRACTIONS,
    "mat_gbar_weight": OF_POSITIVES,
    "max_counter_every": (0, -1),
    "max_matrix_size": (-1,),
    "min_dim_size_to_factor": (0, -1),
    "min_parameter_scale": OF_SIZES,
    "min_shrinkage": OF_CLOSED_FRACTIONS,
    "momentum": OF_SIZES,
    "ns_coefficients": ((2, -1.5), 4 * [(2, -1.5, 0.5)], 5 * [(2, -1.5)], (NAN, -1.5, 0.5)),
    "ns_steps": (0, 100),
    "owners": ((), ("d", "d")),
    "shampoo_b2": OF_FRACTIONS,
    "sigma_eps": OF_SIZES,
    "start_step": OF_SIZES,
    "statistics_interval": OF_INTERVALS,
    "svd_eps": OF_POSITIVES,
    "preconditioner_interval": OF_INTERVALS,
    "tail_threshold": OF_SIZES,
    "weight_decay": OF_SIZES,
    "l2_weight_decay": OF_SIZES,
    "weight_decay_per_step": OF_SIZES,
    "weight_decay_mode": ("L2", "decouple", None),
    "weight_norm_coefficient": OF_SIZES,
    "window": (0, -1),
}
# Those whose ranges are their own.
OWN_RANGES = {
    ("adagrad_eps", "initial_accumulator_value"): OF_SIZES,
    ("amsgrad", "decay"): (),  # a flag
    ("blocked_shampoo", "alpha"): OF_POSITIVES,
    ("blocked_shampoo", "eps"): OF_POSITIVES,
    ("counter_row_wise_adagrad", "start_step"): (-1,),
    ("ftrl", "beta"): OF_SIZES,
    ("ftrl", "initial_accumulator_value"): OF_SIZES,
    ("global_decay_row_wise_adagrad", "lower_bound"): OF_CLOSED_FRACTIONS,
    ("global_decay_row_wise_adagrad", "start_step"): (-1,),
    ("muon", "momentum"): OF_FRACTIONS,
    ("shampoo", "alpha"): OF_POSITIVES,
    ("shampoo", "eps"): OF_POSITIVES,
} | {(name, "learning_rate"): (0.0, -1) for name in CATALOG if CATALOG[name].family == "proximal"}
# Any number will do, or no number is meant.
FREE = {
    "alpha", "axis_name", "centered", "decay_learning_rate", "decrease_factor", "factored",
    "grafting", "is_ratio", "kl_statistics", "mask", "merge_dims",
    "multiply_by_parameter_scale", "nesterov", "one_sided", "relative_eps", "root",
    "row_wise_bias_correction", "sign_decay", "skip", "skip_vectors", "stagger",
    "use_iterative_root", "window_dtype",
}  # fmt: skip


def arguments():
    for name, entry in CATALOG.items():
        yield from ((name, argument) for argument in inspect.signature(entry.factory).parameters)


def out_of_range(name, argument):
    return OWN_RANGES.get((name, argument), OUT_OF_RANGE.get(argument, ()))


BAD = [
    *((name, {a: value}, ValueError) for name, a in arguments() for value in out_of_range(name, a)),
    *((name, {"learning_rate": NAN}, ValueError) for name in CATALOG),
    *((name, {"learning_rate": float("inf")}, ValueError) for name in CATALOG),
    *((name, {"learning_rate": "fast"}, TypeError) for name in CATALOG),
    *((n, {"learning_rate": None}, TypeError) for n in CATALOG if n != "adafactor"),
]


@pytest.mark.parametrize(("name", "bad", "error"), BAD)
def test_bad_arguments_are_named(name, bad, error):
    entry, [argument] = CATALOG[name], bad
    with pytest.raises(error, match=rf"^{argument} must be"):
        entry.factory(**{"learning_rate": entry.rate, **entry.required, **bad})


def test_the_range_of_each_argument_is_known():
    ranges = OUT_OF_RANGE.keys() | FREE | {"learning_rate"}
    assert {(n, a) for n, a in arguments() if a not in ranges} <= OWN_RANGES.keys()
    assert (OUT_OF_RANGE.keys() | FREE) <= {argument for _, argument in arguments()}


def test_required_arguments_are_those_without_default(entry):
    parameters = inspect.signature(entry.factory).parameters.values()
    required = {p.name for p in parameters if p.default is p.empty}
    assert next(iter(inspect.signature(entry.factory).parameters)) == "learning_rate"
    # The default of Muon refuses vectors, which the parameters of the tests and of the race have.
    chosen = {"axes"} if entry.factory is optzoo.muon else set()
    assert required - {"learning_rate"} | chosen == set(entry.required)


def test_docstring_is_complete(entry):
    doc = inspect.getdoc(entry.factory)
    if entry.original is not None:
        assert f"as in ``{entry.original}``" in doc.splitlines()[0]
    for part in (".. math::", "Args:", "References:"):
        assert part in doc, part
    assert f":func:`optzoo.rules.{entry.rows}`" in doc
    described = re.split("Raises:|References:", doc.split("Args:")[1])[0]
    for argument in inspect.signature(entry.factory).parameters:
        assert f"{argument}:" in described, argument


def test_slots_of_float32_where_float64_is_enabled(x64):
    """They do not take the dtype of JAX's new arrays."""
    x = {"w": jax.ShapeDtypeStruct((6, 4), jnp.float32)}
    with x64(True):
        states = {k: jax.eval_shape(samples.make(e).init, x) for k, e in CATALOG.items()}
    slots = {k: jax.tree.leaves(samples.slots(state)) for k, state in states.items()}
    assert not {k for k, of in slots.items() if any(a.dtype == "float64" for a in of)}
