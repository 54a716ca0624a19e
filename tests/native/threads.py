"""Prints what native steps compute, through XLA; a script for ``test_threads.py``.

    NPROC=4 python -m tests.native.threads steps
    NPROC=4 python -m tests.native.threads devices
    NPROC=4 python -m tests.native.threads soak 10000

NPROC is the number of threads in XLA's pool.
"""

import hashlib
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optzoo

from .test_fuzz import WRAPPERS, values_of

NUM_ROWS, WIDTH, MANY = 4000, 64, 9000
SIZE, ROWS = 150_000, (5, 30_000)
STEPS = 3
OTHERS = {
    "accumulate": lambda tx, shapes: optzoo.accumulate(tx, 2, max_rows={"table": MANY}),
    "adam": lambda tx, shapes: tx,
    "ftrl": lambda tx, shapes: optzoo.ftrl(0.1),
    "gradient_descent": lambda tx, shapes: optzoo.gradient_descent(0.1),
    "row_wise_lamb": lambda tx, shapes: optzoo.row_wise_lamb(0.1),
    "packed": lambda tx, shapes: optzoo.slots_dtype(tx, "bfloat16", stochastic=True, packed=True),
}


def grads_of(rng):
    ids = np.where(rng.random(MANY) < 0.3, 7, rng.integers(-3, NUM_ROWS + 3, MANY))
    values = jnp.asarray(rng.normal(size=(MANY, WIDTH)), jnp.float32)
    rows = optzoo.SparseRows(jnp.asarray(ids, jnp.int32), values, NUM_ROWS)
    draw = lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    return {"table": rows, "w": draw(SIZE), "rows": draw(ROWS)}


def digest(make):
    """That of the parameters and the state after some steps."""
    rng = np.random.default_rng(0)
    params = {"table": jnp.ones((NUM_ROWS, WIDTH)), "w": jnp.ones(SIZE), "rows": jnp.ones(ROWS)}
    tx = make(optzoo.lazy_adam(0.1), {k: v.shape for k, v in params.items()})
    state = optax.with_extra_args_support(tx).init(params)
    step = jax.jit(optzoo.native_step(tx), donate_argnums=(0, 1))
    for _ in range(STEPS):
        params, state = step(params, state, grads_of(rng))
    return digest_of((params, state))


def of_rows_that_rest():
    """The digest of steps on a table whose rows are read, swept and updated."""
    tx = optzoo.caught_up(optzoo.adam(0.1), horizon=1, mask=True)
    table, rng = jnp.ones((NUM_ROWS, WIDTH)), np.random.default_rng(0)
    state = tx.init(table)
    loss = lambda x, ids, y: jnp.mean((jnp.sum(optzoo.lookup(x, ids), axis=-1) - y) ** 2)
    step = optzoo.minimize(loss, tx, native="require")
    for _ in range(STEPS):
        ids = np.where(rng.random(MANY) < 0.3, 7, rng.integers(-3, NUM_ROWS, MANY))
        table, state, _ = step(table, state, jnp.asarray(np.maximum(ids, 0)), jnp.ones(MANY))
    return digest_of((table, state))


def digest_of(trees):
    found = hashlib.sha256()
    for x in values_of(trees):
        found.update(np.asarray(x).tobytes())
    return found.hexdigest()


def on_devices():
    """The digest of steps on a table over four devices, which share the pool."""
    jax.config.update("jax_num_cpu_devices", 4)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("shard",))
    sharding = optzoo.sharded.RowSharding(NUM_ROWS, mesh.size)
    table = optzoo.sharded.create_table(
        sharding, mesh, optzoo.sharded.uniform_rows(jax.random.key(0), WIDTH)
    )
    params, tx = {"table": table}, optzoo.lazy_adam(0.1)
    state = jax.jit(tx.init, out_shardings=optzoo.state_sharding(tx, params))(params)
    loss = lambda p, ids, y: jnp.mean((jnp.sum(p["table"][ids], axis=-1) - y) ** 2)
    step = optzoo.sharded_minimize(loss, tx, mesh, {"table": sharding}, native="require")
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        ids = jnp.asarray(rng.integers(0, NUM_ROWS, 4 * MANY), jnp.int32)
        params, state, _ = step(params, state, ids, jnp.ones(4 * MANY))
    return digest_of((params, state))


def soak(steps):
    """Steps of changing shapes; by how many bytes the process grows in the last three quarters."""
    rng = np.random.default_rng(0)
    tx = optzoo.lazy_adam(0.1)
    step = jax.jit(optzoo.native_step(tx, required=True), donate_argnums=(0, 1))
    cases = []
    for many, num_rows in [(1, 9), (700, 300), (3000, 900), (9000, 1200), (5000, 4000)]:
        params = {"table": jnp.ones((num_rows, WIDTH)), "w": jnp.ones(40 * many)}
        values = jnp.asarray(rng.normal(size=(many, WIDTH)), jnp.float32)
        ids = jnp.asarray(rng.integers(0, num_rows, many), jnp.int32)
        grads = {"table": optzoo.SparseRows(ids, values, num_rows), "w": jnp.ones(40 * many)}
        cases.append([params, tx.init(params), grads])
    memory = lambda: int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096
    for k in range(steps):
        if k == steps // 4:
            before = memory()
        case = cases[rng.integers(len(cases))]
        case[:2] = step(*case)
    jax.block_until_ready(cases)
    return memory() - before


if __name__ == "__main__":
    if sys.argv[1] == "soak":
        print(soak(int(sys.argv[2])))
    elif sys.argv[1] == "devices":
        print(on_devices())
    else:
        kinds = {**WRAPPERS, **OTHERS}
        del kinds["variable_clipping"]  # XLA before 0.12 divides these norms as it has threads
        for name, make in kinds.items():
            print(name, digest(make), flush=True)
        print("deferred rows", of_rows_that_rest())
