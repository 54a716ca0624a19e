"""Muon on sharded parameters, without gathering them in each iteration."""

import re

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import optzoo

ASKED = ["google-deepmind/optax/issues/1660", "goodfire-ai/spd/pull/978"]
ANSWERED = "yes: with `owners=` each matrix is sent to one device and back, however many there are"
COLLECTIVE = re.compile(r" (?:all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\(")


def collectives(tx):
    """How many collectives a compiled step on twelve matrices has, sharded over eight devices."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))  # the others refuse muon
    placed = NamedSharding(mesh, PartitionSpec("d"))
    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=placed)
    sharded = lambda a: shape if a.shape == (64, 64) else a
    params = {f"w{i}": shape for i in range(12)}
    state = jax.tree.map(sharded, jax.eval_shape(tx.init, params))
    step = lambda x, state, g: tx.update(g, state, x)
    text = jax.jit(step).lower(params, state, params).compile().as_text()
    return len(COLLECTIVE.findall(text))


def with_optax():
    """XLA divides the products of each of the five iterations."""
    number = collectives(optax.contrib.muon(1e-3))
    return f"`muon`: {number} collectives in a step on twelve matrices"


def with_optzoo():
    """One all-to-all to the owners, and one back."""
    with_owners, without = (collectives(optzoo.muon(1e-3, owners=owners)) for owners in ("d", None))
    return (
        f'`muon(owners="d")`: {with_owners} collectives, without owners {without}; element-wise '
        f"ones as `adam`: {collectives(optzoo.adam(1e-3))}"
    )


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    print("optax: ", with_optax(), "\noptzoo:", with_optzoo())
