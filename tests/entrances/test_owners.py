"""Options of what divides matrices or states over devices."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import optzoo

from .effects import Table

TABLE = Table()


def is_sent_in_16_bits(factory, exchange_dtype):
    """Whether the program of an update of matrices in float32 has words of 16 bits."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    rows = NamedSharding(mesh, PartitionSpec("d"))
    params = {k: jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=rows) for k in "ab"}
    given = {"iteration_dtype": "float32"} if "muon" in factory.__name__ else {}
    tx = factory(**given, owners="d", exchange_dtype=exchange_dtype)
    state = jax.eval_shape(tx.init, params)
    return "xui16>" in jax.jit(tx.update).lower(params, state, params).as_text()


for name in ("muon", "soap", "shampoo", "blocked_shampoo"):
    TABLE.effect(name, "exchange_dtype", {None: False, "bfloat16": True})(
        functools.partial(is_sent_in_16_bits, getattr(optzoo, name))
    )
for name in ("scale_by_muon", "scale_by_soap", "scale_by_shampoo"):
    TABLE.effect(f"transforms.{name}", "exchange_dtype", {None: False, "bfloat16": True})(
        functools.partial(is_sent_in_16_bits, getattr(optzoo.transforms, name))
    )


@TABLE.effect("divide_states", "specs", {"automatic": 2, "model": 4})
def _(specs):
    """Into how many parts a slot is divided, of a parameter that another axis may divide."""
    return parts_of(specs=None if specs == "automatic" else {"a": PartitionSpec(specs)})


@TABLE.effect("divide_states", "mask", {None: 2, "b": 1})
def _(mask):
    return parts_of(mask=mask)


@TABLE.effect("divide_states", "min_size", {16: 2, 17: 1})
def _(min_size):
    return parts_of(min_size=min_size)


def parts_of(*, specs=None, mask=None, min_size=0):
    """Into how many parts the slots of ``a``, of shape (4, 4), are divided."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    mesh = mesh.update(axis_types=(AxisType.Auto,) * 2)
    place = NamedSharding(mesh, PartitionSpec() if specs is None else specs["a"])
    params = {"a": jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=place)}
    if mask is not None:
        params["b"] = params["a"]
    tx = optzoo.divide_states(
        optzoo.momentum(0.1, 0.9), "data", specs=specs, mask=mask, min_size=min_size
    )
    found = optzoo.state_sharding(tx, params)[0].slots.momentum["a"]
    rows, columns = found.shard_shape((4, 4))
    return 16 // (rows * columns)


test_an_option_has_its_effect = TABLE.test(all_quick=True)
