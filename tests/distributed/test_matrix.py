"""The same numbers in every way to have replicas."""

import chex
import jax
import numpy as np
import pytest

import optzoo
from optzoo.state.types import SharedParamsState

from ..selection import chosen_first
from . import cases

# One for each kind of exchange.
KINDS = ("elastic_average", "model_average, of slots", "sync_replicas, backup")
QUICK = {
    *((method, "shard_map unchecked", True) for method in KINDS),
    # Those that have all of what the others have, with masks.
    ("agn, round robin", "shard_map", True),
    ("diloco, streaming", "shard_map", True),
    ("drop_stale_gradient", "shard_map", True),
    ("sync_replicas, several ticks", "shard_map", True),
    ("elastic_average", "sharded jit", False),
    ("model_average, of slots", "pmap", False),
    ("sync_replicas", "shard_map", False),
}


WAYS = [
    (method, way, masked)
    for method in cases.METHODS
    for masked in (False, True)
    for way in cases.WAYS[1:]
]


@pytest.mark.parametrize(
    ("method", "way", "masked"),
    chosen_first(WAYS, QUICK),
    ids=lambda value: value if isinstance(value, str) else "masked" * value or "all",
)
def test_every_way_gives_the_same(method, way, masked):
    got, want = cases.simulated(method, way, masked), cases.simulated(method, "vmap", masked)
    close = lambda a, b: chex.assert_trees_all_close(a, b, rtol=1e-6, atol=1e-6)
    jax.tree.map(close, jax.device_get(got), jax.device_get(want))
    assert np.ptp(want[2]) > 0.1  # it moves


@pytest.mark.parametrize("method", chosen_first(cases.METHODS, KINDS))
def test_what_is_shared_is_bit_identical(method):
    x, state, _ = cases.simulated(method, "shard_map unchecked", True)
    replicated = [state.replicated] + ([x] if isinstance(state, SharedParamsState) else [])
    for leaf in jax.tree.leaves(replicated):
        copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert len(copies) == cases.REPLICAS
        for copy in copies[1:]:
            np.testing.assert_array_equal(copy, copies[0])


@pytest.mark.parametrize("method", chosen_first(cases.METHODS, KINDS))
def test_a_batched_counter_turns_cond_into_select_and_changes_nothing(method):
    tx = cases.make(method, cases.lazy_adam())
    step = cases.train_step(tx, masked=True)
    train = jax.jit(jax.vmap(step, axis_name="replica"))  # everything has an axis
    every = lambda tree: jax.tree.map(lambda a: np.stack([a] * cases.REPLICAS), tree)
    x, state = every(cases.params()), every(tx.init(cases.params()))
    for batch in zip(*cases.batches(), strict=True):
        x, state, _ = train(x, state, *batch)
    want, wanted, _ = cases.simulated(method, "vmap", True)
    close = lambda a, b: np.testing.assert_allclose(*np.broadcast_arrays(a, b), 1e-6, 1e-6)
    jax.tree.map(close, x, want)
    jax.tree.map(close, state, wanted)


@pytest.mark.parametrize(("method", "steps"), [("elastic_average", 1024), ("sync_replicas", 4)])
def test_a_thousand_replicas_of_a_small_model(method, steps):
    tx = cases.METHODS[method](optzoo.gradient_descent(0.01), 1024)
    train = cases.over("vmap", cases.train_step(tx), tx)
    x, state = cases.start(tx, replicas=1024)
    for batch in zip(*cases.batches(4, 1024), strict=True):
        x, state, losses = train(x, state, *batch)
    assert np.all(np.isfinite(losses)) and state.replicated.global_step == steps


def test_two_axes_as_one():
    """Replicas along the axes of hosts and of devices."""
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh, axes = (
        jax.make_mesh((2, 2), ("host", "device"), auto, devices=jax.devices()[:4]),
        ("host", "device"),
    )
    tx = optzoo.elastic_average(
        optzoo.lazy_adam(0.1), 4, axis_name=axes, communication_period=3, rho=0.1
    )
    step = cases.train_step(tx, axes)
    train = jax.jit(optzoo.replicas.map_over_replicas(step, axis_name=axes, mesh=mesh))
    x, state = optzoo.replicas.replicate(
        cases.params(), tx.init(cases.params()), 4, mesh=mesh, axis_name=axes
    )
    for batch in zip(*cases.batches(), strict=True):
        x, state, _ = train(x, state, *batch)
    want, _, _ = cases.simulated("elastic_average", "vmap", False)
    chex.assert_trees_all_close(jax.device_get(x), jax.device_get(want), rtol=1e-6, atol=1e-6)
