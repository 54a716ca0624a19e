"""Adadelta against optax's, and its first steps."""

import jax.numpy as jnp
import numpy as np
import optax

import optzoo
from optzoo.testing.samples import trajectory

G = jnp.array([3.0, -0.02])


def test_is_that_of_optax():
    grads = lambda x, i: jnp.cos(3 * x + i)
    ours, theirs = (
        trajectory(tx, jnp.arange(3.0), grads, jnp.arange(20.0))
        for tx in (
            optzoo.adadelta(0.5, rho=0.8, eps=1e-3),
            optax.adadelta(0.5, rho=0.8, eps=1e-3),
        )
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_two_steps_by_hand():
    tx, eps = optzoo.adadelta(2.0, rho=0.75, eps=0.01), 0.01
    path = trajectory(tx, jnp.zeros(2), lambda x, _: G, jnp.arange(2))
    first = np.sqrt(eps) / np.sqrt(0.25 * G**2 + eps) * G
    second = np.sqrt(0.25 * first**2 + eps) / np.sqrt(0.4375 * G**2 + eps) * G
    np.testing.assert_allclose(path[0], -2 * first, rtol=1e-6)
    np.testing.assert_allclose(path[1], -2 * (first + second), rtol=1e-6)


def test_without_epsilon_nothing_moves():
    path = trajectory(optzoo.adadelta(1.0, eps=0.0), G, lambda x, _: G, jnp.arange(3))
    np.testing.assert_array_equal(path, jnp.stack([G] * 3))


def test_a_square_that_overflows_stops_the_element():
    """As in the original: the mean of squares is infinite from then on, and the step is zero."""
    g = jnp.array([1e25, 1.0])
    tx = optzoo.adadelta(1.0)
    state = tx.init(g)
    for _ in range(2):
        updates, state = tx.update(g, state, g)
    assert updates[0] == 0 and updates[1] < 0
    assert optzoo.get_slot(state, "accum_update")[0] == 0
