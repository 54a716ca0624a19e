"""LAMB of whole parameters against its formula and optax's."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

import optzoo
from optzoo.testing.samples import params, row_grads, step, to_dense, trajectory

SETTINGS = {"b1": 0.8, "b2": 0.99, "eps": 1e-3, "weight_decay": 0.1}


def test_formula():
    tx = optzoo.lamb(lambda k: 0.5 / (1 + k), **SETTINGS)
    path = trajectory(tx, params()["table"], lambda x, i: jnp.cos(x + i), jnp.arange(5.0))
    x, m, v = np.asarray(params()["table"], np.float64), 0.0, 0.0
    for i, got in enumerate(path):
        g = np.cos(x + i)
        m, v = 0.8 * m + 0.2 * g, 0.99 * v + 0.01 * g**2
        debiased = m / (1 - 0.8 ** (i + 1)), v / (1 - 0.99 ** (i + 1))
        r = debiased[0] / (np.sqrt(debiased[1]) + 1e-3) + 0.1 * x
        x = x - 0.5 / (1 + i) * np.linalg.norm(x) / np.linalg.norm(r) * r
        np.testing.assert_allclose(got, x, rtol=2e-5, atol=2e-6)


def test_is_lamb_of_optax():
    """Also from zeros, with parameters that do not decay."""
    x = {**params(), "zero": jnp.zeros((2, 2))}
    mask = {"table": True, "layer": (True, True), "one_row": True, "zero": False}
    ours = optzoo.lamb(0.1, skip="zero", **SETTINGS)
    theirs = optax.lamb(0.1, mask=mask, **SETTINGS)
    grads = lambda x, i: jax.tree.map(lambda x: jnp.cos(x + i), x)
    paths = [trajectory(tx, x, grads, jnp.arange(9.0)) for tx in (ours, theirs)]
    chex.assert_trees_all_close(*paths, rtol=1e-5, atol=1e-6)


def test_a_ratio_is_one_if_a_norm_is_zero():
    """A parameter of zeros takes Adam's step, and without a gradient nothing moves."""
    tx = optzoo.lamb(0.5, eps=0.0)
    x = {"zero": jnp.zeros((2, 2)), "still": jnp.ones(3), "both": jnp.zeros(2)}
    g = {"zero": jnp.array([[1.0, -2.0], [0.0, 3.0]]), "still": jnp.zeros(3), "both": jnp.zeros(2)}
    moved, _ = step(tx, g, x)
    np.testing.assert_allclose(moved["zero"], -0.5 * np.sign(g["zero"]), rtol=1e-5)
    np.testing.assert_array_equal(moved["still"], 1)
    np.testing.assert_array_equal(moved["both"], 0)


def test_the_norms_of_rows_are_those_of_the_whole_table():
    tx, x = optzoo.lamb(0.1, **SETTINGS), params()
    rows = row_grads(x)
    got, want = (step(tx, g, x) for g in (rows, to_dense(rows)))
    chex.assert_trees_all_close(got, want, rtol=1e-6)
    assert np.all(got[0]["table"][0] != x["table"][0])  # it decays
    for name in ("table", "one_row"):
        length = np.linalg.norm(got[0][name] - x[name])
        np.testing.assert_allclose(length, 0.1 * np.linalg.norm(x[name]), rtol=1e-5)
