"""Nesterov's step along a moving average: what the record of ``tests/golden`` does not have."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo import SparseRows
from optzoo.testing import samples
from optzoo.testing.samples import step

TABLE = np.array([[1.0, -2.0], [4.0, 0.5], [-1.0, 3.0]])
GRADS = np.random.default_rng(0).normal(size=(5, 3, 2))


def quadratic(x, g):
    return 0.5 * x + g


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_without_a_mean_it_is_diloco_with_one_replica(momentum, x64):
    inner = optax.sgd(0.1, momentum=momentum)
    outer = optax.sgd(1.0, momentum=0.6, nesterov=True)
    with x64(True):
        ahead, local = (
            samples.trajectory(tx, jnp.asarray(TABLE), quadratic, GRADS)
            for tx in (
                optzoo.ema_nesterov(inner, 0.6, decay=0.0),
                optzoo.diloco(inner, outer, axis_name=None, communication_period=1),
            )
        )
    np.testing.assert_allclose(ahead, local, rtol=0, atol=1e-12)


def test_rows_are_as_dense():
    """Row 1 has no gradient in the second step, and goes on."""
    rows = lambda g: SparseRows(jnp.array([2, 0, 2, 3]), jnp.asarray(g), 3)
    listed = np.array([[1.0, 1], [1, -1], [1, -3], [9, 9]], np.float32)
    dense = np.array([[1.0, -1], [0, 0], [2, -2]], np.float32)
    x = jnp.asarray(TABLE, jnp.float32)
    tx = optzoo.ema_nesterov(optzoo.gradient_descent(0.5), 0.5, 0.75)
    begun = jax.jit(lambda: step(tx, GRADS[0].astype(np.float32), x))()
    got, want = (jax.jit(lambda g=g: step(tx, g, *begun))() for g in (rows(listed), dense))
    chex.assert_trees_all_close(got, want, rtol=1e-6)
    assert np.all(got[0][1] != begun[0][1])


def test_without_a_gradient_nothing_moves():
    x = {"still": jnp.asarray(TABLE), "alive": jnp.asarray(TABLE)}
    tx = optzoo.ema_nesterov(optax.sgd(0.1), 0.5)
    x, state = step(tx, x, x)
    updates, new = tx.update({"still": None, "alive": x["alive"]}, state, x)
    assert updates["still"] is None
    for name in ("iterate", "direction"):
        before, after = (optzoo.get_slot(s, name) for s in (state, new))
        np.testing.assert_array_equal(after["still"], before["still"])
        assert np.all(after["alive"] != before["alive"])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_slots_of_parameters_in_16_bits_have_32(dtype):
    x = jnp.ones(2, dtype)
    tx = optzoo.ema_nesterov(optax.sgd(1.0), 0.5, decay=0.5)
    moved, state = step(tx, jnp.full(2, 2.0**-12, dtype), x)
    assert moved.dtype == dtype and optzoo.eval_params(moved, state).dtype == dtype
    np.testing.assert_array_equal(optzoo.get_slot(state, "iterate"), np.float32(1 - 2.0**-12))
    np.testing.assert_array_equal(optzoo.get_slot(state, "direction"), np.float32(-(2.0**-13)))


def test_averages_inside_are_evaluated():
    x = jnp.asarray(TABLE)
    tx = optzoo.ema_nesterov(optzoo.moving_average(optax.sgd(1.0), 0.5), 0.5)
    moved, state = step(tx, jnp.ones_like(x), x)
    np.testing.assert_allclose(optzoo.eval_params(moved, state), TABLE - 0.5, rtol=1e-6)
    swapped, held = optzoo.state.swap_averages(moved, state)
    np.testing.assert_allclose(swapped, TABLE - 0.5, rtol=1e-6)
    chex.assert_trees_all_equal(optzoo.state.swap_averages(swapped, held), (moved, state))


@pytest.mark.parametrize("wrong", ["a", "b", "c"])
def test_parameters_of_another_shape_are_not_evaluated(wrong):
    params = {name: jnp.asarray(TABLE) for name in "abc"}
    state = optzoo.ema_nesterov(optax.sgd(0.1), 0.5).init(params)
    with pytest.raises(ValueError, match=f"the average of parameter '{wrong}'"):
        optzoo.eval_params(params | {wrong: jnp.ones((2, 3))}, state)


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"lookahead must be zero or positive, got -0.1"):
        optzoo.ema_nesterov(optax.sgd(0.1), -0.1)
    with pytest.raises(ValueError, match=r"decay must be in \[0, 1\), got 1.0"):
        optzoo.ema_nesterov(optax.sgd(0.1), 0.5, 1.0)
    with pytest.raises(TypeError, match="mask must be a pattern"):
        optzoo.ema_nesterov(optax.sgd(0.1), 0.5, mask=1.0)
    tx = optzoo.ema_nesterov(optzoo.caught_up(optzoo.adam(0.1)), 0.5)
    x = {"table": jnp.asarray(TABLE)}
    rows = SparseRows(jnp.array([1]), jnp.ones((1, 2)), 3)
    with pytest.raises(
        ValueError, match=r"rows, which is incompatible with the deferred rows of optzoo.caught_up"
    ):
        step(tx, {"table": rows}, x)
