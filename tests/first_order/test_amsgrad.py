"""AMSGrad, as RETURNN has it."""

import jax.numpy as jnp
import numpy as np
import pytest

import optzoo
from optzoo.testing.samples import run, trajectory


@pytest.mark.parametrize("decay", [False, True])
def test_formula(decay):
    grads = np.cos(np.arange(12.0)).reshape(6, 2)
    tx = optzoo.amsgrad(0.1, b1=0.7, b2=0.8, eps=0.01, decay_learning_rate=decay)
    path = trajectory(tx, jnp.zeros(2), lambda _, g: g, jnp.array(grads, "float32"))
    x = m = v = v_hat = np.zeros(2)
    for t, (g, got) in enumerate(zip(grads, path, strict=True), start=1):
        m, v = 0.7 * m + 0.3 * g, 0.8 * v + 0.2 * g**2
        v_hat = np.maximum(v_hat, v)
        x = x - 0.1 / np.sqrt(t if decay else 1) * m / (np.sqrt(v_hat) + 0.01)
        np.testing.assert_allclose(got, x, rtol=1e-4)


def test_squared_mean_never_falls():
    tx = optzoo.transforms.scale_by_amsgrad(b2=0.5)
    _, states = run(tx, np.array([[4], [0], [0], [8]], "float32"))
    np.testing.assert_array_equal(states.slots.v, [[8], [4], [2], [33]])
    np.testing.assert_array_equal(states.slots.v_hat, [[8], [8], [8], [33]])


def test_defaults_give_no_nan_where_there_was_no_gradient():
    """The original's default, eps=0, divides zero by zero."""
    tx, g = optzoo.amsgrad(0.1), jnp.array([0.0, 1.0])
    path = trajectory(tx, jnp.ones(2), lambda x, _: g, jnp.arange(3))
    np.testing.assert_array_equal(path[:, 0], 1)
    assert jnp.all(jnp.diff(path[:, 1]) < 0)
