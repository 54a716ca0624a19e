"""AdamGS and LazyAdamGS: Adam with bias corrections of a given global step."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optzoo
from optzoo import SparseRows
from optzoo.testing.samples import params, row_grads, step

G = jnp.array([3.0, -0.2])
BOTH = pytest.mark.parametrize("make", [optzoo.adam_gs, optzoo.lazy_adam_gs])


@BOTH
def test_error_without_a_global_step_names_the_fix(make):
    tx = make()
    with pytest.raises(ValueError, match=r"pass update\(\.\.\., global_step=n\)"):
        tx.update(G, tx.init(G), G)


@pytest.mark.parametrize("name", ["adam", "lazy_adam"])
def test_from_step_zero_it_is_adam(name):
    """For dense gradients and rows; AdamGS computes the powers directly, Adam as products."""
    ours, theirs = getattr(optzoo, f"{name}_gs")(0.1), getattr(optzoo, name)(0.1)

    def run(tx, step_at):
        x, state = params(), tx.init(params())
        for n in range(4):
            x, state = step(tx, row_grads(params()), x, state, **step_at(n))
        return x

    got = jax.jit(lambda: run(ours, lambda n: {"global_step": jnp.int32(n)}))()
    want = jax.jit(lambda: run(theirs, lambda n: {}))()
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-5)


@BOTH
@pytest.mark.parametrize("n", [0, 10, 100, 100_000])
def test_first_step_from_a_later_step(make, n):
    """The means start at zero, the bias correction does not."""
    tx = make(0.01)
    updates, state = jax.jit(tx.update)(G, tx.init(G), global_step=n)
    correction = np.sqrt(1 - 0.999 ** (n + 1.0)) / (1 - 0.9 ** (n + 1.0))
    want = -0.01 * correction * 0.1 / np.sqrt(0.001) * np.sign(G)
    np.testing.assert_allclose(updates, want, rtol=1e-3)
    assert state[0].count == 1  # the count of updates, which AdamGS does not use


def test_a_constant_step_keeps_the_first_correction():
    """The default of the original: the steps converge to sqrt(1 - b2) / (1 - b1) times the rate."""
    tx, x = optzoo.adam_gs(1.0, b1=0.9, b2=0.99), jnp.zeros(2)
    still = lambda carry, _: (step(tx, G, *carry, global_step=0), carry[0])
    _, path = jax.lax.scan(still, (x, tx.init(x)), length=1000)
    np.testing.assert_allclose(path[-1] - path[-2], -np.sign(G), rtol=1e-3)


def test_lazy_variant_keeps_rows_without_a_gradient():
    x = jnp.ones(3)
    for make, moves in ((optzoo.adam_gs, True), (optzoo.lazy_adam_gs, False)):
        tx = make(0.1)
        first = step(tx, SparseRows(jnp.array([0]), jnp.array([1.0]), 3), x, global_step=0)
        second, _ = step(tx, SparseRows(jnp.array([2]), jnp.array([1.0]), 3), *first, global_step=1)
        assert (second[0] != first[0][0]) == moves and second[1] == 1
