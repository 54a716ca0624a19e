"""Muon on sharded parameters, without gathering them in each iteration."""

import re

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import optzoo

ASKED = ["google-deepmind/optax/issues/1660", "goodfire-ai/spd/pull/978"]
ANSWERED = (
    "partly: on the CPU XLA fetches the matrix once, and each device iterates on all of it; "
    "MaxText has had a Muon for sharded parameters since August 2026"
)
COLLECTIVE = re.compile(r" (?:all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\(")


def collectives(tx):
    """How many collectives a compiled step on one matrix has, sharded over eight devices."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))  # the others refuse muon
    placed = NamedSharding(mesh, PartitionSpec("d"))
    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=placed)
    sharded = lambda a: shape if a.shape == (64, 64) else a
    state = jax.tree.map(sharded, jax.eval_shape(tx.init, {"w": shape}))
    step = lambda x, state, g: tx.update(g, state, x)
    text = jax.jit(step).lower({"w": shape}, state, {"w": shape}).compile().as_text()
    return len(COLLECTIVE.findall(text))


def with_optax():
    """XLA divides the products of each of the five iterations."""
    return f"`muon`: {collectives(optax.contrib.muon(1e-3))} collectives in a step on one matrix"


def with_optzoo():
    """Its loop has no collective."""
    return (
        f"`muon`: {collectives(optzoo.muon(1e-3))} collectives; element-wise ones as `adam`: "
        f"{collectives(optzoo.adam(1e-3))}"
    )


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    print("optax: ", with_optax(), "\noptzoo:", with_optzoo())
