"""LARS against its formula and optax's."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo import SparseRows
from optzoo.testing.samples import dense_grads, params, row_grads, step, trajectory

SETTINGS = {"momentum": 0.8, "l2_weight_decay": 0.2, "trust_coefficient": 0.3}
X, G = jnp.array([[3.0, 0], [0, 4]]), jnp.array([[0.0, 5], [12, 0]])


@pytest.mark.parametrize("nesterov", [False, True])
def test_formula(nesterov):
    """The rate is inside the sum: past steps keep their rate."""
    tx = optzoo.lars(lambda k: 0.5 / (1 + k), eps=0.1, nesterov=nesterov, **SETTINGS)
    path = trajectory(tx, X, lambda x, i: G * jnp.cos(i), jnp.arange(4.0))
    x, a = np.asarray(X), 0.0
    for i, got in enumerate(path):
        g, n = np.asarray(G) * np.cos(i), np.linalg.norm
        ratio = 0.3 * n(x) / (n(g) + 0.2 * n(x) + 0.1)
        s = 0.5 / (1 + i) * ratio * (g + 0.2 * x)
        a = 0.8 * a + s
        x = x - (s + 0.8 * a if nesterov else a)
        np.testing.assert_allclose(got, x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("nesterov", [False, True])
def test_is_lars_of_optax_at_a_constant_rate(nesterov):
    theirs = optax.lars(
        0.1, weight_decay=0.0, trust_coefficient=0.3, momentum=0.8, nesterov=nesterov
    )
    ours = optzoo.lars(0.1, **SETTINGS | {"l2_weight_decay": 0.0}, nesterov=nesterov)
    grads = lambda x, i: jax.tree.map(lambda x: jnp.cos(x + i), x)
    paths = [trajectory(tx, params(), grads, jnp.arange(5.0)) for tx in (ours, theirs)]
    chex.assert_trees_all_close(*paths, rtol=1e-4, atol=1e-6)


def test_trust_ratio_is_one_if_a_norm_is_zero():
    """A zero parameter moves by the whole gradient; a zero gradient leaves the decay alone."""
    tx = optzoo.lars(0.5, **SETTINGS)
    x, zero = {"zero": 0 * X, "still": X, "both": 0 * X}, 0 * G
    moved, _ = step(tx, {"zero": G, "still": zero, "both": zero}, x)
    np.testing.assert_allclose(moved["zero"], -0.5 * G, rtol=1e-6)
    np.testing.assert_allclose(moved["still"], 0.9 * X, rtol=1e-6)
    np.testing.assert_array_equal(moved["both"], 0)


@pytest.mark.parametrize(
    "skip", [("layer/1",), {"table": False, "layer": (False, True), "one_row": False}]
)
def test_skipped_parameters_have_neither_ratio_nor_decay(skip):
    x = params()
    moved, state = step(optzoo.lars(0.5, skip=skip, **SETTINGS), dense_grads(x), x)
    default, default_state = step(optzoo.lars(0.5, **SETTINGS), dense_grads(x), x)
    assert jax.tree.structure(state) == jax.tree.structure(default_state)
    np.testing.assert_allclose(moved["layer"][1], 1 - 0.5 * jnp.cos(2.0), rtol=1e-6)
    others = lambda tree: (tree["table"], tree["layer"][0], tree["one_row"])
    chex.assert_trees_all_equal(others(moved), others(default))
    assert moved["layer"][1] != default["layer"][1]


def test_skipping_everything_is_momentum():
    grads = lambda x, i: dense_grads(x)
    skipped = optzoo.lars(0.1, skip=".*", **SETTINGS)
    paths = [
        trajectory(tx, params(), grads, jnp.arange(4))
        for tx in (skipped, optzoo.momentum(0.1, 0.8))
    ]
    chex.assert_trees_all_close(*paths, rtol=1e-5)


@pytest.mark.parametrize("nesterov", [False, True])
def test_rows_are_momentum_with_its_rate_outside(nesterov):
    rate = lambda k: 0.5 / (1 + k)
    grads = lambda x, i: SparseRows(jnp.array([1, 2, 1, 5]), jnp.cos(i + jnp.arange(4.0)), 5)
    x = jnp.arange(5.0)
    paths = [
        trajectory(tx, x, grads, jnp.arange(4.0))
        for tx in (
            optzoo.lars(rate, nesterov=nesterov, **SETTINGS),
            optzoo.momentum(rate, 0.8, nesterov),
        )
    ]
    np.testing.assert_array_equal(*paths)
    np.testing.assert_array_equal(paths[0][:, 0], x[0])  # no decay


def test_dense_leaves_beside_rows_and_rows_after_dense():
    tx, x = optzoo.lars(0.5, **SETTINGS), params()
    (mixed, state), (dense, _) = (step(tx, f(x), x) for f in (row_grads, dense_grads))
    chex.assert_trees_all_equal(mixed["layer"], dense["layer"])
    # Rows and dense gradients use the same sum, which is scaled by the rate for dense ones only.
    sums = state[1].slots.momentum["table"]
    after, _ = step(tx, {**dense_grads(x), "table": jnp.zeros((5, 2))}, mixed, state)
    decay = 0.5 * 0.2 * mixed["table"]  # the ratio is 1 for a zero gradient
    np.testing.assert_allclose(
        after["table"], mixed["table"] - 0.8 * sums - decay, rtol=1e-5, atol=1e-6
    )
