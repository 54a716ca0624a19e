"""None in the place of a parameter, as ``equinox.filter(model, eqx.is_array)`` gives it."""

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import optzoo

from .selection import chosen_first
from .test_boxes import BOXES, IN_PARTS, boxed, program
from .test_meshes import ALL

OPTIMIZERS = ALL | IN_PARTS


def alone(tx):
    return tx


def in_groups(tx):
    """Each group has one of the two None, and sees none of the other one."""
    groups = {"table|activation": tx, "bias|layers/.*": optzoo.momentum(0.1, 0.9)}
    return optzoo.param_groups(groups | {".*": optzoo.adam(0.1)})


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("group", [alone, in_groups])
@pytest.mark.parametrize("name", chosen_first(ALL, ["caught_up"]))
def test_none_among_the_parameters(name, group, native):
    """All is as without it."""
    tx = group(ALL[name])
    x = {"table": jnp.cos(jnp.arange(32.0)).reshape(8, 4), "bias": jnp.ones(4)}

    def loss(params, ids):
        return jnp.mean((params["table"][ids] + (params["bias"] * params["scale"])[None]) ** 2)

    def train(params):
        state = tx.init(params)
        grads = jax.grad(loss)(params, jnp.array([1, 2]))
        updates, state = jax.jit(tx.update)(grads, state, params)
        params = optax.apply_updates(params, updates)
        step = optzoo.minimize(loss, tx, native=native, sparse="allow", min_rows=1)
        for _ in range(2):
            params, state, value = step(params, state, jnp.array([5, 2]))
        return params, value

    x["scale"] = jnp.ones(4)
    got, value = train(x | {"activation": None, "layers": [None, {}]})
    want, expected = train(x)
    assert got.pop("activation") is None and got.pop("layers") == [None, {}]
    chex.assert_trees_all_close((got, value), (want, expected), rtol=1e-6)


def lowered(f, tree):
    leaves, treedef = jax.tree.flatten(tree)
    f_of_leaves = lambda *xs: jax.tree.leaves(f(treedef.unflatten(xs)))
    return jax.jit(f_of_leaves).lower(*leaves).as_text()


@pytest.mark.parametrize("kind", BOXES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_none_in_a_box(name, kind):
    """As Equinox' filters leave a frozen parameter. The programs are those without it."""
    tx, params = OPTIMIZERS[name], boxed(BOXES[kind][0])
    frozen = params | {"bias": jax.tree.map(lambda _: None, params["bias"])}
    others = {k: params[k] for k in ("table", "kernel")}
    run = lambda params: tx.update(params, tx.init(params), params)
    updates, state = jax.eval_shape(run, frozen)
    chex.assert_trees_all_equal_structs((updates, state), (frozen, tx.init(frozen)))
    chex.assert_trees_all_equal_shapes(*map(jax.tree.leaves, (state, tx.init(others))))
    # Lowered, a program is without the random bits that nothing reads.
    text = lowered if "random" in name else program
    assert text(run, frozen) == text(run, others)
