"""A model of several kinds: sharded and replicated tables, dense layers, a clip, averages."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optzoo

from .cases import mesh_of

pytestmark = pytest.mark.usefixtures("several_rounds")

# Rows and columns; all are stored in 64 rows, as many as the kernel has.
TABLES, INPUTS, STEPS = {"users": (50, 4), "items": (60, 3), "one": (1, 2)}, 64, 8
WIDTH, SMALL = 4, (30, 4)
# The axes of the mesh that the tables are divided over, on four devices and on two.
AXES = {
    "one": ({"users": "shard", "items": "shard", "one": "shard"}, (1, 4), (1, 2)),
    "two": ({"users": "data", "items": "shard", "one": "data"}, (2, 2), (2, 1)),
}
RNG = np.random.default_rng(0)
HOST = {name: RNG.normal(size=shape) * 0.1 for name, shape in (TABLES | {"small": SMALL}).items()}
KERNEL, WIDEN = RNG.normal(size=(INPUTS, WIDTH)) * 0.1, RNG.normal(size=(3, WIDTH))


def loss(p, users, items, small, x, y):
    h = optzoo.lookup(p["users"], users) * (optzoo.lookup(p["items"], items) @ WIDEN)
    h += optzoo.lookup(p["small"], small) + x @ p["dense"]["kernel"] + p["dense"]["bias"][None]
    return jnp.mean((h.sum(-1) - y * optzoo.lookup(p["one"], users % 2).sum(-1)) ** 2)


def batches(first, end):
    for k in range(first, end):
        rng = np.random.default_rng(k)
        numbers = TABLES["users"][0], TABLES["items"][0], SMALL[0]
        ids = [np.minimum(rng.zipf(1.3, 16) - 1, n - 1) for n in numbers]
        yield *map(jnp.asarray, ids), rng.normal(size=(16, INPUTS)), 5 * rng.normal(size=16)


def make():
    averaged = lambda tx: optzoo.moving_average(tx, 0.99, num_updates="count")
    adam = optzoo.adam(optax.piecewise_constant_schedule(2**-6, {4: 0.5}), eps=1e-3)
    return optax.chain(
        optzoo.clip_by_global_norm(0.5),
        optzoo.param_groups(
            {
                "users": optzoo.caught_up(averaged(adam), mask=True, horizon=1),
                "items": optzoo.lazy_adam(2**-5),
                "one": optzoo.row_wise_adagrad(2**-7),
                "small": optzoo.caught_up(adam, mask=True, horizon=1),
                "dense/.*": averaged(optzoo.momentum(2**-6, 0.9)),
            }
        ),
    )


def start(tx, axes, sizes):
    """Parameters and state on several devices, the mesh and the shardings of the tables."""
    mesh = mesh_of(*sizes)
    tables = {
        name: optzoo.sharded.RowSharding(
            rows,
            mesh.shape[axes[name]],
            "div" if name == "items" else "mod",
            axis_name=axes[name],
            multiple=64,
        )
        for name, (rows, _) in TABLES.items()
    }
    replicated = lambda a: jax.device_put(jnp.asarray(a), NamedSharding(mesh, P()))
    rows = lambda k: jnp.pad(jnp.asarray(HOST[k]), [(0, 64), (0, 0)])
    params = {
        k: optzoo.sharded.create_table(s, mesh, lambda ids, k=k: rows(k)[ids])
        for k, s in tables.items()
    }
    params["small"] = replicated(HOST["small"])
    params["dense"] = {"kernel": replicated(KERNEL), "bias": replicated(np.zeros(WIDTH))}
    state = jax.jit(tx.init, out_shardings=optzoo.state_sharding(tx, params))(params)
    return params, state, mesh, tables


@pytest.mark.parametrize("axes", AXES)
def test_as_on_one_device_across_a_checkpoint(axes, x64):
    """On 4 devices, then from a checkpoint on 2: the losses and the averages of one device."""
    axes, first, then = AXES[axes]
    with x64(True):
        tx, values = make(), []
        params, state, mesh, tables = start(tx, axes, first)
        assert {s.stored_rows for s in tables.values()} == {INPUTS}
        step = optzoo.sharded_minimize(loss, tx, mesh, tables, capacity_factor=0.1)
        for batch in batches(0, STEPS // 2):
            params, state, value = step(params, state, *batch)
            values.append(float(value))
        saved = optzoo.sharded.in_order_of_ids((params, state), tables, params)
        *like, mesh, tables = start(tx, axes, then)
        put = lambda a, b: jax.device_put(np.asarray(a), b.sharding)
        moved = jax.tree.map(put, saved, tuple(like))
        params, state = optzoo.sharded.from_order_of_ids(moved, tables, like[0])
        step = optzoo.sharded_minimize(loss, tx, mesh, tables, capacity_factor=0.1)
        for batch in batches(STEPS // 2, STEPS):
            params, state, value = step(params, state, *batch)
            values.append(float(value))

        one = {k: jnp.asarray(x) for k, x in HOST.items()}
        one["dense"] = {"kernel": jnp.asarray(KERNEL), "bias": jnp.zeros(WIDTH)}
        of_one, step, wanted = tx.init(one), optzoo.minimize(loss, tx), []
        for batch in batches(0, STEPS):
            one, of_one, value = step(one, of_one, *batch)
            wanted.append(float(value))
        np.testing.assert_allclose(values, wanted, rtol=1e-12)
        got = optzoo.sharded.in_order_of_ids(optzoo.eval_params(params, state), tables)
        for name, (n, _) in TABLES.items():
            got[name] = np.asarray(got[name])[:n]
        averages = optzoo.eval_params(one, of_one)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(averages), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)
        far = jax.tree.map(
            lambda x, a: float(jnp.abs(x - a).max()), one["dense"], averages["dense"]
        )
    assert min(jax.tree.leaves(far)) > 1e-4 and values[-1] != values[0]
