"""Sums of many 16-bit numbers are made in float32 and rounded once, wherever the library adds.

One after the other, ones in bfloat16 add up to 256 and no more, those in float16 to 2,048. The
right values are those of NumPy in float64.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo import SparseRows
from optzoo.testing import samples

NUMBER = 4000
ROWS, WIDTH = 6, 3
IDS = jnp.zeros(NUMBER, jnp.int32)
DTYPES = [jnp.bfloat16, jnp.float16]


def one_row(dtype, shape=(ROWS, WIDTH)):
    """Row 0, listed often."""
    return SparseRows(IDS, jnp.ones((NUMBER, *shape[1:]), dtype), shape[0])


def check(got, want, dtype):
    """Row 0 to one rounding; the others are not touched."""
    error = float(jnp.finfo(dtype).eps)
    assert got.dtype == dtype
    got = np.asarray(got, np.float64)
    np.testing.assert_allclose(got[0], want, rtol=error, err_msg="row 0")


LINES = (1000, 16)  # a table that is narrower than a line
OF_ROWS = {
    "params + rows": lambda dtype: jnp.ones((ROWS, WIDTH), dtype) + one_row(dtype),
    "NumPy + rows": lambda dtype: np.ones((ROWS, WIDTH), dtype) + one_row(dtype),
    "rows of float32": lambda dtype: jnp.ones((ROWS, WIDTH), dtype) + one_row(jnp.float32),
    "rows + rows": lambda dtype: (
        jnp.ones((ROWS, WIDTH), dtype) + (one_row(dtype) + one_row(dtype) / 2 - one_row(dtype) / 2)
    ),
    "to_dense": lambda dtype: one_row(dtype).to_dense() + jnp.ones((), dtype),
    "coalesce": lambda dtype: jnp.ones((ROWS, WIDTH), dtype) + one_row(dtype).coalesce(),
    "apply_updates": lambda dtype: optax.apply_updates(
        jnp.ones((ROWS, WIDTH), dtype), one_row(dtype)
    ),
    "lines": lambda dtype: (
        optzoo.rows.to_lines(jnp.ones(LINES, dtype)).value + one_row(dtype, LINES).of_lines()
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OF_ROWS)
def test_rows(name, dtype):
    for run in (OF_ROWS[name], jax.jit(OF_ROWS[name], static_argnums=0)):
        got = run(dtype)
        check(got[:, :WIDTH] if name == "lines" else got, 1 + NUMBER, dtype)


def widely(rows):
    return jnp.sum(rows.astype(jnp.float32))


def scanned(table):
    return jax.lax.scan(lambda c, i: (c + widely(optzoo.lookup(table, i)), None), 0.0, IDS)[0]


def bags(table, weights=None):
    segments = jnp.zeros(NUMBER, jnp.int32)
    return widely(optzoo.lookup_sparse(table, IDS, segments, 1, combiner="sum", weights=weights))


LOSSES = {
    "lookup": lambda table: widely(optzoo.lookup(table, IDS)),
    "vmap": lambda table: widely(jax.vmap(lambda i: optzoo.lookup(table, i))(IDS)),
    "lookup_sparse": bags,
    "weights": lambda table: bags(table, jnp.ones(NUMBER)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*LOSSES, "scan"])
def test_gradients_of_lookups(name, dtype):
    table = jnp.ones((ROWS, WIDTH), dtype)
    if name in LOSSES:  # of a loop outside of optzoo.value_and_grad, JAX makes the sums
        check(jax.jit(jax.grad(LOSSES[name]))(table), NUMBER, dtype)
    _, rows = jax.jit(optzoo.value_and_grad(LOSSES.get(name, scanned)))(table)
    check(rows.to_dense(), NUMBER, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("weights", [None, np.float32, "same"])
def test_bags(combiner, weights, dtype):
    """Random rows: TensorFlow, which pools in float32, is as close."""
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.uniform(0.5, 1.5, (1000, 4)), dtype)
    ids = rng.integers(0, 1000, (2, 500))
    w = None if weights is None else rng.uniform(0.5, 1.5, ids.shape)
    w = None if w is None else jnp.asarray(w, dtype if weights == "same" else weights)
    got = optzoo.lookup_sparse(table, ids, weights=w, combiner=combiner)
    exact = np.ones(ids.shape) if w is None else np.asarray(w, np.float64)
    sums = np.sum(np.asarray(table, np.float64)[ids] * exact[..., None], 1)
    size = {"sum": 1.0, "mean": exact.sum(1), "sqrtn": np.sqrt((exact**2).sum(1))}[combiner]
    want = sums / np.reshape(size, (-1, 1))
    assert got.dtype == dtype
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=float(jnp.finfo(dtype).eps))


def use_of(kind):
    """A loss that reads row 0 of a table."""
    read = {
        "lookup": lambda table: optzoo.lookup(table, IDS),
        "gather": lambda table: table[IDS],
        "take": lambda table: jnp.take(table, IDS, axis=0),
        "at": lambda table: table.at[IDS].get(mode="fill", fill_value=7),
        "gather in jit": lambda table: jax.jit(lambda table: table[IDS])(table),
        "gather of a cast": lambda table: table.astype(jnp.bfloat16)[IDS],
    }[kind]
    return lambda params: 1e-4 * widely(read(params["table"]))


@pytest.mark.parametrize("dtype", [*DTYPES, jnp.float32])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("num_rows", [64, 20_000])  # smaller and larger than min_rows
@pytest.mark.parametrize(
    "kind", ["lookup", "gather", "take", "at", "gather in jit", "gather of a cast"]
)
def test_steps(kind, num_rows, tied, dtype):
    """The gradient is dense, or rows, or rows added to that of another use."""
    read = use_of(kind)
    loss = lambda params: read(params) + (0.0 * widely(params["table"]) if tied else 0.0)
    tx = optzoo.gradient_descent(1.0)
    params = {"table": jnp.ones((num_rows, WIDTH), dtype)}
    step = jax.jit(optzoo.minimize(loss, tx, sparse="allow"))
    params, _, _ = step(params, tx.init(params))
    got = np.asarray(params["table"], np.float64)
    # Each row's gradient, and the sum, are rounded to the dtype in which the rows are read.
    np.testing.assert_allclose(
        got[0], 1 - 1e-4 * NUMBER, atol=2 * float(jnp.finfo(jnp.bfloat16).eps)
    )
    np.testing.assert_array_equal(got[1:], 1)


class Nothing(NamedTuple):
    """No slots."""


LINEAR = {
    "gradient_descent": optzoo.gradient_descent(1e-4),
    "param_groups": optzoo.param_groups({"table": optzoo.gradient_descent(1e-4)}),
    "moving_average": optzoo.moving_average(optzoo.gradient_descent(1e-4), 0.9),
    "chain": optax.chain(optzoo.clip_by_global_norm(1e9), optzoo.gradient_descent(1e-4)),
    "leafwise": optzoo.rules.leafwise(
        lambda g, x, s, t: (-1e-4 * g, s), slots=Nothing(), rows=optzoo.rules.linear
    ),
    "lazy": optzoo.momentum(1e-4, 0.0),
    "on_rows": optzoo.on_rows(optax.sgd(1e-4)),
}


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LINEAR)
def test_optimizers(name, dtype, native):
    tx = LINEAR[name]
    params = {"table": jnp.ones((ROWS, 16), dtype)}
    step = optzoo.native_step(tx, required=True) if native else jax.jit(samples.step_of(tx))
    grads = {"table": one_row(dtype, (ROWS, 16))}
    params, _ = step(params, tx.init(params), grads)
    check(params["table"], 1 - 1e-4 * NUMBER, dtype)


MEMBERS = 300
OVER_REPLICAS = {
    "psum": lambda g: optzoo.rows.psum(g, "replica"),
    "psum of rows": lambda g: optzoo.rows.psum(
        SparseRows(IDS[:1], g[:1], ROWS), "replica"
    ).to_dense(),
}


@pytest.mark.parametrize("name", OVER_REPLICAS)
def test_over_replicas(name):
    grads = jnp.ones((MEMBERS, ROWS, WIDTH), jnp.bfloat16)
    got = jax.vmap(OVER_REPLICAS[name], axis_name="replica")(grads)
    check(got[0], MEMBERS, jnp.bfloat16)


METHODS = {
    "sync_replicas": lambda tx: optzoo.sync_replicas(tx),
    "model_average": lambda tx: optzoo.model_average(tx, interval_steps=1),
    "agn": lambda tx: optzoo.agn(tx, communication_period=1),
    "elastic_average": lambda tx: optzoo.elastic_average(tx, communication_period=1),
}


@pytest.mark.parametrize("name", METHODS)
def test_methods(name):
    """300 replicas with equal gradients do what one does."""
    tx = METHODS[name](optzoo.gradient_descent(0.125))

    def train(x):
        params, state = {"w": x}, tx.init({"w": x})
        for _ in range(2):
            updates, state = tx.update({"w": jnp.ones_like(x)}, state, params)
            params = optax.apply_updates(params, updates)
        return params["w"]

    got = jax.vmap(train, axis_name="replica")(jnp.ones((MEMBERS, WIDTH), jnp.bfloat16))
    check(got, 0.75, jnp.bfloat16)


@pytest.mark.parametrize("kind", ["dense", "rows", "max_rows"])
def test_accumulated_gradients(kind):
    dtype, number = jnp.bfloat16, MEMBERS
    options = {"max_rows": {"table": 1}} if kind == "max_rows" else {}
    tx = optzoo.accumulate(optax.identity(), number, **options)
    params = {"table": jnp.ones((ROWS, WIDTH), dtype)}
    rows = SparseRows(IDS[:1], jnp.ones((1, WIDTH), dtype), ROWS)
    grads = {"table": jnp.ones((ROWS, WIDTH), dtype) if kind == "dense" else rows}
    step, state = jax.jit(tx.update), tx.init(params)
    for _ in range(number):
        updates, state = step(grads, state, params)
    got = updates["table"]
    check(got.to_dense() if isinstance(got, SparseRows) else got, number, dtype)
