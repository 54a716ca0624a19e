"""None in the place of a parameter, as ``equinox.filter(model, eqx.is_array)`` gives it."""

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import optzoo

from .test_meshes import ALL


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_none_among_the_parameters(name, native):
    """All is as without it."""
    tx = ALL[name]
    x = {"table": jnp.cos(jnp.arange(32.0)).reshape(8, 4), "bias": jnp.ones(4)}

    def loss(params, batch):
        return jnp.mean((batch @ params["table"] + params["bias"][None]) ** 2)

    def train(params):
        state = tx.init(params)
        grads = jax.grad(loss)(params, jnp.ones((2, 8)))
        updates, state = jax.jit(tx.update)(grads, state, params)
        params = optax.apply_updates(params, updates)
        step = optzoo.minimize(loss, tx, native=native)
        for _ in range(2):
            params, state, value = step(params, state, jnp.ones((2, 8)))
        return params, value

    got, value = train(x | {"activation": None, "layers": [None, {}]})
    want, expected = train(x)
    assert got.pop("activation") is None and got.pop("layers") == [None, {}]
    chex.assert_trees_all_close((got, value), (want, expected), rtol=1e-6)
