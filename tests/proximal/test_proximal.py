"""Both proximal optimizers against NumPy, and without penalties against their plain forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optzoo
from optzoo import SparseRows
from optzoo.proximal.shrink import soft_threshold
from optzoo.testing.samples import step, trajectory

X, G = jnp.array([0.5, -1.0, 0.01, 0.0]), jnp.array([3.0, -0.1, 0.5, -0.2])
L1, L2 = 0.4, 0.6
PAIR = {
    optzoo.proximal_gradient_descent: optzoo.gradient_descent,
    optzoo.proximal_adagrad: optzoo.adagrad,
}


@pytest.mark.parametrize("make", PAIR)
def test_formula(make):
    tx = make(0.25, l1_regularization_strength=L1, l2_regularization_strength=L2)
    path = trajectory(tx, X, lambda x, i: G * (1 - i), jnp.arange(4.0))
    x, total = np.asarray(X), 0.1
    for i, got in enumerate(path):
        g = np.asarray(G) * (1 - i)
        total = total + g**2
        e = 0.25 / np.sqrt(total) if make is optzoo.proximal_adagrad else 0.25
        u = x - e * g
        x = np.sign(u) * np.maximum(abs(u) - e * L1, 0) / (1 + e * L2)
        np.testing.assert_allclose(got, x, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("make", PAIR)
def test_l1_gives_exact_zeros(make):
    """If the step ends within rate * l1 of zero, on either side."""
    x = jnp.array([0.03, -0.03, 0.5, -0.5])
    tx = make(0.1, l1_regularization_strength=1.0)
    moved, _ = step(tx, jnp.full(4, 1e-4), x)
    assert list(moved[:2]) == [0, 0] and moved[2] > 0 > moved[3]


@pytest.mark.parametrize(("make", "plain"), PAIR.items())
def test_without_penalties(make, plain):
    grads = lambda x, i: jnp.cos(x + i)
    paths = [trajectory(f(0.1), X, grads, jnp.arange(9.0)) for f in (make, plain)]
    np.testing.assert_allclose(*paths, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", PAIR)
def test_rows_without_a_gradient_are_not_shrunk(make):
    tx = make(0.1, l1_regularization_strength=100.0)
    moved, _ = step(tx, SparseRows(jnp.array([1]), jnp.array([0.0]), 4), X)
    np.testing.assert_array_equal(moved, X.at[1].set(0))


@pytest.mark.parametrize("l1", [0.0, 0.4])
def test_derivatives_of_the_threshold(l1):
    """Without one it is the identity, at zero as well."""
    z = jnp.array([-1.0, -0.3, 0.0, 0.3, 1.0])
    by_z, by_l1 = jax.vmap(jax.grad(soft_threshold, argnums=(0, 1)), (0, None))(z, l1)
    outside = np.abs(z) >= l1
    np.testing.assert_array_equal(by_z, outside)
    np.testing.assert_array_equal(by_l1, -np.sign(z) * outside)
