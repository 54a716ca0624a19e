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
from optzoo.testing.samples import step_of


@pytest.fixture
def params():
    mesh = Mesh(np.array(jax.devices()), ("d",))
    return jax.device_put({"w": jnp.ones((16, 4))}, NamedSharding(mesh, PartitionSpec("d")))


def gradients(kind, params):
    rows = optzoo.SparseRows(jnp.array([1, 5, 1, 15]), jnp.ones((4, 4)), 16)
    return {"w": rows} if kind == "rows" else params


def takes_norms(entry):
    return entry.factory in (optzoo.adafactor, optzoo.lamb, optzoo.lars, optzoo.normalized_sgd)


def has_matrices(entry):
    """Of the whole parameter: XLA chooses where they are, and what to fetch for them."""
    return entry.factory in (
        optzoo.blocked_shampoo,
        optzoo.muon,
        optzoo.shampoo,
        optzoo.soap,
    )


def has_rows(leaf):
    """But for Adafactor's means over rows, which all devices have."""
    return leaf.ndim and leaf.shape != (4,)


@pytest.mark.optimized
@pytest.mark.parametrize("kind", ["dense", "rows"])
def test_sharded(entry, kind, params):
    tx = entry.make()
    state, grads = tx.init(params), gradients(kind, params)
    is_placed = lambda leaf: leaf.shape == (16, 4) if has_matrices(entry) else has_rows(leaf)
    shardings = lambda tree: [x.sharding.spec for x in jax.tree.leaves(tree) if is_placed(x)]
    assert set(shardings(state)) <= {PartitionSpec("d")}
    step = jax.jit(step_of(tx))
    compiled = step.lower(params, state, grads).compile()
    if kind == "dense":  # rows must be fetched from where they are
        collectives = set(re.findall(r"all-\w+|collective-\w+|reduce-scatter", compiled.as_text()))
        if has_matrices(entry):
            assert "all-reduce" in collectives
        else:
            assert collectives == ({"all-reduce"} if takes_norms(entry) else set())
    after, new = compiled(params, state, grads)
    assert shardings(new) == shardings(state) and shardings(after) == shardings(params)
    alone = jax.device_put((params, state, grads), jax.devices()[0])
    chex.assert_trees_all_close(after, step(*alone)[0], rtol=1e-6)


def per_replica(ids, table, *, varying, check):
    """Each of the replicas takes a lazy step on its own ids, from a table all have."""
    mesh = Mesh(np.array(jax.devices()), ("r",))
    tx = optzoo.lazy_adam(0.1)

    def step(table, ids):
        table = table[0] if varying else table
        loss = lambda table: jnp.sum(optzoo.lookup(table, ids[0]) ** 2)
        _, grad = optzoo.value_and_grad(loss)(table)
        updates, _ = tx.update(grad, tx.init(table), table)
        return grad.to_dense()[None], optax.apply_updates(table, updates)[None]

    of_table = PartitionSpec("r") if varying else PartitionSpec()
    specs = {"in_specs": (of_table, PartitionSpec("r")), "out_specs": PartitionSpec("r")}
    mapped = jax.shard_map(step, mesh=mesh, check_vma=check, **specs)
    given = jnp.broadcast_to(table, (8, *table.shape)) if varying else table
    return jax.jit(mapped)(given, ids)


TABLE, IDS = jnp.arange(1.0, 13).reshape(6, 2), (jnp.arange(24).reshape(8, 3) ** 2) % 6


@pytest.mark.parametrize(("varying", "check"), [(True, True), (True, False), (False, False)])
def test_rows_in_shard_map_are_those_of_the_replica(varying, check):
    grads, moved = per_replica(IDS, TABLE, varying=varying, check=check)
    for replica, ids in enumerate(IDS):
        want = jax.grad(lambda table, ids=ids: jnp.sum(table[ids] ** 2))(TABLE)
        np.testing.assert_allclose(grads[replica], want, rtol=1e-6)
        np.testing.assert_array_equal(moved[replica] != TABLE, want != 0)


def test_a_replicated_table_in_a_checked_shard_map_is_refused():
    """JAX would sum the gradient over the replicas, whose rows are different ones."""
    with pytest.raises(ValueError, match="pcast"):
        per_replica(IDS, TABLE, varying=False, check=True)
