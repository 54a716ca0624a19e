"""Momentum against geometric sums."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo.testing.samples import trajectory

G = jnp.array([2.0, -1.0])


def steps(tx, grads):
    path = trajectory(tx, jnp.zeros(2), lambda _, g: g, grads)
    return -jnp.diff(path, axis=0, prepend=jnp.zeros((1, 2)))


@pytest.mark.parametrize("nesterov", [False, True])
def test_constant_gradient_sums_geometrically(nesterov):
    """After t steps a = (1 - mu^t) / (1 - mu) g; Nesterov's step is one ahead."""
    t = jnp.arange(1, 6)[:, None] + nesterov
    want = 0.5 * (1 - 0.8**t) / (1 - 0.8) * G[None]
    tx = optzoo.momentum(0.5, momentum=0.8, nesterov=nesterov)
    np.testing.assert_allclose(steps(tx, jnp.stack([G] * 5)), want, rtol=1e-4)


def test_rate_acts_on_the_whole_history():
    tx = optzoo.momentum(lambda k: jnp.where(k == 0, 0.0, 1.0), momentum=0.5)
    got = steps(tx, jnp.stack([G, 0 * G, 0 * G]))
    np.testing.assert_allclose(got, jnp.stack([0 * G, G / 2, G / 4]), rtol=1e-6)


@pytest.mark.parametrize("nesterov", [False, True])
def test_scale_by_momentum_is_the_trace_of_optax(nesterov):
    ours, theirs = optzoo.transforms.scale_by_momentum(0.9, nesterov), optax.trace(0.9, nesterov)
    grads = jnp.cos(jnp.arange(10.0)).reshape(5, 2)
    np.testing.assert_allclose(steps(ours, grads), steps(theirs, grads), rtol=1e-4, atol=1e-6)
