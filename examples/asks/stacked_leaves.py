"""Many small parameters of one shape, updated as a few arrays."""

import jax
import jax.numpy as jnp
import optax

import optzoo

ASKED = ["goodfire-ai/spd/pull/982", "goodfire-ai/spd/pull/978"]
ANSWERED = "yes, for element-wise optimizers"
PARAMS = {f"layer{i}": jnp.ones(16) for i in range(200)}


def arrays(tx):
    """How many arrays the state has."""
    return len(jax.tree.leaves(tx.init(PARAMS)))


def with_optax():
    """Two moments for each parameter, and a count."""
    return f"`adam` on 200 parameters of one shape: {arrays(optax.adam(1e-3))} arrays of state"


def with_optzoo():
    """The values are those of the optimizer inside."""
    plain, stacked = optzoo.adam(1e-3), optzoo.stacked(optzoo.adam(1e-3))
    expected, _ = jax.jit(plain.update)(PARAMS, plain.init(PARAMS), PARAMS)
    got, _ = jax.jit(stacked.update)(PARAMS, stacked.init(PARAMS), PARAMS)
    equal = all(jax.tree.leaves(jax.tree.map(jnp.array_equal, got, expected)))
    return f"`stacked(adam)`: {arrays(stacked)} arrays of state; updates equal: {equal}"


if __name__ == "__main__":
    print("optax: ", with_optax(), "\noptzoo:", with_optzoo())
