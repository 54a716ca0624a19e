"""Steps in files of jax.export, as a function of leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import optzoo
from optzoo.core import compat
from optzoo.testing import samples

IDS = np.array([1, 3, 1])
OPTIMIZERS = {
    "lazy_adam": lambda: optzoo.lazy_adam(0.1),
    "average": lambda: optzoo.moving_average(optzoo.lazy_adam(0.1), 0.9),
    "caught_up": lambda: optzoo.caught_up(optzoo.adam(0.1), mask="table"),
    "random bits": lambda: optzoo.slots_dtype(
        optzoo.lazy_adam(0.1), "bfloat16", packed=True, stochastic=True
    ),
}


def loss(params, ids):
    return jnp.sum(optzoo.lookup(params["table"], ids) ** 2)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_file_has_the_step(name, monkeypatch):
    monkeypatch.setattr(compat, "may_be_for_tpus", lambda: False)  # whether libtpu is here or not
    tx = OPTIMIZERS[name]()
    params = samples.params()
    leaves, tree = jax.tree.flatten((params, tx.init(params)))
    step = optzoo.minimize(loss, tx)
    flat = jax.jit(lambda leaves, ids: jax.tree.leaves(step(*tree.unflatten(leaves), ids)))
    file = export.export(flat)(leaves, IDS).serialize()
    got = export.deserialize(file).call(leaves, IDS)
    for a, b in zip(got, flat(leaves, IDS), strict=True):
        np.testing.assert_array_equal(a, b)
    assert len(export.export(step)(*tree.unflatten(leaves), IDS).in_avals) == len(leaves) + 1
