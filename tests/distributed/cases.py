"""The distributed family at work on a small problem, in every way to have replicas."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import optzoo
from optzoo.testing import samples

REPLICAS, TICKS = 4, 7
METHODS = {
    "elastic_average": lambda inner, n: optzoo.elastic_average(
        inner, n, communication_period=3, rho=0.1
    ),
    "elastic_average, round robin": lambda inner, n: optzoo.elastic_average(
        inner, n, communication_period=3, order="round_robin"
    ),
    "agn": lambda inner, n: optzoo.agn(inner, communication_period=3),
    "agn, round robin": lambda inner, n: optzoo.agn(
        inner, communication_period=3, order="round_robin"
    ),
    "model_average": lambda inner, n: optzoo.model_average(inner, interval_steps=3),
    "model_average, of slots": lambda inner, n: optzoo.model_average(
        inner, interval_steps=3, slots="average"
    ),
    "diloco": lambda inner, n: optzoo.diloco(inner, communication_period=3),
    "diloco, streaming": lambda inner, n: optzoo.diloco(
        inner, communication_period=3, warmup_steps=2, fragments=2
    ),
    "diloco, overlapping": lambda inner, n: optzoo.diloco(
        inner, communication_period=3, overlap_steps=2, mixing=0.25
    ),
    "sync_replicas": lambda inner, n: optzoo.sync_replicas(inner, n),
    "sync_replicas, backup": lambda inner, n: optzoo.sync_replicas(inner, n - 1, n),
    "sync_replicas, several ticks": lambda inner, n: optzoo.sync_replicas(inner, 2 * n, n),
    "drop_stale_gradient": lambda inner, n: optzoo.drop_stale_gradient(inner, 1),
}
WAYS = ["vmap", "sharded jit", "pmap", "shard_map", "shard_map unchecked", "shard_map, automatic"]


def params():
    table = np.arange(1, 11, dtype=np.float32).reshape(5, 2) / 10
    return {"table": table, "bias": np.ones(3, np.float32)}


# One object for each, so that its compiled steps are used again.
make = functools.cache(lambda method, inner, n=REPLICAS: METHODS[method](inner, n))
lazy_adam = functools.cache(lambda: optzoo.lazy_adam(0.1))


def batches(ticks=TICKS, replicas=REPLICAS):
    """For each tick and replica: ids of the table, a target, and whether it takes part."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 6, (ticks, replicas, 3))  # 5 is padding
    target = rng.normal(size=(ticks, replicas, 3)).astype(np.float32)
    takes_part = rng.random((ticks, replicas)) < 0.7
    return ids, target, takes_part


def loss_fn(params, ids, target):
    rows = optzoo.lookup(params["table"], ids)
    return jnp.sum((rows - target[:, None]) ** 2) + jnp.sum((params["bias"] - target) ** 2)


def train_step(tx, axis_name="replica", masked=False, **static):
    """What one replica does in a tick."""

    def step(params, state, ids, target, takes_part):
        x = optzoo.replicas.per_replica(params, axis_name)
        value, grads = optzoo.value_and_grad(loss_fn)(x, ids, target)
        masks = {"active": takes_part, "arrived": takes_part} if masked else {}
        return *samples.step(tx, grads, params, state, **masks, **static), value

    return step


def mesh(replicas=REPLICAS, kind="Explicit"):
    return jax.make_mesh((replicas,), ("replica",), axis_types=(jax.sharding.AxisType[kind],))


def _kind(way):
    """The kind of the mesh axes."""
    return "Auto" if way == "shard_map, automatic" else "Explicit"


@functools.cache
def start(tx, way="vmap", replicas=REPLICAS):
    """Parameters and state of all replicas, where this way needs them."""
    places = None if way in ("vmap", "pmap") else mesh(replicas, _kind(way))
    return optzoo.replicas.replicate(params(), tx.init(params()), replicas, mesh=places)


def over(way, step, tx, replicas=REPLICAS):
    """The compiled step of all replicas."""
    if way.startswith("shard_map"):
        of_mesh = {"mesh": mesh(replicas, _kind(way)), "check_vma": way != "shard_map unchecked"}
        return jax.jit(optzoo.replicas.map_over_replicas(step, **of_mesh))
    if way == "pmap":
        specs = optzoo.replicas.replica_specs(params(), tx.init(params()), None, 0)
        axes = {"in_axes": (*specs, 0, 0, 0), "out_axes": (*specs, 0)}
        return jax.pmap(step, axis_name="replica", **axes, devices=jax.devices()[:replicas])
    return jax.jit(optzoo.replicas.map_over_replicas(step))


def run(method, way="vmap", masked=False, inner=None, ticks=TICKS):
    """Parameters, state and losses after some ticks."""
    tx = make(method, inner or lazy_adam())
    train = over(way, train_step(tx, masked=masked), tx)
    x, state = start(tx, way)
    losses = []
    for batch in list(zip(*batches(), strict=True))[:ticks]:
        x, state, value = train(x, state, *batch)
        losses.append(value)
    return x, state, np.stack(losses)


simulated = functools.cache(run)
