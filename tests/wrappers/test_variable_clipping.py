"""Clipped parameters against NumPy."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optzoo
from optzoo import SparseRows
from optzoo.testing.samples import step

C = 1.5
TABLE = jnp.array([[3.0, 4.0], [0.3, 0.4], [1.0, 1.0], [-6.0, 8.0]])


def clipped(x, axes):
    x = np.asarray(x)
    return x * C / np.maximum(np.sqrt(np.sum(x**2, axis=axes, keepdims=True)), C)


def clip(dims, inner=None):
    return optzoo.variable_clipping(inner or optzoo.gradient_descent(1.0), dims, C)


@pytest.mark.parametrize("axes", [(1,), (0,), (0, 1), (1, 0), (-1,), (-2, 1), (), [1]], ids=str)
@pytest.mark.parametrize("dims", [lambda axes: {"t": axes}, lambda axes: {"t": axes, "b": None}])
def test_norms_over_axes(axes, dims):
    """The table is clipped after the step; the bias has no axes and is not."""
    x = {"t": 2 * TABLE, "b": jnp.full(2, 9.0)}
    moved, _ = step(clip(dims(axes)), {"t": TABLE, "b": jnp.ones(2)}, x)
    np.testing.assert_allclose(moved["t"], clipped(TABLE, tuple(axes)), rtol=1e-6)
    np.testing.assert_array_equal(moved["b"], 8)


def test_patterns_match_in_full():
    x = {"net": [{"kernel": TABLE, "kernel2": TABLE}], "kernel": TABLE}
    zero = jax.tree.map(jnp.zeros_like, x)
    moved, _ = step(clip({"net/[0-9]+/kernel": (1,)}), zero, x)
    np.testing.assert_allclose(moved["net"][0]["kernel"], clipped(TABLE, 1), rtol=1e-6)
    np.testing.assert_array_equal(moved["net"][0]["kernel2"], TABLE)
    np.testing.assert_array_equal(moved["kernel"], TABLE)
    moved, _ = step(clip({".*kernel2?": (1,), "kernel": [-1]}), zero, x)  # twice the same axes
    for leaf in jax.tree.leaves(moved):
        np.testing.assert_allclose(leaf, clipped(TABLE, 1), rtol=1e-6)


def test_parameters_below_the_bound_are_not_clipped():
    x, g = 0.1 * TABLE, 0.01 * TABLE
    moved, _ = step(clip((1,)), g, x)
    np.testing.assert_allclose(moved, x - g, rtol=1e-6)


def test_half_precision_does_not_overflow():
    x = jnp.full((1, 4), 300.0, jnp.float16)  # whose square overflows in float16
    moved, _ = step(clip((1,)), jnp.zeros_like(x), x)
    np.testing.assert_array_equal(moved, C / 2)
    assert moved.dtype == jnp.float16


# Rows

LISTED = SparseRows(jnp.array([3, 1, 3, 4]), jnp.array([[0.5, 0], [0, 0], [0.5, 0], [9, 9]]), 4)
REST = jnp.array([0, 2])


def steps(tx, grads, x=TABLE):
    return jax.jit(lambda: step(tx, grads, x)[0])()


@pytest.mark.parametrize("axes", [(1,), ()])
@pytest.mark.parametrize("inner", [optzoo.gradient_descent(1.0), optzoo.momentum(1.0, 0.9)])
def test_only_listed_rows_are_clipped_once(axes, inner):
    """Rows 0 and 2 are too long but not in the gradient; row 3 is listed twice."""
    moved = steps(clip(axes, inner), LISTED)
    want = TABLE.at[3].set(clipped(TABLE[3] - jnp.array([1.0, 0]), 0 if axes else ()))
    np.testing.assert_allclose(moved, want, rtol=1e-6)


def test_listed_rows_are_clipped_though_the_inner_optimizer_moves_all():
    inner = optzoo.adam(0.5)
    x, state = step(inner, TABLE, TABLE)  # with nonzero means
    moved, _ = jax.jit(lambda: step(clip((1,), inner), LISTED, x, state))()
    want, _ = jax.jit(lambda: step(inner, LISTED, x, state))()
    assert jnp.all(want[REST] != x[REST])
    np.testing.assert_array_equal(moved[REST], want[REST])
    listed = jnp.array([1, 3])
    np.testing.assert_allclose(moved[listed], clipped(want[listed], 1), rtol=1e-6)


@pytest.mark.parametrize("axes", [(0,), (0, 1), (-2,)])
@pytest.mark.parametrize("inner", [optzoo.gradient_descent(1.0), optzoo.adam(0.5)])
def test_norms_over_rows_clip_the_whole_table(axes, inner):
    want = steps(inner, LISTED)
    np.testing.assert_allclose(steps(clip(axes, inner), LISTED), clipped(want, axes), rtol=1e-6)


def test_no_gradient_no_clipping():
    tx = clip({"t": (1,), "u": (1,)})
    x = {"t": TABLE, "u": TABLE}
    updates, _ = tx.update({"t": None, "u": 0 * TABLE}, tx.init(x), x)
    assert updates["t"] is None
    np.testing.assert_allclose(TABLE + updates["u"], clipped(TABLE, 1), rtol=1e-6)


# Errors


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        (
            {"tabel": (1,)},
            "dims: no parameter matches ['tabel']; the parameters are ['b', 'table']",
        ),
        ({"tab": (1,)}, "no parameter matches ['tab']"),
        ({".*": (), "table": (1,)}, "dims: ['.*', 'table'] all match parameter 'table'"),
        ({"table": (2,)}, "dims: parameter 'table' of shape (4, 2) has no axes (2,)"),
        ({"table": (-3,)}, "dims: parameter 'table' of shape (4, 2) has no axes (-3,)"),
        ({"table": (1,), "b": (1, 0)}, "parameter 'b' of shape (2,) has no axes (1, 0)"),
        ({"table": (2,), "b": None}, "parameter 'table' of shape (4, 2) has no axes (2,)"),
    ],
)
def test_bad_dims(dims, message):
    x = {"table": TABLE, "b": jnp.ones(2)}
    with pytest.raises(ValueError, match=re.escape(message)):
        step(clip(dims), x, x)


def test_axes_are_tuples():
    with pytest.raises(ValueError, match=r"dims must contain tuples of axes such as \(1,\), got"):
        clip({"table": 1})


@pytest.mark.parametrize("max_norm", [0, -1.0, float("nan")])
def test_bad_bound(max_norm):
    with pytest.raises(ValueError, match="max_norm must be positive, got"):
        optzoo.variable_clipping(optzoo.adam(), {".*": ()}, max_norm)
