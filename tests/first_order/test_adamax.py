"""AdaMax against its formula."""

import jax.numpy as jnp
import numpy as np

import optzoo
from optzoo.testing.samples import run


def test_first_step_is_the_learning_rate():
    """At t = 1 the bias correction cancels and v = |g|."""
    g = jnp.array([3.0, -0.2])
    tx = optzoo.adamax(0.01)
    updates, _ = tx.update(g, tx.init(g))
    np.testing.assert_allclose(updates, -0.01 * jnp.sign(g), rtol=1e-6)


def test_norm_decays_slowly_and_grows_at_once():
    tx = optzoo.transforms.scale_by_adamax(b2=0.5)
    _, states = run(tx, np.array([[1], [0], [-8]], "float32"))
    np.testing.assert_array_equal(states.slots.v, [[1], [0.5], [8]])
