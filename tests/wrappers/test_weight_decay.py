"""Decoupled decay: before the update, independent of the rate, on listed rows only."""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo import SparseRows
from optzoo.testing.samples import dense_grads, params, step
from tests.public import BY_LAST

X, G = jnp.array([1.0, -2.0, 4.0]), jnp.array([0.5, 0.1, -1.0])
ROWS = SparseRows(jnp.array([2, 0, 2, 3]), jnp.array([1.0, 2, 3, 9]), 3)
DECAYED = X * jnp.array([0.75, 1, 0.75])  # of the listed rows

READERS = [
    optzoo.ftrl(0.1, l1_regularization_strength=0.01),
    optzoo.proximal_adagrad(0.1, l1_regularization_strength=0.01),
    optzoo.lars(0.1),
    optax.adamw(0.1, weight_decay=0.3),
]
IDS = ["ftrl", "proximal_adagrad", "lars", "optax.adamw"]


def steps(tx, grads, x=X):
    return jax.jit(lambda: step(tx, grads, x)[0])()


@pytest.mark.parametrize("inner", READERS, ids=IDS)
def test_inner_optimizer_sees_the_decayed_parameters(inner):
    got = steps(optzoo.decoupled_weight_decay(inner, weight_decay_per_step=0.25), G)
    np.testing.assert_allclose(got, steps(inner, G, 0.75 * X), rtol=1e-5)


@pytest.mark.parametrize("inner", READERS[:3], ids=IDS[:3])
def test_inner_optimizer_sees_the_decayed_rows(inner):
    got = steps(optzoo.decoupled_weight_decay(inner, weight_decay_per_step=0.25), ROWS)
    np.testing.assert_allclose(got, steps(inner, ROWS, DECAYED), rtol=1e-5)


@pytest.mark.parametrize(
    "inner",
    [optzoo.gradient_descent(0.0), optzoo.momentum(0.0, 0.9), optzoo.adam(0.0), optzoo.nadam(0.0)],
    ids=["linear", "lazy", "dense", "touched"],
)
def test_listed_rows_decay_once_at_any_rate(inner):
    """Row 2 is listed twice; a dense update includes the decay of the rows."""
    got = steps(optzoo.decoupled_weight_decay(inner, weight_decay_per_step=0.25), ROWS)
    np.testing.assert_allclose(got, DECAYED, rtol=1e-6)


@pytest.mark.parametrize(
    ("mask", "decays"),  # of layer/0, layer/1, one_row and table
    [
        (None, (True, True, True, True)),
        ({"table": True, "layer": (False, True), "one_row": False}, (False, True, False, True)),
        ({"table": False, "layer": True, "one_row": True}, (True, True, True, False)),  # a prefix
        (("table", "layer/1"), (False, True, False, True)),
        (["layer/.*"], (True, True, False, False)),
        (".*", (True, True, True, True)),
        ((), (False, False, False, False)),
        (False, (False, False, False, False)),
    ],
    ids=str,
)
def test_mask(mask, decays):
    x = params()
    tx = optzoo.decoupled_weight_decay(
        optzoo.gradient_descent(0.0), weight_decay_per_step=0.25, mask=mask
    )
    moved, _ = step(tx, dense_grads(x), x)
    for new, old, decay in zip(jax.tree.leaves(moved), jax.tree.leaves(x), decays, strict=True):
        np.testing.assert_allclose(new, 0.75 * old if decay else old, rtol=1e-6)


def test_no_decay_is_the_inner_optimizer():
    x, inner = params(), optzoo.adam(0.1)
    got, want = (
        step(tx, dense_grads(x), x)
        for tx in (optzoo.decoupled_weight_decay(inner, weight_decay_per_step=0.0), inner)
    )
    chex.assert_trees_all_equal(got, want)


def test_no_gradient_no_decay():
    tx = optzoo.decoupled_weight_decay(optzoo.gradient_descent(0.0), weight_decay_per_step=0.25)
    x = {"still": X, "alive": X}
    updates, _ = tx.update({"still": None, "alive": 0 * X}, tx.init(x), x)
    assert updates["still"] is None
    np.testing.assert_array_equal(updates["alive"], -0.25 * X)


def test_bad_arguments():
    with pytest.raises(
        ValueError, match=r"weight_decay_per_step must be zero or positive, got -0.1"
    ):
        optzoo.decoupled_weight_decay(optzoo.adam(), weight_decay_per_step=-0.1)
    for mask in (1.0, {"table": 1.0}):
        with pytest.raises(TypeError, match="mask must be a pattern"):
            optzoo.decoupled_weight_decay(optzoo.adam(), weight_decay_per_step=0.1, mask=mask)


PER_STEP = {
    "adamw": optzoo.adamw,
    "momentumw": functools.partial(optzoo.momentumw, 0.1, 0.9),
    "decoupled_weight_decay": functools.partial(
        optzoo.decoupled_weight_decay, optzoo.gradient_descent(0.1)
    ),
}


@pytest.mark.parametrize("name", PER_STEP)
def test_the_name_of_another_decay_is_refused(name):
    make = PER_STEP[name]
    with pytest.raises(TypeError, match=f"^{name} has no weight_decay, got 0.1: give ") as caught:
        make(weight_decay=0.1)
    for word in ("weight_decay_per_step", "learning_rate", "optax.adamw", "optzoo.sparse_adamw"):
        caught.match(word)
    parameter = inspect.signature(BY_LAST[name], eval_str=True).parameters["weight_decay_per_step"]
    assert parameter.kind is parameter.KEYWORD_ONLY and parameter.annotation is float
    for missing in ({}, {"mask": None}):
        with pytest.raises(TypeError, match="weight_decay_per_step"):
            make(**missing)


DECAYS = [
    (name, argument, {"weight_decay_mode": mode} if mode else {})
    for name, entry in optzoo.CATALOG.items()
    for parameters in [inspect.signature(entry.factory).parameters]
    for argument in ("weight_decay", "weight_decay_per_step")
    if argument in parameters
    for mode in (("l2", "decoupled") if "weight_decay_mode" in parameters else (None,))
]


@pytest.mark.parametrize(("name", "argument", "mode"), DECAYS)
@pytest.mark.filterwarnings("ignore:half_life=-1 makes the factor")
def test_the_name_says_whether_the_rate_multiplies(name, argument, mode):
    entry = optzoo.CATALOG[name]
    tx = entry.factory(0.0, **{**entry.required, argument: 0.25, **mode})
    updates, _ = tx.update(jnp.ones_like(X), tx.init(X), X)
    np.testing.assert_array_equal(updates, -0.25 * X if argument.endswith("per_step") else 0)


MASKED = {
    "decoupled_weight_decay": lambda mask: optzoo.decoupled_weight_decay(
        optzoo.gradient_descent(0.1), weight_decay_per_step=0.1, mask=mask
    ),
    "cautious_weight_decay": lambda mask: optzoo.cautious_weight_decay(
        optzoo.gradient_descent(0.1), weight_decay_per_step=0.1, mask=mask
    ),
    "ema_nesterov": lambda mask: optzoo.ema_nesterov(optzoo.gradient_descent(0.1), 0.5, mask=mask),
    "adamw": lambda mask: optzoo.adamw(weight_decay_per_step=0.1, mask=mask),
    "lars": lambda mask: optzoo.lars(0.1, skip=mask),
    "shampoo": lambda mask: optzoo.shampoo(weight_decay=0.1, mask=mask),
    "stacked": lambda mask: optzoo.stacked(optzoo.momentum(0.1, 0.9), mask),
}


@pytest.mark.parametrize("name", MASKED)
def test_masks_of_patterns_and_functions(name):
    """They mark the same, with rows and a missing gradient; a typing error is refused."""
    x = {"kernel": X, "bias": X, "kernel2": X}
    for g in (0.1 * X, None):
        grads = {"kernel": 0.1 * X, "bias": 0.1 * X, "kernel2": g}
        if name != "shampoo":
            grads["bias"] = optzoo.SparseRows(jnp.array([0]), X[:1], len(X))
        by_name = lambda tree: {k: None if v is None else "kernel" in k for k, v in tree.items()}
        done = []
        for mask in (("kernel.*",), by_name):
            tx = MASKED[name](mask)
            done.append(tx.update(grads, tx.init(x), x)[0])
        chex.assert_trees_all_equal(*done)
    tx = MASKED[name](("kernal",))
    with pytest.raises(ValueError, match=r"no parameter matches \['kernal'\]"):
        tx.update(grads, tx.init(x), x)
