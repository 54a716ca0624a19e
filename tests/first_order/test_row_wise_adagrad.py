"""Row-wise Adagrad against its definition, and the cost of its rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import optzoo
from optzoo import SparseRows
from optzoo.first_order.row_wise_adagrad import row_wise_adagrad
from optzoo.state.sharding import state_sharding
from optzoo.testing.samples import step


def as_in_fbgemm(x, accumulators, row, g, rate, eps):
    """One row, in float64: its mean square is added to the sum, whose root divides the rate."""
    accumulators[row] += np.mean(g**2)
    x[row] -= rate / (np.sqrt(accumulators[row]) + eps) * g


@pytest.mark.parametrize("eps", [1e-8, 0.5])
@pytest.mark.parametrize("shape", [(6, 4), (6, 2, 3), (6,)])
def test_follows_the_definition(shape, eps):
    rng, tx = np.random.default_rng(0), row_wise_adagrad(0.1, eps)
    want, sums = rng.normal(size=shape), np.zeros(6)
    got = jnp.asarray(want, jnp.float32)
    state = tx.init(got)
    assert state[0].slots.accumulator.shape == (6,)
    for _ in range(5):
        ids = rng.integers(0, 6, 4)
        values = rng.normal(size=(4, *shape[1:]))
        for row in set(ids.tolist()):
            as_in_fbgemm(want, sums, row, values[ids == row].sum(axis=0), 0.1, eps)
        rows = SparseRows(jnp.asarray(ids), jnp.asarray(values, jnp.float32), 6)
        got, state = step(tx, rows, got, state)
        dense = rng.normal(size=shape)
        for row in range(6):
            as_in_fbgemm(want, sums, row, dense[row], 0.1, eps)
        got, state = step(tx, jnp.asarray(dense, jnp.float32), got, state)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state[0].slots.accumulator, sums, rtol=1e-5)


def test_a_vector_and_a_scalar_are_those_of_adagrad():
    x = (jnp.array([1.0, -2, 3]), jnp.float32(4))
    plain = optzoo.adagrad(0.1, initial_accumulator_value=1e-20)
    for ours, theirs in zip(
        step(row_wise_adagrad(0.1), x, x)[0], step(plain, x, x)[0], strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_rows_without_gradients_are_unchanged_with_eps_zero():
    x, g = jnp.ones((2, 3)), jnp.array([[1.0, 1, 1], [0, 0, 0]])
    x, _ = step(row_wise_adagrad(0.1, 0.0), g, x)
    np.testing.assert_allclose(x, [[0.9] * 3, [1] * 3], rtol=1e-6)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0,)])
def test_empty_arrays(shape):
    x, state = step(row_wise_adagrad(0.1), jnp.ones(shape), jnp.ones(shape))
    assert x.shape == shape and jnp.isfinite(state[0].slots.accumulator).all()


def test_slots_are_sharded_like_the_rows():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("rows", "columns"))
    placed = NamedSharding(mesh, PartitionSpec("rows", "columns"))
    x = jax.device_put(jnp.ones((8, 4)), placed)
    tx = row_wise_adagrad(0.1)
    assert tx.init(x)[0].slots.accumulator.sharding.spec == PartitionSpec("rows")
    assert state_sharding(tx, x)[0].slots.accumulator.spec == PartitionSpec("rows")


def test_few_rows_touch_nothing_else():
    """Only gathers and scatters have arrays with as many rows as the table."""
    table, tx = jnp.ones((1009, 8)), row_wise_adagrad(0.1)
    rows = SparseRows(jnp.arange(4), jnp.ones((4, 8)), 1009, coalesced=True)
    program = jax.make_jaxpr(tx.update)(rows, tx.init(table), table)
    of_table = lambda eqn: any(1009 in v.aval.shape for v in (*eqn.invars, *eqn.outvars))

    def names(jaxpr):
        for eqn in jaxpr.eqns:
            bodies = [p.jaxpr for p in eqn.params.values() if hasattr(p, "jaxpr")]
            if bodies:
                for body in bodies:
                    yield from names(body)
            elif of_table(eqn):
                yield eqn.primitive.name

    assert set(names(program.jaxpr)) == {"gather", "scatter"}
