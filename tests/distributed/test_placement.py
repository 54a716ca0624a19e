"""Replicas that move to other devices, with automatic and explicit axes."""

import itertools

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import optzoo

START = {"w": np.arange(6, dtype=np.float32).reshape(3, 2), "b": np.ones((), np.float32)}
BEFORE = 4


def mesh(devices, kind, name="replica"):
    """A mesh over the first devices; None for one device without a mesh."""
    if devices is None:
        return None
    return jax.make_mesh((devices,), (name,), axis_types=(kind,), devices=jax.devices()[:devices])


KINDS = [AxisType.Auto, AxisType.Explicit]
PLACES = [(None, AxisType.Auto), *itertools.product([4], KINDS)]
TARGETS = [(None, AxisType.Auto), *itertools.product([2, 4, 8], KINDS)]


def started(tx, place):
    """Parameters and state in which each replica has its own slots; with ``w`` of replica i + i."""
    here = mesh(*place)
    params, state = optzoo.replicas.replicate(START, tx.init(START), BEFORE, mesh=here)
    ranks = np.arange(BEFORE, dtype=np.float32)
    put = lambda new, old: jax.device_put(new, old.sharding)
    differ = lambda a: put(np.asarray(a) + ranks.reshape(-1, *(1,) * (a.ndim - 1)), a)
    own = state.per_replica
    slots = own.inner[0]._replace(trace=jax.tree.map(differ, own.inner[0].trace))
    inner = (slots, *own.inner[1:])
    return jax.tree.map(differ, params), state._replace(per_replica=own._replace(inner=inner))


@pytest.mark.parametrize("in_context", [False, True], ids=["", "set_mesh"])
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_replicas_move_to_a_mesh_of_other_devices(place, target, in_context):
    """Old replicas keep theirs; new ones start from the center, with slots of replica i % 4."""
    tx = optzoo.model_average(optax.sgd(0.1, momentum=0.9))
    params, state = started(tx, place)
    new, number = mesh(*target), target[0] or 6
    resize = lambda: optzoo.replicas.resize_replicas(tx, params, state, number, mesh=new)
    if in_context and new is not None:
        with jax.set_mesh(new):
            x, after = resize()
    else:
        x, after = resize()

    ranks = np.arange(number)
    shift = np.where(ranks < BEFORE, ranks, 0).astype(np.float32)
    for name, start in START.items():
        ones = (1,) * start.ndim
        np.testing.assert_array_equal(x[name], start + shift.reshape(-1, *ones))
        of_slots = np.broadcast_to((ranks % BEFORE).reshape(-1, *ones), (number, *start.shape))
        np.testing.assert_array_equal(after.per_replica.inner[0].trace[name], of_slots)
        np.testing.assert_array_equal(after.replicated.center[name], start)
    if new is not None:
        marks = optzoo.replicas.replica_specs(x, after, PartitionSpec(), PartitionSpec("replica"))
        is_there = lambda spec, tree: all(
            a.sharding.mesh == new and a.sharding.is_equivalent_to(NamedSharding(new, spec), a.ndim)
            for a in jax.tree.leaves(tree)
        )
        assert jax.tree.all(jax.tree.map(is_there, marks, (x, after)))


def test_without_a_mesh_replicas_stay_on_explicit_axes():
    tx = optzoo.model_average(optax.sgd(0.1, momentum=0.9))
    params, state = started(tx, (4, AxisType.Explicit))
    for number, along in ((8, "replica"), (6, None)):
        x, after = optzoo.replicas.resize_replicas(tx, params, state, number)
        assert jax.typeof(x["w"]).sharding.spec == PartitionSpec(along, None, None)
        assert after.replicated.center["w"].sharding.is_fully_replicated


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("committed", ["mesh", "another name", "device"])
def test_committed_parameters_are_replicated_on_another_mesh(committed, kind):
    places = {
        "mesh": NamedSharding(mesh(2, kind), PartitionSpec()),
        "another name": NamedSharding(mesh(4, kind, "data"), PartitionSpec()),
        "device": jax.devices()[1],
    }
    tx, new = optzoo.sync_replicas(optzoo.adam(0.1)), mesh(4, kind)
    params = jax.device_put(START, places[committed])
    x, state = optzoo.replicas.replicate(params, tx.init(params), 4, mesh=new)
    for a in jax.tree.leaves((x, state)):
        assert a.sharding.mesh == new
    np.testing.assert_array_equal(x["w"], START["w"])
