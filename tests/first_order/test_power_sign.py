"""PowerSign against its formula."""

import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo.testing.samples import trajectory


def steps(tx, grads):
    path = trajectory(tx, jnp.zeros(()), lambda _, g: g, jnp.array(grads))
    return -jnp.diff(path, prepend=0.0)


@pytest.mark.parametrize("base", [math.e, 4, 0.5])
def test_agreement_multiplies_and_disagreement_divides(base):
    got = steps(optzoo.power_sign(0.5, base=base), [4.0, 2.0, -1.0, 0.0])
    np.testing.assert_allclose(got, [2 * base, base, -0.5 / base, 0], rtol=1e-5)


def test_sign_decay_of_one_half_is_a_square_root():
    decay = optzoo.linear_sign_decay(2)
    got = steps(optzoo.power_sign(1.0, base=4.0, sign_decay=decay), [1.0, 1.0, 1.0, 1.0])
    np.testing.assert_allclose(got, [4, 2, 1, 1], rtol=1e-5)
    got = steps(optzoo.power_sign(1.0, base=4.0, sign_decay=0.5), [1.0, -0.01])
    np.testing.assert_allclose(got, [2, -0.005], rtol=1e-4)


def test_injected_base():
    grads = [3.0, -1.0]
    tx = optax.inject_hyperparams(optzoo.power_sign)(0.5, base=lambda k: 4.0 - k)
    np.testing.assert_allclose(steps(tx, grads), [1.5 * 4, -0.5 / 3], rtol=1e-5)
