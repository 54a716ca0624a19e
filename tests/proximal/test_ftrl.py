"""FTRL against its closed forms."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo.testing.samples import step, trajectory

X, G = jnp.array([0.5, -1.0, 2.0]), jnp.array([3.0, -0.1, 0.5])


def test_l1_gives_exact_zeros():
    """From zero, the first step stays at zero exactly where |g| is at most l1."""
    x, _ = step(optzoo.ftrl(0.1, l1_regularization_strength=0.5), G, jnp.zeros(3))
    assert x[0] < 0 and list(x[1:]) == [0, 0]
    weak, _ = step(optzoo.ftrl(0.1, l1_regularization_strength=0.05), G, jnp.zeros(3))
    assert jnp.all(weak != 0)


@pytest.mark.parametrize("initial", [0.0, 0.1])
def test_zero_gradient_zeroes_the_parameter(initial):
    x, _ = step(optzoo.ftrl(0.1, initial_accumulator_value=initial), 0 * G, X)
    np.testing.assert_array_equal(x, 0)


def test_first_step_without_accumulator():
    """With n_0 = 0 the initial value counts: x_1 = x_0 - rate * sign(g), as for Adagrad."""
    x, state = step(optzoo.ftrl(0.1, initial_accumulator_value=0.0), G, X)
    np.testing.assert_allclose(x, X - 0.1 * jnp.sign(G), rtol=1e-5)
    np.testing.assert_allclose(state.slots.accum, G**2, rtol=1e-6)


def test_is_adagrad_without_regularization():
    """For x_0 = 0 both do x <- x - rate * g / sqrt(sum of g^2), at a constant rate."""
    grads = lambda x, i: jnp.cos(x + i)
    ours, theirs = (
        trajectory(make(0.2, initial_accumulator_value=0.3), jnp.zeros(3), grads, jnp.arange(9.0))
        for make in (optzoo.ftrl, optzoo.adagrad)
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_power_zero_is_gradient_descent():
    x, _ = step(optzoo.ftrl(0.1, learning_rate_power=0.0), G, jnp.zeros(3))
    np.testing.assert_allclose(x, -0.1 * G, rtol=1e-6)


def test_l2_and_shrinkage_on_a_first_step():
    tx = optzoo.ftrl(
        0.5,
        initial_accumulator_value=0.0,
        l2_regularization_strength=0.7,
        l2_shrinkage_regularization_strength=0.2,
    )
    n = jnp.abs(G)
    want = -(G + 0.4 * X - n / 0.5 * X) / (n / 0.5 + 1.4)
    np.testing.assert_allclose(step(tx, G, X)[0], want, rtol=1e-5)


def in_float64(rates, grads, x, l1=0.02, l2=0.03, shrinkage=0.05, beta=0.5):
    """The formula; an update with a rate of zero changes nothing."""
    x, n, z = np.float64(x), 0.1, 0.0
    for rate, g in zip(rates, grads, strict=True):
        if rate == 0:
            continue
        before, n = n, n + g**2
        z = z + g + 2 * shrinkage * x - (np.sqrt(n) - np.sqrt(before)) / rate * x
        x = (np.clip(z, -l1, l1) - z) / ((beta + np.sqrt(n)) / rate + 2 * l2)
    return x


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("given", ["schedule", "injected", "update", "update, traced"])
def test_a_rate_of_zero_changes_nothing(given, rows):
    rates = np.array([0, 0.1, 0.3, 0, 0.2, 0], np.float32)
    options = {
        "l1_regularization_strength": 0.02,
        "l2_regularization_strength": 0.03,
        "l2_shrinkage_regularization_strength": 0.05,
        "beta": 0.5,
    }
    schedule = lambda step: jnp.asarray(rates)[step]
    if given == "injected":
        tx = optax.inject_hyperparams(optzoo.ftrl)(schedule, **options)
    else:
        tx = optzoo.ftrl(schedule if given == "schedule" else 0.1, **options)
    grads = np.random.default_rng(0).normal(size=(6, 3, 2)).astype(np.float32)
    start = np.array([[0.5, -1.0], [2.0, 0.0], [0.1, -0.1]], np.float32)
    x, state = start, tx.init(jnp.asarray(start))
    for rate, g in zip(rates, grads, strict=True):
        override = {"update": float(rate), "update, traced": jnp.asarray(rate)}.get(given)
        extra = {} if override is None else {"learning_rate": override}
        sent = optzoo.SparseRows(jnp.arange(3), jnp.asarray(g), 3) if rows else g
        updates, state = tx.update(sent, state, x, **extra)
        x = optax.apply_updates(x, updates.to_dense() if rows else updates)
    np.testing.assert_allclose(x, in_float64(rates, grads, start), rtol=1e-5, atol=1e-6)


def test_why_a_rate_of_zero_changes_nothing():
    """The smaller the rate of one update, the greater the parameter after the next one."""
    after = [in_float64([0.1, tiny, 0.1], [1.0, 1.0, 1.0], 0.0) for tiny in (1e-3, 1e-6, 1e-9)]
    assert abs(after[1]) > 500 * abs(after[0]) and abs(after[2]) > 500 * abs(after[1])
