"""Averages of the parameters, and a rate for each kind of parameter (Flax's cookbook)."""

import jax
import jax.numpy as jnp
import optax

import optzoo

ASKED = ["google/flax/pull/5117"]
ANSWERED = "yes: `moving_average`, `param_groups`, `state_sharding`; L-BFGS and LoRA are not here"
PARAMS = {"dense": {"kernel": jnp.ones((3, 2)), "bias": jnp.zeros(2)}}
STEPS, DECAY = 20, 0.9


def loss(params):
    """A small quadratic."""
    dense = params["dense"]
    return jnp.sum((dense["kernel"] - 3) ** 2) + jnp.sum((dense["bias"] - 1) ** 2)


def average_by_hand():
    """Labels for the rates, and the average as a second tree in the loop."""
    labels = {"dense": {"kernel": "kernel", "bias": "bias"}}
    tx = optax.partition({"kernel": optax.sgd(0.1), "bias": optax.sgd(0.01)}, labels)
    params, average, state = PARAMS, PARAMS, tx.init(PARAMS)
    for _ in range(STEPS):
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        params = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda a, x: DECAY * a + (1 - DECAY) * x, average, params)
    return average


def with_optax():
    """`optax.ema` averages updates, not parameters."""
    found = loss(average_by_hand()) / loss(PARAMS)
    return f"labels, and the average in your loop: loss of the average {float(found):.3f}"


def with_optzoo():
    """The average is in the state, saved and sharded with it."""
    groups = optzoo.param_groups({"kernel": optax.sgd(0.1), "bias": optax.sgd(0.01)})
    tx = optzoo.moving_average(groups, DECAY)
    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(STEPS):
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        params = optax.apply_updates(params, updates)
    found = loss(optzoo.eval_params(params, state)) / loss(PARAMS)
    return f"`moving_average(param_groups(...))`: loss of the average {float(found):.3f}"


if __name__ == "__main__":
    print("optax: ", with_optax(), "\noptzoo:", with_optzoo())
