"""CustomAdam is LazyAdam."""

import chex
import jax.numpy as jnp
import pytest

import optzoo
from optzoo.testing.samples import dense_grads, params, row_grads, trajectory


@pytest.mark.parametrize("grads", [dense_grads, row_grads])
def test_is_lazy_adam(grads):
    both = [
        trajectory(make(0.1, 0.7, 0.9, 1e-3), params(), lambda x, _: grads(x), jnp.arange(3))
        for make in (optzoo.custom_adam, optzoo.lazy_adam)
    ]
    chex.assert_trees_all_equal(*both)
