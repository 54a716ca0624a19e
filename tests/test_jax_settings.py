"""Settings of JAX with which users look for mistakes of their own find none here."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import optzoo

PARAMS = {"table": jnp.ones((50, 4)), "w": jnp.ones((4, 3)), "b": jnp.zeros(3)}
IDS = jnp.arange(8)
ADAM = optzoo.adam(0.1)
WRAPPED = {
    "accumulate": optzoo.accumulate(optzoo.lazy_adam(0.1), 2, max_rows={"table": 20}),
    "caught_up": optzoo.caught_up(ADAM),
    "chain": optax.chain(optzoo.clip_by_global_norm(1.0), ADAM),
    "int8 at random": optzoo.slots_dtype(optzoo.lazy_adam(0.1), "int8", stochastic=True),
    "moving_average": optzoo.moving_average(ADAM, 0.9),
    "skip_spikes": optzoo.skip_spikes(ADAM),
    "stacked": optzoo.stacked(ADAM),
}


def loss(params, ids):
    y = optzoo.lookup(params["table"], ids) @ params["w"] + params["b"][None]
    return jnp.sum(y**2), {"y": y}


def check_leaks(tx, **options):
    step = optzoo.minimize(loss, tx, has_aux=True, **options)
    state = jax.eval_shape(tx.init, PARAMS)
    with jax.checking_leaks():
        jax.eval_shape(step, PARAMS, state, IDS)


def test_no_optimizer_keeps_tracers(entry):
    """What a step leaves behind, such as the rule of a derivative, holds nothing of its trace."""
    check_leaks(entry.make(0.1))


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("name", WRAPPED)
def test_no_wrapper_keeps_tracers(name, native):
    check_leaks(WRAPPED[name], native=native)


@pytest.mark.parametrize("name", ["caught_up", "int8 at random", "chain"])
def test_no_step_on_a_mesh_keeps_tracers(name):
    tx, mesh = WRAPPED[name], jax.make_mesh((4,), ("shard",))
    tables = {"table": optzoo.sharded.RowSharding(50, 4, multiple=4)}
    table = jax.ShapeDtypeStruct((tables["table"].stored_rows, 4), jnp.float32)
    params = PARAMS | {"table": table}
    step = optzoo.sharded_minimize(loss, tx, mesh, tables, has_aux=True, capacity_factor=None)
    state = jax.eval_shape(tx.init, params)
    with jax.checking_leaks():
        jax.eval_shape(step, params, state, IDS)


@pytest.mark.parametrize("name", ["caught_up", "int8 at random", "skip_spikes"])
def test_a_step_moves_nothing_to_the_device(name):
    """Neither while it is compiled nor afterwards."""
    step = optzoo.minimize(loss, WRAPPED[name], has_aux=True)
    params = jax.tree.map(jnp.copy, PARAMS)
    state = WRAPPED[name].init(params)
    with jax.transfer_guard("disallow"):
        for _ in range(2):
            params, state, value, _ = step(params, state, IDS)
        with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
            step(params, state, np.arange(8))
    assert np.isfinite(value)


@pytest.fixture
def without_shardy():
    """XLA's older partitioner, which JAX still has."""
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", False)
    yield
    jax.config.update("jax_use_shardy_partitioner", before)


@pytest.mark.parametrize("tx", [ADAM, optzoo.divide_states(ADAM, axis="data", min_size=1)])
@pytest.mark.usefixtures("without_shardy")
def test_a_mesh_without_shardy(tx):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    params = jnp.arange(32.0).reshape(8, 4)
    expected, _ = ADAM.update(params, ADAM.init(params), params)
    x = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    with jax.set_mesh(mesh):
        found, _ = jax.jit(tx.update)(x, jax.jit(tx.init)(x), x)
    np.testing.assert_array_equal(found, expected)
