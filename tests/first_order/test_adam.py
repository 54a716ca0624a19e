"""Adam and LazyAdam against closed forms and each other."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo import SparseRows
from optzoo.testing.samples import dense_grads, params, step, trajectory


@pytest.mark.parametrize("make", [optzoo.adam, optzoo.lazy_adam])
def test_every_step_on_a_constant_gradient_is_the_rate(make):
    """The bias correction compensates the start at zero, at every step."""
    g = jnp.array([3.0, -0.2])
    path = trajectory(make(0.01), jnp.zeros(2), lambda x, _: g, jnp.arange(5))
    t = jnp.arange(1.0, 6)[:, None]
    np.testing.assert_allclose(path, -0.01 * t * jnp.sign(g)[None], rtol=1e-4)


def test_epsilon_hat_is_added_before_the_correction():
    """With eps much larger than the root of v, the first step is rate * sqrt(1 - b2) g / eps."""
    g = jnp.array([2.0])
    tx = optzoo.adam(1.0, b2=0.75, eps=1e6)
    updates, _ = tx.update(g, tx.init(g))
    np.testing.assert_allclose(updates, -0.5 * 2 / 1e6, rtol=1e-5)


def test_is_optax_adam_where_epsilon_does_not_matter():
    grads = lambda x, i: jnp.cos(x + i)
    ours, theirs = (
        trajectory(tx, jnp.arange(4.0), grads, jnp.arange(20.0))
        for tx in (optzoo.adam(0.1, eps=0.0), optax.adam(0.1, eps=0.0))
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_lazy_adam_is_adam_on_dense_gradients():
    x = params()
    both = [
        trajectory(tx, x, lambda x, _: dense_grads(x), jnp.arange(5))
        for tx in (optzoo.lazy_adam(0.1), optzoo.adam(0.1))
    ]
    chex.assert_trees_all_equal(*both)


def test_the_second_moment_of_a_table_in_bfloat16_moves():
    """In bfloat16 a thousandth of the way to 1 is lost from 0.25 on."""
    tx, x = optzoo.lazy_adam(1e-3), jnp.zeros((4, 2), jnp.bfloat16)
    g = SparseRows(jnp.array([1]), jnp.ones((1, 2), jnp.bfloat16), 4)

    def thousand_updates():
        update = lambda state, _: (tx.update(g, state, x)[1], None)
        return jax.lax.scan(update, tx.init(x), length=1000)[0]

    v = optzoo.get_slot(jax.jit(thousand_updates)(), "v")
    assert v.dtype == jnp.float32
    np.testing.assert_allclose(v[1], 1 - 0.999**1000, rtol=1e-4)  # 0.632
    np.testing.assert_array_equal(v[0], 0)


def test_lazy_adam_counts_updates_without_a_gradient_of_the_row():
    tx, x = optzoo.lazy_adam(1.0, b1=0.5, b2=0.75, eps=0.0), jnp.zeros(2)
    first, second = (SparseRows(jnp.array([i]), jnp.array([4.0]), 2) for i in (0, 1))
    x, state = step(tx, second, *step(tx, first, x))
    # m = 4/2, v = 16/4, and the corrections of t = 2.
    np.testing.assert_allclose(x[1], -np.sqrt(1 - 0.75**2) / (1 - 0.5**2) * 2 / 2, rtol=1e-6)
    assert state[0].count == 2
