"""Totals of 0: weights, norms, numbers of ids, of rows and of gradients; and those of 1 and of all.

Expected values are those of the definitions, in NumPy.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo import SparseRows
from optzoo.testing import samples

TABLE = np.arange(1.0, 9).reshape(4, 2).astype(np.float32)
PADDING = len(TABLE)

# Bags: ids, and weights.
BAGS = {
    "no bags": (np.zeros((0, 3), int), np.zeros((0, 3))),
    "no ids": (np.zeros((2, 0), int), np.zeros((2, 0))),
    "padding alone": (np.full((2, 3), PADDING), np.ones((2, 3))),
    "weights of 0": (np.array([[0, 1, 2], [3, 3, 3]]), np.zeros((2, 3))),
    "weights that sum to 0": (np.array([[0, 1], [3, 3]]), np.array([[1, -1], [2, -2]])),
    "one id": (np.array([[2, PADDING], [PADDING, 1]]), np.array([[3.0, 5], [5, 0.5]])),
    "one weight": (np.array([[0, 1, 2]]), np.array([[0, 2, 0]])),
    "all": (np.array([[0, 1, 2, 3]]), np.array([[1, 2, 3, 4]])),
}


def pooled(ids, weights, combiner):
    """The definition; and the derivative of the sum of the results for each row."""
    out, slope = np.zeros((len(ids), 2)), np.zeros(PADDING)
    for bag, (i, w) in enumerate(zip(ids, weights, strict=True)):
        i, w = i[i < PADDING], np.float64(w[i < PADDING])
        size = {"sum": 1.0, "mean": w.sum(), "sqrtn": np.sqrt((w**2).sum())}[combiner]
        if size == 0:
            continue
        out[bag] = (w[:, None] * TABLE[i]).sum(0) / size
        np.add.at(slope, i, w / size)
    return out, slope


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("bags", BAGS)
def test_bags(bags, combiner, weighted):
    ids, weights = BAGS[bags]
    weights = np.float32(weights) if weighted else None

    def loss(table):
        out = optzoo.lookup_sparse(table, ids, weights=weights, combiner=combiner)
        return jnp.sum(out), out

    (_, got), grads = optzoo.value_and_grad(loss, has_aux=True)(jnp.asarray(TABLE))
    want, slope = pooled(ids, np.ones(ids.shape) if weights is None else weights, combiner)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_allclose(grads.to_dense(), np.outer(slope, [1, 1]), rtol=1e-6)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize(("ids", "number"), [([], 1), ([], 2), ([1], 1), ([2], 2)])
def test_ragged_bags(ids, number, combiner):
    ids, segments = np.array(ids, int), np.zeros(len(ids), int)
    pool = functools.partial(optzoo.lookup_sparse, num_segments=number, combiner=combiner)
    loss = lambda table: (jnp.sum(out := pool(table, ids, segments)), out)
    (_, got), grads = optzoo.value_and_grad(loss, has_aux=True)(jnp.asarray(TABLE))
    want, slope = np.zeros((number, 2)), np.zeros_like(TABLE)
    if len(ids):
        want[0], slope[ids] = TABLE[ids[0]], 1
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(grads.to_dense(), slope)


@pytest.mark.parametrize("shape", [(0,), (1,), (2, 0), (0, 2)])
def test_lookups_of_no_ids(shape):
    ids = np.zeros(shape, int)
    loss = lambda table: (jnp.sum(rows := optzoo.lookup(table, ids)), rows)
    (_, rows), grads = optzoo.value_and_grad(loss, has_aux=True)(jnp.asarray(TABLE))
    assert rows.shape == (*shape, 2)
    want = np.zeros_like(TABLE)
    want[0] = ids.size
    np.testing.assert_array_equal(grads.to_dense(), want)


# Clips: gradients of norm 0, just at the limit, and of which the squares are 0 or infinite.

LIMIT = 5.0
NORMS = {
    "0": [0, 0],
    "below": [3, 3.999],
    "the limit": [3, 4],
    "above": [3, 4.001],
    "one element": [50, 0],
    "squares of 0": [1e-30, -1e-30],
}
INFINITE = {"squares": [3e30, 4e30], "element": [np.inf, 4], "negative": [-np.inf, 4]}


def clip(g, limit):
    return g * (limit / max(limit, np.sqrt(np.sum(np.float64(g) ** 2))))


CLIPS = {
    "clip_by_norm": (optzoo.transforms.clip_by_norm(LIMIT), clip),
    "clip_by_global_norm": (optzoo.clip_by_global_norm(LIMIT), clip),
    "clip_by_average_norm": (
        optzoo.transforms.clip_by_average_norm(LIMIT / 2),
        lambda g, limit: clip(g, limit / 2 * g.size),
    ),
    "zero_if_norm_exceeds": (
        optzoo.transforms.zero_if_norm_exceeds(LIMIT),
        lambda g, limit: g if np.sum(np.float64(g) ** 2) <= limit**2 else 0 * g,
    ),
}


def both_forms(tx, g):
    """The update of an array, and of rows."""
    g = np.float32([g])
    dense, _ = jax.jit(tx.update)(g, tx.init(g))
    rows, _ = jax.jit(tx.update)(SparseRows(np.zeros(1, int), g, 1), tx.init(g))
    return dense[0], rows.to_dense()[0]


@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize("norm", NORMS)
def test_clips(name, norm):
    tx, formula = CLIPS[name]
    for got in both_forms(tx, NORMS[norm]):
        np.testing.assert_allclose(got, formula(np.float32(NORMS[norm]), LIMIT), rtol=1e-6)


@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize("norm", INFINITE)
def test_clips_of_an_infinite_norm(name, norm):
    """Finite gradients become 0; an infinite element is NaN, unless it is what to look for."""
    g = np.float32(INFINITE[norm])
    want = np.where(np.isfinite(g), 0, 0 if name == "zero_if_norm_exceeds" else np.nan)
    for got in both_forms(CLIPS[name][0], g):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("x", [[0, 0], [3, 4], [0.3, 0.4], [30, -40]], ids=str)
@pytest.mark.parametrize("u", [[0, 0], [-3, -4]], ids=str)
def test_variable_clipping(u, x):
    """Also of parameters that become 0."""
    tx = optzoo.variable_clipping(optax.identity(), (0,), LIMIT)
    x, u = np.float32(x), np.float32(u)
    got, _ = jax.jit(tx.update)(u, tx.init(x), x)
    np.testing.assert_allclose(x + got, clip(x + u, LIMIT), rtol=1e-6, atol=1e-6)


# Trust ratios: a parameter of zeros, a gradient of zeros, and both.

VALUES = {"zeros": np.zeros(4, np.float32), "numbers": np.float32([1, -2, 3, 0.5])}


def lars(x, g):
    size, of_g = np.linalg.norm(x), np.linalg.norm(g)
    ratio = 0.1 * size / (of_g + 0.01 * size) if size > 0 and of_g > 0 else 1
    return -0.5 * ratio * (g + 0.01 * x)


def lamb(x, g):
    r = g / (np.abs(g) + 1e-6) + 0.01 * x
    size, of_r = np.linalg.norm(x), np.linalg.norm(r)
    return -0.5 * (size / of_r if size > 0 and of_r > 0 else 1) * r


def adafactor(x, g):
    """Its first mean has no old part; the vector is not factored."""
    rms = lambda a: np.sqrt(np.mean(a**2))
    u = np.divide(g, np.abs(g), out=np.zeros(4), where=g != 0)
    return -0.5 * max(rms(x), 1e-3) * u / max(1, rms(u))


RATIOS = {
    "lars": (
        optzoo.lars(0.5, momentum=0.0, l2_weight_decay=0.01, trust_coefficient=0.1),
        lars,
    ),
    "lamb": (optzoo.lamb(0.5, weight_decay=0.01), lamb),
    "adafactor": (optzoo.adafactor(0.5, eps=0.0), adafactor),
    "normalized_sgd": (
        optzoo.normalized_sgd(0.5),
        lambda x, g: -0.5 * g / max(np.linalg.norm(g), 1e-6),
    ),
}


@pytest.mark.parametrize("g", VALUES)
@pytest.mark.parametrize("x", VALUES)
@pytest.mark.parametrize("name", RATIOS)
def test_ratios_of_norms(name, x, g):
    tx, formula = RATIOS[name]
    x, g = VALUES[x], VALUES[g]
    got, state = jax.jit(tx.update)(g, tx.init(x), x)
    np.testing.assert_allclose(got, formula(np.float64(x), np.float64(g)), rtol=2e-5)
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(state))


# Rows: none listed, and a table without any.


@pytest.mark.parametrize("num_rows", [0, 1, 4])
def test_no_rows(num_rows, entry):
    """They change a table as padding does."""
    tx, x = samples.make(entry), {"table": jnp.ones((num_rows, 2)), "w": jnp.ones(2)}
    none = SparseRows(jnp.zeros(0, int), jnp.zeros((0, 2)), num_rows)
    padding = SparseRows(jnp.full(1, num_rows), jnp.full((1, 2), 3.0), num_rows)
    run = lambda rows: samples.step(tx, {"table": rows, "w": jnp.ones(2)}, x)
    got, want = run(none), run(padding)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape and np.isfinite(a).all()
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("num_rows", [0, 1])
@pytest.mark.parametrize("number", [0, 1])
def test_sums_of_rows(number, num_rows):
    rows = SparseRows(jnp.zeros(number, int), jnp.full((number, 2), 3.0), num_rows)
    total = 3.0 * number * min(num_rows, 1)
    want = np.full((num_rows, 2), total)
    for got in (
        rows,
        rows.coalesce(),
        rows.coalesce(deterministic=True),
        rows + rows / 2 - rows / 2,
    ):
        np.testing.assert_array_equal(got.to_dense(), want)
        np.testing.assert_array_equal(jnp.ones((num_rows, 2)) + got, 1 + want)
    np.testing.assert_allclose(optzoo.rows.global_norm([rows]), total * np.sqrt(2), rtol=1e-6)
    np.testing.assert_array_equal(optzoo.rows.global_norm([]), 0)


# Gradients of a cycle: in no step, in one, and in all.


@pytest.mark.parametrize("ends", [False, True])  # by end_cycle, or where three steps end it
@pytest.mark.parametrize("use_mean", [False, True])
@pytest.mark.parametrize("present", [(), (1,), (0, 1, 2)], ids=str)
def test_accumulate(present, use_mean, ends):
    """Without a gradient in the cycle neither parameters nor slots change."""
    tx = optzoo.accumulate(optzoo.momentum(0.5, 0.9), 5 if ends else 3, use_mean=use_mean)
    x, g = {"a": np.ones(2, np.float32), "b": np.ones(2, np.float32)}, np.float32([1, 2])
    state, step = tx.init(x), jax.jit(tx.update)
    moves = np.zeros(2)
    for cycle in range(2):  # all have a gradient in the first one, so that slots are not 0
        for i in range(3):
            is_present = cycle == 0 or i in present
            options = {"end_cycle": i == 2} if ends else {}
            updates, state = step({"a": g if is_present else None, "b": g}, state, x, **options)
            moved = updates["a"]
        number = 3 if cycle == 0 else len(present)
        if number:
            moves = 0.9 * moves + number * g / (3 if use_mean else 1)
        want = -0.5 * moves if number else np.zeros(2)
        np.testing.assert_allclose(0 if moved is None else moved, want, rtol=1e-6)
        np.testing.assert_allclose(optzoo.get_slot(state, "momentum")["a"], moves, rtol=1e-6)
