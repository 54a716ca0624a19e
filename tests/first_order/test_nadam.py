"""Nadam, as in TensorFlow 1."""

import jax.numpy as jnp
import numpy as np
import optax

import optzoo
from optzoo.testing.samples import trajectory


def test_first_step_is_too_long_by_b1():
    g = jnp.array([3.0, -0.2])
    tx = optzoo.nadam(0.01, b1=0.8)
    updates, _ = tx.update(g, tx.init(g))
    np.testing.assert_allclose(updates, -0.018 * jnp.sign(g), rtol=1e-5)


def test_formula():
    grads = np.cos(np.arange(12.0)).reshape(6, 2)
    tx = optzoo.nadam(0.1, b1=0.7, b2=0.9, eps=0.01)
    path = trajectory(tx, jnp.zeros(2), lambda _, g: g, jnp.array(grads, "float32"))
    x = m = v = np.zeros(2)
    for t, (g, got) in enumerate(zip(grads, path, strict=True), start=1):
        m, v = 0.7 * m + 0.3 * g, 0.9 * v + 0.1 * g**2
        correction = np.sqrt(1 - 0.9**t) / (1 - 0.7**t)
        x = x - 0.1 * correction * (0.7 * m + 0.3 * g) / (np.sqrt(v) + 0.01)
        np.testing.assert_allclose(got, x, rtol=1e-4)


def test_is_not_that_of_optax():
    paths = [
        trajectory(tx, jnp.zeros(2), lambda x, i: jnp.cos(x + i), jnp.arange(5.0))
        for tx in (optzoo.nadam(0.1), optax.nadam(0.1))
    ]
    assert not np.allclose(*paths, rtol=0.05)
