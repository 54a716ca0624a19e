"""Every optimizer, wrapper and method under JAX's transformations, and its derivatives.

For each case one compiled program holds a vmap, a scan, conditionals and a checkpoint, and gives
what plain steps give; another one holds its derivatives, which equal difference quotients.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo import CATALOG
from optzoo.catalog import DISTRIBUTED, WRAPPERS
from optzoo.testing import samples
from optzoo.testing.samples import step_of
from tests.public import BY_LAST, NAMES

from .selection import chosen_first

STEPS = 4

# Settings with which every part of an optimizer works within four steps.
SETTINGS = {
    "blocked_shampoo": {"preconditioner_interval": 2, "start_step": 1},
    "ggt": {"window": 3},
    "muon": {"iteration_dtype": None},  # in bfloat16 an update is a staircase
    "shampoo": {"eps": 1e-2},
    # A basis for the rows only: the gradients of "w" have rank two, so of the four eigenvalues for
    # the columns two are zero. Their vectors are not a function of the gradient.
    "soap": {"preconditioner_interval": 2, "max_matrix_size": 3},
}
# Other branches of the same optimizers.
BRANCHES = {
    "adam, eps=0": {"eps": 0.0},
    "counter_row_wise_adagrad, adagradw": {
        "weight_decay": 0.1,
        "weight_decay_mode": "adagradw",
        "start_step": 1,
    },
    "counter_row_wise_adagrad, l2": {
        "weight_decay": 0.1,
        "weight_decay_mode": "l2",
        "half_life": 3,
        "learning_rate_mode": "tail_increase",
        "max_counter_every": 2,
    },
    "cowclip_row_wise_adagrad, l2": {"weight_decay": 0.1, "weight_decay_mode": "l2"},
    "sparse_adamw, rows": {"weight_decay": 0.1, "row_wise_bias_correction": True},
    "row_wise_adagrad, decay": {"weight_decay": 0.1},
    "row_wise_adagrad, l2": {"l2_weight_decay": 0.1},
    "row_wise_rmsprop, decay": {"weight_decay": 0.1},
    "blocked_shampoo, newton": {"root": "newton", **SETTINGS["blocked_shampoo"]},
    "blocked_shampoo, stagger": {"stagger": True, **SETTINGS["blocked_shampoo"]},
    "soap, stagger": {"stagger": True, **SETTINGS["soap"]},
    "ftrl, l1": {"l1_regularization_strength": 0.1},
    "ftrl, power": {"learning_rate_power": -0.3, "initial_accumulator_value": 0.0},
    "lars, nesterov": {"nesterov": True, "eps": 1e-3},
    "rmsprop, centered": {"centered": True, "momentum": None},
    "shampoo, two iterations": {"use_iterative_root": True, "eps": 1e-2},
}
WRAPPED = {
    "accumulate": lambda inner: optzoo.accumulate(inner, 2),
    "decoupled_weight_decay": lambda inner: optzoo.decoupled_weight_decay(
        inner, weight_decay_per_step=0.1
    ),
    "cautious_weight_decay": lambda inner: optzoo.cautious_weight_decay(
        inner, weight_decay_per_step=0.1
    ),
    "ema_nesterov": lambda inner: optzoo.ema_nesterov(inner, 0.5),
    "hyperball": lambda inner: optzoo.hyperball(inner, 0.1, {"w": (1,)}),
    "ema_in_place": lambda inner: optzoo.interop.fbgemm.ema_in_place(inner, 2),
    "ensemble": lambda inner: optzoo.interop.fbgemm.ensemble(inner, 2, 3),
    "moving_average": lambda inner: optzoo.moving_average(inner, 0.9),
    "multitask": lambda inner: optzoo.multitask(inner),
    "skip_spikes": lambda inner: optzoo.skip_spikes(inner, on="norm"),
    "stacked": lambda inner: optzoo.stacked(inner),
    "variable_clipping": lambda inner: optzoo.variable_clipping(inner, {"w": (1,)}, 0.9),
}
TRANSFORMS = {
    "clip_by_average_norm": optzoo.transforms.clip_by_average_norm(0.2),
    "clip_by_global_norm": optzoo.clip_by_global_norm(2.0),
    "clip_by_norm": optzoo.transforms.clip_by_norm(1.5),
    "gradient_nan_inf_filter": optzoo.transforms.gradient_nan_inf_filter(),
    "gradient_summaries": optzoo.transforms.gradient_summaries(),
    "scale": optzoo.transforms.scale(0.5),
    "scale_by_schedule": optzoo.transforms.scale_by_schedule(lambda step: 1 / (1 + step)),
    "zero_if_norm_exceeds": optzoo.transforms.zero_if_norm_exceeds(9.0),
}
RETURNN = {
    "gradient_clip_norm": 1.5,
    "gradient_clip_avg_norm": 0.2,
    "gradient_clip_global_norm": 2.0,
    "grad_norm_to_clip_to_zero": 9.0,
    "gradient_nan_inf_filter": True,
}
WRAPPED |= {
    name: lambda inner, transform=transform: optax.chain(transform, inner)
    for name, transform in TRANSFORMS.items()
}
WRAPPED["transforms"] = lambda inner: optax.chain(*TRANSFORMS.values(), inner)
WRAPPED["returnn"] = lambda inner: optax.chain(
    optzoo.interop.returnn.returnn_updater(
        {"optimizer": {"class": "GradientDescent"}, **RETURNN}, layers={}
    ),
    inner,
)
PERIODS = {
    "agn": {"communication_period": 2},
    "diloco": {"communication_period": 2},
    "elastic_average": {"communication_period": 2},
    "model_average": {"interval_steps": 2},
}
STORED = {
    "slots_dtype": {"dtype": "bfloat16"},
    "slots_dtype, random": {"dtype": "bfloat16", "stochastic": True},
    "slots_dtype, packed": {"dtype": "bfloat16", "packed": True},
    "slots_dtype, words": {"dtype": "float32", "packed": True},
}


def make(name, rate=None):
    """The optimizer of a case; a method has a single replica here."""
    kind = name.split(",")[0]
    if kind in CATALOG:
        return samples.make(CATALOG[kind], rate, **BRANCHES.get(name, SETTINGS.get(name, {})))
    inner = optzoo.adam(0.01 if rate is None else rate)
    if kind in DISTRIBUTED:
        return DISTRIBUTED[kind].make(inner, 1, axis_name=None, **PERIODS.get(kind, {}))
    return WRAPPED[kind](inner) if kind in WRAPPED else optzoo.slots_dtype(inner, **STORED[name])


PLAIN = [*CATALOG, *BRANCHES, *WRAPPED, *DISTRIBUTED]
ALL = [*PLAIN, *STORED]


# One for each way to compute an update, roots, corners, wrappers and exchanges included.
QUICK = (
    "adam", "adam, eps=0", "add_sign", "adagrad", "blocked_shampoo, newton", "ftrl", "ftrl, power",
    "ggt", "lars", "rmsprop, centered", "shampoo", "accumulate", "moving_average", "stacked",
    "variable_clipping", "elastic_average", "sync_replicas", "transforms", "returnn",
)  # fmt: skip


def test_nothing_is_left_out():
    of_bfloat16 = {"master_weights"}  # see tests/wrappers/test_master_weights.py
    assert {*CATALOG, *WRAPPERS, *DISTRIBUTED} <= {*ALL, *of_bfloat16}
    made = {BY_LAST[name] for name in TRANSFORMS}
    of_gradients = (v for v in NAMES.values() if _makes_transformation(v))
    assert made | {optzoo.transforms.check_numerics} == set(of_gradients)  # which has no value


def _makes_transformation(thing):
    folder = getattr(thing, "__module__", "").startswith("optzoo.transforms")
    return folder and "GradientTransformation" in str(thing.__annotations__.get("return"))


# Parameters and gradients

SHAPES = {"w": (3, 4), "b": (4,), "c": (4,), "d": ()}  # b and c can share a stack


def params(dtypes):
    """Parameters; ``dtypes`` has one for each name."""
    rng = np.random.default_rng(0)
    return {k: jnp.asarray(rng.normal(size=SHAPES[k]), dtypes[k]) for k in SHAPES}


def gradients(dtypes, *lead):
    """Gradients of all steps: some elements are zero in one step, some in all, and so is "c"."""
    rng = np.random.default_rng(1)
    grads = {k: rng.normal(size=(*lead, STEPS, *shape)) for k, shape in SHAPES.items()}
    grads["w"][..., 0, 0, 1] = grads["w"][..., 1, 1, 0] = 0
    grads["w"][..., 0, 0] = grads["w"][..., 2, :] = grads["b"][..., 0] = grads["c"][:] = 0
    return {k: jnp.asarray(g, dtypes[k]) for k, g in grads.items()}


def everywhere(dtype):
    return dict.fromkeys(SHAPES, dtype)


# Values

# The third step is left out; of the others the second one, by one of two members.
LEFT_OUT = np.array([False, False, True, False])
TAKES_PART = np.array([[True, True, True, True], [True, False, True, True]])


def transformed(tx, x, grads):
    """Parameters and states of both members after all steps, in one program."""
    take = jax.checkpoint(step_of(tx))

    def tick(carry, now):
        g, left_out, takes_part = now
        taken = lambda carry: jax.lax.cond(takes_part, lambda c: take(*c, g), lambda c: c, carry)
        return jax.lax.cond(left_out, lambda c: c, taken, carry), None

    def member(g, takes_part):
        return jax.lax.scan(tick, (x, tx.init(x)), (g, LEFT_OUT, takes_part))[0]

    return jax.jit(jax.vmap(member))(grads, TAKES_PART)


def plain(tx, x, grads):
    """The same by compiled steps, one after another."""
    take, start, ends = jax.jit(step_of(tx)), (x, tx.init(x)), []
    for member in range(2):
        carry = start
        for t in range(STEPS):
            if TAKES_PART[member, t] and not LEFT_OUT[t]:
                carry = take(*carry, {k: g[member, t] for k, g in grads.items()})
        ends.append(carry)
    return jax.tree.map(lambda *leaves: np.stack(leaves), *ends)


# The statistics here have a condition number of up to 7**4, and their root of order 4 multiplies
# their rounding errors by up to a quarter of it: XLA adds in another order in the two programs.
MULTIPLIES_ROUNDING = dict.fromkeys(
    ("blocked_shampoo", "blocked_shampoo, newton", "blocked_shampoo, stagger"), 7**4 / 4
)


def assert_equal_values(name, of_params, of_grads):
    tx, x, grads = make(name), params(of_params), gradients(of_grads, 2)
    got, want = transformed(tx, x, grads), plain(tx, x, grads)
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
    chex.assert_tree_all_finite(want)
    digits = max(jnp.finfo(d).eps for d in (*of_params.values(), *of_grads.values()))
    digits *= MULTIPLIES_ROUNDING.get(name, 1)
    largest = lambda *arrays: max(np.max(np.abs(a), initial=0) for a in arrays)
    # What a method keeps of an exchange is a difference of parameters, with their rounding.
    floor = largest(*map(np.asarray, x.values())) if name in PERIODS else 0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(v, np.result_type(v.dtype, np.float64)) for v in (a, b))
        np.testing.assert_allclose(a, b, rtol=0, atol=4 * digits * max(largest(b), floor))


MIXED = {"w": "float32", "b": "float64", "c": "float64", "d": "bfloat16"}
OTHERS = {"w": "float64", "b": "float32", "c": "float32", "d": "float32"}


@pytest.mark.parametrize("name", chosen_first(ALL, (*QUICK, *STORED)))
def test_values(name, x64):
    """With float64; gradients are wider and narrower than the parameters."""
    with x64(True):
        assert_equal_values(name, MIXED, OTHERS)


# Whether there is float64, and the dtypes of parameters and gradients.
MIXES = [
    ("x32", "float32", "float32"),
    ("x32", "float32", "bfloat16"),
    ("x32", "bfloat16", "float32"),
    ("x32", "bfloat16", "bfloat16"),
    ("x32", "float16", "float16"),
    ("x64", "float32", "float32"),
    ("x64", "float32", "float64"),
    ("x64", "float64", "bfloat16"),
    ("x64", "float64", "float64"),
    ("x64", "bfloat16", "float64"),
]


@pytest.mark.full
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("mix", MIXES, ids="-".join)
def test_values_of_all_dtypes(name, mix, x64):
    width, of_params, of_grads = mix
    with x64(width == "x64"):
        assert_equal_values(name, everywhere(of_params), everywhere(of_grads))


# Derivatives

AT = np.array([1.0, 1.0, 0.0])
# An exchange that the step count decides is a loop, with derivatives in forward mode only.
FORWARD = list(PERIODS)
EVERY_STEP = [f"{name}, exchange" for name in FORWARD]
# Where a gradient of exactly zero is a corner or a jump of the formula, the derivative there is
# that of the formula with sgn(0) = 0, and 0 in a quotient without epsilon: the part of the slope.
AT_CORNERS = {
    "add_sign": 1 / 2,
    "power_sign": 1 / np.e,
    "adam, eps=0": 0,
    "amsgrad": 0,
    "ftrl, power": 0,
}
JUMPS_AT_ZERO = {"cautious_weight_decay"}  # whose quotient there is infinite


def after(name, dtype, at):
    """A smooth function of the parameters after all steps.

    ``at`` holds a factor of the rate, one of the gradients, and the value of an element of the
    gradients that is zero otherwise.
    """
    kind = name.split(",")[0]
    tx = make(name, at[0] * (CATALOG[kind].rate if kind in CATALOG else 0.01))
    exchange = {"exchange": True} if name in EVERY_STEP else {}
    take = jax.checkpoint(functools.partial(step_of(tx), **exchange))
    x = params(everywhere(dtype))

    def tick(carry, g):
        g = jax.tree.map(lambda g, x: at[1] * g * jnp.cos(x / 10), g, carry[0])
        return take(*carry, {**g, "w": g["w"].at[0, 0].add(at[2])}), None

    (x, _), _ = jax.lax.scan(tick, (x, tx.init(x)), gradients(everywhere(dtype)))
    waves = lambda x: jnp.sum(jnp.sin(x.ravel() + jnp.arange(x.size)))
    return sum(map(waves, jax.tree.leaves(x)))


@functools.cache
def derivatives(name, dtype):
    """``f(at, direction)``: the value, its derivative in this direction, and by all arguments."""
    f = functools.partial(after, name, dtype)
    reverse = (lambda at: at * jnp.nan) if name in FORWARD else jax.grad(f)
    return jax.jit(lambda at, towards: (*jax.jvp(f, (at,), (towards,)), reverse(at)))


def forward_and_reverse(name, dtype="float64"):
    call, at = derivatives(name, dtype), AT.astype(dtype)
    forward = np.array([call(at, towards)[1] for towards in np.eye(3, dtype=dtype)])
    return forward, call(at, at)[2]


@pytest.mark.parametrize(
    "name", chosen_first([*PLAIN, *EVERY_STEP], [*QUICK, "elastic_average, exchange"])
)
def test_derivatives_are_difference_quotients(name, x64):
    with x64(True):
        forward, reverse = forward_and_reverse(name)
        # As a function of a gradient near zero, an update over epsilon is steep.
        h = np.diag([1e-6, 1e-6, 1e-7] / np.maximum(1, np.abs(forward)))
        value = lambda at: float(derivatives(name, "float64")(at, AT)[0])
        want = np.array([(value(AT + d) - value(AT - d)) / (2 * d.sum()) for d in h])
        if name in FORWARD:
            with pytest.raises(TypeError, match="Pass exchange="):
                jax.eval_shape(jax.grad(functools.partial(after, name, "float64")), AT)
    assert np.isfinite(want).all()  # two NaN would be equal
    if name in AT_CORNERS:
        want[2] *= AT_CORNERS[name]
    if name in JUMPS_AT_ZERO:
        forward, reverse, want = forward[:2], reverse[:2], want[:2]
    np.testing.assert_allclose(forward, want, rtol=1e-4, atol=1e-7)
    if name not in FORWARD:
        np.testing.assert_allclose(reverse, forward, rtol=1e-6, atol=1e-9)


@pytest.mark.full
@pytest.mark.parametrize("name", PLAIN)
def test_derivatives_in_float32(name, x64):
    with x64(True):
        want, _ = forward_and_reverse(name)
    with x64(False):
        for got in forward_and_reverse(name, "float32")[: 1 if name in FORWARD else 2]:
            np.testing.assert_allclose(got, want, rtol=0.05, atol=1e-3)


@pytest.mark.parametrize("name", STORED)
def test_derivatives_of_stored_slots(name, x64):
    """They pass straight through the rounding, or are refused."""
    with x64(True):
        want, _ = forward_and_reverse("adam")
        if name == "slots_dtype, packed":
            with pytest.raises(TypeError, match="packed 16-bit slots"):
                forward_and_reverse(name)
            return
        for got in forward_and_reverse(name):
            np.testing.assert_allclose(got, want, rtol=0.02, atol=1e-3)
