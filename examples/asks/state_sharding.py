"""The optimizer's state with the sharding of the parameters, or another."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import optzoo

ASKED = ["google/flax/issues/5172", "google/flax/issues/5105"]
ANSWERED = "yes: `state_sharding`; in nnx the shardings are those of its variables"
SHAPE = (64, 64)


def placed(*axes):
    """A sharding over eight devices."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec(*axes))


def devices(state):
    """The shape of a moment on a device, and on how many devices it is."""
    moment = next(a for a in jax.tree.leaves(state) if a.shape == SHAPE)
    shard = moment.addressable_shards[0].data.shape
    return f"moments of {shard[0]} x {shard[1]} on {len(moment.sharding.device_set)} of 8 devices"


def with_optax():
    """`jit` sees no reason to divide zeros; you write the shardings of the state yourself."""
    params = {"w": jax.device_put(jnp.ones(SHAPE), placed("d"))}
    return (
        f"`jit(adam.init)` on a sharded parameter: {devices(jax.jit(optax.adam(1).init)(params))}"
    )


def with_optzoo():
    """The parameters are sharded, or replicated while the state is not (as in ZeRO)."""
    tx = optzoo.adam(1e-3)
    found = []
    for params_on, state_on in ((placed("d"), placed("d")), (placed(), placed("d"))):
        params = {"w": jax.device_put(jnp.ones(SHAPE), params_on)}
        like = {"w": jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=state_on)}
        init = jax.jit(tx.init, out_shardings=optzoo.state_sharding(tx, like))
        found.append(devices(init(params)))
    return f"with `state_sharding`: {found[0]}; for replicated parameters: {found[1]}"


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    print("optax: ", with_optax(), "\noptzoo:", with_optzoo())
