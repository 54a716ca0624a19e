"""A step called in all ways that a function of JAX can be, against NumPy."""

import concurrent.futures
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optzoo
from optzoo.testing import samples

TABLE = np.linspace(-1, 1, 12, dtype=np.float32).reshape(6, 2)
BATCHES = np.array([[0, 3, 3], [3, 1, 0], [5, 5, 5]], np.int32)
RATE, B1, B2, EPS = 0.1, 0.9, 0.999, 1e-8


def by_numpy(table):
    """The table after lazy Adam of TensorFlow, whose loss is the sum of the squares of rows."""
    table = table.astype(np.float64)
    m, v = np.zeros_like(table), np.zeros_like(table)
    b1_power = b2_power = np.float32(1)
    for ids in BATCHES:
        b1_power, b2_power = b1_power * np.float32(B1), b2_power * np.float32(B2)
        rows, counts = np.unique(ids, return_counts=True)
        g = 2 * table[rows] * counts[:, None]
        m[rows] = B1 * m[rows] + (1 - B1) * g
        v[rows] = B2 * v[rows] + (1 - B2) * g**2
        rate = RATE * np.sqrt(1 - b2_power) / (1 - b1_power)
        table[rows] -= rate * m[rows] / (np.sqrt(v[rows]) + EPS)
    return table


def close(got, table):
    np.testing.assert_allclose(got, by_numpy(table), rtol=2e-6, atol=1e-7)


def loss(params, ids):
    return jnp.sum(optzoo.lookup(params["table"], ids) ** 2)


def start(tx, table=TABLE):
    params = {"table": jnp.array(table)}
    return params, tx.init(params)


def one_by_one(tx, step, table=TABLE):
    params, state = start(tx, table)
    for ids in BATCHES:
        params, state, _ = step(params, state, ids)
    return params["table"]


def in_a_scan(tx, step):
    body = lambda carry, ids: (step(*carry, ids)[:2], None)
    return jax.jit(lambda *carry: jax.lax.scan(body, carry, BATCHES)[0])(*start(tx))[0]["table"]


def compiled(tx, step):
    return one_by_one(tx, step.lower(*start(tx), BATCHES[0]).compile())


def compiled_from_shapes(tx, step):
    shapes = jax.eval_shape(lambda: (*start(tx), jnp.array(BATCHES[0])))
    return one_by_one(tx, step.trace(*shapes).lower().compile())


def of_several_models(tx, step):
    params = {"table": jnp.stack([2 * TABLE, TABLE])}
    state = jax.vmap(tx.init)(params)
    for ids in BATCHES:
        params, state, _ = jax.vmap(step, in_axes=(0, 0, None))(params, state, ids)
    close(params["table"][0], 2 * TABLE)
    return params["table"][1]


def with_updates_by_hand(tx, step):
    del step

    @jax.jit
    def by_hand(params, state, ids):
        value, grads = optzoo.value_and_grad(loss)(params, ids)
        return *samples.step(tx, grads, params, state), value

    return one_by_one(tx, by_hand)


def in_threads(tx, step):
    """Of one transformation and one step, also when it is compiled."""
    tables = [TABLE * scale for scale in (1, 2, 3, 4)]
    with concurrent.futures.ThreadPoolExecutor(len(tables)) as pool:
        found = list(pool.map(functools.partial(one_by_one, tx, step), tables))
    for table, got in zip(tables, found, strict=True):
        close(got, table)
    return found[0]


WAYS = (
    *(one_by_one, in_a_scan, compiled, compiled_from_shapes, of_several_models),
    *(with_updates_by_hand, in_threads),
)
KINDS = {
    "plain": lambda: optzoo.lazy_adam(RATE),
    "average": lambda: optzoo.moving_average(optzoo.lazy_adam(RATE), 0.9),
    "packed": lambda: optzoo.slots_dtype(optzoo.lazy_adam(RATE), "float32", packed=True),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_all_ways_are_lazy_adam(way, kind):
    tx = KINDS[kind]()
    close(way(tx, optzoo.minimize(loss, tx)), TABLE)


def test_eager_updates_in_threads():
    """What a transformation remembers of calls is filled by several threads at once."""
    tx, x = optzoo.moving_average(optzoo.adam(RATE), 0.9), samples.params()
    update = lambda _: tx.update(samples.dense_grads(x), tx.init(x), x)[0]
    with jax.disable_jit(), concurrent.futures.ThreadPoolExecutor(4) as pool:
        for got in pool.map(update, range(8)):
            for u, g in zip(
                jax.tree.leaves(got), jax.tree.leaves(samples.dense_grads(x)), strict=True
            ):
                # The first update of Adam is the rate times the sign.
                np.testing.assert_allclose(u, -RATE * np.sign(g), rtol=1e-4)
