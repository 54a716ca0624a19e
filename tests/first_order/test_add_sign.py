"""AddSign against its formula."""

import jax.numpy as jnp
import numpy as np

import optzoo
from optzoo.testing.samples import trajectory


def steps(tx, grads):
    path = trajectory(tx, jnp.zeros(()), lambda _, g: g, jnp.array(grads))
    return -jnp.diff(path, prepend=0.0)


def test_agreement_doubles_and_disagreement_cancels():
    got = steps(optzoo.add_sign(0.5), [4.0, 2.0, -1.0])
    np.testing.assert_allclose(got, [0.5 * 8, 0.5 * 4, 0], atol=1e-6)


def test_no_mean_no_sign():
    """A zero gradient moves nothing; after the decay of the sign term only alpha is left."""
    got = steps(optzoo.add_sign(1.0, alpha=3.0, sign_decay=0.5), [0.0, 2.0])
    np.testing.assert_allclose(got, [0, 3.5 * 2], rtol=1e-6)


def test_sign_decay_is_a_schedule():
    decay = optzoo.linear_sign_decay(2)
    got = steps(optzoo.add_sign(1.0, sign_decay=decay), [1.0, 1.0, 1.0, 1.0])
    np.testing.assert_allclose(got, [2, 1.5, 1, 1], rtol=1e-6)
