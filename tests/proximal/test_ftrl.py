"""FTRL against its closed forms."""

import pathlib

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


# A rate of zero, and rates that fall


def in_float64(rates, grads, x, l1=0.0, l2=0.0, shrinkage=0.0, beta=0.0, n=0.1):
    """All parameters by the formula; an update with a rate of zero changes nothing."""
    x, z, path = np.float64(x), 0.0, []
    for rate, g in zip(rates, grads, strict=True):
        if rate != 0:
            before, n = n, n + g**2
            z = z + g + 2 * shrinkage * x - (np.sqrt(n) - np.sqrt(before)) / rate * x
            x = (np.clip(z, -l1, l1) - z) / ((beta + np.sqrt(n)) / rate + 2 * l2)
        path.append(x)
    return np.array(path)


RATES = np.array([0, 0.1, 0.3, 0, 0.2, 0], np.float32)
GRADS = np.random.default_rng(0).normal(size=(6, 3, 2)).astype(np.float32)
START = np.array([[0.5, -1.0], [2.0, 0.0], [0.1, -0.1]], np.float32)
OPTIONS = {
    "l1_regularization_strength": 0.02,
    "l2_regularization_strength": 0.03,
    "l2_shrinkage_regularization_strength": 0.05,
    "beta": 0.5,
}
WANT = in_float64(RATES, GRADS, START, l1=0.02, l2=0.03, shrinkage=0.05, beta=0.5)


def schedule(step):
    return jnp.asarray(RATES)[step]


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("given", ["schedule", "injected", "update", "update, traced"])
def test_a_rate_of_zero_changes_nothing(given, rows):
    if given == "injected":
        tx = optax.inject_hyperparams(optzoo.ftrl)(schedule, **OPTIONS)
    else:
        tx = optzoo.ftrl(schedule if given == "schedule" else 0.1, **OPTIONS)
    x, state = START, tx.init(jnp.asarray(START))
    for rate, g, want in zip(RATES, GRADS, WANT, strict=True):
        override = {"update": float(rate), "update, traced": jnp.asarray(rate)}.get(given)
        extra = {} if override is None else {"learning_rate": override}
        sent = optzoo.SparseRows(jnp.arange(3), jnp.asarray(g), 3) if rows else g
        before = optzoo.get_slot(state, "linear")
        updates, state = tx.update(sent, state, x, **extra)
        x = optax.apply_updates(x, updates.to_dense() if rows else updates)
        np.testing.assert_allclose(x, want, rtol=1e-5, atol=1e-6)
        if rate == 0:
            np.testing.assert_array_equal(optzoo.get_slot(state, "linear"), before)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rate_of_zero_in_a_compiled_step(native, dtype):
    """Rows of a table, of which the gradient is NaN where the rate is zero; slots in 16 bits."""
    tx = optzoo.slots_dtype(optzoo.ftrl(schedule, **OPTIONS), dtype, stochastic=dtype != "float32")
    loss = lambda x, g: jnp.sum(optzoo.lookup(x, jnp.arange(3)) * g)
    step, x = optzoo.minimize(loss, tx, native=native), jnp.asarray(START)
    state = tx.init(x)
    for rate, g, want in zip(RATES, GRADS, WANT, strict=True):
        x, state, _ = step(x, state, jnp.where(rate == 0, jnp.nan, g))
        np.testing.assert_allclose(x, want, rtol=1e-5 if dtype == "float32" else 0.05, atol=1e-5)


@pytest.mark.parametrize("dialect", ["tf1", "keras", "sparsecore", "dynamicemb"])
@pytest.mark.filterwarnings("ignore::optzoo.InitialValueWarning")
def test_a_rate_of_zero_in_all_dialects(dialect):
    tx = optzoo.ftrl_from(dialect, learning_rate=schedule)
    x, state = START, tx.init(jnp.asarray(START))
    for g in GRADS:
        updates, state = tx.update(g, state, x)
        x = optax.apply_updates(x, updates)
    n = 0.0 if dialect == "dynamicemb" else 0.1
    np.testing.assert_allclose(x, in_float64(RATES, GRADS, START, n=n)[-1], rtol=1e-5, atol=1e-6)


def norms(rates):
    """Of the parameters after some updates, as ``docs/ftrl.md`` shows."""
    rng, x, n, z, found = np.random.default_rng(0), np.zeros(20), 0.1, 0.0, {}
    for t, rate in enumerate(rates, 1):
        features, noise = rng.normal(size=(32, 20)), 0.1 * rng.normal(size=32)
        g = features.T @ (features @ (x - 1) - noise) / 32
        before, n = n, n + g**2
        z = z + g - (np.sqrt(n) - np.sqrt(before)) / rate * x
        x = -z * rate / np.sqrt(n)
        found[t] = np.linalg.norm(x) / np.sqrt(20)
    return [found[t] for t in (100, 500, 900, 990, 999)]


def test_rates_that_fall():
    """The figures of the page."""
    page = (pathlib.Path(__file__).parents[2] / "docs" / "ftrl.md").read_text()
    show = lambda values: " | ".join(f"{v:.2f}" if v > 0.1 else f"{v:.2g}" for v in values)
    assert f"| 0.3 | {show(norms(np.full(1000, 0.3)))} |" in page
    falling = 0.15 * (1 + np.cos(np.pi * np.arange(1000) / 1000))
    assert f"| from 0.3 to 0 by a cosine | {show(norms(falling))} |" in page
    tiny = [in_float64([0.3, rate, 0.3], [1.0] * 3, 0.0)[-1] for rate in (1e-6, 1e-9)]
    np.testing.assert_allclose(tiny, [-20e3, -20e6], rtol=0.05)
