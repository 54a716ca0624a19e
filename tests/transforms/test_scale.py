"""Scaling by numbers and schedules."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo import SparseRows
from optzoo.core.rows import map_rows
from optzoo.testing.samples import params, row_grads

MAKE = {
    "number": (lambda: optzoo.transforms.scale(-0.3), lambda: optax.scale(-0.3)),
    "schedule": (
        lambda: optzoo.transforms.scale_by_schedule(lambda t: 0.5 - t),
        lambda: optax.scale_by_schedule(lambda t: 0.5 - t),
    ),
}


@pytest.mark.parametrize("name", MAKE)
def test_rows_equal_the_dense_gradient_by_optax(name):
    ours, theirs = (make() for make in MAKE[name])
    grads, state = row_grads(params()), ours.init(params())
    assert jax.tree.structure(state) == jax.tree.structure(theirs.init(params()))
    dense, wanted = map_rows(SparseRows.to_dense, grads), theirs.init(params())
    update = jax.jit(ours.update)
    for _ in range(3):
        got, state = update(grads, state)
        want, wanted = theirs.update(dense, wanted)
        np.testing.assert_array_equal(got["table"].indices, grads["table"].indices)
        chex.assert_trees_all_close(map_rows(SparseRows.to_dense, got), want, rtol=1e-6)
        chex.assert_trees_all_equal(state, wanted)


@pytest.mark.parametrize("name", MAKE)
def test_dtypes_stay_and_missing_gradients_pass(name):
    tx = MAKE[name][0]()
    grads = {"rows": SparseRows([1], jnp.ones(1, "float16"), 3), "half": jnp.ones(2, "bfloat16")}
    got, _ = tx.update({**grads, "no": None}, tx.init(None))
    assert got["no"] is None
    assert got["rows"].dtype == jnp.float16 and got["half"].dtype == jnp.bfloat16


def test_bad_factors():
    for bad in (np.nan, np.inf):
        with pytest.raises(ValueError, match="step_size must be finite"):
            optzoo.transforms.scale(bad)
    with pytest.raises(TypeError, match=r"must be a function of the step, got 0\.1"):
        optzoo.transforms.scale_by_schedule(0.1)


def test_a_schedule_returns_a_number():
    tx = optzoo.transforms.scale_by_schedule(lambda step: jnp.ones(1))
    with pytest.raises(ValueError, match="schedule of step_size_fn must return a scalar, got an"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
