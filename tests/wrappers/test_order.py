"""Wrappers around each other: as they are defined, or refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo

SGD = optzoo.gradient_descent(0.1)
ALONE = {"axis_name": None}
MOVE = {
    "decoupled_weight_decay": lambda tx: optzoo.decoupled_weight_decay(
        tx, weight_decay_per_step=0.001
    ),
    "moving_average": lambda tx: optzoo.moving_average(tx, 0.5),
    "variable_clipping": lambda tx: optzoo.variable_clipping(tx, {".*": (0,)}, 0.5),
    "cautious_weight_decay": lambda tx: optzoo.cautious_weight_decay(
        tx, weight_decay_per_step=0.001
    ),
    "ema_nesterov": lambda tx: optzoo.ema_nesterov(tx, 0.5),
    "hyperball": lambda tx: optzoo.hyperball(tx, 0.1, {".*": (0,)}),
    "ensemble": lambda tx: optzoo.interop.fbgemm.ensemble(tx, 2, 3),
    "ema_in_place": lambda tx: optzoo.interop.fbgemm.ema_in_place(tx, 3),
}
EXCHANGE = {
    "diloco": lambda tx: optzoo.diloco(tx, **ALONE),
    "agn": lambda tx: optzoo.agn(tx, **ALONE),
    "elastic_average": lambda tx: optzoo.elastic_average(tx, **ALONE),
    "model_average": lambda tx: optzoo.model_average(tx, **ALONE),
}
INSIDE = {
    "": lambda tx: tx,
    "groups": lambda tx: optzoo.param_groups({".*": tx}),
    "chain": lambda tx: optax.chain(optzoo.clip_by_global_norm(1.0), tx),
    "multitask": optzoo.multitask,
}
X = {"w": jnp.ones((2, 2), jnp.bfloat16)}


@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("name", [*MOVE, *EXCHANGE])
def test_around_master_weights(name, inside):
    """They would see rounded parameters, and what they move would be rounded away."""
    tx = {**MOVE, **EXCHANGE}[name](INSIDE[inside](optzoo.master_weights(SGD)))
    of_agn = "so master_weights has nothing to correct"  # its center is in float32
    words = of_agn if name == "agn" else rf"{name} is around .*master_weights\({name}\(tx"
    with pytest.raises(ValueError, match=words):
        tx.init(X)
    optzoo.master_weights(MOVE.get(name, lambda tx: tx)(SGD)).init(X)


@pytest.mark.parametrize("inside", [inside for inside in INSIDE if inside != "multitask"])
@pytest.mark.parametrize("name", MOVE)
def test_around_accumulate(name, inside):
    """They would act in each step, and not in each update."""
    tx = MOVE[name](INSIDE[inside](optzoo.accumulate(SGD, 2)))
    with pytest.raises(ValueError, match=rf"{name} is around .*accumulate\({name}\(tx"):
        tx.init(X)
    MOVE[name](optzoo.accumulate(SGD, 1)).init(X)


@pytest.mark.parametrize("name", EXCHANGE)
def test_exchanges_count_steps(name):
    EXCHANGE[name](optzoo.accumulate(SGD, 2)).init(X)


def steps(tx, x, grads):
    state, update = tx.init(x), jax.jit(tx.update)
    for g in grads:
        updates, state = update({"w": jnp.full_like(x["w"], g)}, state, x)
        x = optax.apply_updates(x, updates)
    return x, state


def test_decay_of_parameters_in_16_bits():
    tx = optzoo.master_weights(MOVE["decoupled_weight_decay"](SGD), bits=32)
    x, state = steps(tx, X, np.zeros(400))
    np.testing.assert_allclose(optzoo.wide_params(x, state)["w"], 0.999**400, rtol=1e-4)


def test_averages_of_parameters_in_16_bits():
    tx = optzoo.master_weights(MOVE["moving_average"](SGD), bits=32)
    grads = np.random.default_rng(0).normal(size=40) * 1e-3
    _, state = steps(tx, X, grads)
    x = average = 1.0
    for g in grads.astype(jnp.bfloat16).astype(float):
        x -= 0.1 * g
        average = 0.5 * average + 0.5 * x
    [got] = jax.tree.leaves(optzoo.get_slot(state, "average"))
    np.testing.assert_allclose(got, average, rtol=1e-6)


def test_decay_and_averages_in_each_update():
    """Of two steps: by NumPy."""
    tx = MOVE["moving_average"](MOVE["decoupled_weight_decay"](SGD))
    x, state = steps(optzoo.accumulate(tx, 2), {"w": jnp.ones((2, 2))}, [1.0, 2.0, -4.0, 3.0])
    want = average = 1.0
    for g in (3.0, -1.0):
        want -= 0.001 * want + 0.1 * g
        average = 0.5 * average + 0.5 * want
    np.testing.assert_allclose(x["w"], want, rtol=1e-6)
    np.testing.assert_allclose(optzoo.eval_params(x, state)["w"], average, rtol=1e-6)
