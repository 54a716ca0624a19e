"""Arguments and states of an inner optimizer that makes one update for all replicas."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo

from . import cases

N = cases.REPLICAS
LOSSES = np.arange(1, N + 1, dtype=np.float32) ** 2
X = np.zeros(2, np.float32)
GRADS = np.ones((N, 2), np.float32)
DRIVES = {
    "vmap": {},
    "shard_map": {"mesh": cases.mesh(N)},
    "unchecked": {"mesh": cases.mesh(N), "check_vma": False},
}


def keeps_values():
    """SGD whose state has, in base 1000, the values of all its updates."""

    def update(updates, state, params=None, *, value, **extra_args):
        return jax.tree.map(jnp.negative, updates), state * 1000 + jnp.asarray(value, jnp.float32)

    init = lambda params: jnp.zeros([], jnp.float32)
    return optax.GradientTransformationExtraArgs(init, update)


METHODS = {
    "sync_replicas": (
        functools.partial(optzoo.sync_replicas, replicas_to_aggregate=2, total_num_replicas=N),
        "arrived",
        lambda state: state.replicated.inner,
    ),
    "drop_stale_gradient": (
        functools.partial(optzoo.drop_stale_gradient, staleness=N),
        "active",
        lambda state: state.replicated.inner,
    ),
    "agn": (
        functools.partial(optzoo.agn, communication_period=1),
        "active",
        lambda state: state.replicated.method.center_inner,
    ),
}


def run(tx, drive, **by_replica):
    """The state after one step with arguments for each replica."""
    mapped = DRIVES[drive]

    def step(x, state, g, given):
        updates, state = tx.update(g, state, x, **given)
        return optax.apply_updates(x, updates), state

    on = {"mesh": mapped["mesh"]} if "mesh" in mapped else {}
    start = optzoo.replicas.replicate(X, tx.init(X), N, **on)
    step = jax.jit(optzoo.replicas.map_over_replicas(step, **mapped))
    return step(*start, GRADS, by_replica)


@pytest.mark.parametrize("drive", DRIVES)
@pytest.mark.parametrize("name", METHODS)
def test_the_loss_is_the_mean_over_the_replicas_of_an_update(name, drive):
    """Each device of an unchecked shard_map would else compute an update of its own."""
    method, argument, found = METHODS[name]
    takes_part = np.arange(N) % 2 == 1
    losses = np.where(takes_part, LOSSES, np.nan)
    _, state = run(method(keeps_values()), drive, value=losses, **{argument: takes_part})
    first, second = LOSSES[takes_part]
    want = {
        "sync_replicas": (first + second) / 2,
        "drop_stale_gradient": first * 1000 + second,  # an update for each
        "agn": first * 1000 + (first + second) / 2,  # after the local step of the first
    }[name]
    np.testing.assert_allclose(found(state), want, rtol=1e-6)


@pytest.mark.parametrize("drive", DRIVES)
@pytest.mark.parametrize("name", METHODS)
def test_replicas_decide_together(name, drive):
    """The mean loss is not finite, so no replica moves; there is no axis_name for skip_spikes."""
    method, *_ = METHODS[name]
    tx = method(optzoo.skip_spikes(optzoo.gradient_descent(1.0), on="loss"))
    x, _ = run(tx, drive, value=np.full(N, np.inf, np.float32))
    np.testing.assert_array_equal(x, np.zeros_like(x))
    x, _ = run(tx, drive, value=LOSSES)
    assert np.all(np.asarray(x) < 0)


@pytest.mark.parametrize("drive", ["vmap", "shard_map"])
@pytest.mark.parametrize("name", METHODS)
def test_other_arguments_must_be_equal_on_all_replicas(name, drive):
    """If inner reads them; an argument of another method may differ."""

    def scaled(updates, state, params=None, *, value=None, size=1, **extra_args):
        return jax.tree.map(lambda g: -g * size, updates), state

    method, *_ = METHODS[name]
    tx = method(optax.GradientTransformationExtraArgs(lambda params: (), scaled))
    with pytest.raises(
        ValueError, match=r"replicas share differ between them: '.*by jax.lax.pmean"
    ):
        run(tx, drive, size=LOSSES)
    x, _ = run(tx, drive, another=LOSSES)
    assert np.all(np.asarray(x) < 0)


@pytest.mark.parametrize("drive", ["vmap", "shard_map"])
@pytest.mark.parametrize("name", METHODS)
def test_a_wrapper_that_decides_for_each_replica_belongs_inside(name, drive):
    method, *_ = METHODS[name]
    outside = optax.apply_if_finite(method(optzoo.gradient_descent(1.0)), 3)
    names = "'state/inner_state/replicated/count', " if name == "agn" else "'params'"
    if name == "agn" and drive == "shard_map":  # where the branches of a conditional give the types
        run(outside, drive)
    else:
        with pytest.raises(ValueError, match=f"replicas share differ between them: {names}"):
            run(outside, drive)
    run(method(optax.apply_if_finite(optzoo.gradient_descent(1.0), 3)), drive)


@pytest.mark.parametrize("drive", ["vmap", "shard_map"])
def test_a_group_without_the_method_differs(drive):
    sgd = optzoo.gradient_descent(1.0)
    tx = optzoo.param_groups({"a": optzoo.sync_replicas(sgd), "b": sgd})
    params, grads = {"a": X, "b": X}, {"a": GRADS, "b": GRADS}
    step = lambda x, state, g: tx.update(g, state, x)
    mapped = DRIVES[drive]
    on = {"mesh": mapped["mesh"]} if "mesh" in mapped else {}
    start = optzoo.replicas.replicate(params, tx.init(params), N, **on)
    with pytest.raises(ValueError, match=r"share differ between them: 'params/b'\. What"):
        jax.jit(optzoo.replicas.map_over_replicas(step, **mapped))(*start, grads)


def test_an_error_of_the_step_itself_stays():
    def step(x, state, g):
        raise ValueError("the step's own")

    tx = optzoo.sync_replicas(optzoo.gradient_descent(1.0))
    for mapped in DRIVES.values():
        on = {"mesh": mapped["mesh"]} if "mesh" in mapped else {}
        start = optzoo.replicas.replicate(X, tx.init(X), N, **on)
        with pytest.raises(ValueError, match=r"^the step's own$"):
            optzoo.replicas.map_over_replicas(step, **mapped)(*start, GRADS)


# Random keys


@pytest.mark.parametrize("drive", DRIVES)
def test_random_keys_of_the_first_pusher_are_used(drive):
    """That is after its local step, which has used the first key."""
    noisy = optax.chain(optax.add_noise(1.0, 0.0, jax.random.key(7)), optax.sgd(1.0))
    x, state = run(optzoo.agn(noisy, communication_period=1), drive)
    _, local = noisy.update(GRADS[0], noisy.init(X), X)
    want, _ = noisy.update(GRADS[0], local, X)
    np.testing.assert_allclose(x, np.broadcast_to(want, (N, 2)), rtol=1e-6)
    keys = state.per_replica.inner[0].rng_key
    assert jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) and keys.shape == (N,)


def test_keys_and_bools_are_broadcast():
    keys, bools = jax.random.split(jax.random.key(0), N), np.arange(N) == 0
    copied = jax.vmap(optzoo.replicas.broadcast, axis_name="replica")({"k": keys, "b": bools})
    words = jax.random.key_data
    np.testing.assert_array_equal(words(copied["k"]), np.tile(words(keys[0]), (N, 1)))
    assert copied["b"].dtype == bool and copied["b"].all()
