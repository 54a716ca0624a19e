"""RMSProp against its formula."""

import jax.numpy as jnp
import numpy as np
import pytest

import optzoo
from optzoo.testing.samples import trajectory

G = jnp.array([3.0, -0.5])


@pytest.mark.parametrize("centered", [False, True])
def test_mean_square_starts_at_one(centered):
    tx = optzoo.rmsprop(0.1, b2=0.75, eps=0.0, centered=centered)
    updates, state = tx.update(G, tx.init(G))
    rms = 0.75 + 0.25 * G**2
    variance = rms - (0.25 * G) ** 2 if centered else rms
    np.testing.assert_allclose(updates, -0.1 * G / jnp.sqrt(variance), rtol=1e-6)
    np.testing.assert_allclose(state.slots.rms, rms, rtol=1e-6)
    assert ("mg" in state.slots._fields) == centered


def test_long_run_normalizes_the_gradient():
    path = trajectory(optzoo.rmsprop(0.1), jnp.zeros(2), lambda x, _: G, jnp.arange(200))
    np.testing.assert_allclose(path[-1] - path[-2], -0.1 * jnp.sign(G), rtol=1e-3)


def test_past_steps_keep_their_rate():
    """Without gradients the last step is halved, for any later rate."""
    tx = optzoo.rmsprop(lambda k: jnp.where(k == 0, 1.0, 100.0), momentum=0.5)
    grads = jnp.stack([G, 0 * G, 0 * G])
    path = trajectory(tx, jnp.zeros(2), lambda _, g: g, grads)
    np.testing.assert_allclose(path[1], 1.5 * path[0], rtol=1e-6)
    np.testing.assert_allclose(path[2], 1.75 * path[0], rtol=1e-6)


@pytest.mark.parametrize("centered", [False, True])
def test_no_momentum_is_momentum_of_zero_without_its_slot(centered):
    grads = jnp.stack([G, -G, 0 * G, 2 * G])
    none, zero = (
        optzoo.rmsprop(0.1, momentum=momentum, centered=centered) for momentum in (None, 0.0)
    )
    path = lambda tx: trajectory(tx, jnp.zeros(2), lambda _, g: g, grads)
    np.testing.assert_allclose(path(none), path(zero), rtol=1e-6)
    assert {*none.init(G).slots._fields} == {*zero.init(G).slots._fields} - {"momentum"}


@pytest.mark.parametrize(("eps", "want"), [(0.0, 0.0), (0.04, -0.5)])
def test_a_variance_below_zero_is_zero(eps, want):
    """Rounding may make it so; without an epsilon there is no step, rather than NaN."""
    tx, x = optzoo.rmsprop(0.1, b2=0.5, eps=eps, centered=True), jnp.ones(1)
    state = optzoo.set_slot(tx.init(x), "mg", x)
    state = optzoo.set_slot(state, "rms", 0.99 * x)
    np.testing.assert_allclose(tx.update(x, state)[0], [want], rtol=1e-6)
