"""What is done to a state in the middle of a cycle leaves the history what it is without it."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import optzoo

from ..growing.cases import same
from ..round_trips import through_flax, through_orbax

ROWS, STEPS = 8, 7
LAZY = lambda: optzoo.lazy_adam(0.1)
FBGEMM = optzoo.interop.fbgemm
GRAFTED = {"start_step": 6, "preconditioner_interval": 3, "block_size": 4}
# With the number of steps after which each is stopped.
CYCLES = {
    "accumulate": (lambda: optzoo.accumulate(LAZY(), 3), 5),
    "accumulate, rows": (lambda: optzoo.accumulate(LAZY(), 3, max_rows={"table": 9}), 5),
    "accumulate, by a schedule": (lambda: optzoo.accumulate(LAZY(), lambda k: 2 + k), 4),
    "agn": (lambda: optzoo.agn(LAZY(), axis_name=None, communication_period=3), 5),
    "elastic_average": (
        lambda: optzoo.elastic_average(LAZY(), 1, axis_name=None, communication_period=3),
        5,
    ),
    "model_average": (lambda: optzoo.model_average(LAZY(), axis_name=None, interval_steps=3), 5),
    "diloco, overlapping": (
        lambda: optzoo.diloco(LAZY(), axis_name=None, communication_period=3, overlap_steps=2),
        5,
    ),
    "diloco, fragments": (
        lambda: optzoo.diloco(
            LAZY(), axis_name=None, communication_period=4, fragments=2, overlap_steps=1
        ),
        5,
    ),
    "sync_replicas": (
        lambda: optzoo.sync_replicas(LAZY(), 3, 1, axis_name=None),
        5,
    ),
    "drop_stale_gradient": (
        lambda: optzoo.drop_stale_gradient(LAZY(), 1, axis_name=None),
        3,
    ),
    "caught_up": (lambda: optzoo.caught_up(optzoo.adam(0.1), mask="table", horizon=4), 5),
    "caught_up, average": (
        lambda: optzoo.caught_up(
            optzoo.moving_average(optzoo.adam(0.1), 0.9), mask="table", horizon=4
        ),
        5,
    ),
    "moving_average": (
        lambda: optzoo.moving_average(LAZY(), 0.9, num_updates="count"),
        3,
    ),
    "ensemble": (lambda: FBGEMM.ensemble(LAZY(), 2, 6), 3),
    "ema_in_place": (lambda: FBGEMM.ema_in_place(LAZY(), 4), 2),
    "multitask": (lambda: optzoo.multitask(LAZY()), 3),
    "skip_spikes": (
        lambda: optzoo.skip_spikes(LAZY(), window=4, min_values=2, deviations=0.5),
        5,
    ),
    "at random": (lambda: optzoo.slots_dtype(LAZY(), "bfloat16", stochastic=True), 3),
    "packed at random": (
        lambda: optzoo.slots_dtype(LAZY(), "bfloat16", packed=True, stochastic=True),
        3,
    ),
    "int8 at random": (lambda: optzoo.slots_dtype(LAZY(), "int8", stochastic=True), 3),
    "master_weights": (lambda: optzoo.master_weights(LAZY()), 3),
    "shampoo": (lambda: optzoo.shampoo(0.1, preconditioner_interval=3), 5),
    "blocked_shampoo": (lambda: optzoo.blocked_shampoo(0.1, **GRAFTED, stagger=True), 5),
    "soap": (lambda: optzoo.soap(0.1, preconditioner_interval=3, one_sided=True), 5),
    "ggt": (lambda: optzoo.ggt(0.1, window=4), 3),
}
OF_MATRICES = ("shampoo", "blocked_shampoo", "soap", "ggt")


def start(name, rows=ROWS):
    draw = np.random.default_rng(0).normal
    table, w, b = (draw(size=shape).astype("float32") for shape in ((12, 2), (4, 2), ()))
    params = {"table": table[:rows], "layer": {"w": w, "b": b}}
    return cast(params, "bfloat16") if name == "master_weights" else params


def cast(tree, dtype):
    return jax.tree.map(lambda a: jnp.asarray(a, dtype), tree)


def rows_of(ids):
    """The rows that a larger table has from the start."""
    return jnp.asarray(start("", 12)["table"])[ids]


def loss(p, ids, y):
    rows = optzoo.lookup(p["table"], ids)
    return jnp.mean((rows @ p["layer"]["w"].T + p["layer"]["b"] - y) ** 2)


def batches():
    draw = np.random.default_rng(1)
    ids = draw.integers(0, ROWS, (STEPS, 3))
    return list(zip(ids, draw.normal(size=(STEPS, 3, 4)).astype("float32"), strict=True))


def goes_on(tx, params, state, steps):
    """Parameters and state after these steps, by a program of its own."""
    step = jax.jit(optzoo.minimize(loss, tx))
    for batch in batches()[steps]:
        params, state, _ = step(params, state, *batch)
    return params, state


def begun(name, rows=ROWS, place=lambda tree: tree):
    make, at = CYCLES[name]
    params = place(start(name, rows))
    tx = make()
    return at, goes_on(tx, params, tx.init(params), slice(at))


@functools.cache
def until_the_middle(name):
    return begun(name)


@functools.cache
def until_the_end(name):
    make, at = CYCLES[name]
    return goes_on(make(), *until_the_middle(name)[1], slice(at, None))


def close(got, want):
    """Of two programs, which may round in another order."""
    chex.assert_trees_all_close(*jax.device_get((got, want)), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("save", [through_flax, through_orbax])
@pytest.mark.parametrize("name", CYCLES)
def test_saved_and_restored(name, save, tmp_path):
    at, now = until_the_middle(name)
    tx, params = CYCLES[name][0](), start(name)
    like = jax.eval_shape(lambda: (jax.tree.map(jnp.asarray, params), tx.init(params)))
    restored = save(now, like, tmp_path)
    same(restored, now)
    same(goes_on(tx, *restored, slice(at, None)), until_the_end(name))


@pytest.mark.parametrize("name", CYCLES)
def test_another_storage_and_back(name):
    at, (params, state) = until_the_middle(name)
    tx, x = CYCLES[name][0](), start(name)
    like = jax.eval_shape(optzoo.slots_dtype(tx, "float32", packed=True).init, x)
    other = optzoo.state.slots_like(state, like)
    same(optzoo.state.slots_like(other, jax.eval_shape(tx.init, x)), state)
    got, _ = goes_on(
        optzoo.slots_dtype(CYCLES[name][0](), "float32", packed=True),
        params,
        other,
        slice(at, None),
    )
    close(got, until_the_end(name)[0])


@pytest.mark.parametrize("name", CYCLES)
def test_slots_that_are_set_as_they_are(name):
    _, now = until_the_middle(name)
    _, state = optzoo.rows.catch_up(*now) if "caught_up" in name else now
    for slot in optzoo.slot_names(state):
        same(optzoo.set_slot(state, slot, optzoo.get_slot(state, slot)), state)


# New rows have the slots of tx.init: averages that do not start from the parameters are others.
GROW = [name for name in CYCLES if name not in ("ensemble", *OF_MATRICES)]


@pytest.mark.parametrize("name", GROW)
def test_tables_that_grow(name):
    """As with the larger table from the start."""
    _, now = until_the_middle(name)
    tx = CYCLES[name][0]()
    now = optzoo.growing.resize_table(*now, {"table": 12}, tx=tx, init=rows_of)
    _, want = begun(name, 12)
    if "caught_up" in name:  # they are caught up before
        want = optzoo.rows.catch_up(*want)
    same(now, want)


def on_devices(number, kind, tree):
    """The first axes are divided, where they can be."""
    mesh = jax.make_mesh((number,), ("shard",), axis_types=(AxisType[kind],))
    spec = lambda x: PartitionSpec(*("shard" for rows in x.shape[:1] if rows % number == 0))
    put = lambda x: jax.device_put(jnp.asarray(x), NamedSharding(mesh, spec(x)))
    return jax.tree.map(put, tree)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("name", [name for name in CYCLES if name != "master_weights"])
def test_on_more_devices(name, kind):
    """From two to four, without ``jax.set_mesh``; sums in 16 bits have an order."""
    at, now = begun(name, place=functools.partial(on_devices, 2, kind))
    params, tx = on_devices(4, kind, start(name)), CYCLES[name][0]()
    places = jax.tree.map(lambda x: x.sharding, params), optzoo.state_sharding(tx, params)
    got, _ = goes_on(tx, *jax.device_put(now, places), slice(at, None))
    close(got, until_the_end(name)[0])
