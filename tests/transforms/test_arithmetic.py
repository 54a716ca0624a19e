"""Sums and norms of trees with rows, against those of dense gradients."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

import optzoo
from optzoo import SparseRows
from optzoo.core.rows import map_rows
from optzoo.testing.samples import dense_grads, params, row_grads

dense = functools.partial(map_rows, SparseRows.to_dense)


def test_add():
    rows, others = row_grads(params()), dense_grads(params())
    add = jax.jit(optzoo.rows.add)
    for one, other in ((rows, rows), (rows, others), (others, rows), (others, others)):
        want = optax.tree.add(dense(one), dense(other))
        chex.assert_trees_all_close(dense(add(one, other)), want, rtol=1e-6)
    assert isinstance(add(rows, rows)["table"], SparseRows)
    assert optzoo.rows.add({"a": None}, {"a": None}) == {"a": None}
    with pytest.raises(ValueError, match="do not match an array of shape"):
        optzoo.rows.add(rows["table"], jnp.ones((6, 2)))


def test_global_norm():
    rows = row_grads(params())
    got = jax.jit(optzoo.rows.global_norm)(rows)
    np.testing.assert_allclose(got, optax.tree.norm(dense(rows)), rtol=1e-6)
    half = {"a": jnp.full(4, 200, "float16"), "no": None}
    assert optzoo.rows.global_norm(half) == 400 and optzoo.rows.global_norm({}) == 0


def replicas():
    grads = row_grads(params())
    other = SparseRows(jnp.array([4, 1, 7, 1]), jnp.cos(jnp.arange(8.0)).reshape(4, 2), 5)
    one_row = SparseRows(jnp.array([0, 0]), jnp.array([[1.0, 2, 3], [4, 5, 6]]), 1)
    rows = {"table": other, "one_row": one_row}
    many = grads, {**jax.tree.map(jnp.sin, dense_grads(params())), **rows}
    return many, jax.tree.map(lambda *a: jnp.stack(a), *many)


@pytest.mark.parametrize("over", ["vmap", "shard_map"])
def test_psum(over):
    (one, two), stacked = replicas()
    total = functools.partial(optzoo.rows.psum, axis_name="r")
    if over == "vmap":
        got = jax.tree.map(lambda a: a[0], jax.jit(jax.vmap(total, axis_name="r"))(stacked))
    else:
        mesh = Mesh(np.array(jax.devices()[:2]), "r")
        local = lambda g: total(jax.tree.map(lambda a: a[0], g))
        specs = {"in_specs": PartitionSpec("r"), "out_specs": PartitionSpec()}
        got = jax.jit(jax.shard_map(local, mesh=mesh, **specs))(stacked)
    assert got["table"].values.shape == (8, 2) and got["one_row"].values.shape == (4, 3)
    want = optax.tree.add(dense(one), dense(two))
    chex.assert_trees_all_close(dense(got), want, rtol=1e-6)


def test_psum_keeps_dtypes_and_exact_integers():
    tree = {
        "half": jnp.full((2, 1), 0.5, "bfloat16"),
        "count": jnp.full((2, 1), 2**24 + 1),
        "no": None,
        "rows": SparseRows(jnp.array([[1], [1]]), jnp.ones((2, 1), "float16"), 3),
    }
    got = jax.jit(jax.vmap(lambda g: optzoo.rows.psum(g, "r"), axis_name="r"))(tree)
    assert got["no"] is None
    assert [got[k].dtype for k in ("half", "count", "rows")] == ["bfloat16", "int32", "float16"]
    np.testing.assert_array_equal(got["count"], [[2**25 + 2]] * 2)
    alone = optzoo.rows.psum({"rows": tree["rows"]}, None)
    assert alone["rows"].shape == tree["rows"].shape
    with pytest.raises(NameError, match="axis_name='r' is not an axis of the enclosing map"):
        optzoo.rows.psum(tree, "r")
