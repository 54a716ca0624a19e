"""What goes wrong silently elsewhere: an error here, or right."""

import functools

import chex
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import optzoo
from optzoo.testing import samples

from . import cases

SHARED = [m for m in cases.METHODS if m.startswith(("sync", "drop"))]
N = cases.REPLICAS


def gradients(value=1.0):
    return jax.tree.map(lambda a: np.full((N, *a.shape), value, np.float32), cases.params())


@functools.cache
def train_of(tx):
    step = lambda params, state, grads, masks: samples.step(tx, grads, params, state, **masks)
    return jax.jit(optzoo.replicas.map_over_replicas(step))


def ticks(tx, *masks, grads=None):
    """Parameters and state of all replicas after ticks with constant gradients."""
    grads = gradients() if grads is None else grads
    x, state = cases.start(tx)
    for mask in masks:
        x, state = train_of(tx)(x, state, grads, mask)
    return x, state


INNER = optzoo.gradient_descent(0.1)
MOMENTUM = optzoo.momentum(0.1, 0.9)


# Gradients that are summed already


@pytest.mark.parametrize("method", SHARED)
def test_gradients_that_are_summed_already_are_refused(method):
    """Under check_vma, jax.grad by replicated parameters sums over the replicas."""
    tx = cases.make(method, INNER)

    def step(params, state, ids, target, _):
        _, grads = jax.value_and_grad(cases.loss_fn)(params, ids, target)
        return samples.step(tx, grads, params, state)

    train = optzoo.replicas.map_over_replicas(step, mesh=cases.mesh())
    batch = jax.tree.map(lambda a: a[0], cases.batches())
    with pytest.raises(
        ValueError, match=r"gradient of 'bias' .* optzoo.replicas.per_replica\(params"
    ):
        jax.eval_shape(train, *cases.start(tx, "shard_map"), *batch)


@pytest.mark.parametrize("check_vma", [True, False])
def test_each_replica_has_its_own_gradient_by_per_replica_parameters(check_vma):
    x = np.arange(N, dtype=np.float32)
    own = lambda p, x: jax.grad(lambda p: p * x[0])(optzoo.replicas.per_replica(p))[None]
    specs = {"in_specs": (PartitionSpec(), PartitionSpec("replica"))}
    specs |= {"out_specs": PartitionSpec("replica"), "check_vma": check_vma}
    grads = jax.jit(jax.shard_map(own, mesh=cases.mesh(kind="Auto"), **specs))(np.float32(2), x)
    np.testing.assert_array_equal(grads, x)


@pytest.mark.parametrize("method", SHARED)
def test_parameters_that_differ_between_replicas_are_refused_where_they_are_shared(method):
    tx = cases.make(method, INNER)
    specs = optzoo.replicas.replica_specs(
        None, tx.init(cases.params()), PartitionSpec(), PartitionSpec()
    )
    update = jax.shard_map(
        lambda state, x, g: tx.update(g, state, x)[0],
        mesh=cases.mesh(kind="Auto"),
        in_specs=(specs[1], PartitionSpec("replica"), PartitionSpec("replica")),
        out_specs=PartitionSpec("replica"),
    )
    x = jax.tree.map(lambda a: np.repeat(a, N, axis=0), cases.params())
    with pytest.raises(ValueError, match=r"'bias' may differ along \['replica'\]"):
        jax.eval_shape(update, tx.init(cases.params()), x, x)


# Replicas that drop out


SPOILT = {"active": np.arange(N) != 1, "arrived": np.arange(N) != 1}


def spoil(tree):
    """The second replica's part is NaN."""
    is_spoilt = lambda a: np.arange(N).reshape(N, *[1] * (a.ndim - 1)) == 1
    return jax.tree.map(lambda a: np.where(is_spoilt(a), np.float32(np.nan), a), tree)


def test_parameters_that_are_nan_do_not_reach_an_average_without_them():
    tx = optzoo.model_average(MOMENTUM, interval_steps=1)
    x, state = cases.start(tx)
    x, state = train_of(tx)(spoil(x), state, gradients(0.0), {"arrived": SPOILT["arrived"]})
    chex.assert_trees_all_close(optzoo.eval_params(x, state), cases.params())


def test_masks_may_come_and_go():
    """Replicas that fell behind keep their own period in ticks without a mask."""
    everyone, most = {"active": np.ones(N, bool)}, {"active": np.arange(N) != 1}
    tx = optzoo.elastic_average(optzoo.gradient_descent(0.1), N, communication_period=3)
    some = ticks(tx, most, *[everyone] * 6)
    x, state = ticks(tx, most, *[{}] * 6)
    chex.assert_trees_all_close((x, state), some, rtol=1e-6)
    # Two exchanges of each.
    np.testing.assert_array_equal(state.per_replica.local_step, [7, 6, 7, 7])
    assert state.replicated.global_step == 2 * N


# Arguments


def test_an_axis_that_is_not_there_is_named():
    tx = optzoo.model_average(optzoo.gradient_descent(0.1), interval_steps=1)
    with pytest.raises(
        NameError, match=r"axis_name='replica'.*optzoo\.replicas\.map_over_replicas"
    ):
        tx.update(cases.params(), tx.init(cases.params()), cases.params())


@pytest.mark.parametrize("axis_name", ["replica", ("model", "replica")])
def test_an_axis_that_a_mesh_does_not_have_is_named(axis_name):
    tx, mesh = optzoo.model_average(INNER), jax.make_mesh((4,), ("model",))
    options = {"mesh": mesh, "axis_name": axis_name}
    words = r"mesh has no axis 'replica', its axes are \{'model': 4\}: give axis_name="
    for call in (
        lambda: optzoo.replicas.map_over_replicas(lambda x, s: (x, s), **options),
        lambda: optzoo.replicas.replicate(cases.params(), tx.init(cases.params()), N, **options),
        lambda: optzoo.replicas.resize_replicas(tx, *cases.start(tx), N, **options),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_replicas_that_devices_cannot_share_are_refused():
    tx = optzoo.model_average(INNER)
    with pytest.raises(
        ValueError, match=r"num_replicas must be a multiple of the 4 devices .*got 6"
    ):
        optzoo.replicas.replicate(
            cases.params(), tx.init(cases.params()), 6, mesh=cases.mesh(4), axis_name="replica"
        )


# With the number of replicas, and without it.
NUMBERS = {
    "agn": lambda n=None: optzoo.agn(INNER, n, communication_period=1),
    "diloco": lambda n=None: optzoo.diloco(INNER, num_workers=n, communication_period=1),
    "drop_stale_gradient": lambda n=None: optzoo.drop_stale_gradient(INNER, 2, num_workers=n),
    "elastic_average": lambda n=None: optzoo.elastic_average(INNER, n, communication_period=1),
    "model_average": lambda n=None: optzoo.model_average(INNER, n, interval_steps=1),
    "sync_replicas": lambda n=None: optzoo.sync_replicas(INNER, n),
}


@pytest.mark.parametrize("method", NUMBERS)
def test_the_number_of_replicas_is_that_of_the_axis(method):
    chex.assert_trees_all_equal(ticks(NUMBERS[method](), {}), ticks(NUMBERS[method](N), {}))


@pytest.mark.parametrize("exchange", [None, False])
@pytest.mark.parametrize("method", NUMBERS)
def test_another_number_of_replicas_is_refused(method, exchange):
    name = "total_num_replicas" if method == "sync_replicas" else "num_workers"
    words = f"{name} must be the size of the axis 'replica', 4, got 5"
    if exchange is False and method in ("sync_replicas", "drop_stale_gradient"):
        exchange = None  # they always exchange
    tx = NUMBERS[method](N + 1)
    step = lambda params, state, g: tx.update(g, state, params, exchange=exchange)
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(optzoo.replicas.map_over_replicas(step), *cases.start(tx), gradients())


def test_numbers_of_gradients_and_of_replicas():
    """Alone, the first is the second, and the second the first."""
    for given, same in (((2,), (2, 2)), ((None, N), (N, N)), ((), (N, N))):
        tx, other = (optzoo.sync_replicas(INNER, *numbers) for numbers in (given, same))
        replicas = same[1]
        x, y = (
            optzoo.replicas.replicate(cases.params(), t.init(cases.params()), replicas)
            for t in (tx, other)
        )
        g = jax.tree.map(lambda a, n=replicas: a[:n], gradients())
        chex.assert_trees_all_equal(train_of(tx)(*x, g, {}), train_of(other)(*y, g, {}))


WRONG = {
    "num_workers": lambda: optzoo.elastic_average(INNER, 0),
    "communication_period": lambda: optzoo.elastic_average(INNER, 2, communication_period=0),
    "moving_rate": lambda: optzoo.elastic_average(INNER, 2, moving_rate=1.5),
    "rho": lambda: optzoo.elastic_average(INNER, 2, rho=-0.1),
    "order": lambda: optzoo.agn(INNER, order="random"),
    "interval_steps": lambda: optzoo.model_average(INNER, interval_steps=0),
    "slots": lambda: optzoo.model_average(INNER, slots="drop"),
    "replicas_to_aggregate": lambda: optzoo.sync_replicas(INNER, 0),
    "replicas_to_aggregate=3": lambda: optzoo.sync_replicas(INNER, 3, 2, hold=False),
    "rows_divisor": lambda: optzoo.sync_replicas(INNER, 1, rows_divisor="row"),
    "warmup_steps": lambda: optzoo.diloco(INNER, warmup_steps=-1),
    "fragments": lambda: optzoo.diloco(INNER, communication_period=2, fragments=3),
    "bucket_bytes": lambda: optzoo.diloco(INNER, bucket_bytes=-1),
}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_out_of_range_are_named(name):
    with pytest.raises(ValueError, match=f"^{name}.* (must|take)"):
        WRONG[name]()


def test_an_overlap_has_time():
    options = {"communication_period": 7, "fragments": 2}
    words = r"overlap_steps must be below communication_period // fragments = 7 // 2 = 3, .*got 3"
    with pytest.raises(ValueError, match=words):
        optzoo.diloco(INNER, overlap_steps=3, **options)
    with pytest.raises(ValueError, match=r"mixing must be in \[0, 1\], got 1.5"):
        optzoo.diloco(INNER, mixing=1.5)
    round = optzoo.replicas.scan_local_steps(lambda x, s, exchange: (x, s), overlap_steps=2)
    with pytest.raises(ValueError, match="below the number of steps of a round, 2, got 2"):
        round(0, 0, np.zeros(2))


@pytest.mark.parametrize(
    ("method", "exchange", "words"),
    [
        ("diloco", "start", "exchange='start' needs .* overlap_steps of at least 1"),
        ("diloco, overlapping", "begin", "exchange must be one of start, finish, got 'begin'"),
    ],
)
def test_stages_are_of_exchanges_that_overlap(method, exchange, words):
    tx = cases.make(method, INNER)
    step = lambda params, state, g: tx.update(g, state, params, exchange=exchange)
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(optzoo.replicas.map_over_replicas(step), *cases.start(tx), gradients())


def test_a_fragment_that_does_not_exist_is_refused():
    tx = optzoo.diloco(INNER, axis_name=None, communication_period=2, fragments=2)
    x = cases.params()
    with pytest.raises(ValueError, match="fragment must be below fragments=2, got 2"):
        tx.update(x, tx.init(x), x, exchange=True, fragment=2)


@pytest.mark.parametrize("method", [m for m in cases.METHODS if not m.startswith("sync")])
def test_parameters_are_needed(method):
    tx = cases.make(method, INNER)
    with pytest.raises(ValueError, match="requires the current value of parameters"):
        tx.update(cases.params(), tx.init(cases.params()))


def test_more_than_one_replica_for_a_device_is_refused():
    tx = optzoo.model_average(INNER)
    step = lambda x, s: (x, s)
    with pytest.raises(ValueError, match="each device must have one replica, got 2"):
        jax.eval_shape(
            optzoo.replicas.map_over_replicas(step, mesh=cases.mesh(2)), *cases.start(tx)
        )
