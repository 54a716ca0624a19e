"""NormalizedSGD: steps of a fixed length."""

import jax.numpy as jnp
import numpy as np
import pytest

import optzoo
from optzoo import SparseRows
from optzoo.testing.samples import step


def moved(grads):
    x, _ = step(
        optzoo.normalized_sgd(0.5), grads, {k: jnp.zeros(g.shape) for k, g in grads.items()}
    )
    return x


def test_each_parameter_moves_by_the_rate():
    got = moved({"x": jnp.array([[3.0, 0], [0, -4]]), "scalar": jnp.float32(-1e-3)})
    np.testing.assert_allclose(got["x"], [[-0.3, 0], [0, 0.4]], rtol=1e-6)
    np.testing.assert_allclose(got["scalar"], 0.5, rtol=1e-6)


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-7])
def test_below_the_floor_steps_are_in_proportion(scale):
    got = moved({"x": scale * jnp.array([0.6, -0.8])})
    np.testing.assert_allclose(got["x"], [-0.3e6 * scale, 0.4e6 * scale], rtol=1e-5)


def test_rows_sum_before_the_norm():
    values = jnp.array([[1.0, 4], [0, 0], [2, 0], [9, 9]])
    got = moved({"x": SparseRows(jnp.array([1, 0, 1, 3]), values, 3)})
    np.testing.assert_allclose(got["x"], [[0, 0], [-0.3, -0.4], [0, 0]], rtol=1e-6)
