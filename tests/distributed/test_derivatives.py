"""Derivatives of training with exchanges, against difference quotients in double precision."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo.testing import samples

from ..selection import chosen_first
from . import cases

METHODS = {
    "elastic_average": lambda inner, n, axis: optzoo.elastic_average(
        inner, n, communication_period=2, rho=0.1, axis_name=axis
    ),
    "elastic_average, round robin": lambda inner, n, axis: optzoo.elastic_average(
        inner, n, communication_period=2, order="round_robin", axis_name=axis
    ),
    "agn": lambda inner, n, axis: optzoo.agn(inner, communication_period=2, axis_name=axis),
    "model_average": lambda inner, n, axis: optzoo.model_average(
        inner, interval_steps=2, slots="average", axis_name=axis
    ),
    "diloco": lambda inner, n, axis: optzoo.diloco(inner, communication_period=2, axis_name=axis),
}
WAYS = ["alone", "vmap", "shard_map"]
CASES = [f"{method}-{way}" for method in METHODS for way in WAYS]
QUICK = [
    case
    for case in CASES
    if case in ("elastic_average, round robin-vmap", "diloco-shard_map")
    or (case.endswith("-alone") and "robin" not in case)
]
in_every_way = pytest.mark.parametrize("case", chosen_first(CASES, QUICK))
TICKS, STEP = 2, 1e-5


def trained(method, way, exchanges, x, rate):
    """A number that depends on all parameters and centers after some ticks."""
    n, axis = (1, None) if way == "alone" else (cases.REPLICAS, "replica")
    tx = METHODS[method](optzoo.momentum(rate, 0.9), n, axis)

    def step(params, state, target, exchange):
        # Not by jax.grad, so that the derivative of the training is the only one.
        grads = jax.tree.map(
            lambda a: a - jnp.sin(a) * target, optzoo.replicas.per_replica(params, axis)
        )
        return samples.step(tx, grads, params, state, exchange=exchange)

    targets = jnp.asarray(np.random.default_rng(1).normal(size=(TICKS, n)))
    params, state = x, tx.init(x)
    if way == "alone":
        targets = targets[:, 0]
    else:
        params, state = optzoo.replicas.replicate(x, state, n)
    for target, exchange in zip(targets, exchanges, strict=True):
        tick = functools.partial(step, exchange=exchange)
        if way != "alone":
            # No argument of the program is on explicit axes, which JAX 0.10 would need.
            mesh = None if way == "vmap" else cases.mesh(kind="Auto")
            tick = optzoo.replicas.map_over_replicas(tick, mesh=mesh)
        params, state = tick(params, state, target)
    weighted = lambda a: jnp.sum(jnp.cos(a) * jnp.arange(1.0, a.size + 1).reshape(a.shape))
    return sum(map(weighted, jax.tree.leaves((params, optzoo.eval_params(params, state)))))


def point():
    """Parameters and a learning rate; and a direction from there."""
    x, along = {"a": np.array([0.3, -0.7])}, {"a": np.array([0.4, 0.2])}
    return (x, np.array(0.1)), (along, np.array(0.7))


def quotient(f, at, along):
    ahead, behind = (jax.tree.map(lambda a, d, s=s: a + s * d, at, along) for s in (STEP, -STEP))
    return (f(*ahead) - f(*behind)) / (2 * STEP)


@in_every_way
def test_forward_mode_goes_through_exchanges_and_reverse_mode_is_refused(case, x64):
    method, way = case.rsplit("-", 1)
    with x64(True):
        f = jax.jit(functools.partial(trained, method, way, [None] * TICKS))
        at, along = point()
        derivative = jax.jvp(f, at, along)[1]
        np.testing.assert_allclose(derivative, quotient(f, at, along), rtol=1e-8)
        with pytest.raises(TypeError, match="Pass exchange=True or exchange=False to update"):
            jax.grad(f)(*at)


@in_every_way
def test_both_modes_go_through_exchanges_at_known_steps(case, x64):
    method, way = case.rsplit("-", 1)
    with x64(True):
        f = jax.jit(functools.partial(trained, method, way, [False, True]))
        at, along = point()
        gradient = jax.grad(f, (0, 1))(*at)
        want = quotient(f, at, along)
        np.testing.assert_allclose(optax.tree.vdot(gradient, along), want, rtol=1e-8)
        np.testing.assert_allclose(jax.jvp(f, at, along)[1], want, rtol=1e-8)
