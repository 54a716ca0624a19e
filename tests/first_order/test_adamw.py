"""AdamW against optax's, where the decay is multiplied by the rate."""

import chex
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo import SparseRows
from optzoo.testing.samples import dense_grads, params, step, trajectory


def test_is_optax_adamw_with_the_rate_taken_out_of_the_decay():
    grads = lambda x, i: jnp.cos(x + i)
    ours, theirs = (
        trajectory(tx, jnp.arange(4.0), grads, jnp.arange(10.0))
        for tx in (
            optzoo.adamw(0.1, eps=0.0, weight_decay_per_step=0.02),
            optax.adamw(0.1, eps=0.0, weight_decay=0.2),
        )
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_decay_does_not_depend_on_the_rate():
    tx = optzoo.adamw(lambda k: 0.0, weight_decay_per_step=0.25)
    x = params()
    moved, _ = step(tx, dense_grads(x), x)
    np.testing.assert_allclose(moved["table"], 0.75 * x["table"], rtol=1e-6)


@pytest.mark.parametrize(
    "mask", [("table", "layer/1"), {"table": True, "layer": (False, True), "one_row": False}]
)
def test_mask(mask):
    x = params()
    moved, _ = step(optzoo.adamw(0.1, weight_decay_per_step=0.5, mask=mask), dense_grads(x), x)
    plain, _ = step(optzoo.adam(0.1), dense_grads(x), x)
    for of in (lambda tree: tree["layer"][0], lambda tree: tree["one_row"]):
        chex.assert_trees_all_equal(of(moved), of(plain))
    chex.assert_trees_all_close(moved["layer"][1], plain["layer"][1] - 0.5, rtol=1e-6)


def test_all_rows_move_but_only_listed_ones_decay():
    tx, x = optzoo.adamw(0.1, weight_decay_per_step=0.5), jnp.ones(3)
    rows = [SparseRows(jnp.array([i, i]), jnp.array([1.0, 1]), 3) for i in (0, 1)]
    x, state = step(tx, rows[0], x)
    np.testing.assert_allclose(x, [0.4, 1, 1], rtol=1e-5)
    x, _ = step(tx, rows[1], x, state)
    assert 0.3 < x[0] < 0.4 and x[1] < 0.5 and x[2] == 1
