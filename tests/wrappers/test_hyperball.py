"""Steps of constant norm: what the records of ``tests/golden`` do not have."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo import SparseRows
from optzoo.testing import samples
from optzoo.testing.samples import step

TABLE = jnp.array([[3.0, 4.0], [0.3, 0.4], [1.0, -1.0], [-6.0, 8.0]])
# Row 3 is listed twice; row 4 is padding.
LISTED = SparseRows(jnp.array([3, 1, 3, 4]), jnp.array([[0.5, 0], [0, -1], [0.5, 2], [9, 9]]), 4)
DENSE = np.array([[0.0, 0], [0, -1], [0, 0], [1, 2]])


def turned(x, u, rate, axes):
    norm = lambda a: np.sqrt(np.sum(a**2, axis=axes, keepdims=True))
    y = x + rate * norm(x) * u / np.where(norm(u) == 0, 1, norm(u))
    return y * norm(x) / norm(y)


@pytest.mark.parametrize("axes", [(1,), (0,), (0, 1)], ids=str)
@pytest.mark.parametrize(
    "inner", [optzoo.gradient_descent(7.0), optzoo.adam(0.1)], ids=["linear", "dense"]
)
def test_rows(inner, axes):
    """The rows that the inner optimizer moves; all of them, if norms are over rows."""
    tx = optzoo.hyperball(inner, 0.25, {".*": axes})
    x, state = step(tx, TABLE, TABLE)  # means of adam that are not zero
    moved, _ = jax.jit(lambda: step(tx, LISTED, x, state))()
    u, _ = inner.update(LISTED, state.inner, x)
    u = np.asarray(u.to_dense() if isinstance(u, SparseRows) else u)
    np.testing.assert_allclose(moved, turned(np.asarray(x), u, 0.25, axes), rtol=1e-5)
    if isinstance(tx.update(LISTED, state, x)[0], SparseRows):
        assert axes == (1,) and not DENSE[[0, 2]].any()
        np.testing.assert_array_equal(moved[jnp.array([0, 2])], x[jnp.array([0, 2])])


def test_a_stack_of_layers_has_a_norm_for_each():
    """As the same matrices by themselves."""
    rng = np.random.default_rng(0)
    x, g = (rng.normal(size=(3, 4, 2)).astype(np.float32) for _ in range(2))
    together, _ = step(optzoo.hyperball(optax.adam(0.1), 0.2, {".*": (1, 2)}), g, jnp.asarray(x))
    alone = optzoo.hyperball(optax.adam(0.1), 0.2, {".*": (0, 1)})
    split = lambda a: {str(i): jnp.asarray(m) for i, m in enumerate(a)}
    each, _ = step(alone, split(g), split(x))
    np.testing.assert_allclose(together, np.stack(list(each.values())), rtol=0, atol=1e-6)


@pytest.mark.parametrize("scale", [1e-15, 1e3])
def test_only_the_direction_of_the_inner_update_counts(scale):
    got = step(optzoo.hyperball(optax.sgd(scale), 0.5, (0, 1)), DENSE, TABLE)[0]
    np.testing.assert_allclose(got, turned(np.asarray(TABLE), -DENSE, 0.5, (0, 1)), rtol=1e-5)


def test_without_a_direction_nothing_moves():
    """Nor does what is zero become NaN."""
    x = {"still": TABLE, "none": TABLE, "zero": 0 * TABLE}
    tx = optzoo.hyperball(optax.sgd(1.0), 0.5, {".*": (1,)})
    grads = {"still": 0 * TABLE, "none": None, "zero": TABLE}
    updates, _ = jax.jit(tx.update)(grads, jax.eval_shape(tx.init, x) and jax.jit(tx.init)(x), x)
    assert updates["none"] is None
    np.testing.assert_array_equal(updates["still"], 0)
    np.testing.assert_array_equal(updates["zero"], 0)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_parameters_in_16_bits(dtype):
    """Squares overflow in float16; norms are those of the rounded parameters."""
    x = (300 * TABLE / 8).astype(dtype)
    moved, _ = step(optzoo.hyperball(optax.sgd(1.0), 0.5, (0, 1)), DENSE.astype(dtype), x)
    want = turned(np.asarray(x, np.float64), -DENSE, 0.5, (0, 1))
    assert moved.dtype == dtype
    np.testing.assert_allclose(
        np.asarray(moved, np.float64), want, rtol=0, atol=float(jnp.finfo(dtype).eps) * 300
    )


@pytest.mark.parametrize("start", ["zero", "one row of zeros"])
def test_a_parameter_that_would_stay_zero(start):
    x = {"a": TABLE, "b": 0 * TABLE if start == "zero" else TABLE.at[0].set(0)}
    tx = optzoo.hyperball(optax.sgd(1.0), 0.5, {".*": (1,)})
    if start != "zero":
        tx.init(x)
        return
    for state in (jax.eval_shape(tx.init, x), jax.jit(tx.init)(x)):  # not known there
        assert state.count.shape == ()
    with pytest.raises(
        ValueError, match=r"dims: parameter 'b' is zero, and its norm would stay zero"
    ):
        tx.init(x)


def test_one_count_for_the_schedule():
    """Also where a step has no gradient of the parameter."""
    rates = optax.piecewise_constant_schedule(0.5, {2: 0.0})
    tx = optzoo.hyperball(optax.sgd(1.0), rates, (0, 1))
    path = samples.trajectory(tx, TABLE, lambda _, g: g, jnp.stack([jnp.asarray(DENSE)] * 4))
    still = [bool(jnp.all(path[i] == path[i - 1])) for i in range(1, 4)]
    assert still == [False, True, True]


def test_a_rate_or_a_step_of_this_update():
    tx = optzoo.hyperball(optzoo.gradient_descent(1.0), lambda step: 0.1 * step, (0, 1))
    state, g = tx.init(TABLE), jnp.asarray(DENSE)
    for given, rate in (({"global_step": 5}, 0.5), ({"learning_rate": 0.3}, 0.3), ({}, 0.0)):
        updates, _ = tx.update(g, state, TABLE, **given)
        want = turned(np.asarray(TABLE), -DENSE, rate, (0, 1))
        np.testing.assert_allclose(TABLE + updates, want, rtol=1e-5)


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"dims must contain tuples of axes such as \(1,\), got"):
        optzoo.hyperball(optax.sgd(1.0), 0.1, {"a": 1})
    with pytest.raises(ValueError, match="learning_rate must be a finite number, got nan"):
        optzoo.hyperball(optax.sgd(1.0), float("nan"), {"a": (1,)})
    tx = optzoo.hyperball(optax.sgd(1.0), 0.1, {"b": (2,)})
    with pytest.raises(ValueError, match=r"parameter 'b' of shape \(4, 2\) has no axes \(2,\)"):
        tx.init({"b": TABLE})
    deferred = optzoo.caught_up(optzoo.adam(0.1))
    tx = optzoo.hyperball(deferred, 0.1, {".*": (1,)})
    with pytest.raises(
        ValueError, match=r"hyperball is incompatible with the deferred rows of optzoo.caught_up"
    ):
        step(tx, {"table": LISTED}, {"table": TABLE})
