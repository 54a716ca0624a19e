"""A small model with a table on the host, and the same with an ordinary table."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

import optzoo

ROWS, CACHE, WIDTH, IDS, STEPS = 60, 16, 8, 12, 7


def table(rows=ROWS, row=(WIDTH,), dtype=np.float32, seed=0):
    """The rows at the start."""
    return np.random.default_rng(seed).normal(size=(rows, *row)).astype(dtype)


def batches(steps=STEPS, rows=ROWS, number=IDS, seed=1):
    """Pairs of ids, of which some repeat and one is padding, and labels."""
    rng = np.random.default_rng(seed)
    ids = np.minimum(rng.zipf(1.3, (steps, number)) - 1, rows - 1).astype(np.int32)
    ids[:, ::3] = rng.integers(0, rows, ids[:, ::3].shape)
    ids[:, -1] = rows
    return list(zip(ids, rng.normal(size=(steps, number)).astype(np.float32), strict=True))


def others(dtype=jnp.float32):
    """The other parameters."""
    return {"w": jnp.linspace(-1.0, 1.0, WIDTH, dtype=dtype)}


def loss(p, ids, y):
    rows = optzoo.lookup(p["table"], ids)
    rows = rows.reshape(len(ids), math.prod(rows.shape[1:])).astype(jnp.float32)
    errors = rows @ p["w"][: rows.shape[1]].astype(jnp.float32) - y
    return jnp.sum(errors**2) / max(1, len(ids))


def first(batch):
    return batch[0]


def ordinary(tx, start=None, data=None, extra=lambda i: {}, state=None):
    """Parameters, state and losses of an ordinary table."""
    start, data = table() if start is None else start, batches() if data is None else data
    params = start if isinstance(start, dict) else {"table": jnp.asarray(start), **others()}
    params = jax.tree.map(jnp.array, params)
    state = tx.init(params) if state is None else jax.tree.map(jnp.array, state)
    step, losses = optzoo.minimize(loss, tx, sparse="allow"), []
    for i, (ids, y) in enumerate(data):
        params, state, value = step(params, state, ids, y, **extra(i))
        losses.append(float(value))
    return params, state, losses


def train(store, params, state, data=None, extra=lambda i: {}, step=None):
    """Parameters, state and losses after batches."""
    step, losses = store.minimize(loss) if step is None else step, []
    data = batches() if data is None else data
    for i, (places, (_, y)) in enumerate(store.ahead(data, ids=first)):
        params, state, value = step(*store.swap(params, state), places, y, **extra(i))
        losses.append(float(value))
    return params, state, losses


def cached(tx, start=None, data=None, extra=lambda i: {}, cache=CACHE, **options):
    """The same of a table on the host, after a flush; and the store."""
    start = table() if start is None else start
    store = optzoo.host.HostTable(start.copy(), tx, cache, **options)
    params, state, losses = train(store, *store.init(others()), data, extra)
    return *store.flush(params, state), losses, store


def same(got, want):
    """Asserts that trees are equal, bit by bit."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True)
    for (path, a), b in pairs:
        a, b = np.asarray(a), np.asarray(b)
        name = jax.tree_util.keystr(path)
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        assert a.tobytes() == b.tobytes(), (name, np.argwhere(a != b)[:5])


def near(got, want, tolerance=2e-6):
    """Asserts that trees are equal up to rounding."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        wide = lambda x: np.asarray(x).astype(np.float64)
        np.testing.assert_allclose(wide(a), wide(b), tolerance, tolerance)


@functools.cache
def adam():
    """One optimizer for tests that are not about optimizers."""
    return optzoo.lazy_adam(0.05)
