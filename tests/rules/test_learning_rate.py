"""Scaling by the learning rate, the last transformation of a chain."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo import SparseRows
from optzoo.transforms import scale_by_learning_rate

G = {"x": jnp.array([1.0, -2.0])}


def test_descends():
    tx = scale_by_learning_rate(0.5)
    updates, _ = tx.update(G, tx.init(G))
    np.testing.assert_array_equal(updates["x"], [-0.5, 1.0])


def test_rows_stay_rows():
    rows = SparseRows(jnp.array([3, 3]), jnp.array([1.0, 2.0]), 5)
    tx = scale_by_learning_rate(2.0)
    updates, _ = tx.update(rows, tx.init(jnp.zeros(5)))
    np.testing.assert_array_equal(updates.to_dense(), [0, 0, 0, -6, 0])


def test_schedule_counts_from_zero():
    tx = scale_by_learning_rate(lambda k: k + 1.0)
    state = tx.init(G)
    for rate in (1.0, 2.0, 3.0):
        updates, state = tx.update(G, state)
        np.testing.assert_array_equal(updates["x"], -rate * G["x"])
    updates, _ = tx.update(G, state, global_step=9)
    np.testing.assert_array_equal(updates["x"], -10 * G["x"])


def test_state_is_the_same_for_number_and_schedule():
    number, schedule = (scale_by_learning_rate(r) for r in (0.1, optax.cosine_decay_schedule(1, 9)))
    assert jax.tree.structure(number.init(G)) == jax.tree.structure(schedule.init(G))


@pytest.mark.parametrize("rate", [np.float32(0.5), jnp.float32(0.5), np.array(0.5), True * 0.5])
def test_rates_of_any_number_type(rate):
    tx = scale_by_learning_rate(rate)
    updates, _ = tx.update(G, tx.init(G))
    np.testing.assert_array_equal(updates["x"], -0.5 * G["x"])
    assert updates["x"].dtype == jnp.float32


def test_traced_rate_has_a_gradient():
    def moved(rate):
        tx = optzoo.gradient_descent(rate)
        return jnp.sum(tx.update(G, tx.init(G))[0]["x"])

    assert jax.grad(moved)(0.3) == 1.0  # minus the sum of the gradients


@pytest.mark.parametrize("name", ["adam", "momentum", "blocked_shampoo", "lars", "ftrl"])
def test_an_optimizer_keeps_one_count(name):
    state = optzoo.CATALOG[name].make().init(G)
    is_count = lambda path: path and path[-1] == jax.tree_util.GetAttrKey("count")
    counts = [p for p, _ in jax.tree_util.tree_leaves_with_path(state) if is_count(p)]
    assert len(counts) == 1


def test_the_rate_follows_the_count_of_the_direction():
    schedule = lambda k: 1.0 / (1 + k)
    tx = optzoo.momentum(schedule, 0.9)
    chained = optax.chain(
        optzoo.transforms.scale_by_momentum(0.9), scale_by_learning_rate(schedule)
    )
    state, other = tx.init(G), chained.init(G)
    for extra in ({}, {}, {"global_step": 7}, {"learning_rate": 0.3}, {}):
        updates, state = tx.update(G, state, **extra)
        wanted, other = chained.update(G, other, **extra)
        np.testing.assert_array_equal(updates["x"], wanted["x"])
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(G))


def test_a_rate_is_one_number():
    """Of which a shape is told by the name of the argument, wherever it comes from."""
    tx = optzoo.rules.leafwise(
        lambda g, x, s, t, factor: (factor * g, s), scheduled={"factor": jnp.ones(2)}
    )
    with pytest.raises(ValueError, match=r"^factor must be a scalar, got .* shape \(2,\)"):
        tx.update(G, tx.init(G))
    with pytest.raises(ValueError, match=r"^update\(\.\.\., factor=\) must be a scalar"):
        tx.update(G, tx.init(G), factor=np.ones(1))
    with pytest.raises(TypeError, match=r"^update\(\.\.\., factor=\) must be a number, got <func"):
        tx.update(G, tx.init(G), factor=lambda step: 0.1)


def test_a_rate_of_rows_that_rest_is_one_number():
    tx = optzoo.caught_up(optzoo.adam(lambda step: jnp.ones(1)))
    x = jnp.ones((3, 2))
    rows = SparseRows(jnp.array([1]), jnp.ones((1, 2)), 3)
    with pytest.raises(ValueError, match="the schedule of learning_rate must return a scalar"):
        tx.update(rows, tx.init(x), x)


MAKE = {
    "alone": scale_by_learning_rate,
    "of an optimizer": lambda rate: optzoo.momentum(rate, 0.0),
}
make = pytest.mark.parametrize("make", MAKE.values(), ids=list(MAKE))


@make
def test_a_missing_gradient_stays_missing(make):
    params, tx = {"a": jnp.ones(2), "b": jnp.ones(())}, make(0.1)
    updates, _ = tx.update({"a": None, "b": jnp.ones(())}, tx.init(params), params)
    assert updates["a"] is None
    np.testing.assert_allclose(updates["b"], -0.1)


@make
def test_the_rate_has_the_precision_of_the_gradient(make, x64):
    with x64(True):
        g = jnp.array([3.0, -0.7])
        tx = make(0.1)
        updates, _ = jax.jit(tx.update)(g, tx.init(g), g)
        assert updates.dtype == "float64"
        np.testing.assert_array_equal(updates, -0.1 * np.array([3.0, -0.7]))


@make
def test_repeated_rows_of_16_bits_are_merged(make):
    """One by one they would be lost: 256 and 1 are 256 in bfloat16."""
    table, tx = jnp.zeros((3, 2), jnp.bfloat16), make(1.0)
    g = SparseRows(jnp.ones(300, jnp.int32), jnp.ones((300, 2), jnp.bfloat16), 3)
    updates, _ = jax.jit(tx.update)(g, tx.init(table), table)
    assert list(updates.indices).count(1) == 1
    moved = (table + updates).astype("float32")
    np.testing.assert_array_equal(moved, [[0, 0], [-300, -300], [0, 0]])
