"""What a user keeps, while steps donate the parameters and the state that it was made of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optzoo

TABLE = 20_000  # rows: so many that optzoo.caught_up lets them rest
SGD = optzoo.momentum(0.01, 0.9)
ALONE = {"axis_name": None}
AVERAGES = {
    "none": SGD,
    "moving_average": optzoo.moving_average(SGD, 0.9),
    "diloco": optzoo.diloco(SGD, communication_period=2, **ALONE),
    "agn": optzoo.agn(SGD, communication_period=2, **ALONE),
    "elastic_average": optzoo.elastic_average(SGD, communication_period=2, **ALONE),
    "model_average": optzoo.model_average(SGD, interval_steps=2, **ALONE),
    "some": optzoo.param_groups(
        {"w": optzoo.moving_average(SGD, 0.9), ".*": optzoo.gradient_descent(0.1)}
    ),
    "caught_up": optzoo.caught_up(optzoo.adam(0.1)),
    "average of caught_up": optzoo.caught_up(optzoo.moving_average(optzoo.adam(0.1), 0.9)),
}


def loss(params, ids):
    return jnp.sum((optzoo.lookup(params["table"], ids) @ params["w"]) ** 2)


def new_params():
    return {"table": jnp.ones((TABLE, 4)), "w": jnp.ones((4, 2))}


@pytest.mark.parametrize("name", AVERAGES)
def test_the_best_average_is_kept_and_trained_on(name):
    tx = AVERAGES[name]
    step, params, ids = optzoo.minimize(loss, tx), new_params(), jnp.arange(3)
    state = tx.init(params)
    params, state, _ = step(params, state, ids)
    best = optzoo.eval_params(params, state)
    before = jax.device_get(best)
    for _ in range(2):
        params, state, _ = step(params, state, ids)
    jax.tree.map(np.testing.assert_array_equal, best, before)
    params = optzoo.eval_params(params, state)
    params, state, value = step(params, state, ids)
    assert np.isfinite(value)
    jax.tree.map(np.testing.assert_array_equal, best, before)


@pytest.mark.unique
def test_wide_parameters_are_kept():
    tx = optzoo.master_weights(optzoo.adam(0.1))
    wide = new_params() | {"half": jnp.ones(2, jnp.bfloat16), "long": jnp.ones(2, jnp.float16)}
    params, state = optzoo.split_params(wide, tx)
    step = optzoo.minimize(lambda p, ids: loss(p, ids) + jnp.sum(p["long"] ** 2), tx)
    for _ in range(2):
        kept = optzoo.wide_params(params, state)
        before = jax.device_get(kept)
        params, state, _ = step(params, state, jnp.arange(3))
        jax.tree.map(np.testing.assert_array_equal, kept, before)
    assert not any(x.is_deleted() for x in jax.tree.leaves(wide))


def test_under_jit_nothing_is_copied():
    tx = AVERAGES["moving_average"]
    params = new_params()
    state = tx.init(params)
    assert "copy" not in str(jax.make_jaxpr(optzoo.eval_params)(params, state))
