"""Slow weights in the memory of the host: only an exchange moves them."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import optzoo

from .facts.cases import of

WIDTH, DEVICE = 512, "v5e:2x2"
NBYTES = 4 * WIDTH * WIDTH


@functools.cache
def report(placement, exchange=None):
    """Of a step of one replica."""
    tx = optzoo.diloco(optzoo.adam(1e-3), axis_name=None, placement=placement)

    def step(params, state, x):
        grads = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(params)
        updates, state = tx.update(grads, state, params, exchange=exchange)
        return optax.apply_updates(params, updates), state

    w = of(WIDTH, WIDTH)
    state, mesh = jax.eval_shape(tx.init, w), Mesh(np.array(jax.devices()[:1]), ("device",))
    if placement is not None:
        there = NamedSharding(mesh, PartitionSpec(), memory_kind=placement)
        put = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=there) if a.ndim else a
        of_all = state.replicated
        of_all = of_all._replace(center=put(of_all.center), method=jax.tree.map(put, of_all.method))
        state = state._replace(replicated=of_all)
    return optzoo.compile_report(
        jax.jit(step, donate_argnums=(0, 1)), w, state, of(32, WIDTH), device=DEVICE
    )


@pytest.mark.parametrize("exchange", [None, False, True])
def test_slow_weights_take_no_memory_of_the_device(exchange):
    usual, on_host = report(None, exchange), report("pinned_host", exchange)
    saved = usual.arguments - on_host.arguments
    assert saved == pytest.approx(2 * NBYTES, rel=0.01)  # the center, and the momentum outside
    assert on_host.not_reused == {}


@pytest.mark.parametrize(("exchange", "moved"), [(None, 4), (False, 0)])
def test_only_an_exchange_moves_them(exchange, moved):
    """There and back, in the loop of the exchange, which has a turn or none."""
    text = report("pinned_host", exchange).text
    entry = text[text.index("\nENTRY") :]
    moves = lambda text: len(re.findall(r"S\(5\)[^=]*\) copy-start\(", text))
    assert moves(entry) == 0 and moves(text) == moved
