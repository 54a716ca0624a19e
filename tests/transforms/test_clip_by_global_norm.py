"""The global norm of all gradients, row-sparse ones included."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo import SparseRows
from optzoo.testing.samples import params, row_grads, to_dense


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_clip_by_global_norm_is_that_of_the_dense_gradient(max_norm):
    grads = row_grads(params())
    got, _ = optzoo.clip_by_global_norm(max_norm).update(grads, optax.EmptyState())
    want, _ = optax.clip_by_global_norm(max_norm).update(to_dense(grads), optax.EmptyState())
    chex.assert_trees_all_close(to_dense(got), want, rtol=1e-6)


@pytest.mark.unique
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_clip_by_global_norm_of_special_gradients(dtype):
    """Zeros stay zeros, a missing gradient stays missing, a squared float16 does not overflow."""
    clip = optzoo.clip_by_global_norm(1.0)
    none = SparseRows(jnp.array([0]), jnp.zeros(1), 5)
    zero, _ = clip.update({"x": jnp.zeros(3, dtype), "t": none}, optax.EmptyState())
    np.testing.assert_array_equal(zero["x"], 0)
    np.testing.assert_array_equal(zero["t"].to_dense(), 0)
    large = {"x": jnp.array([6e4, 0], dtype), "none": None}
    with jax.numpy_dtype_promotion("strict"):
        large, _ = clip.update(large, optax.EmptyState())
    assert large["none"] is None and large["x"].dtype == dtype
    np.testing.assert_allclose(large["x"], [1, 0], rtol=1e-3)


def test_clip_by_global_norm_refuses_a_norm_of_zero():
    with pytest.raises(ValueError, match="max_norm must be positive, got 0"):
        optzoo.clip_by_global_norm(0)
