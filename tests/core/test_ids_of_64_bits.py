"""Ids of NumPy and Python that JAX cannot keep, such as hashes: never those of another row.

Without x64 JAX keeps the lower 32 bits: of 2**32 + 5 the row 5.
"""

import json
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optzoo
from optzoo import SparseRows
from optzoo.sharded import RowSharding

TABLE = np.arange(20.0, dtype=np.float32).reshape(10, 2)
WIDE = 2**32 + 5
IDS = {
    "int64": np.array([WIDE, 3]),
    "uint64": np.array([2**63 + 5, 3], np.uint64),
    "list": [WIDE, 3],
    "longer than 64 bits": [2**64 + 5, 3],
    "negative": np.array([5 - 2**32, 3]),
    "uint32": np.array([2**32 - 1, 3], np.uint32),
}
PARAMS = {"table": TABLE}


@pytest.mark.parametrize("name", IDS)
def test_lookups(name):
    """Known ids out of range are an error, of whatever width."""
    ids = IDS[name]
    with pytest.raises(IndexError, match=str(np.asarray(ids).ravel()[0])):
        optzoo.lookup(TABLE, ids)
    with pytest.raises(IndexError, match=str(np.asarray(ids).ravel()[0])):
        optzoo.lookup_sparse(TABLE, ids, np.array([0, 0]), 1)
    with pytest.raises(IndexError, match=str(np.asarray(ids).ravel()[0])):
        jax.jit(lambda table: optzoo.lookup(table, ids))(TABLE)  # known when traced


def test_one_id():
    with pytest.raises(IndexError, match=str(WIDE)):
        optzoo.lookup(TABLE, WIDE)
    np.testing.assert_array_equal(optzoo.lookup(TABLE, 3), TABLE[3])


def test_segments():
    """Ids of no bag are ignored."""
    segments = np.array([2**32, 1])
    got = optzoo.lookup_sparse(TABLE, np.array([5, 3]), segments, 2, combiner="sum")
    np.testing.assert_array_equal(got, [[0, 0], TABLE[3]])


@pytest.mark.parametrize("name", IDS)
def test_rows(name):
    """Ids out of range are ignored."""
    rows = SparseRows(IDS[name], jnp.ones((2, 2)), 10)
    want = TABLE + np.where(np.arange(10)[:, None] == 3, 1, 0)
    np.testing.assert_array_equal(TABLE + rows, want)
    np.testing.assert_array_equal(TABLE + rows.with_rows(IDS[name], jnp.ones((2, 2))), want)


@pytest.mark.parametrize("name", IDS)
def test_reset_rows(name):
    tx = optzoo.lazy_adam(0.1)
    state = jax.tree.map(lambda a: a + 1, tx.init(PARAMS))
    init = lambda ids: jnp.full((len(ids), 2), -1.0)
    params, _ = optzoo.growing.reset_rows(
        PARAMS, state, {"table": IDS[name]}, tx=tx, init={"table": init}
    )
    np.testing.assert_array_equal(np.flatnonzero(params["table"][:, 0] == -1), [3])


@pytest.mark.parametrize("name", IDS)
def test_catch_up(name):
    """All rows but row 0 rest in the second step."""
    tx = optzoo.caught_up(optzoo.adam(0.1), mask="table")
    step = optzoo.minimize(lambda p, ids: jnp.sum(optzoo.lookup(p["table"], ids) ** 2), tx)
    params, state = PARAMS, tx.init(PARAMS)
    for ids in (np.arange(10), np.arange(1)):
        params, state, _ = step(params, state, ids)
    got, _ = optzoo.rows.catch_up(params, state, {"table": IDS[name]})
    moved = np.any(np.asarray(got["table"]) != np.asarray(params["table"]), 1)
    np.testing.assert_array_equal(np.flatnonzero(moved), [3])


@pytest.mark.parametrize("partition", ["mod", "div"])
@pytest.mark.parametrize("name", ["int64", "uint64", "negative", "uint32"])
def test_places(name, partition):
    sharding = RowSharding(10, 2, partition)
    places = sharding.places_of(IDS[name])
    assert places[0] == sharding.stored_rows + 1 and places[1] < sharding.stored_rows


def loss(params, batch):
    return jnp.sum(optzoo.lookup(params["table"], jnp.asarray(batch["ids"])))


STEPS = {
    "minimize": lambda tx: optzoo.minimize(loss, tx),
    "native": lambda tx: optzoo.minimize(loss, tx, native=True),
    "sharded_minimize": lambda tx: optzoo.sharded_minimize(
        loss, tx, jax.make_mesh((1,), ("shard",)), {}
    ),
    "map_over_replicas": lambda tx: optzoo.replicas.map_over_replicas(lambda p, s, batch: (p, s)),
}


@pytest.mark.parametrize("ids", ["int64", "uint64", "negative", "list"])
@pytest.mark.parametrize("name", STEPS)
def test_steps(name, ids):
    """JAX makes the batch arrays of 32 bits before a step sees them."""
    tx = optzoo.lazy_adam(0.1)
    given = IDS[ids]
    with pytest.raises(OverflowError, match=rf"batch\[0\] 'ids.* has the integer {given[0]},.*x64"):
        STEPS[name](tx)(PARAMS, tx.init(PARAMS), {"ids": given})


def test_modules():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Embed(10, 2, rngs=nnx.Rngs(0))
    step = optzoo.nnx_minimize(lambda model, ids: jnp.sum(model(ids)))
    optimizer = nnx.Optimizer(model, optzoo.lazy_adam(0.1), wrt=nnx.Param)
    with pytest.raises(OverflowError, match=str(WIDE)):
        step(model, optimizer, IDS["int64"])


@pytest.mark.parametrize(
    "dtype", [np.int8, np.uint8, np.int16, np.uint16, np.uint32, np.int64, np.uint64]
)
def test_ids_of_any_width_that_fit(dtype):
    ids, tx = np.array([7, 3, 3], dtype), optzoo.gradient_descent(1.0)
    step = optzoo.minimize(lambda p, ids: jnp.sum(optzoo.lookup(p["table"], ids)), tx)
    params, _, _ = step(PARAMS, tx.init(PARAMS), ids)
    want = TABLE - np.bincount([7, 3, 3], minlength=10)[:, None]
    np.testing.assert_array_equal(params["table"], want)
    np.testing.assert_array_equal(optzoo.lookup(TABLE, ids), TABLE[ids])


def test_a_step_is_still_what_jit_makes():
    tx = optzoo.lazy_adam(0.1)
    step = optzoo.minimize(loss, tx)
    args = PARAMS, tx.init(PARAMS), {"ids": jnp.arange(3)}
    assert isinstance(step, jax.stages.Wrapped)
    shapes = jax.eval_shape(step, *args)
    chex.assert_trees_all_equal_shapes(shapes, step.eval_shape(*args))
    compiled = step.lower(*args).compile()
    copies = lambda: jax.tree.map(jnp.array, args)
    chex.assert_trees_all_close(compiled(*copies()), jax.jit(step)(*copies()))
    assert step.trace(*args).jaxpr is not None
    step(*copies())
    assert step._cache_size() == 1
    step.clear_cache()
    assert step._cache_size() == 0


@pytest.mark.unique
def test_with_x64():
    """Then 64 bits are kept, but JAX's own gathers and scatters take the lower 32 of them."""
    program = f"""
import json, jax, numpy as np, jax.numpy as jnp, optzoo
jax.config.update("jax_enable_x64", True)
tx, table, ids = optzoo.gradient_descent(1.0), np.zeros((10, 2)), np.array([{WIDE}, 3])
rows = lambda ids: optzoo.SparseRows(ids, jnp.ones((2, 2)), 10)
step = optzoo.minimize(lambda p, ids: jnp.sum(jnp.nan_to_num(optzoo.lookup(p, ids))), tx)
native = optzoo.native_step(tx)
bags = lambda t, s: optzoo.lookup_sparse(t, jnp.array([2, 3]), s, 6, combiner="sum")
lines = optzoo.rows.to_lines(jnp.zeros((10, 2))).value
found = [
    step(table, tx.init(table), ids)[0],
    native(table, tx.init(table), rows(ids))[0],
    table + rows(ids),
    table + rows(ids).coalesce(),
    jax.jit(lambda t, ids: rows(ids).scatter(t, jnp.ones((2, 2))))(table, ids),
    jax.jit(lambda t, ids: t + rows(ids))(table, ids),
    jax.jit(lambda t, ids: t + rows(ids).of_lines())(lines, ids).reshape(-1, 2)[:10],
    jax.jit(bags)(table + 1, np.array([{WIDE}, 3])),
]
is_nan = jnp.isnan(jax.jit(optzoo.lookup)(table, ids))
print(json.dumps([[np.asarray(x)[:, 0].tolist() for x in found], is_nan[:, 0].tolist()]))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found, is_nan = json.loads(done.stdout)
    assert is_nan == [True, False]
    for k, of_rows in enumerate(found):
        assert np.flatnonzero(of_rows).tolist() == [3], k
