"""Sums over replicas, ticks and elements in 16 bits: they are made in float32, and rounded once.

Expected values are sums in float64. A sum of float16 in 16 bits overflows here, and one of bfloat16
is rounded more than once.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optzoo
from optzoo import SparseRows
from optzoo.distributed.engine.accumulator import append_row_counts, divide_counted
from optzoo.distributed.engine.collectives import Replicas

N = 96  # replicas; not a power of two, by which a sum is divided without another rounding
ELEMENTS = 40
TABLE = 8
IDS = np.random.default_rng(1).integers(0, TABLE, (N, 3))

in_16_bits = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])


def numbers(shape, dtype, seed=0):
    """Positive numbers; the sum of 96 is greater than the greatest float16."""
    return np.random.default_rng(seed).uniform(900, 2000, shape).astype(jnp.dtype(dtype))


def exactly(a):
    return np.asarray(a).astype(float)


def close(got, want):
    """In float32."""
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(exactly(got), want, rtol=3e-6)


def rounded_once(got, want, dtype):
    assert got.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(exactly(got), exactly(want.astype(np.float32).astype(got.dtype)))


def on_all(f, *args):
    """What the first replica gets of ``f`` on all of them."""
    got = jax.jit(jax.vmap(f, axis_name="replica"))(*args)
    return jax.tree.map(lambda a: a[0], got)


def dense_of(values):
    """The table, from the values of all replicas, or of their sum."""
    total = np.zeros((TABLE, *values.shape[2:]))
    np.add.at(total, IDS.ravel(), exactly(values).reshape(-1, *values.shape[2:]))
    return total


def dense(g):
    """Rows as a table, in float64."""
    total = np.zeros((TABLE + 1, *g.values.shape[1:]))
    np.add.at(total, np.asarray(g.indices), exactly(g.values))
    return total[:TABLE]


# Over replicas


@in_16_bits
def test_gradients_of_replicas(dtype):
    replicas, g, values = Replicas(), numbers((N, ELEMENTS), dtype), numbers((N, 3, 2), dtype)
    mask = np.arange(N) != 5
    g[5], values[5] = np.inf, np.nan  # of one that is left out

    def of_one(g, ids, values, mask):
        tree = {"layer": g, "table": SparseRows(ids, values, TABLE)}
        return replicas.sum_gradients(tree, mask)[0], replicas.mean_gradients(tree, mask)[0]

    sums, means = on_all(of_one, g, IDS, values, mask)
    assert all(np.isfinite(exactly(tree["table"].values)).all() for tree in (sums, means))
    total = exactly(g)[mask].sum(0)
    close(sums["layer"], total)
    rounded_once(means["layer"], total / (N - 1), dtype)
    assert sums["table"].dtype == jnp.float32
    masked = np.where(mask[:, None, None], exactly(values), 0)
    np.testing.assert_allclose(dense(sums["table"]), dense_of(masked), rtol=3e-6)
    # Rows are not added, so that each is rounded by itself.
    listed = exactly(values)[mask].reshape(-1, 2) / (N - 1)
    real = np.asarray(means["table"].indices) < TABLE
    rounded_once(means["table"].values[real], listed, dtype)


@in_16_bits
def test_psum(dtype):
    g = numbers((N, ELEMENTS), dtype) / jnp.dtype(dtype).type(64)
    total = on_all(lambda g: optzoo.rows.psum({"g": g}), g)["g"]
    rounded_once(total, exactly(g).sum(0), dtype)


@pytest.mark.unique
@in_16_bits
def test_gradients_that_wait_for_others(dtype):
    """In three ticks there are enough of them."""
    tx = optzoo.sync_replicas(optzoo.gradient_descent(1.0), 3 * N // 4, N // 4)
    g, values = numbers((3, N // 4, ELEMENTS), dtype), numbers((3, N // 4, 3, 2), dtype)
    ids = IDS[: 3 * N // 4].reshape(3, N // 4, 3)
    params = {"layer": np.zeros(ELEMENTS, np.float32), "table": np.zeros((TABLE, 2), np.float32)}
    params, state = optzoo.replicas.replicate(params, tx.init(params), N // 4)

    @jax.jit
    @optzoo.replicas.map_over_replicas
    def step(params, state, layer, ids, values):
        return tx.update({"layer": layer, "table": SparseRows(ids, values, TABLE)}, state, params)

    for tick in range(3):
        updates, state = step(params, state, g[tick], ids[tick], values[tick])
        if tick == 1:
            close(state.replicated.accumulator.sum["layer"], exactly(g[:2]).sum((0, 1)))
    rounded_once(updates["layer"], -exactly(g).mean((0, 1)), dtype)
    table = np.zeros((TABLE, 2))
    np.add.at(table, ids.ravel(), exactly(values).reshape(-1, 2))
    close(state.replicated.accumulator.sum["table"], table)
    real = np.unique(ids)
    got = updates["table"].to_dense()
    rounded_once(got[real], -table[real] / (3 * N // 4), dtype)


DESCENT = optzoo.gradient_descent(1.0)
AVERAGED = {
    "model_average": optzoo.model_average(DESCENT),
    "diloco": optzoo.diloco(DESCENT, DESCENT),
    "agn": optzoo.agn(DESCENT),
    "elastic_average": optzoo.elastic_average(DESCENT, N, moving_rate=1 / N),
}


@in_16_bits
@pytest.mark.parametrize("method", AVERAGED)
def test_centers(method, dtype):
    """After a local step, all of them have the mean of the parameters as center."""
    tx, x = AVERAGED[method], jnp.zeros(ELEMENTS, dtype)
    g = numbers((N, ELEMENTS), dtype)
    x, state = optzoo.replicas.replicate(x, tx.init(x), N)
    step = lambda x, state, g: tx.update(g, state, x, exchange=True)
    updates, state = jax.jit(optzoo.replicas.map_over_replicas(step))(x, state, g)
    want = -exactly(g).mean(0)
    close(state.replicated.center, want)
    if method != "elastic_average":
        rounded_once(updates[0], want, dtype)


@in_16_bits
def test_slots_that_are_averaged(dtype):
    inner = optzoo.slots_dtype(optzoo.momentum(1.0, 0.9), dtype)
    tx, x = optzoo.model_average(inner, slots="average"), jnp.zeros(ELEMENTS, dtype)
    g = numbers((N, ELEMENTS), dtype)
    x, state = optzoo.replicas.replicate(x, tx.init(x), N)
    step = lambda x, state, g: tx.update(g, state, x, exchange=True)
    _, state = jax.jit(optzoo.replicas.map_over_replicas(step))(x, state, g)
    [momentum] = jax.tree.leaves(optzoo.get_slot(state.per_replica.inner, "momentum"))
    rounded_once(momentum[0], exactly(g).mean(0), dtype)


# Over ticks

TICKS = 50


@in_16_bits
def test_gradients_of_a_push(dtype):
    tx, x = optzoo.agn(DESCENT, axis_name=None), jnp.zeros(ELEMENTS, dtype)
    g, state = numbers((TICKS, ELEMENTS), dtype), tx.init(x)
    update = jax.jit(tx.update, static_argnames="exchange")
    for tick in range(TICKS):
        updates, state = update(g[tick], state, x, exchange=tick == TICKS - 1)
        if tick == TICKS - 2:
            close(state.per_replica.method.accumulated, exactly(g[:-1]).sum(0))
    rounded_once(updates, -exactly(g).mean(0), dtype)


@in_16_bits
def test_accumulate(dtype):
    tx = optzoo.accumulate(DESCENT, TICKS, use_mean=True, max_rows={"table": 3})
    params = {"layer": jnp.zeros(ELEMENTS, dtype), "table": jnp.zeros((TABLE, 2), dtype)}
    g, values = numbers((TICKS, ELEMENTS), dtype), numbers((TICKS, 3, 2), dtype)
    update, state = jax.jit(tx.update), tx.init(params)
    for tick in range(TICKS):
        table = SparseRows(IDS[tick], values[tick], TABLE)
        updates, state = update({"layer": g[tick], "table": table}, state, params)
    rounded_once(updates["layer"], -exactly(g).mean(0), dtype)
    want = np.zeros((TABLE, 2))
    np.add.at(want, IDS[:TICKS].ravel(), exactly(values).reshape(-1, 2))
    rounded_once(updates["table"].to_dense(), -want / TICKS, dtype)


@in_16_bits
def test_moving_averages(dtype):
    """In 16 bits an average would stay where it is."""
    tx, x = optzoo.moving_average(DESCENT, 0.999), jnp.ones(ELEMENTS, dtype)
    update, state, want = jax.jit(tx.update), tx.init(x), np.ones(ELEMENTS)
    g = numbers((TICKS, ELEMENTS), dtype) / jnp.dtype(dtype).type(4096)
    for tick in range(TICKS):
        _, state = update(g[tick], state, x)
        want = 0.999 * want + 0.001 * (1 - exactly(g[tick]))
    [average] = jax.tree.leaves(optzoo.get_slot(state, "average"))
    close(average, want)


# Over elements and rows


@in_16_bits
def test_rows_that_share_an_index(dtype):
    values = numbers((N, 3, 2), dtype) / jnp.dtype(dtype).type(8)
    rows = SparseRows(IDS.ravel(), values.reshape(-1, 2), TABLE)
    sums = jax.jit(lambda rows: (rows.coalesce().to_dense(), rows.to_dense()))(rows)
    for got in sums:
        rounded_once(got, dense_of(values), dtype)


NORMS = {
    "clip_by_global_norm": lambda norm, size: optzoo.clip_by_global_norm(norm / 3),
    "clip_by_norm": lambda norm, size: optzoo.transforms.clip_by_norm(norm / 3),
    "clip_by_average_norm": lambda norm, size: optzoo.transforms.clip_by_average_norm(
        norm / 3 / size
    ),
}


@in_16_bits
@pytest.mark.parametrize("kind", NORMS)
def test_norms(kind, dtype):
    g = numbers(500, dtype)
    norm = np.sqrt((exactly(g) ** 2).sum())
    tx = NORMS[kind](float(norm), g.size)
    both = jax.jit(lambda g: (tx.update(g, tx.init(g))[0], optzoo.rows.global_norm({"g": g})))
    clipped, got = both(g)
    rounded_once(clipped, exactly(g) / 3, dtype)
    close(got, norm)


@in_16_bits
def test_means_of_the_squares_of_rows(dtype):
    """The slot of a row is the mean of its squares: those of float16 would be infinite."""
    tx, x = optzoo.row_wise_adagrad(1.0), jnp.zeros((3, ELEMENTS), dtype)
    g = numbers((3, ELEMENTS), dtype)
    _, state = jax.jit(tx.update)(g, tx.init(x), x)
    [slot] = jax.tree.leaves(state[0].slots)
    close(slot, (exactly(g) ** 2).mean(1))


# More rows than fit


@pytest.mark.unique
def test_a_sum_with_more_rows_than_fit_is_nan():
    """The total has room for twice the rows of the last gradient, or for the whole table."""
    tx = optzoo.sync_replicas(DESCENT, 2, 1, axis_name=None)
    params = {"layer": jnp.zeros(2), "table": jnp.zeros((9, 1))}
    rows = lambda *ids: SparseRows(np.array(ids), np.ones((len(ids), 1), np.float32), 9)
    update = jax.jit(tx.update)

    def total(*ticks):
        state = tx.init(params)
        for table in ticks:
            updates, state = update(
                {"layer": np.ones(2, np.float32), "table": table}, state, params
            )
        np.testing.assert_array_equal(updates["layer"], -1)
        return updates["table"]

    def check(rows, want):
        np.testing.assert_array_equal(rows.to_dense().ravel(), [*want, 0, 0, 0, 0, 0])

    lost = total(rows(0, 1, 2, 3, 4), rows(5, 6))  # 7 rows, room for 4
    assert np.isnan(lost.values).any() and len(lost.indices) == 4
    first = rows(0, 1, 2, 9, 9), rows(2, 3)  # 9 is padding
    check(total(*first), [-0.5, -0.5, -1, -0.5])
    check(total(*first, rows(3, 3), rows(2, 9)), [0, 0, -0.5, -1])  # without those before


def test_rows_divided_by_how_often_they_came():
    """Two tables of other widths, of which each replica lists other rows; padding is none."""
    listed = [{"a": [0, 1, 1], "b": [2]}, {"a": [1, 3], "b": [0, 2]}]
    width, rows = {"a": 2, "b": 1}, {"a": 3, "b": 4}

    def gradients(of_replica, value):
        values = {n: jnp.full((len(ids), width[n]), value) for n, ids in of_replica.items()}
        return {n: SparseRows(jnp.array(of_replica[n]), v, rows[n]) for n, v in values.items()}

    gs = [
        gradients(of_replica, value) for of_replica, value in zip(listed, (1.0, 4.0), strict=True)
    ]

    @jax.jit
    def run(gs):
        sums = optzoo.rows.add(*map(append_row_counts, gs))
        means = divide_counted(sums, jnp.float32(2), gs[0], by_row_counts=True)
        return {name: g.to_dense()[:, 0] for name, g in means.items()}

    means = run(gs)
    assert means["a"].tolist() == [1, (2 + 4) / 2, 0]
    assert means["b"].tolist() == [4, 0, (1 + 4) / 2, 0]
