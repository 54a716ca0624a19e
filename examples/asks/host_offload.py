"""Slots in host memory, chosen by a regular expression."""

import re

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

import optzoo

ASKED = ["apple/axlearn/pull/867", "jax-ml/jax/pull/28988"]
ANSWERED = "partly: no function for it, but a tree of shardings with readable paths"


def on_host(tree, pattern, sharding_of):
    """The shardings of a state, those with a matching path in the memory of the host."""

    def place(path, leaf):
        sharding = sharding_of(leaf)
        matches = re.search(pattern, jax.tree_util.keystr(path))
        return sharding.with_memory_kind("pinned_host") if matches else sharding

    return jax.tree_util.tree_map_with_path(place, tree)


def kinds(state):
    """The memory of each array with the shape of the parameter."""
    return ", ".join(a.sharding.memory_kind for a in jax.tree.leaves(state) if a.shape == (8, 8))


def setting():
    """A sharding and a parameter."""
    sharding = NamedSharding(jax.make_mesh((8,), ("d",)), PartitionSpec("d"))
    return sharding, {"w": jax.device_put(jnp.ones((8, 8)), sharding)}


def with_optax():
    """You know the fields of the state, and give each leaf its sharding."""
    sharding, params = setting()
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    tx = optax.adam(1e-3)
    sharding_of = lambda leaf: sharding if leaf.shape == (8, 8) else whole
    shardings = on_host(jax.eval_shape(tx.init, params), r"\.nu", sharding_of)
    return f"mu, nu with `nu` on the host: {kinds(jax.device_put(tx.init(params), shardings))}"


def with_optzoo():
    """`state_sharding` has the shardings; the paths have the names of the slots."""
    _, params = setting()
    tx = optzoo.adam(1e-3)
    shardings = on_host(optzoo.state_sharding(tx, params), r"\.slots\.v", lambda s: s)
    return f"m, v with `v` on the host: {kinds(jax.device_put(tx.init(params), shardings))}"


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    print("optax: ", with_optax(), "\noptzoo:", with_optzoo())
