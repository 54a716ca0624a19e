"""Adadelta against optax's, and its first steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo.testing.samples import trajectory

G = jnp.array([3.0, -0.02])


def test_is_that_of_optax():
    grads = lambda x, i: jnp.cos(3 * x + i)
    ours, theirs = (
        trajectory(tx, jnp.arange(3.0), grads, jnp.arange(20.0))
        for tx in (
            optzoo.adadelta(0.5, b2=0.8, eps=1e-3),
            optax.adadelta(0.5, rho=0.8, eps=1e-3),
        )
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_two_steps_by_hand():
    tx, eps = optzoo.adadelta(2.0, b2=0.75, eps=0.01), 0.01
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


def by_formula(gs, rho, eps):
    """The directions in float64, and the slots after the last."""
    a, u, ds = np.zeros(gs.shape[1]), np.zeros(gs.shape[1]), []
    for g in gs:
        a = rho * a + (1 - rho) * g**2
        ds.append(np.sqrt(u + eps) / np.sqrt(a + eps) * g)
        u = rho * u + (1 - rho) * ds[-1] ** 2
    return np.stack(ds), a, u


@pytest.mark.parametrize("eps", [1e-8, 1e-4])
@pytest.mark.parametrize("rho", [0.0, 0.5, 0.95, 0.999])
@pytest.mark.parametrize("scales", ["one for each element", "changing from step to step"])
def test_is_exact_at_all_magnitudes(rho, eps, scales):
    powers = 10.0 ** np.arange(-20, 19)
    if scales == "changing from step to step":
        powers = np.stack([np.roll(powers, 11 * k) for k in range(6)])
    signs = np.cos(np.arange(6 * 39)).reshape(6, 39)
    gs = (powers * signs).astype(np.float32)
    gs[2:4, ::7] = 0
    tx = optzoo.adadelta(1.0, b2=rho, eps=eps)
    state = tx.init(jnp.zeros(39))
    ds, accum, accum_update = by_formula(gs.astype(np.float64), rho, eps)
    for g, d in zip(gs, ds, strict=True):
        update, state = jax.jit(tx.update)(jnp.asarray(g), state)
        np.testing.assert_allclose(update, -d, rtol=2e-6)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-37)
    close(optzoo.get_slot(state, "accum"), accum)
    close(optzoo.get_slot(state, "accum_update"), accum_update)


def test_a_tiny_epsilon_moves_large_gradients():
    """The quotient of the means is 1e-66 here, which float32 does not have."""
    g, tx = jnp.array([1e18, 1.0]), optzoo.adadelta(1.0, b2=0.5, eps=1e-30)
    state, update = tx.init(g), jax.jit(tx.update)
    for squared_step in (1e-30 / 0.5, 2e-30 / 0.75):
        step, state = update(g, state)
        np.testing.assert_allclose(step, np.full(2, -(squared_step**0.5)), rtol=1e-5)


def test_an_injected_rho_may_be_zero():
    """Within jit, where no branch may be taken by the value of rho or epsilon."""
    tx = optax.inject_hyperparams(optzoo.adadelta)(learning_rate=1.0, b2=0.0)
    g = jnp.array([0.0, 1e-6, 1.0, 1e16])
    updates, _ = jax.jit(tx.update)(g, tx.init(g), g)
    np.testing.assert_allclose(updates, -1e-4 / np.sqrt(np.square(g) + 1e-8) * g, rtol=1e-5)
