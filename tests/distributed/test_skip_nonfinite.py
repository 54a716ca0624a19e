"""One replica of eight with NaN or infinity, left out."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optzoo
from optzoo.testing import samples

from ..selection import chosen_first
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
}


@pytest.mark.parametrize(
    "method", chosen_first(["elastic_average, round robin", "agn", "diloco, streaming"], ["agn"])
)
def test_on_devices_it_breaks_no_other(method):
    """``test_machines.py`` has the same on one device."""
    tx = METHODS[method](optzoo.momentum(0.1, 0.9), skip_nonfinite=True)

    def step(params, state, ids, target, factor):
        loss = lambda x: factor * cases.loss_fn(x, ids, target)
        _, grads = optzoo.value_and_grad(loss)(optzoo.replicas.per_replica(params))
        return samples.step(tx, grads, params, state)

    train = jax.jit(optzoo.replicas.map_over_replicas(step, mesh=cases.mesh(N)))
    start = tx.init(cases.params())
    x, state = optzoo.replicas.replicate(cases.params(), start, N, mesh=cases.mesh(N))
    visited, (ids, target, _) = [], cases.batches(TICKS, N)
    for tick in range(TICKS):
        factor = np.where((np.arange(N) == BROKEN) & (tick > 0), np.nan, 1).astype(np.float32)
        x, state = train(x, state, ids[tick], target[tick], factor)
        visited.append(jax.device_get((x, optzoo.eval_params(x, state))))
    chex.assert_tree_all_finite((visited, jax.device_get(state)))
    (_, first), (x, center) = visited[0], visited[-1]  # of the second exchange
    assert all(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (first, center)), strict=True))
    for name in center if method != "diloco, streaming" else ["table"]:
        np.testing.assert_allclose(x[name][BROKEN], center[name], rtol=1e-6, atol=1e-6)
    for slot in jax.tree.leaves(optzoo.get_slot(state.per_replica.inner, "momentum")):
        slot = np.asarray(slot)
        assert np.all(slot[BROKEN] == 0) and np.any(slot[0] != 0)


def alone(method):
    """The arguments for a single replica."""
    return {"num_workers": 1} if method.startswith("elastic") else {}


@pytest.mark.parametrize("method", METHODS)
def test_parameters_without_a_gradient_and_in_16_bits(method):
    tx = METHODS[method](optzoo.adam(0.1), axis_name=None, skip_nonfinite=True, **alone(method))
    params = {"a": np.ones(3, jnp.bfloat16), "b": np.ones(2, np.float32)}
    state = tx.init(params)
    update = jax.jit(tx.update, static_argnames="exchange")
    for value in (np.nan, 1.0):
        grads = {"a": np.full(3, value, jnp.bfloat16), "b": None}
        updates, new = update(grads, state, params, exchange=True)
        assert not np.any(updates["b"]) and updates["a"].dtype == jnp.bfloat16
        assert np.all((updates["a"] == 0) == np.isnan(value))
        chex.assert_tree_all_finite(new)
        chex.assert_trees_all_equal_shapes_and_dtypes(new, state)


def test_a_sum_of_gradients_that_overflows_is_left_out():
    """Of finite gradients, with finite parameters."""
    tx = optzoo.agn(optzoo.gradient_descent(1e-3), axis_name=None, skip_nonfinite=True)
    x, g = np.zeros(2, np.float32), np.full(2, 2e38, np.float32)
    update, state = jax.jit(functools.partial(tx.update, exchange=False)), tx.init(x)
    for _ in range(2):
        updates, state = update(g, state, x)
    assert not np.any(updates)
    np.testing.assert_array_equal(state.per_replica.method.accumulated, g)
