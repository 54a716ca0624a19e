"""Options of optimizers whose matrices have owners."""

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

test_an_option_has_its_effect = TABLE.test(all_quick=True)
