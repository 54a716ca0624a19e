"""Rows that sleep in sharded tables: as on one device, and as the dense optimizer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optzoo

from .cases import ROWS, WIDTH, mesh_of, of_ids, shards, whole
from .test_minimize import W, loss, start

pytestmark = pytest.mark.usefixtures("quick_to_compile")

RATE, STEPS = optax.linear_schedule(0.1, 0.02, 40), 24
ADAM = optzoo.adam(RATE)


def asleep(tables=("table", "small"), inner=ADAM):
    return optzoo.caught_up(inner, tables=tables, horizon=1)


def batches(mesh, number=STEPS):
    """Most ids are few, so that most rows sleep; some are padding."""
    for seed in range(number):
        rng = np.random.default_rng(seed)
        n = 2 * mesh.size
        ids, bags = (
            rng.integers(0, ROWS + 1, shape) // rng.integers(1, 9, shape) for shape in (n, (n, 3))
        )
        y = rng.normal(size=(n, WIDTH))
        yield jnp.asarray(ids), jnp.asarray(bags), jnp.asarray(y, W.dtype)


@functools.cache
def dense(size):
    """Adam on all rows, on one device."""
    params = {"table": jnp.array(whole()), "w": jnp.array(W), "small": jnp.array(whole())}
    state, step, losses = ADAM.init(params), optzoo.minimize(loss, ADAM), []
    for batch in batches(mesh_of(size)):
        params, state, value = step(params, state, *batch)
        losses.append(value)
    return params, state, np.stack(losses)


def train(tx, mesh, s, carry=None, first=0, **options):
    params, state = start(tx, mesh, s) if carry is None else carry
    step, losses = optzoo.sharded_minimize(loss, tx, mesh, {"table": s}, **options), []
    for batch in list(batches(mesh))[first:]:
        params, state, value = step(params, state, *batch)
        losses.append(value)
    return params, state, np.stack(losses)


def check(params, expected, s, rtol=2e-4, atol=2e-5):
    np.testing.assert_allclose(of_ids(params["table"], s), expected["table"], rtol, atol)
    for name in ("w", "small"):
        np.testing.assert_allclose(params[name], expected[name], rtol, atol)


@pytest.mark.parametrize(
    ("sizes", "names", "axis_name"),
    [
        ((8,), ("shard",), "shard"),
        ((2, 4), ("data", "shard"), "shard"),
        ((2, 4), ("shard", "other"), ("shard", "other")),
    ],
    ids=["8", "data-x-shard", "two-axes"],
)
@pytest.mark.parametrize("factor", [None, 0.1])
def test_equal_to_dense_adam(sizes, names, axis_name, factor):
    mesh = mesh_of(*sizes, names=names)
    n = int(np.prod([mesh.shape[a] for a in np.atleast_1d(axis_name)]))
    s = optzoo.RowSharding(ROWS, n, axis_name=axis_name, multiple=64)
    params, state, losses = train(asleep(), mesh, s, capacity_factor=factor)
    last = of_ids(state.last["table"], s)
    assert (last < STEPS).any() and (np.asarray(state.last["small"]) < STEPS).any()
    wanted, _, values = dense(mesh.size)
    np.testing.assert_allclose(losses, values, rtol=1e-4)
    check(optzoo.eval_params(params, state), wanted, s)
