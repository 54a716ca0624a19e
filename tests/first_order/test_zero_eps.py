"""With eps=0: updates are finite if the gradient is, and zero gradients change nothing."""

import chex
import jax.numpy as jnp
import pytest

from optzoo import CATALOG
from optzoo.testing import samples

WITH_EPS = """
    adadelta adam adam_gs adamax adamw amsgrad custom_adam grad_variance_scaled lazy_adam
    lazy_adam_gs nadam rmsprop
"""
CASES = {name: {} for name in WITH_EPS.split()}
CASES["rmsprop centered"] = {"centered": True}
CASES["amsgrad decay"] = {"decay_learning_rate": True}
CASES["adamw"] = {"weight_decay_per_step": 0.0}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("without_memory", [False, True], ids=["default", "b1=b2=0"])
@pytest.mark.parametrize("eps", [0.0, 1e-40])  # the latter is zero if subnormals are flushed
def test_finite_without_epsilon(name, without_memory, eps):
    kwargs = dict(CASES[name], eps=eps)
    name = name.split()[0]
    if without_memory:  # the means equal the gradient, so a zero gradient gives zero means
        decays = {"rmsprop": ["b2"], "adadelta": ["b2"]}.get(name, ["b1", "b2"])
        kwargs |= dict.fromkeys(decays, 0.0)
    tx, x = samples.make(CATALOG[name], **kwargs), jnp.ones(6)
    tiny, state = jnp.finfo("float32").tiny, tx.init(x)
    for g in ([0, 1, -1e-30, tiny, 1e15, 3], [0, 1, 1e-30, 0, 1e15, 0], [0, 1, 0, 0, 0, 0]):
        updates, state = tx.update(jnp.array(g, jnp.float32), state, x)
        chex.assert_tree_all_finite((updates, state))
        assert updates[0] == 0
