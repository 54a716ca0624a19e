"""`nnx.Optimizer` with one optimizer for each group of parameters."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import optzoo

ASKED = ["google/flax/issues/5372", "google-deepmind/optax/issues/1148"]
ANSWERED = "yes: `param_groups`, by names"
RATES = {"kernel": optax.sgd(0.1), "bias": optax.sgd(0.01)}


def trained(tx_of):
    """Whether a compiled step works, with the transformation made for a model."""
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    try:
        optimizer = nnx.Optimizer(model, tx_of(model), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, x):
            optimizer.update(model, nnx.grad(lambda m: jnp.mean(m(x) ** 2))(model))

        step(model, optimizer, jnp.ones((4, 2)))
    except ValueError:
        return "ValueError"
    return "works"


def with_optax():
    """Labels must be a tree of nnx; `jax.tree` on its state makes another one."""
    name = lambda path, _: "kernel" if "kernel" in jax.tree_util.keystr(path) else "bias"
    by_jax = lambda m: jax.tree_util.tree_map_with_path(name, nnx.state(m, nnx.Param))
    by_nnx = lambda m: nnx.map_state(lambda path, _: path[-1], nnx.state(m, nnx.Param))
    found = [trained(lambda m, f=f: optax.partition(RATES, f(m))) for f in (by_jax, by_nnx)]
    return f"labels by `jax.tree`: {found[0]}; by `nnx.map_state`: {found[1]}"


def with_optzoo():
    """No tree of labels: patterns of names."""
    works = trained(lambda _: optzoo.param_groups(RATES))
    return f'`param_groups({{"kernel": ..., "bias": ...}})`: {works}'


if __name__ == "__main__":
    print("optax: ", with_optax(), "\noptzoo:", with_optzoo())
