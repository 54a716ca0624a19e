"""Deferred rows on the host are brought up to now in turn, so that none rests too long."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo.deferred.state import CaughtUpState
from optzoo.state.types import nodes_of

from .cases import CACHE, IDS, ROWS, cached, loss, near, ordinary, others, table, train

# As short as the window of the sums allows: 64 steps.
ADAM = optzoo.adam(0.05, b1=0.5)
DEFERRED = {
    "alone": lambda: optzoo.caught_up(ADAM, mask="table", horizon=1),
    "groups": lambda: optzoo.param_groups(
        {
            "table": optzoo.caught_up(ADAM, mask="table", horizon=1),
            "w": optzoo.momentum(0.1, 0.9),
        }
    ),
    "clipped": lambda: optax.chain(
        optzoo.clip_by_global_norm(0.5), optzoo.caught_up(ADAM, mask="table", horizon=1)
    ),
    "average": lambda: optzoo.caught_up(optzoo.moving_average(ADAM, 0.9), mask="table", horizon=1),
    "dense": lambda: optzoo.caught_up(
        optzoo.momentum(0.05, 0.5), mask="table", dense=True, horizon=1
    ),
}


def few_rows(steps):
    """Batches of which most ask for a few rows, so that the others rest for long."""
    rng = np.random.default_rng(2)
    ids = rng.integers(0, 5, (steps, IDS)).astype(np.int32)
    ids[0] = np.arange(IDS)
    ids[5] = np.arange(ROWS - IDS, ROWS)
    ids[steps - 2] = np.arange(20, 20 + IDS)
    return [(i, rng.normal(size=IDS).astype(np.float32)) for i in ids]


def longest(tx):
    """The greatest age of a row."""
    state = jax.eval_shape(tx.init, {"table": table(), **others()})
    [node] = nodes_of(CaughtUpState, state)
    return next(clock.longest for clock in node.clock.values())


@pytest.mark.unique
@pytest.mark.parametrize("name", DEFERRED)
def test_several_horizons(name):
    tx = DEFERRED[name]()
    data = few_rows(3 * longest(tx))
    params, state, losses = ordinary(tx, data=data)
    want = optzoo.rows.catch_up(params, state)
    *got, values, store = cached(tx, data=data)
    near(tuple(got), want, 1e-5)
    np.testing.assert_allclose(values, losses, 1e-5)
    assert np.isfinite(got[0]["table"]).all()
    read = store.read(*store.load(*got), np.arange(ROWS))
    near(read, want[0]["table"], 1e-5)


def test_rows_are_read_as_of_now():
    tx = DEFERRED["alone"]()
    params, state, _ = ordinary(tx, data=few_rows(30))
    want = optzoo.rows.catch_up(params, state)[0]["table"]
    store = optzoo.host.HostTable(table(), tx, CACHE)
    got = train(store, *store.init(others()), few_rows(30))[:2]
    near(store.read(*got, np.arange(ROWS)), want, 1e-5)


def test_a_flush_is_an_ordinary_state_also_after_a_long_rest():
    """It continues for another horizon with an ordinary table."""
    tx = DEFERRED["alone"]()
    data = few_rows(2 * longest(tx))
    half = longest(tx) - 5
    want = optzoo.rows.catch_up(*ordinary(tx, data=data)[:2])
    *at, _, _ = cached(tx, data=data[:half])
    got = ordinary(tx, at[0], data[half:], state=at[1])
    near(optzoo.rows.catch_up(*got[:2]), want, 1e-5)
    *at, _ = ordinary(tx, data=data[:half])
    store = optzoo.host.HostTable(table(), tx, CACHE)
    params, state = store.load(*at)
    [last] = [a for a in store._tables["table"].host.arrays if a.dtype == np.int32]
    assert (last == half).all()
    got = train(store, params, state, data[half:])[:2]
    near(store.flush(*got), want, 1e-5)


def test_rows_that_a_step_does_not_look_up():
    """They come into the cache, and stay there for a horizon without being read."""
    tx = DEFERRED["alone"]()
    data = few_rows(2 * longest(tx))
    some = lambda p, ids, y: loss(p, ids[:3], y[:3])
    store = optzoo.host.HostTable(table(), tx, ROWS)
    step = store.minimize(some)
    params, state, _ = train(store, *store.init(others()), data, step=step)
    plain, plain_state = {"table": jnp.asarray(table()), **others()}, None
    plain_state, step = tx.init(plain), optzoo.minimize(some, tx)
    for ids, y in data:
        plain, plain_state, _ = step(plain, plain_state, ids, y)
    near(store.flush(params, state), optzoo.rows.catch_up(plain, plain_state), 1e-5)


@pytest.mark.unique
def test_how_long_rows_rest():
    """On the host half of a horizon, since they leave as of now; in the cache a whole one."""
    tx, rows, cache = optzoo.caught_up(ADAM, mask="table", horizon=100), 700, 90
    store = optzoo.host.HostTable(table(rows), tx, cache)
    params, state = store.init(others())
    ring = len(next(iter(nodes_of(CaughtUpState, state)[0].clock.values())).ring)
    rng, data = np.random.default_rng(0), []
    for step in range(5 * ring):
        ids = rng.integers(0, 5, IDS)
        if step % (ring // 2) < 6:  # rows that are in no other batch until they leave
            ids[1:] = rng.integers(0, rows, IDS - 1)
        data.append((ids, rng.normal(size=IDS).astype(np.float32)))
    few = lambda p, ids, y: loss(p, ids[:1], y[:1])  # the others only come into the cache
    step, greatest = store.minimize(few), np.zeros(2)
    for places, (_, y) in store.ahead(data, ids=lambda batch: batch[0]):
        params, state, _ = step(*store.swap(params, state), places, y)
        if store.step % 7:
            continue
        store._take_back()
        of = store._tables["table"]
        of.write_back()
        [node] = nodes_of(CaughtUpState, state)
        count = max(int(clock.count) for clock in node.clock.values())
        last = next(a for a in of.host.arrays if a.dtype == np.int32)
        on_host = np.flatnonzero(of.map.find(np.arange(rows)) < 0)
        held = of.map.held()
        ages = count - last[on_host], count - np.asarray(node.last["table"])[held]
        greatest = np.maximum(greatest, [a.max() for a in ages])
    half = (ring - 2) // 2
    assert half / 2 < greatest[0] <= half + 2
    assert ring / 2 < greatest[1] <= ring
    assert np.isfinite(store.flush(params, state)[0]["table"]).all()


def test_a_small_cache_needs_a_mask():
    store = optzoo.host.HostTable(table(5000), optzoo.caught_up(ADAM), CACHE)
    with pytest.raises(ValueError, match="whose mask matches the tables"):
        store.init(others())
