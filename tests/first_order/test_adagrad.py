"""Adagrad: steps that fall with the square root of their number."""

import jax.numpy as jnp
import numpy as np

import optzoo
from optzoo.testing.samples import trajectory


def test_steps_fall_with_the_root_of_their_number():
    """If the gradient is constant and the accumulator starts near 0, step t is rate / sqrt(t)."""
    tx, g = optzoo.adagrad(0.1, initial_accumulator_value=1e-20), jnp.array([5.0, -0.01])
    path = trajectory(tx, jnp.zeros(2), lambda x, _: g, jnp.arange(6))
    steps = jnp.diff(path, axis=0, prepend=jnp.zeros((1, 2)))
    t = jnp.arange(1.0, 7)[:, None]
    np.testing.assert_allclose(steps, -0.1 * jnp.sign(g)[None] / jnp.sqrt(t), rtol=1e-4)


def test_first_step_weighs_in_the_initial_accumulator():
    tx, g = optzoo.adagrad(1.0, initial_accumulator_value=16.0), jnp.array([3.0])
    updates, state = tx.update(g, tx.init(g))
    np.testing.assert_allclose(updates, -3 / 5, rtol=1e-6)
    np.testing.assert_allclose(state[0].slots.accumulator, 25)
