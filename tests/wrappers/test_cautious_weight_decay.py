"""Cautious decay: what the record of ``tests/golden`` does not have."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo import SparseRows
from optzoo.testing.samples import step

X = np.array([[1.0, -2.0], [4.0, 0.5], [-1.0, 3.0]])
ROWS = SparseRows(jnp.array([2, 0, 2, 3]), jnp.array([[1.0, 1], [1, -1], [1, -3], [9, 9]]), 3)
DENSE = np.array([[1.0, -1], [0, 0], [2, -2]])
TOWARDS_ZERO = X * DENSE >= 0  # the update is -DENSE


@pytest.mark.parametrize(
    ("inner", "rows"),
    [(optzoo.gradient_descent(0.5), [0, 2]), (optax.sgd(0.5), [0, 1, 2])],
    ids=["rows", "dense"],
)
def test_where_it_decays(inner, rows):
    """Row 2 is listed twice; in the dense gradient row 1 is zero, and decays."""
    g = ROWS if len(rows) == 2 else jnp.asarray(DENSE)
    tx = optzoo.cautious_weight_decay(inner, weight_decay_per_step=0.25)
    got = jax.jit(lambda: step(tx, g, jnp.asarray(X)))()[0]
    decays = TOWARDS_ZERO & np.isin(np.arange(3), rows)[:, None]
    np.testing.assert_allclose(got, X - 0.5 * DENSE - 0.25 * np.where(decays, X, 0), rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_parameters_in_16_bits(dtype):
    """The decay is computed in float32: in 16 bits 1 / 512 of it would be lost."""
    x, g = jnp.ones(2, dtype), jnp.array([1.0, -1], dtype)
    tx = optzoo.cautious_weight_decay(optax.sgd(1.0), weight_decay_per_step=1 / 512)
    updates, _ = tx.update(g, tx.init(x), x)
    assert updates.dtype == dtype
    want = np.asarray([-1 - 1 / 512, 1], np.float32).astype(dtype)
    np.testing.assert_array_equal(updates, want)


def test_no_gradient_no_decay():
    tx = optzoo.cautious_weight_decay(optzoo.gradient_descent(0.0), weight_decay_per_step=0.25)
    x = {"still": jnp.asarray(X), "alive": jnp.asarray(X)}
    updates, _ = tx.update({"still": None, "alive": 0 * x["alive"]}, tx.init(x), x)
    assert updates["still"] is None
    np.testing.assert_array_equal(updates["alive"], -0.25 * X)


def test_bad_arguments():
    for bad in (-0.1, float("nan")):
        with pytest.raises(ValueError, match="weight_decay_per_step must be "):
            optzoo.cautious_weight_decay(optax.sgd(0.1), weight_decay_per_step=bad)
    with pytest.raises(TypeError, match="mask must be a pattern"):
        optzoo.cautious_weight_decay(optax.sgd(0.1), weight_decay_per_step=0.1, mask=1.0)
    with pytest.raises(TypeError, match=r"^cautious_weight_decay has no weight_decay, got 0.1"):
        optzoo.cautious_weight_decay(optax.sgd(0.1), weight_decay=0.1)
