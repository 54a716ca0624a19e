"""Every method with gradients wider and narrower than the parameters, with and without x64."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo.testing import samples

from ..selection import chosen_first
from . import cases

TICKS = 7
# Those with all of what the others have.
QUICK = [
    "elastic_average, round robin",
    "agn, round robin",
    "model_average, of slots",
    "diloco, streaming",
    "sync_replicas, backup",
    "sync_replicas, several ticks",
    "drop_stale_gradient",
]
# Whether there is float64; the dtypes of parameters and gradients; whether some are inactive.
MIXES = [
    (False, "float32", "bfloat16", True),
    (True, "float32", "float64", False),
    (False, "bfloat16", "float32", False),
    (True, "float32", "float32", True),
    (True, "float64", "float32", True),
    (True, "bfloat16", "float64", True),
]


def run(method, of_params, of_grads, masked):
    """Parameters of each replica and those to evaluate, after a scan over some ticks."""
    tx = cases.METHODS[method](optzoo.adam(0.1), cases.REPLICAS)
    params = {"a": np.ones((2, 3), of_params), "b": np.zeros(4, of_params)}
    shapes = {"a": (TICKS, cases.REPLICAS, 2, 3), "b": (TICKS, cases.REPLICAS, 4)}
    rng = np.random.default_rng(0)
    eighths = lambda shape: (rng.integers(-8, 9, shape) / 8).astype(of_grads)  # exact in all
    grads = {name: eighths(shape) for name, shape in shapes.items()}
    takes_part = rng.random((TICKS, cases.REPLICAS)) < 0.7

    def step(params, state, grads, takes_part):
        masks = {"active": takes_part, "arrived": takes_part} if masked else {}
        updates, state = tx.update(grads, state, params, **masks)
        chex.assert_trees_all_equal_dtypes(updates, grads)
        return optax.apply_updates(params, updates), state

    train = optzoo.replicas.map_over_replicas(step)
    start = optzoo.replicas.replicate(params, tx.init(params), cases.REPLICAS)
    # A scan refuses a state whose dtypes change.
    tick = lambda carry, now: (train(*carry, *now), None)
    (x, state), _ = jax.jit(lambda *args: jax.lax.scan(tick, *args))(start, (grads, takes_part))
    chex.assert_trees_all_equal_dtypes(x, params)
    return jax.tree.map(lambda a: np.asarray(a, np.float32), (x, optzoo.eval_params(x, state)))


in_float32 = functools.cache(functools.partial(run, of_params="float32", of_grads="float32"))


@pytest.mark.parametrize("mix", MIXES, ids=str)
@pytest.mark.parametrize("method", chosen_first(cases.METHODS, QUICK))
def test_dtypes_mix(method, mix, x64):
    enabled, of_params, of_grads, masked = mix
    with x64(False):
        want = in_float32(method, masked=masked)
    with x64(enabled):
        got = run(method, of_params, of_grads, masked)
    # Parameters, or updates, are rounded to 8 bits at every step.
    atol = 0.03 if "bfloat16" in (of_params, of_grads) else 1e-5
    chex.assert_trees_all_close(got, want, rtol=0, atol=atol)
    assert max(np.abs(leaf - leaf.round()).max() for leaf in jax.tree.leaves(want)) > 0.1


def test_a_moving_rate_may_be_wider_than_the_parameters(x64):
    with x64(True):
        inner = optzoo.momentum(0.1, 0.9)
        tx = optzoo.elastic_average(inner, 1, axis_name=None, moving_rate=np.float64(0.5))
        params = jnp.ones(3, jnp.float32)
        updates, state = tx.update(params, tx.init(params), params, exchange=True)
        assert updates.dtype == state.replicated.center.dtype == jnp.float32


@pytest.mark.every_value
@pytest.mark.parametrize("with_float64", [True, False])
@pytest.mark.parametrize("method", cases.METHODS)
def test_strict_promotion(method, with_float64, x64):
    """No dtype is promoted without a word: neither in a step that exchanges nor in another one."""
    tx = cases.METHODS[method](optzoo.adam(0.1), cases.REPLICAS)
    extra = dict.fromkeys(("active", "arrived"), np.ones(cases.REPLICAS, bool))
    if "diloco" in method:
        extra["weight"] = np.ones(cases.REPLICAS, np.float32)

    def step(params, state, grads, extra):
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    dtypes = ("bfloat16", "float64") if with_float64 else ("bfloat16", "float32")
    with x64(with_float64), jax.numpy_dtype_promotion("strict"):
        params = {"a": jnp.ones((2, 3), dtypes[0]), "b": jnp.zeros(4, dtypes[1])}
        x, state = optzoo.replicas.replicate(params, tx.init(params), cases.REPLICAS)
        of_all = lambda a: jnp.ones((cases.REPLICAS, *a.shape), a.dtype)
        grads = jax.tree.map(of_all, params)
        after = jax.eval_shape(optzoo.replicas.map_over_replicas(step), x, state, grads, extra)
        assert samples.avals(after) == samples.avals((x, state))
