"""NeuralOptimizer1 against its formula."""

import math

import jax.numpy as jnp
import numpy as np

import optzoo
from optzoo.testing.samples import trajectory


def steps(tx, grads):
    path = trajectory(tx, jnp.zeros(()), lambda _, g: g, jnp.array(grads))
    return -jnp.diff(path, prepend=0.0)


def test_different_signs_are_scaled_by_the_factor():
    """The mean changes its sign when the new gradient outweighs it."""
    tx = optzoo.neural_optimizer1(0.5, b1=0.5, decrease_factor=0.25)
    np.testing.assert_allclose(steps(tx, [4.0, -1.0, -8.0]), [2, -0.125, -4], rtol=1e-5)


def test_no_gradient_no_step():
    np.testing.assert_array_equal(steps(optzoo.neural_optimizer1(1.0), [0.0, 1.0, 0.0]), [0, 1, 0])


def test_is_power_sign_at_another_rate():
    grads = lambda x, i: jnp.cos(x + i)
    ours, theirs = (
        trajectory(tx, jnp.arange(3.0), grads, jnp.arange(20.0))
        for tx in (
            optzoo.neural_optimizer1(0.1 * math.e, decrease_factor=math.exp(-2)),
            optzoo.power_sign(0.1),
        )
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
