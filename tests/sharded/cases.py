"""Ids, meshes and tables for the tests of sharded tables."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import optzoo

ROWS, WIDTH = 43, 3


def mesh_of(*sizes, names=("data", "shard"), kind="Explicit"):
    kinds = len(sizes) * (jax.sharding.AxisType[kind],)
    return jax.make_mesh(sizes, names[-len(sizes) :], axis_types=kinds)


def ids_of(kind, shape, num_shards, seed=0):
    """Random ids; 43 is padding."""
    rng = np.random.default_rng(seed)
    ids = {
        "uniform": rng.integers(0, ROWS, shape),
        "zipf": np.minimum(rng.zipf(1.2, shape) - 1, ROWS),
        "one_owner": rng.integers(0, ROWS // num_shards, shape) * num_shards,
        "one_id": np.full(shape, 7),
        "padding": np.where(rng.integers(0, 2, shape) == 0, rng.integers(0, ROWS, shape), ROWS),
        "only_padding": np.full(shape, ROWS),
    }
    return jnp.asarray(ids[kind], jnp.int32)


@functools.cache
def whole(width=WIDTH):
    """The table on one device."""
    rng = np.random.default_rng(width)
    return rng.normal(size=(ROWS, width)).astype(np.float32)


def shards(sharding, mesh, width=WIDTH):
    """The same table, sharded."""
    table = jnp.pad(whole(width), [(0, sharding.stored_rows), (0, 0)])
    return optzoo.sharded.create_table(sharding, mesh, lambda ids: table[ids], chunk=64)


def of_ids(table, sharding):
    """The rows of a sharded table in the order of the ids."""
    return np.asarray(optzoo.sharded.in_order_of_ids(table, sharding))[:ROWS]
