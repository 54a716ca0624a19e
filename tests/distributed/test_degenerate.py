"""Nobody, one and all: of replicas that take part, of finite gradients, and of weights.

Three replicas make one step of gradient descent with weight decay, which is no step of zero where
the gradient is 0; an exchange follows. Where each has its own parameters, they start from several
numbers, and the center from 1. Expected values are those of the definitions, in NumPy.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo.distributed.engine.collectives import Replicas

GRADS = np.array([1.0, 2.0, 4.0])
RATE, KEPT, START = 0.5, 0.875, 1.0
STARTS = np.array([1.0, 3.0, -2.0])
LOCAL = KEPT * STARTS - RATE * GRADS  # after a local step
NOBODY, ONE, ALL = np.zeros(3, bool), np.array([False, True, False]), np.ones(3, bool)
PRESENT = {"nobody": NOBODY, "one": ONE, "all": ALL}
PLAIN = optax.sgd(1.0)  # the center moves to the mean


def averaged(present, stay):
    """Parameters, and the center: what is not averaged stays."""
    mean = LOCAL[present].mean() if present.any() else START
    return np.full(3, mean) if present.any() else stay, mean


def elastic(present, broken):
    d = np.where(present, 0.25 * (LOCAL - START), 0)
    center = START + d.sum()
    rest = center if broken else STARTS
    return np.where(present, LOCAL - d, rest), center


def agn(present, broken):
    center = KEPT * START - RATE * GRADS[present].mean() if present.any() else START
    return np.where(present | broken, center, STARTS), center


def stepped(grads):
    x = functools.reduce(lambda x, g: KEPT * x - RATE * g, grads, START)
    return np.full(3, x), x


def descent():
    tx = optzoo.gradient_descent(RATE)
    return optzoo.decoupled_weight_decay(tx, weight_decay_per_step=1 - KEPT)


# Each: the optimizer; the argument that says who takes part; the result, given who does, and
# whether the others have broken gradients.
METHODS = {
    "model_average": (
        lambda **skip: optzoo.model_average(descent(), interval_steps=1, **skip),
        "arrived",
        lambda present, broken: averaged(present, np.ones(3) if broken else LOCAL),
    ),
    "diloco": (
        lambda **options: optzoo.diloco(descent(), communication_period=1, outer=PLAIN, **options),
        "arrived",
        lambda present, broken: averaged(present, np.ones(3) if broken else LOCAL),
    ),
    "elastic_average": (
        lambda **skip: optzoo.elastic_average(
            descent(), communication_period=1, moving_rate=0.25, **skip
        ),
        "active",
        elastic,
    ),
    "agn": (lambda **skip: optzoo.agn(descent(), communication_period=1, **skip), "active", agn),
    "sync_replicas of one": (
        lambda **skip: optzoo.sync_replicas(descent(), 1, 3, **skip),
        "arrived",
        lambda present, broken: stepped(GRADS[present][:1]),
    ),
    "sync_replicas of all": (
        lambda **skip: optzoo.sync_replicas(descent(), 3, **skip),
        "arrived",
        lambda present, broken: stepped([GRADS.mean()] if present.all() else []),
    ),
    "drop_stale_gradient, fresh": (
        lambda: optzoo.drop_stale_gradient(descent(), 0),
        "active",
        lambda present, broken: stepped(GRADS[present][:1]),
    ),
    "drop_stale_gradient": (
        lambda: optzoo.drop_stale_gradient(descent(), 9),
        "active",
        lambda present, broken: stepped(GRADS[present]),
    ),
}


# One object for each, so that its compiled step is used again.
@functools.cache
def made(method, **options):
    return METHODS[method][0](**options)


@functools.cache
def step_of(tx):
    def step(params, state, grads, options):
        updates, state = tx.update(grads, state, params, **options)
        return optax.apply_updates(params, updates), state

    return jax.jit(optzoo.replicas.map_over_replicas(step))


def one_step(tx, grads=GRADS, **options):
    """The parameters of each replica, those to evaluate, and the state."""
    x = np.ones(2, np.float32)
    params, state = optzoo.replicas.replicate(x, tx.init(x), 3)
    if params.ndim > 1:
        params = np.float32(STARTS)[:, None] * x
    grads = np.float32(grads)[:, None] * np.ones(2, np.float32)
    params, state = step_of(tx)(params, state, grads, options)
    evaluated = jax.tree.map(np.asarray, optzoo.eval_params(params, state))
    whole = lambda a: np.broadcast_to(a, (3, 2))  # replicas may share one copy
    return whole(np.asarray(params)), whole(evaluated), state


def check(tx, want, **options):
    params, center, state = one_step(tx, **options)
    of_each, of_all = want
    np.testing.assert_allclose(params, np.broadcast_to(of_each, (2, 3)).T, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(center, np.full((3, 2), of_all), rtol=1e-6, atol=1e-7)
    return state


@pytest.mark.parametrize("present", PRESENT)
@pytest.mark.parametrize("method", METHODS)
def test_replicas_that_take_part(method, present):
    _, name, want = METHODS[method]
    check(made(method), want(PRESENT[present], False), **{name: PRESENT[present]})


@pytest.mark.every_value
@pytest.mark.parametrize("method", [optzoo.agn, optzoo.elastic_average])
def test_replicas_in_turn(method):
    """Each exchanges with the center that those before it have left."""
    options, centers, params = {}, [START], []
    for x, g in zip(LOCAL, GRADS, strict=True):
        center = centers[-1]
        if method is optzoo.agn:
            centers.append(KEPT * center - RATE * g)
            params.append(centers[-1])
        else:
            options = {"moving_rate": 0.25}
            centers.append(center + 0.25 * (x - center))
            params.append(x - 0.25 * (x - center))
    tx = method(descent(), communication_period=1, order="round_robin", **options)
    check(tx, (params, centers[-1]), active=ALL)


@pytest.mark.unique
def test_gradients_beyond_the_number_to_aggregate():
    """One in the accumulator and the first of three complete two; so do the first two of three."""
    two = optzoo.sync_replicas(descent(), 2, 3)
    check(two, stepped([GRADS[:2].mean()]))
    state = check(two, stepped([]), arrived=ONE)
    assert (state.replicated.count, state.replicated.dropped) == (1, 0)
    grads = np.float32(GRADS)[:, None] * np.ones(2, np.float32)
    params, state = step_of(two)(np.full(2, START, np.float32), state, grads, {"arrived": ALL})
    np.testing.assert_allclose(params, stepped([GRADS[[1, 0]].mean()])[1], rtol=1e-6)
    assert (state.replicated.count, state.replicated.dropped) == (0, 2)


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
@pytest.mark.parametrize("present", PRESENT)
@pytest.mark.parametrize("method", [m for m in METHODS if "stale" not in m])
def test_gradients_that_are_finite(method, present, bad):
    want = METHODS[method][2]
    grads = np.where(PRESENT[present], GRADS, bad)
    check(made(method, skip_nonfinite=True), want(PRESENT[present], True), grads=grads)


WEIGHTS = {
    "none": [0, 0, 0],
    "of one": [0, 2, 0],
    "of one, small": [0, 0, 1e-20],
    "equal": [3, 3, 3],
    "of two": [1, 0, 3],
}


@pytest.mark.parametrize("bad", [None, np.nan, np.inf])  # the gradients of those without weight
@pytest.mark.parametrize("options", [{}, {"exchange_dtype": "bfloat16", "error_feedback": True}])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_weights_of_diloco(weights, options, bad):
    weight, want = np.array(WEIGHTS[weights]), (LOCAL, START)
    if weight.any():
        # Each part of the mean, and their sum, is rounded to what is sent.
        rounded = lambda a: np.float64(np.asarray(a, jnp.bfloat16)) if options else a
        change = rounded(np.sum(rounded(weight / weight.sum() * (START - LOCAL))))
        want = (START - change, START - change)
    tx = made("diloco", **options)
    grads = GRADS if bad is None or not weight.any() else np.where(weight == 0, bad, GRADS)
    state = check(tx, want, grads=grads, weight=np.float32(weight))
    assert state.replicated.global_step.max() == weight.any()


def test_a_mean_of_no_weight_is_never_kept():
    """An exchange that has begun is in the state until it ends."""
    options = {"outer": PLAIN, "communication_period": 2, "overlap_steps": 1}
    tx = optzoo.diloco(descent(), **options)
    state = check(tx, (LOCAL, START), weight=np.zeros(3, np.float32))
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(state))


@pytest.mark.parametrize("weight", [[1, 1, 1], [0, 1, 0]])
@pytest.mark.parametrize(("least", "present", "moves"), [
    (1, "nobody", False), (1, "one", True), (2, "one", False), (3, "one", False), (3, "all", True),
])  # fmt: skip
def test_min_arrived(least, present, moves, weight):
    """It counts replicas, whatever their weights are."""
    tx = made("diloco", min_arrived=least)
    arrived = PRESENT[present]
    mean = np.average(LOCAL, weights=arrived * weight) if moves else START
    want = (np.full(3, mean) if moves else LOCAL, mean)
    check(tx, want, arrived=arrived, weight=np.float32(weight))


@functools.cache
def in_few_bits(few):
    options = {"exchange_dtype": few, "bucket_bytes": None}
    return optzoo.diloco(
        optzoo.gradient_descent(RATE), outer=PLAIN, communication_period=1, **options
    )


@pytest.mark.parametrize("few", [None, "bfloat16", "int8", "int4", "int2"])
@pytest.mark.parametrize("sizes", [(0,), (0, 3), (511, 1, 0), (512, 513), (3 * 512, 3 * 512 + 1)])
def test_sizes_of_what_is_sent(sizes, few):
    """Around the blocks of 512 elements; each array by itself, and an array without any."""
    tx = in_few_bits(few)
    x = [np.ones(n, np.float32) for n in sizes]
    params, state = optzoo.replicas.replicate(x, tx.init(x), 3)
    signs = np.where(np.arange(max(sizes)) % 2, 1, -1)
    grads = [np.float32(GRADS[:, None] * signs[:n]) for n in sizes]
    params, _ = step_of(tx)(params, state, grads, {})
    change = RATE * GRADS.mean() * signs  # of one size, which is a code
    atol = {"int2": 3.0, None: 1e-6}.get(few, 0.02)
    for n, found in zip(sizes, params, strict=True):
        np.testing.assert_allclose(found, np.tile(1 - change[:n], (3, 1)), atol=atol)


@pytest.mark.parametrize("number", [0, 1, 127, 128, 129, 257])
@pytest.mark.parametrize("over", [0, 1, 2])
def test_buckets(number, over):
    """Leaves up to the size are sent together, 128 of them at most; a greater one is alone."""
    replicas = Replicas("replica", bucket_bytes=4 * 8)
    leaves = [np.full(8, i, np.float32) for i in range(number)]
    leaves += [np.full(9, -i, np.float32) for i in range(over)]
    buckets = replicas.buckets(leaves)
    assert sorted(itertools.chain(*buckets)) == list(range(number + over))
    sizes = sorted(map(len, buckets), reverse=True)
    assert sizes == [128] * (number // 128) + [number % 128] * (number % 128 > 0) + [1] * over
    assert all(leaves[i].size == 8 for bucket in buckets if len(bucket) > 1 for i in bucket)
