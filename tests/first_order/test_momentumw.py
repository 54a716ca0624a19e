"""MomentumW against its formula."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo import SparseRows
from optzoo.testing.samples import step, trajectory

X = jnp.array([1.0, -2.0])


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_and_decay_side_by_side(nesterov):
    grads = np.cos(np.arange(8.0, dtype="float32")).reshape(4, 2)
    tx = optzoo.momentumw(0.5, momentum=0.8, weight_decay_per_step=0.25, nesterov=nesterov)
    path = trajectory(tx, X, lambda _, g: g, jnp.asarray(grads))
    x, a = np.asarray(X), 0.0
    for g, got in zip(grads, path, strict=True):
        a = 0.8 * a + g
        x = x - 0.25 * x - 0.5 * (g + 0.8 * a if nesterov else a)
        np.testing.assert_allclose(got, x, rtol=1e-5)


def test_is_sgd_of_optax_with_the_decay_of_the_last_parameters():
    """The decay is not part of the momentum."""
    theirs = optax.chain(optax.trace(0.9), optax.scale(-0.1), optax.add_decayed_weights(-0.02))
    ours = optzoo.momentumw(0.1, 0.9, weight_decay_per_step=0.02)
    paths = [trajectory(tx, X, lambda x, _: x, jnp.arange(9)) for tx in (ours, theirs)]
    np.testing.assert_allclose(*paths, rtol=1e-5)


def test_rows_without_a_gradient_do_not_decay():
    tx = optzoo.momentumw(0.1, 0.9, weight_decay_per_step=0.5)
    x, _ = step(tx, SparseRows(jnp.array([1, 1]), jnp.array([1.0, 2]), 2), X)
    np.testing.assert_allclose(x, [1, -1.3], rtol=1e-6)


def test_mask():
    tx = optzoo.momentumw(0.1, 0.9, weight_decay_per_step=0.5, mask=("kernel",))
    x, _ = step(tx, {"bias": X, "kernel": X}, {"bias": X, "kernel": X})
    np.testing.assert_allclose(x["bias"], 0.9 * X, rtol=1e-6)
    np.testing.assert_allclose(x["kernel"], 0.4 * X, rtol=1e-6)
