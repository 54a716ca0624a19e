"""The step along a direction: the last part of most optimizers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optzoo
from optzoo import SparseRows
from optzoo.transforms import scale_by_learning_rate

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
