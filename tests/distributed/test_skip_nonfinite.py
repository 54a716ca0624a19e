"""One replica of eight with NaN or infinity, left out."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo

from ..selection import quick
from . import cases

N, TICKS, PERIOD, BROKEN = 8, 6, 3, 3
PERIODIC = {"communication_period": PERIOD}
METHODS = {
    "elastic_average": functools.partial(
        optzoo.elastic_average, num_workers=N, rho=0.1, **PERIODIC
    ),
    "elastic_average, round robin": functools.partial(
        optzoo.elastic_average, num_workers=N, order="round_robin", **PERIODIC
    ),
    "agn": functools.partial(optzoo.agn, **PERIODIC),
    "agn, round robin": functools.partial(optzoo.agn, order="round_robin", **PERIODIC),
    "model_average": functools.partial(optzoo.model_average, interval_steps=PERIOD),
    "model_average, of slots": functools.partial(
        optzoo.model_average, interval_steps=PERIOD, slots="average"
    ),
    "diloco": functools.partial(optzoo.diloco, **PERIODIC),
    "diloco, streaming": functools.partial(optzoo.diloco, warmup_steps=2, fragments=2, **PERIODIC),
    "sync_replicas": functools.partial(optzoo.sync_replicas, replicas_to_aggregate=N),
    "sync_replicas, backup": functools.partial(
        optzoo.sync_replicas, replicas_to_aggregate=N - 1, total_num_replicas=N
    ),
}


@functools.cache
def compiled(method, way, skip_nonfinite):
    """The step of all replicas, and where it starts."""
    tx = METHODS[method](optzoo.momentum(0.1, 0.9), skip_nonfinite=skip_nonfinite)

    def step(params, state, ids, target, factor, masks):
        loss = lambda x: factor * cases.loss_fn(x, ids, target)
        _, grads = optzoo.value_and_grad(loss)(optzoo.per_replica(params))
        updates, state = tx.update(grads, state, params, **masks)
        return optax.apply_updates(params, updates), state

    mesh = None if way == "vmap" else cases.mesh(N)
    start = optzoo.replicate(cases.params(), tx.init(cases.params()), N, mesh=mesh)
    return jax.jit(optzoo.map_over_replicas(step, mesh=mesh)), start


def run(method, factors=None, way="vmap", skip_nonfinite=True, arrived=None):
    """Parameters of all replicas and those to evaluate, after each tick; and the last state.

    Args:
        method: one of ``METHODS``.
        factors: of the loss, for each tick and replica.
        way: how to have replicas: ``"vmap"`` or ``"shard_map"``.
        skip_nonfinite: the option.
        arrived: for each tick and replica; None to give none.
    """
    factors = np.ones((TICKS, N)) if factors is None else factors
    masks = {} if arrived is None else {"arrived": arrived}
    train, (x, state) = compiled(method, way, skip_nonfinite)
    visited, (ids, target, _) = [], cases.batches(TICKS, N)
    for tick in range(TICKS):
        now = ids, target, factors.astype(np.float32), masks
        batch = jax.tree.map(lambda a, tick=tick: a[tick], now)
        x, state = train(x, state, *batch)
        visited.append(jax.device_get((x, optzoo.eval_params(x, state))))
    return visited, state


def spoilt(value, ticks=slice(1, None)):
    factors = np.ones((TICKS, N))
    factors[ticks, BROKEN] = value
    return factors


def breaks_no_other(method, way):
    visited, state = run(method, spoilt(np.nan), way)
    chex.assert_tree_all_finite((visited, jax.device_get(state)))
    _, first = visited[0]
    _, last = visited[-1]
    assert all(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (first, last)), strict=True))
    if method.startswith("sync"):
        return
    x, center = visited[-1]  # of the second exchange
    of_broken = jax.tree.map(lambda a: a[BROKEN], x)
    whole = [k for k in center if method != "diloco, streaming" or k == "table"]
    for name in whole:
        np.testing.assert_allclose(of_broken[name], center[name], rtol=1e-6, atol=1e-6)
    for slot in jax.tree.leaves(optzoo.get_slot(state.per_replica.inner, "momentum")):
        slot = np.asarray(slot)
        want = slot[0] if method == "model_average, of slots" else 0
        np.testing.assert_array_equal(slot[BROKEN], want)
        assert np.any(slot[0] != 0)


@pytest.mark.parametrize("method", quick(METHODS, METHODS.keys() - {"agn", "sync_replicas"}))
def test_a_replica_that_breaks_for_good_breaks_no_other(method):
    breaks_no_other(method, "vmap")


@pytest.mark.parametrize(
    "method", quick(["elastic_average, round robin", "agn", "diloco, streaming"], ["agn"])
)
def test_on_devices_it_breaks_no_other(method):
    breaks_no_other(method, "shard_map")


@pytest.mark.parametrize(
    "method", quick(METHODS, ["agn, round robin", "diloco, streaming", "sync_replicas, backup"])
)
def test_where_all_is_finite_nothing_changes(method):
    got, want = (run(method, skip_nonfinite=skip)[0] for skip in (True, False))
    chex.assert_trees_all_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("method", ["model_average", "diloco"])
def test_it_counts_as_not_arrived(method, value):
    arrived = np.ones((TICKS, N), bool)
    arrived[PERIOD - 1, BROKEN] = False
    want = run(method, arrived=arrived)[0][PERIOD - 1]
    got = run(method, spoilt(value, PERIOD - 1))[0][PERIOD - 1]
    chex.assert_trees_all_close(got, want, rtol=1e-6)


def test_a_gradient_that_is_not_finite_is_dropped():
    _, state = run("sync_replicas, backup", spoilt(np.inf))
    assert (state.replicated.global_step, state.replicated.dropped) == (TICKS, TICKS)


def alone(method):
    """The arguments for a single replica."""
    return {"num_workers": 1} if method.startswith("elastic") else {}


@pytest.mark.parametrize("method", [name for name in METHODS if not name.startswith("sync")])
def test_parameters_without_a_gradient_and_in_16_bits(method):
    tx = METHODS[method](optzoo.adam(0.1), axis_name=None, skip_nonfinite=True, **alone(method))
    params = {"a": np.ones(3, jnp.bfloat16), "b": np.ones(2, np.float32)}
    state = tx.init(params)
    update = jax.jit(tx.update, static_argnames="exchange")
    for value in (np.nan, 1.0):
        grads = {"a": np.full(3, value, jnp.bfloat16), "b": None}
        updates, new = update(grads, state, params, exchange=True)
        assert updates["b"] is None and updates["a"].dtype == jnp.bfloat16
        assert np.all((updates["a"] == 0) == np.isnan(value))
        chex.assert_tree_all_finite(new)
        chex.assert_trees_all_equal_shapes_and_dtypes(new, state)


def test_rows_of_a_replica_that_is_left_out_are_not_touched():
    """A row that only this replica has keeps its value: a gradient of zero would move it."""
    tx = optzoo.sync_replicas(
        optzoo.lazy_adam(0.1), replicas_to_aggregate=2, total_num_replicas=3, skip_nonfinite=True
    )

    @jax.jit
    @optzoo.map_over_replicas
    def train(x, state, ids, factor):
        loss = lambda x: factor * jnp.sum(optzoo.lookup(x, ids) ** 2)
        _, grads = optzoo.value_and_grad(loss)(x)
        updates, state = tx.update(grads, state, x)
        return optax.apply_updates(x, updates), state

    table = np.ones((3, 2), np.float32)
    x, state = optzoo.replicate(table, tx.init(table), 3)
    ids = np.array([[0], [1], [2]])
    visited = []
    for factors in ([1.0, 1.0, 1.0], [1.0, np.nan, 1.0]):
        x, state = train(x, state, ids, np.array(factors, np.float32))
        visited.append(np.asarray(optzoo.eval_params(x, state)).reshape(-1, 3, 2)[0])
    first, second = visited
    assert np.all(first[:2] < 1) and np.all(second[0] < first[0])
    np.testing.assert_array_equal(second[1], first[1])


def test_a_sum_of_gradients_that_overflows_is_left_out():
    """Of finite gradients, with finite parameters."""
    tx = optzoo.agn(optzoo.gradient_descent(1e-3), axis_name=None, skip_nonfinite=True)
    x, g = np.zeros(2, np.float32), np.full(2, 2e38, np.float32)
    update, state = jax.jit(functools.partial(tx.update, exchange=False)), tx.init(x)
    for _ in range(2):
        updates, state = update(g, state, x)
    assert not np.any(updates)
    np.testing.assert_array_equal(state.per_replica.method.accumulated, g)
