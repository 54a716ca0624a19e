"""Deferred rows, natively: they are read, swept and updated as XLA does it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optzoo
from optzoo.native import engine
from optzoo.testing.samples import step_of

from ..selection import chosen_first
from .test_step import check_close, table

pytestmark = pytest.mark.skipif(engine.problem() is not None, reason=str(engine.problem()))

ROWS, WIDTH, STEPS = 120, 6, 40
# Sums of a few steps, so that rows are deferred for longer: b1 is small. A row is swept after 40
# steps.
adam = functools.partial(optzoo.adam, 0.1, b1=0.2, eps=1e-3)  # roundings do not grow
half = functools.partial(optzoo.slots_dtype, dtype="bfloat16", stochastic=True)
packed = lambda tx: optzoo.slots_dtype(tx, "float32", packed=True)
# By name the optimizer, whether its gradients are dense, and the shape of rows.
CASES = {
    "adam": (adam, False, (WIDTH,)),
    "adam, matrices": (adam, False, (2, 3)),
    "adam, numbers": (adam, False, ()),
    "adam, packed": (lambda: packed(adam()), False, (WIDTH,)),
    "adam, 16 bits": (lambda: half(adam()), False, (WIDTH,)),
    "adam, 16 bits packed": (lambda: half(adam(), packed=True), False, (WIDTH,)),
    "adamw": (lambda: optzoo.adamw(0.1, b1=0.2, weight_decay_per_step=0.01), True, (WIDTH,)),
    "average": (lambda: optzoo.moving_average(adam(), 0.9), False, (WIDTH,)),
    "average, decay varies": (
        lambda: optzoo.moving_average(adam(), 0.9, num_updates="count"),
        False,
        (WIDTH,),
    ),
    "nadam": (lambda: optzoo.nadam(0.1, b1=0.2), False, (WIDTH,)),
    "add_sign": (lambda: optzoo.add_sign(0.1, b1=0.2), False, (WIDTH,)),
    "momentum": (lambda: optzoo.momentum(0.1, 0.3), True, (WIDTH,)),
    "momentumw": (
        lambda: optzoo.momentumw(0.1, 0.3, weight_decay_per_step=0.01),
        True,
        (WIDTH,),
    ),
    "rmsprop": (lambda: optzoo.rmsprop(0.1, b2=0.5), True, (WIDTH,)),
    "amsgrad": (lambda: optzoo.amsgrad(0.1, b1=0.2), True, (WIDTH,)),
    "adamax": (lambda: optzoo.adamax(0.1, b1=0.2), True, (WIDTH,)),
    "power_sign": (lambda: optzoo.power_sign(0.1, b1=0.2), False, (WIDTH,)),
}
CHOSEN = {"adam", "adam, numbers", "adam, 16 bits packed", "adamw", "average, decay varies"}


def loss(params, ids, y):
    x = optzoo.lookup(params["table"], ids)
    wide = x.reshape(len(x), -1) + jnp.sum(optzoo.lookup(params["users"], ids % 9), axis=1)[:, None]
    return jnp.mean((wide @ params["w"] - y) ** 2)


def of_one_table(params, ids, y):
    return jnp.mean((optzoo.lookup(params["table"], ids) @ params["w"] - y) ** 2)


def batches(steps=STEPS):
    """Ids of which some repeat, and others are out of range; each batch of other rows."""
    rng = np.random.default_rng(0)
    for k in range(steps):
        few = rng.integers(0, 30, 24) + 10 * (k % 10)
        yield jnp.asarray(np.append(few, [ROWS]), jnp.int32), jnp.ones((25, 2))


def rows_seen(params, ids):
    """A loss without gradient, and the rows that it reads."""
    x = optzoo.lookup(params["table"], ids)
    return 0.0 * jnp.sum(x), x


def start(tx, row):
    size = int(np.prod(row))
    params = {"table": table(shape=(ROWS, *row)), "users": table(1, (9, 4))}
    params["w"] = table(2, (size, 2))
    return params, tx.init(params)


def run(tx, row, native, steps=STEPS):
    """The parameters, the state and the losses after some steps."""
    step, (params, state), losses = optzoo.minimize(loss, tx, native=native), start(tx, row), []
    for batch in batches(steps):
        params, state, value = step(params, state, *batch)
        losses.append(value)
    return params, state, jnp.stack(losses)


@pytest.mark.parametrize("case", chosen_first(CASES, CHOSEN))
def test_equals_xla(case):
    make, dense, row = CASES[case]
    tx = optzoo.caught_up(make(), mask=("table", "users"), dense=dense, horizon=1)
    native = True if case == "adam, packed" else "require"  # its dense array is left to XLA
    expected, got = (run(tx, row, how) for how in (False, native))
    last = np.asarray(got[1].last["table"])
    assert (last == STEPS).any() and (last < STEPS).any()
    # Roundings of a step are those of all later ones.
    check_close(expected, got, 1e-2 if "16 bits" in case else 1e-4)


def test_there_are_no_copies_of_tables():
    tx = optzoo.caught_up(adam(), mask="table")
    params = {"table": jnp.zeros((50_000, 16)), "w": jnp.ones((16, 2))}
    [batch] = batches(1)
    step = optzoo.minimize(of_one_table, tx, native="require")
    program = step.lower(params, tx.init(params), *batch).compile()
    assert program.memory_analysis().temp_size_in_bytes < 50_000 * 16
    # The sweep, if the clock runs and if it is stopped; reads of rows; the update, and two arrays.
    text = program.as_text()
    assert text.count('custom_call_target="optzoo_native_') >= 5
    assert " while(" not in text  # by which XLA merges rows of equal ids


def test_a_stopped_clock_gives_nan():
    """As a state does that was put together by hand."""
    tx, [batch] = optzoo.caught_up(adam(), mask="table"), batches(1)
    found = []
    for native in (False, "require"):
        params, state = start(tx, (WIDTH,))
        node = state.inner[0]
        state = state._replace(inner=(node._replace(count=node.count + 5), *state.inner[1:]))
        found.append(optzoo.minimize(loss, tx, native=native)(params, state, *batch))
    check_close(*found)
    assert np.isnan(found[1][2])


def test_ids_out_of_range_are_read_as_lookup_does():
    tx = optzoo.caught_up(adam(), mask="table", horizon=1)
    ids = jnp.array([-3, 0, ROWS - 1, ROWS, ROWS + 7])
    values = []
    for native in (False, True):
        params, state = start(tx, (WIDTH,))
        step = optzoo.minimize(rows_seen, tx, native=native, has_aux=True)
        values.append(step(params, state, ids)[3])
    np.testing.assert_array_equal(*values)
    assert np.isnan(values[1]).all(axis=1).tolist() == [True, False, False, False, True]
    np.testing.assert_array_equal(values[1][3], 0)


def test_rows_are_read_as_of_now():
    """An entry of the clock is taken for each row."""
    tx = optzoo.caught_up(adam(), mask=("table", "users"))
    params, state, _ = run(tx, (WIDTH,), "require", 12)
    current, _ = jax.jit(optzoo.rows.catch_up)(params, state)
    assert len(np.unique(state.last["table"])) > 5
    step = optzoo.minimize(rows_seen, tx, native=True, has_aux=True)
    seen = step(params, state, jnp.arange(ROWS))[3]
    np.testing.assert_allclose(seen, current["table"], rtol=1e-6)


AROUND = {
    "chain": lambda inner: optax.chain(
        optzoo.clip_by_global_norm(0.5), optzoo.caught_up(inner, mask="table", horizon=1)
    ),
    "groups": lambda inner: optzoo.param_groups(
        {"table": optzoo.caught_up(inner, horizon=1, mask="table"), ".*": optzoo.adagrad(0.1)}
    ),
}


@pytest.mark.parametrize("around", AROUND)
def test_part_of_an_optimizer(around):
    """Its rows are read, written, swept and updated by calls of their own."""
    tx = AROUND[around](optzoo.moving_average(adam(), 0.9))
    expected, got = (run(tx, (WIDTH,), native) for native in (False, "require"))
    check_close(expected, got, 1e-4)


def test_a_loop_by_hand():
    tx, found = optzoo.caught_up(adam(), mask="table", horizon=1), []
    for apply in (step_of(tx), optzoo.native_step(tx, required=True)):
        (params, state), run_step = start(tx, (WIDTH,)), jax.jit(apply)
        for ids, y in batches():
            params, state = optzoo.rows.catch_up(params, state, {"table": ids})
            grads = optzoo.value_and_grad(of_one_table)(params, ids, y)[1]
            params, state = run_step(params, state, grads)
        found.append((params, state))
    check_close(*found, 1e-4)


ALONE = {"alone": lambda inner: optzoo.caught_up(inner, mask="table", horizon=1)}


@pytest.mark.parametrize(("around", "capacity_factor"), [("alone", 1.0), ("groups", None)])
def test_sharded(around, capacity_factor):
    mesh = Mesh(np.array(jax.devices()[:4]), ("shard",))
    sharding = optzoo.sharded.RowSharding(ROWS, 4)
    tx, found = (AROUND | ALONE)[around](half(adam())), []
    for native in (False, "require"):
        of_ids = lambda ids: jnp.sin(ids[:, None] + jnp.arange(WIDTH)[None])
        params = {"table": optzoo.sharded.create_table(sharding, mesh, of_ids)}
        params["w"] = jax.device_put(table(shape=(WIDTH, 2)), NamedSharding(mesh, P()))
        state = jax.jit(tx.init, out_shardings=optzoo.state_sharding(tx, params))(params)
        step = optzoo.sharded_minimize(
            of_one_table,
            tx,
            mesh,
            {"table": sharding},
            capacity_factor=capacity_factor,
            native=native,
        )
        for ids, y in batches(20):
            params, state, value = step(params, state, ids[:24], y[:24])
        found.append((params, state, value))
    check_close(*found, 1e-2)
    text = step.lower(params, state, ids[:24], y[:24]).as_text()
    assert text.count("@optzoo_native_") >= 5
