"""A cache that is sharded by rows over the devices of this process."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optzoo

from ..sharded.cases import mesh_of
from .cases import IDS, ROWS, adam, batches, first, loss, near, others, same, table, train

pytestmark = pytest.mark.optimized
DATA = [(np.append(ids[:-1], 3), y) for ids, y in batches()]  # without padding


def of_ordinary(tx, mesh, catch_up=False):
    """Parameters and state of an ordinary sharded table, in the order of ids."""
    s = optzoo.sharded.RowSharding(ROWS, mesh.size, multiple=1)
    whole = jnp.pad(jnp.asarray(table()), ((0, s.stored_rows), (0, 0)))
    put = lambda x: jax.device_put(x, jax.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    params = {"table": optzoo.sharded.create_table(s, mesh, lambda ids: whole[ids])}
    params |= jax.tree.map(put, others())
    state = jax.jit(tx.init, out_shardings=optzoo.state_sharding(tx, params))(params)
    step = optzoo.sharded_minimize(loss, tx, mesh, {"table": s})
    losses = []
    for ids, y in DATA:
        params, state, value = step(params, state, ids, y)
        losses.append(float(value))
    if catch_up:
        params, state = optzoo.rows.catch_up(params, state)
    tree = optzoo.sharded.in_order_of_ids({"p": params, "s": state}, {"table": s}, params)
    cut = lambda a: np.asarray(a)[:ROWS] if a.shape[:1] == (s.stored_rows,) else np.asarray(a)
    return jax.tree.map(cut, (tree["p"], tree["s"])), losses


def of_host(tx, mesh, sharding, cache):
    store = optzoo.host.HostTable(table(), tx, cache, sharding=sharding, mesh=mesh)
    step = store.minimize(loss)
    *got, losses = train(store, *store.init(others()), DATA, step=step)
    assert step._cache_size() == 1  # compiled once
    return store, got, losses


@pytest.mark.unique
@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
@pytest.mark.parametrize("partition", ["mod", "div"])
def test_a_sharded_cache(partition, kind):
    mesh = mesh_of(4, kind=kind)
    want, losses = of_ordinary(adam(), mesh)
    s = optzoo.sharded.RowSharding(18, mesh.size, partition, multiple=1)
    store, got, values = of_host(adam(), mesh, s, 18)
    assert got[0]["table"].sharding.is_equivalent_to(jax.NamedSharding(mesh, s.spec), 2)
    read = store.read(*got, np.arange(ROWS))
    same(store.flush(*got), tuple(want))
    same(read, want[0]["table"])
    assert values == losses and store.stats().rows_out > 0


def test_deferred_rows_in_shards():
    mesh, tx = mesh_of(2), optzoo.caught_up(optzoo.adam(0.05), mask="table")
    want, _ = of_ordinary(tx, mesh, catch_up=True)
    s = optzoo.sharded.RowSharding(18, mesh.size, multiple=1)
    store, got, _ = of_host(tx, mesh, s, 18)
    near(store.flush(*got), tuple(want), 1e-5)


def test_a_cache_on_all_devices():
    """The batch is divided, and each device has the whole cache."""
    mesh = mesh_of(4)
    want, losses = of_ordinary(adam(), mesh)
    store, got, values = of_host(adam(), mesh, None, 16)
    assert got[0]["table"].sharding.is_fully_replicated
    near(store.flush(*got), tuple(want))
    np.testing.assert_allclose(values, losses, 1e-5)


def test_rows_that_begin_anew_in_shards():
    """A vocabulary over a sharded cache has the values of one over a cache on one device."""
    rows = optzoo.sharded.uniform_rows(jax.random.key(0), 8)
    shape = jax.ShapeDtypeStruct((10, 8), jnp.float32)
    data = [(np.arange(k, k + 4).repeat(3), np.ones(IDS, np.float32)) for k in range(0, 24, 2)]
    mesh, found = mesh_of(2), []
    s = optzoo.sharded.RowSharding(6, 2, multiple=1)
    for options in ({}, {"mesh": mesh, "sharding": s}):
        v = optzoo.growing.Vocabulary(10, evict_after=1)
        store = optzoo.host.HostTable(shape, adam(), 6, init=rows, vocabulary=v, **options)
        got = train(store, *store.init(others()), data)[:2]
        found.append(store.flush(*got))
    near(found[1], found[0])


def test_checkpoints_of_shards():
    mesh = mesh_of(2)
    s = optzoo.sharded.RowSharding(18, mesh.size, multiple=1)
    store, got, _ = of_host(adam(), mesh, s, 18)
    saved = jax.tree.map(np.array, store.flush(*got))
    again = optzoo.host.HostTable(table(), adam(), 18, sharding=s, mesh=mesh)
    params, state = again.load(*saved)
    assert not params["table"].sharding.is_fully_replicated
    same(again.flush(params, state), tuple(saved))
    for places, (_, y) in again.ahead(DATA, ids=first):
        params, state = again.swap(params, state)
        del places, y


def test_a_sharding_of_another_size():
    mesh = mesh_of(2)
    s = optzoo.sharded.RowSharding(18, 2)
    with pytest.raises(ValueError, match="has num_rows=18, but cache_rows is 17"):
        optzoo.host.HostTable(table(), adam(), 17, sharding=s, mesh=mesh)
    with pytest.raises(TypeError, match="sharding must be an optzoo"):
        optzoo.host.HostTable(table(), adam(), 17, sharding=3, mesh=mesh)
