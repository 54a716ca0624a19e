"""RegAdagrad: Adagrad with updates that do not change the accumulator."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optzoo
from optzoo import SparseRows
from optzoo.testing.samples import dense_grads, params, step, trajectory

G = jnp.array([3.0, -4.0])
ROWS = SparseRows(jnp.array([1, 1]), jnp.array([1.0, 2]), 3)


def test_is_adagrad_when_slots_are_updated():
    both = [
        trajectory(make(0.1, 0.5), params(), lambda x, _: dense_grads(x), jnp.arange(4))
        for make in (optzoo.reg_adagrad, optzoo.adagrad)
    ]
    chex.assert_trees_all_equal(*both)


@pytest.mark.parametrize("flag", [False, 0, np.bool_(False), jnp.array(False), jnp.float32(0)])
def test_accumulator_is_unchanged_without_slot_updates(flag):
    tx = optzoo.reg_adagrad(1.0, initial_accumulator_value=16.0)
    updates, state = tx.update(G, tx.init(G), update_slots=flag)
    np.testing.assert_allclose(updates, -G / 4, rtol=1e-6)
    np.testing.assert_array_equal(state[0].slots.accumulator, 16)
    updates, state = tx.update(G, state, update_slots=True)  # the flag applies to one update only
    np.testing.assert_allclose(updates, -G / np.sqrt(16 + G**2), rtol=1e-6)


def test_rows_are_unchanged_without_slot_updates():
    tx, x = optzoo.reg_adagrad(1.0, initial_accumulator_value=4.0), jnp.zeros(3)
    x, state = step(tx, ROWS, x, update_slots=False)
    np.testing.assert_array_equal(x, [0, -1.5, 0])
    np.testing.assert_array_equal(state[0].slots.accumulator, 4)
    x, state = step(tx, ROWS, x, state, update_slots=True)
    np.testing.assert_array_equal(state[0].slots.accumulator, [4, 13, 4])


@pytest.mark.parametrize("grad", [jnp.array([0.0, 3, 0]), ROWS], ids=["dense", "rows"])
def test_traced_flag_compiles_once(grad):
    tx, x = optzoo.reg_adagrad(1.0, initial_accumulator_value=4.0), jnp.zeros(3)
    update = jax.jit(lambda s, flag: tx.update(grad, s, x, update_slots=flag)[1])
    got = [update(tx.init(x), flag)[0].slots.accumulator for flag in (False, True)]
    np.testing.assert_array_equal(got, [[4, 4, 4], [4, 13, 4]])
    assert update._cache_size() == 1
