"""Options of tables on the host."""

import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

import optzoo

from .effects import Table, outcome

TABLE = Table()
effect = TABLE.effect
TX = optzoo.momentum(0.1, 0.9)


def store_of(rows=20, **options):
    """A store of rows of ones, its parameters and state."""
    rows = np.ones((rows, 2), np.float32) if isinstance(rows, int) else rows
    store = optzoo.host.HostTable(rows, TX, options.pop("cache_rows", 4), **options)
    return store, *store.init(options.pop("others", None))


def swapped(store, params, state, *batches):
    """Parameters and state after the swaps of batches of ids, without a step."""
    for _ in store.ahead(map(np.array, batches), ids=lambda batch: batch):
        params, state = store.swap(params, state)
    return params, state


@effect("host.HostTable", "policy", {"lfu": [0, 1, 4, 5], "lru": [2, 3, 4, 5]})
def _(policy):
    """Which rows are in the cache."""
    store, params, state = store_of(policy=policy)
    swapped(store, params, state, [0, 1], [0, 1], [2, 3], [4, 5])
    return sorted(store._tables["table"].map.id_of[:-1].tolist())


@effect("host.HostTable", "init", {None: 0.0, "fours": 4.0})
def _(init):
    """What rows begin with that were given as a shape."""
    shape = jax.ShapeDtypeStruct((20, 2), jnp.float32)
    given = None if init is None else lambda ids: jnp.full((len(ids), 2), 4.0)
    store, params, state = store_of(shape, init=given)
    return float(store.read(params, state, 7)[0])


@effect("host.HostTable", "vocabulary", {None: "TypeError", "given": 1})
def _(vocabulary):
    """Keys that are strings."""
    given = None if vocabulary is None else optzoo.growing.Vocabulary(20)
    store, params, state = store_of(vocabulary=given)
    if given is None:
        return outcome(lambda: swapped(store, params, state, ["a"]))
    swapped(store, params, state, ["a"])
    return len(given)


@effect("host.HostTable", "sharding", {False: 4, True: 2})
def _(sharding):
    """The rows of the cache that a device has."""
    mesh = jax.make_mesh((2,), ("shard",), axis_types=(jax.sharding.AxisType.Auto,))
    given = optzoo.sharded.RowSharding(4, 2, multiple=1) if sharding else None
    _, params, _ = store_of(mesh=mesh, sharding=given)
    return params["table"].addressable_shards[0].data.shape[0]


@effect("host.HostTable", "mesh", {1: 1, 2: 2})
def _(mesh):
    """The devices that have the cache."""
    mesh = jax.make_mesh((mesh,), ("shard",), axis_types=(jax.sharding.AxisType.Auto,))
    return len(store_of(mesh=mesh)[1]["table"].sharding.device_set)


@effect("host.HostTable", "folder", {None: 0, "given": 1})
def _(folder):
    """The number of flushes in it."""
    with tempfile.TemporaryDirectory() as path:
        store, *_ = store_of(folder=None if folder is None else pathlib.Path(path))
        store.close()
        return store.flushes


@effect("host.HostTable.init", "others", {None: ["table"], "given": ["table", "w"]})
def _(others):
    store = optzoo.host.HostTable(np.ones((20, 2), np.float32), TX, 4)
    return sorted(store.init(None if others is None else {"w": jnp.ones(3)})[0])


@effect("host.HostTable.minimize", "options", {False: 3, True: 4})
def _(has_aux):
    """What a step returns."""
    store, params, state = store_of()
    loss = lambda p, ids: jnp.sum(optzoo.lookup(p["table"], ids))
    aux = lambda p, ids: (loss(p, ids), 1.0)
    step = store.minimize(aux, has_aux=True) if has_aux else store.minimize(loss)
    return len(step(*swapped(store, params, state, [1]), np.array([0])))


test_an_option_has_its_effect = TABLE.test()
