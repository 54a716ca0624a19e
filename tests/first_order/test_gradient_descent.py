"""Gradient descent against its formula."""

import jax.numpy as jnp
import numpy as np

import optzoo
from optzoo.testing.samples import trajectory


def test_converges_geometrically_on_a_parabola():
    path = trajectory(optzoo.gradient_descent(0.25), jnp.ones(()), lambda x, _: x, jnp.arange(4))
    np.testing.assert_allclose(path, 0.75 ** np.arange(1, 5), rtol=1e-6)
