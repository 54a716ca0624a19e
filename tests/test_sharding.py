"""The state takes the sharding of the parameters, and an update moves nothing between devices."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import optzoo


@pytest.fixture
def params():
    mesh = Mesh(np.array(jax.devices()), ("d",))
    return jax.device_put({"w": jnp.ones((16, 4))}, NamedSharding(mesh, PartitionSpec("d")))


def gradients(kind, params):
    rows = optzoo.SparseRows(jnp.array([1, 5, 1, 15]), jnp.ones((4, 4)), 16)
    return {"w": rows} if kind == "rows" else params


@pytest.mark.parametrize("kind", ["dense", "rows"])
def test_sharded(entry, kind, params):
    tx = entry.make()
    state, grads = tx.init(params), gradients(kind, params)
    shardings = lambda tree: [leaf.sharding.spec for leaf in jax.tree.leaves(tree) if leaf.ndim]
    assert set(shardings(state)) <= {PartitionSpec("d")}

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    compiled = jax.jit(step).lower(params, state, grads).compile()
    if kind == "dense":  # rows must be fetched from where they are
        assert not re.findall(r"all-|collective-|reduce-scatter", compiled.as_text())
    after, new = compiled(params, state, grads)
    assert shardings(new) == shardings(state) and shardings(after) == shardings(params)
    alone = jax.device_put((params, state, grads), jax.devices()[0])
    chex.assert_trees_all_close(after, jax.jit(step)(*alone)[0], rtol=1e-6)
