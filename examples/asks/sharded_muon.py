"""Muon on sharded parameters, without gathering them in each iteration."""

import re

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import optzoo

ASKED = ["google-deepmind/optax/issues/1660", "goodfire-ai/spd/pull/978"]
ANSWERED = "no: optzoo has no Muon; MaxText has had one for sharded parameters since August 2026"
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
    """Optimizers of optax work beside those of optzoo, with the same collectives."""
    alone = collectives(optax.contrib.muon(1e-3))
    grouped = collectives(optzoo.param_groups({"w": optax.contrib.muon(1e-3)}))
    soap = "more" if collectives(optzoo.soap(1e-3)) > 10 else "not more"
    return (
        f"`param_groups` around optax's `muon` has as many: {grouped == alone}; the nearest "
        f"optimizer here, `soap`: {soap} than 10; element-wise ones as `adam`: "
        f"{collectives(optzoo.adam(1e-3))}"
    )


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    print("optax: ", with_optax(), "\noptzoo:", with_optzoo())
