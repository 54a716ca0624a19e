"""AdagradDA against its closed forms."""

import jax.numpy as jnp
import numpy as np
import pytest

import optzoo
from optzoo import SparseRows
from optzoo.testing.samples import step, trajectory

X, G = jnp.array([0.5, -1.0, 2.0]), jnp.array([3.0, -0.1, 0.5])
L1, L2 = 0.2, 0.3


def tx(rate=0.5):
    return optzoo.adagrad_da(rate, l1_regularization_strength=L1, l2_regularization_strength=L2)


def formula(total, squares, steps):
    shrunk = np.sign(total) * np.maximum(abs(total) - L1 * steps, 0)
    return -0.5 * shrunk / (0.5 * L2 * steps + np.sqrt(squares))


def test_steps_are_counted():
    path = trajectory(tx(), X, lambda x, i: G * jnp.cos(i), jnp.arange(4.0))
    total, squares = 0.0, 0.1
    for i, got in enumerate(path):
        g = np.asarray(G) * np.cos(i)
        total, squares = total + g, squares + g**2
        np.testing.assert_allclose(got, formula(total, squares, i + 1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("n", [0, 3, 10, jnp.int32(3)])
def test_steps_are_those_of_the_global_step(n):
    x, state = step(tx(), G, X, global_step=n)
    np.testing.assert_allclose(x, formula(G, 0.1 + G**2, n + 1), rtol=1e-5)
    assert state.count == 1


def test_initial_values_have_no_influence():
    moved = [step(tx(), G.at[1].set(0), x)[0] for x in (X, 10 * X)]
    np.testing.assert_allclose(*moved, rtol=1e-5, atol=1e-6)
    assert moved[0][1] == 0


def test_rows_use_the_global_count():
    """A row without gradients keeps its parameter; its next update counts all steps."""
    rows = lambda i: SparseRows(jnp.array([i]), jnp.array([2.0]), 3)
    x, state = step(tx(), rows(0), X)
    np.testing.assert_array_equal(x[1:], X[1:])
    x, _ = step(tx(), rows(2), x, state)
    np.testing.assert_allclose(x[2], formula(2.0, 4.1, 2), rtol=1e-5)
