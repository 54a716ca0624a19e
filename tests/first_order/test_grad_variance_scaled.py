"""GradVarianceScaled against its formula."""

import jax.numpy as jnp
import numpy as np

import optzoo
from optzoo import SparseRows
from optzoo.testing.samples import trajectory


def test_formula():
    grads = np.cos(np.arange(12.0)).reshape(6, 2)
    tx = optzoo.grad_variance_scaled(0.5, b1=0.7, b2=0.6, eps=0.05)
    path = trajectory(tx, jnp.zeros(2), lambda _, g: g, jnp.array(grads, "float32"))
    x = m = v = np.zeros(2)
    for g, got in zip(grads, path, strict=True):
        m = 0.7 * m + 0.3 * g
        d = (g - m) ** 2
        v = 0.6 * v + 0.4 * d
        x = x - 0.5 * g * np.minimum(v / (d + 0.05), 1)
        np.testing.assert_allclose(got, x, rtol=1e-4, atol=1e-6)


def test_first_step_is_a_thousandth():
    g = jnp.array([3.0, -20.0])
    tx = optzoo.grad_variance_scaled(1.0)
    updates, _ = tx.update(g, tx.init(g))
    np.testing.assert_allclose(updates, -0.001 * g, rtol=1e-4)


def test_steps_are_whole_near_the_mean_and_short_far_from_it():
    """A gradient near its mean is not scaled; an outlier is."""
    grads = jnp.array([1.0, -1.0] * 500 + [0.01, 100.0])
    tx = optzoo.grad_variance_scaled(1.0)
    path = trajectory(tx, jnp.zeros(()), lambda _, g: g, grads)
    common, outlier = -jnp.diff(path[-3:])
    np.testing.assert_allclose(common, 0.01, rtol=1e-3)
    assert 0.1 < outlier < 1


def test_rows_without_a_gradient_have_no_distance():
    """The distance is zero there, though the means decay."""
    tx, x = optzoo.transforms.scale_by_grad_variance(b1=0.5, b2=0.75), jnp.zeros(3)
    _, state = tx.update(jnp.full(3, 4.0), tx.init(x))
    rows = SparseRows(jnp.array([1, 3]), jnp.array([10.0, 9]), 3)
    _, state = tx.update(rows, state)
    np.testing.assert_allclose(state.slots.m, [1, 6, 1])
    np.testing.assert_allclose(state.slots.v, [0.75, 4.75, 0.75])
