"""Identities between the methods, and what their options do."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import optzoo
from optzoo.state.types import SharedParamsState
from optzoo.testing import samples

from . import cases

N = cases.REPLICAS
CENTERS = np.arange(N, dtype=np.float32) - 0.5  # to which the replicas are drawn
START = {"w": np.zeros((2, 2), np.float32), "b": np.ones(3, np.float32)}


def quadratic(x, to):
    return sum(jnp.sum((leaf - to) ** 2) for leaf in jax.tree.leaves(x)) / 2


start = functools.cache(lambda tx: optzoo.replicas.replicate(START, tx.init(START), N))


@functools.cache
def train_of(tx, **static):
    def step(params, state, to, mask):
        grads = jax.grad(quadratic)(params, to)
        return samples.step(tx, grads, params, state, **mask, **static)

    return jax.jit(optzoo.replicas.map_over_replicas(step))


def trajectory(tx, ticks=8, masks=None, to=CENTERS, **static):
    """Parameters of all replicas after each tick, and the last state."""
    masks = [{}] * ticks if masks is None else masks
    (x, state), visited = start(tx), []
    for mask in masks:
        x, state = train_of(tx, **static)(x, state, to, mask)
        visited.append(x)
    return jax.tree.map(lambda *a: np.stack(a), *visited), state


momentum = functools.cache(lambda: optzoo.momentum(0.1, 0.9))
make = lambda method: cases.make(method, momentum())
five_ticks = functools.cache(lambda method: trajectory(make(method), 5))


def close(a, b):
    chex.assert_trees_all_close(a, b, rtol=1e-5, atol=1e-6)


# Identities


def test_diloco_with_plain_steps_of_one_is_model_averaging():
    outer = optzoo.gradient_descent(1.0)
    x, state = trajectory(optzoo.diloco(momentum(), outer, communication_period=3))
    y, other = trajectory(optzoo.model_average(momentum(), interval_steps=3))
    close(x, y)
    close(state.replicated.center, other.replicated.center)


def test_averaging_after_every_step_of_gradient_descent_is_synchronous():
    inner = optzoo.gradient_descent(0.1)
    x, _ = trajectory(optzoo.model_average(inner, interval_steps=1))
    y, _ = trajectory(optzoo.sync_replicas(inner, N))
    close(jax.tree.map(lambda a: a[:, 0], x), y)


ALONE = {
    "model_average": lambda inner: optzoo.model_average(inner, axis_name=None, interval_steps=2),
    "sync_replicas": lambda inner: optzoo.sync_replicas(inner, 1, axis_name=None),
    "drop_stale_gradient": lambda inner: optzoo.drop_stale_gradient(inner, 0, axis_name=None),
    "diloco": lambda inner: optzoo.diloco(
        inner, optax.sgd(1.0), axis_name=None, communication_period=2
    ),
}


@pytest.mark.parametrize("method", ALONE)
def test_one_replica_is_the_inner_optimizer(method):
    x, grads = cases.params(), functools.partial(jax.tree.map, lambda a: jnp.cos(a + 1))
    run = lambda tx: samples.trajectory(tx, x, lambda x, _: grads(x), jnp.arange(5))
    close(run(ALONE[method](momentum())), run(momentum()))


def test_replicas_without_an_exchange_are_independent():
    x, _ = trajectory(optzoo.elastic_average(momentum(), N, communication_period=100))
    y, _ = trajectory(optzoo.model_average(momentum(), interval_steps=100))
    close(x, y)
    assert np.ptp(x["b"][-1], axis=0).min() > 0.5


def test_one_pusher_at_a_time_makes_the_orders_equal():
    """With gradient descent the rounds of both orders end in the same mean-field step."""
    masks = [{"active": np.arange(N) == tick % N} for tick in range(2 * N)]
    for method in (optzoo.agn, functools.partial(optzoo.elastic_average, num_workers=N)):
        runs = [
            trajectory(method(momentum(), communication_period=2, order=order), masks=masks)
            for order in ("simultaneous", "round_robin")
        ]
        close(*runs)


@pytest.mark.parametrize(
    "method", ["elastic_average", "agn", "model_average", "diloco", "diloco, overlapping"]
)
def test_a_round_is_its_steps(method):
    overlap_steps = 2 if "overlapping" in method else 0
    tx = cases.METHODS[method](optzoo.adam(0.1), N)

    def step(params, state, ids, target, exchange):
        value, grads = optzoo.value_and_grad(cases.loss_fn)(params, ids, target)
        return *samples.step(tx, grads, params, state, exchange=exchange), value

    a_round = optzoo.replicas.scan_local_steps(step, overlap_steps=overlap_steps)
    train = jax.jit(optzoo.replicas.map_over_replicas(a_round))
    ids, target, _ = jax.tree.map(lambda a: a[:6].swapaxes(0, 1), cases.batches())
    x, state = cases.start(tx)
    losses = []
    for at in (slice(3), slice(3, 6)):
        x, state, values = train(x, state, ids[:, at], target[:, at])
        losses.append(values)
    wanted = cases.run(method, inner=optzoo.adam(0.1), ticks=6)
    close((x, state, np.concatenate(losses, axis=1).T), wanted)


@pytest.mark.parametrize("method", ["elastic_average", "agn", "diloco", "sync_replicas"])
def test_it_does_not_matter_who_is_who(method):
    order = np.array([2, 0, 3, 1])
    x, state = trajectory(make(method))
    y, other = trajectory(make(method), to=CENTERS[order])
    close(state.replicated, other.replicated)
    if method != "sync_replicas":
        close(jax.tree.map(lambda a: a[:, order], x), y)


# Options


def test_what_starts_in_the_warm_up_is_not_used_after_it():
    """The warm-up has used it already; the next exchange starts after the warm-up."""
    options = {"communication_period": 4, "warmup_steps": 3}
    tx = optzoo.diloco(momentum(), optax.sgd(1.0), overlap_steps=2, **options)
    x, _ = trajectory(tx, 8)
    y, _ = trajectory(optzoo.diloco(momentum(), optax.sgd(1.0), **options), 3)
    close(jax.tree.map(lambda a: a[:3], x), y)
    assert np.ptp(x["b"][2], axis=0).max() == 0  # the end of the warm-up
    alone, _ = trajectory(optzoo.diloco(momentum(), warmup_steps=3, communication_period=100), 7)
    close(jax.tree.map(lambda a: a[:7], x), alone)
    assert np.ptp(x["b"][7], axis=0).max() == 0


def test_an_exchange_now_is_a_start_and_a_finish():
    both, state = trajectory(make("diloco, overlapping"), 2, exchange=True)
    plain = optzoo.diloco(momentum(), communication_period=3, mixing=0.25)
    want, of_plain = trajectory(plain, 2, exchange=True)
    close(both, want)
    close(state.replicated.center, of_plain.replicated.center)


def test_hyperparameters_that_optax_injects():
    numbers = {
        "diloco": (lambda a: optzoo.diloco(momentum(), communication_period=3, mixing=a), 0.25),
        "elastic": (lambda a: optzoo.elastic_average(momentum(), N, moving_rate=a), 0.02),
        "pull": (lambda a: optzoo.elastic_average(momentum(), N, rho=a), 0.5),
    }
    for build, number in numbers.values():
        (want, _), (got, _) = (
            trajectory(tx, 4) for tx in (build(number), optax.inject_hyperparams(build)(number))
        )
        close(got, want)


def test_an_elastic_center_is_followed():
    x, state = trajectory(optzoo.elastic_average(momentum(), N, communication_period=2), 200)
    centers = [a[-1].mean(axis=0) for a in jax.tree.leaves(x)]
    chex.assert_trees_all_close(jax.tree.leaves(state.replicated.center), centers, rtol=0.05)
    assert abs(centers[0].mean() - CENTERS.mean()) < 0.05


def test_a_pull_holds_replicas_together():
    spread = lambda rho: np.ptp(
        trajectory(optzoo.elastic_average(momentum(), N, rho=rho), 40)[0]["b"][-1], axis=0
    )
    assert np.all(spread(1.0) < 0.6 * spread(0.0))


def test_a_moving_average_belongs_inside():
    inner = optzoo.moving_average(momentum(), 0.5)
    x, state = trajectory(optzoo.sync_replicas(inner, N, N), 3)
    averages = optzoo.eval_params(jax.tree.map(lambda a: a[-1], x), state)
    want = START
    for tick in range(3):
        want = jax.tree.map(lambda a, x, tick=tick: 0.5 * a + 0.5 * x[tick], want, x)
    close(averages, want)
    outside = optzoo.moving_average(optzoo.sync_replicas(momentum(), N, N), 0.5)
    with pytest.raises(ValueError, match=r"in each update: .* sync_replicas\(moving_average"):
        outside.init(START)
    x, state = trajectory(optzoo.moving_average(optzoo.model_average(momentum()), 0.5), 3)
    for read in (optzoo.eval_params, optzoo.state.swap_averages):
        with pytest.raises(ValueError, match=r"'b', of shape .*sync_replicas\(moving_average"):
            read(jax.tree.map(lambda a: a[-1, 0], x), state)


def test_sync_replicas_on_another_number_of_replicas():
    with pytest.raises(
        ValueError, match=rf"replicas_to_aggregate=2\): pass total_num_replicas={N}"
    ):
        trajectory(optzoo.sync_replicas(momentum(), 2), 1)


# States


@pytest.mark.parametrize("method", cases.METHODS)
def test_the_type_of_the_state_tells_whether_parameters_are_replicated(method):
    state = make(method).init(START)
    assert isinstance(state, optzoo.replicas.ReplicaState)
    of_params, of_state = optzoo.replicas.replica_specs(START, state, "replicated", "per replica")
    shares_params = method.startswith(("sync", "drop"))
    assert of_params == ("replicated" if shares_params else "per replica")
    assert isinstance(state, SharedParamsState) == shares_params
    assert of_state == type(state)("replicated", "per replica")


def test_what_follows_a_method_has_a_state_for_each_replica():
    method = optzoo.model_average(optzoo.gradient_descent(1.0), interval_steps=9)
    tx = optax.chain(method, optax.scale_by_schedule(lambda k: 1 / (1 + k)))
    x, grads = {"w": np.zeros(2)}, {"w": np.array([[1.0, 2], [3, 4]])}
    params, state = optzoo.replicas.replicate(x, tx.init(x), 2)
    step = jax.jit(optzoo.replicas.map_over_replicas(lambda p, s, g: tx.update(g, s, p)))
    for k in range(2):
        updates, state = step(params, state, grads)
        np.testing.assert_allclose(updates["w"], -grads["w"] / (1 + k), rtol=1e-6)
    _, state = optzoo.replicas.resize_replicas(tx, params, state, 3)
    assert state[1].count.tolist() == [2, 2, 2]


@pytest.mark.parametrize("method", ["sync_replicas", "model_average"])
def test_replicas_are_put_on_the_devices_of_a_mesh(method):
    tx, mesh = make(method), cases.mesh(2)
    replicas = optzoo.replicas.replicate(START, tx.init(START), 2, mesh=mesh)
    of = {"replicated": PartitionSpec(), "per replica": PartitionSpec("replica")}
    for params, state in (replicas, optzoo.replicas.resize_replicas(tx, *replicas, 4, mesh=mesh)):
        marks = optzoo.replicas.replica_specs(params, state, "replicated", "per replica")
        is_there = lambda mark, tree: all(
            a.sharding.is_equivalent_to(NamedSharding(mesh, of[mark]), a.ndim)
            for a in jax.tree.leaves(tree)
        )
        assert jax.tree.all(jax.tree.map(is_there, marks, (params, state)))


# Parameters without gradients, and in 16 bits


@pytest.mark.parametrize("method", cases.METHODS)
def test_a_parameter_without_a_gradient_stays(method):
    tx = make(method)

    def step(x, state, to):
        updates, state = tx.update({"w": x["w"] - to, "b": None}, state, x)
        return {k: a if updates[k] is None else a + updates[k] for k, a in x.items()}, state

    (x, state), train = start(tx), jax.jit(optzoo.replicas.map_over_replicas(step))
    for _ in range(4):
        x, state = train(x, state, CENTERS)
    center = getattr(state.replicated, "center", START)
    chex.assert_trees_all_equal(center["b"], START["b"])
    for b in np.reshape(x["b"], (-1, *np.shape(START["b"]))):
        np.testing.assert_array_equal(b, START["b"])
    assert not np.allclose(x["w"], START["w"])


# Not with rho, which pulls what has a gradient alone.
@pytest.mark.parametrize("method", [name for name in cases.METHODS if name != "elastic_average"])
def test_tasks_in_turn(method):
    """For an optimizer without slots a gradient of None is one of zeros, in an exchange too."""
    zero = jnp.zeros(2)

    def trained(missing):
        tx = cases.make(method, optzoo.gradient_descent(0.1))
        other = lambda g: None if missing is None else jnp.zeros_like(g)

        def step(x, state, to, turn):
            grads = {k: x[k] - to if k == turn else other(x[k]) for k in x}
            updates, state = tx.update(grads, state, x)
            return {k: a if updates[k] is None else a + updates[k] for k, a in x.items()}, state

        params = {"a": zero, "b": zero}
        x, state = optzoo.replicas.replicate(params, tx.init(params), len(CENTERS))
        train = {
            turn: jax.jit(optzoo.replicas.map_over_replicas(functools.partial(step, turn=turn)))
            for turn in "ab"
        }
        tos = jnp.arange(2.0 * len(CENTERS)).reshape(len(CENTERS), 2)
        for turn in "abababbbaa":
            x, state = train[turn](x, state, tos)
        return x

    got, want = trained(None), trained(0)
    chex.assert_trees_all_close(got, want, rtol=1e-6)
    assert np.all(np.abs(np.reshape(jax.tree.leaves(got), (2, -1))).sum(1) > 0)


def test_a_frozen_parameter_is_not_decayed_in_a_center():
    """The optimizer of the center of agn gets a sum for each parameter."""
    decay = optzoo.decoupled_weight_decay(momentum(), weight_decay_per_step=0.1)
    tx = optzoo.agn(decay, axis_name=None, communication_period=2)
    x = {"a": jnp.ones(2), "frozen": jnp.ones(2), "later": jnp.ones(2)}
    state = tx.init(x)
    for k in range(8):
        grads = {"a": jnp.ones(2), "frozen": None, "later": jnp.ones(2) if k == 4 else None}
        updates, state = tx.update(grads, state, x)
        x = {name: a if updates[name] is None else a + updates[name] for name, a in x.items()}
    np.testing.assert_array_equal(x["frozen"], 1)
    # Of one push the mean is 0.5, and the decay a tenth.
    momentum_of = optzoo.get_slot(state.replicated.method.center_inner, "momentum")
    np.testing.assert_array_equal(momentum_of["frozen"], 0)
    np.testing.assert_allclose(momentum_of["later"], 0.5)


@pytest.mark.parametrize("inner", [momentum(), optax.sgd(0.1, 0.9)], ids=["ours", "optax"])
def test_a_reset_without_a_gradient(inner):
    """Our optimizers keep the slot of such a parameter, those of optax have None then."""
    tx = optzoo.model_average(inner, axis_name=None, interval_steps=2, slots="reset")
    x, state = START, tx.init(START)
    for grads in (START, {**START, "b": None}):
        _, state = tx.update(grads, state, x)
    slots = [a for a in jax.tree.leaves(state.per_replica.inner) if a.ndim]
    assert slots and not any(np.any(a) for a in slots)
    _, after = tx.update({**START, "b": None}, state, x)
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)


def test_a_center_of_parameters_in_16_bits_moves():
    small = jax.tree.map(lambda a: a.astype(jnp.bfloat16), START)
    tx = optzoo.elastic_average(
        optzoo.gradient_descent(0.5), N, communication_period=1, moving_rate=1e-3
    )
    grads = lambda x, to: jax.tree.map(lambda a: a - to.astype(a.dtype), x)
    step = lambda x, state, to: samples.step(tx, grads(x, to), x, state)
    x, state = optzoo.replicas.replicate(small, tx.init(small), N)
    train = jax.jit(optzoo.replicas.map_over_replicas(step))
    for _ in range(3):
        x, state = train(x, state, CENTERS)
    assert x["b"].dtype == jnp.bfloat16 and state.replicated.center["b"].dtype == jnp.float32
    assert 0 < jnp.max(jnp.abs(state.replicated.center["w"])) < 1e-2


# Replicas as such


def test_everyone_starts_from_the_first():
    trees = {
        "a": jnp.full(N, 1.5, jnp.float32).at[1].set(jnp.nan),
        "b": jnp.arange(N) < 2,
        "n": jnp.arange(N),
    }
    got = jax.vmap(optzoo.replicas.broadcast, axis_name="replica")(trees)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, [b[0]] * N), got, trees)
    assert samples.avals(got) == samples.avals(trees)


@pytest.mark.parametrize("method", ["elastic_average", "agn", "model_average", "diloco"])
def test_swap_is_an_involution(method):
    x, state = five_ticks(method)
    x = jax.tree.map(lambda a: a[-1], x)
    center, swapped = optzoo.state.swap_averages(x, state)
    chex.assert_trees_all_equal(center, state.replicated.center)
    chex.assert_trees_all_equal(optzoo.eval_params(x, state), center)
    chex.assert_trees_all_equal(optzoo.state.swap_averages(center, swapped), (x, state))
