"""Options of lookups."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

import optzoo

from .effects import Table

TABLE = Table()
effect = TABLE.effect

ROWS = jnp.arange(80.0).reshape(40, 2)


@effect("lookup", "out_sharding", {PartitionSpec(None, "shard"): (4, 1), PartitionSpec(): (4, 2)})
def _(out_sharding):
    """The part of the rows that a device has."""
    mesh = jax.make_mesh((2,), ("shard",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        rows = jax.jit(lambda t: optzoo.lookup(t, jnp.arange(4), out_sharding=out_sharding))(ROWS)
    return rows.addressable_shards[0].data.shape


def bags(**options):
    """The first column of bags of the ids 1 and 2, and 3 and 4."""
    given = {"ids": jnp.array([[1, 2], [3, 4]]), **options}
    pooled = jax.jit(functools.partial(optzoo.lookup_sparse, **given))(ROWS)
    return [round(x, 4) for x in pooled[:, 0].tolist()]


@effect(
    "lookup_sparse", "combiner", {"mean": [3.0, 7.0], "sum": [6.0, 14.0], "sqrtn": [4.2426, 9.8995]}
)
def _(combiner):
    return bags(combiner=combiner)


@effect("lookup_sparse", "weights", {None: [3.0, 7.0], ((1, 0), (0, 3)): [2.0, 8.0]})
def _(weights):
    return bags(weights=None if weights is None else jnp.array(weights, jnp.float32))


@effect("lookup_sparse", "segment_ids", {(0, 0, 1, 1): [3.0, 7.0], (1, 1, 1, 0): [8.0, 4.0]})
def _(segment_ids):
    return bags(ids=jnp.arange(1, 5), segment_ids=jnp.array(segment_ids), num_segments=2)


@effect("lookup_sparse", "num_segments", {2: 2, 3: 3})
def _(num_segments):
    ids = jnp.arange(1, 5)
    return len(bags(ids=ids, segment_ids=ids // 3, num_segments=num_segments))


def in_shards(read, rows=ROWS, **options):
    """What the devices of a table of two shards read together."""
    mesh = jax.make_mesh((2,), ("shard",), axis_types=(AxisType.Auto,))
    sharding = optzoo.sharded.RowSharding(40, 2)
    table = optzoo.sharded.create_table(sharding, mesh, lambda ids: rows[ids % 40])
    spec = PartitionSpec("shard")
    read = functools.partial(read, sharding=sharding, **options)
    mapped = jax.shard_map(read, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    return jax.jit(mapped), table


# Ids of two devices, all of one owner.
OF_ONE_OWNER = jnp.zeros(64, jnp.int32).at[32:].set(2).at[:32].add(2 * jnp.arange(32) % 40)


@effect("sharded.lookup", "capacity_factor", {None: False, 0.01: True})
def _(capacity_factor):
    """Whether ids had no room."""
    mapped, table = in_shards(optzoo.sharded.lookup, capacity_factor=capacity_factor)
    return bool(jnp.isnan(mapped(table, OF_ONE_OWNER)).any())


@effect("sharded.lookup", "transport", {None: 1 + 2**-9, "bfloat16": 1.0})
def _(transport):
    rows = jnp.full((40, 2), 1 + 2**-9)
    mapped, table = in_shards(optzoo.sharded.lookup, rows, transport=transport)
    return float(mapped(table, jnp.arange(4))[0, 0])


@effect("lookup_sparse", "capacity_factor", {None: False, 0.01: True})
def _(capacity_factor):
    read = lambda table, ids, **options: optzoo.lookup_sparse(table, ids[:, None], **options)
    mapped, table = in_shards(read, capacity_factor=capacity_factor, pool="here")
    return bool(jnp.isnan(mapped(table, OF_ONE_OWNER)).any())


@effect("lookup_sparse", "transport", {None: 1 + 2**-9, "bfloat16": 1.0})
def _(transport):
    read = lambda table, ids, **options: optzoo.lookup_sparse(table, ids[:, None], **options)
    mapped, table = in_shards(read, jnp.full((40, 2), 1 + 2**-9), transport=transport, pool="here")
    return float(mapped(table, jnp.arange(4))[0, 0])


@effect("lookup_sparse", "sharding", {True: [1.0, 3.0], False: [2.0, 7.0]})
def _(sharding):
    """Row 1 by its id, and row 1 of the first shard, which has the even ids; row 3 as well."""
    mapped, table = in_shards(
        lambda table, ids, **given: optzoo.lookup_sparse(
            table, ids[:, None], **(given if sharding else {})
        ),
        jnp.repeat(jnp.arange(40.0), 2).reshape(40, 2),
    )
    return mapped(table, jnp.array([1, 3]))[:, 0].tolist()


@effect("lookup_sparse", "pool", {"here": 2, "owner": 3})
def _(pool):
    """How many messages there are: ids and rows, or ids, their bags and sums."""
    mapped, table = in_shards(optzoo.lookup_sparse, pool=pool)
    text = str(jax.make_jaxpr(mapped)(table, jnp.zeros((4, 3), jnp.int32)))
    return text.count("all_to_all")


test_an_option_has_its_effect = TABLE.test()
