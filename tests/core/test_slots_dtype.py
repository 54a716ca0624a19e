"""Slots in another dtype than the parameters, for every optimizer."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo import LeafwiseState, SparseRows, slots_dtype
from optzoo.testing import samples
from optzoo.testing.samples import avals, dense_grads, params, row_grads, step


def cast(tree, dtype):
    floating = lambda a: jnp.issubdtype(a.dtype, jnp.floating)
    return jax.tree.map(lambda a: a.astype(dtype) if floating(a) else a, tree)


def dtypes(tree):
    return {a.dtype for a in jax.tree.leaves(tree)}


def merged(grads):
    return {**grads, "table": grads["table"].coalesce()}


ROWS = merged(row_grads(params()))


@pytest.mark.parametrize(
    ("of_params", "of_slots"), [("float32", "bfloat16"), ("bfloat16", "float32")]
)
def test_slots_keep_their_dtype(entry, of_params, of_slots):
    plain, x = entry.make(), cast(params(), of_params)
    tx = slots_dtype(plain, of_slots)
    state, usual = jax.eval_shape(tx.init, x), jax.eval_shape(plain.init, x)
    assert dtypes(samples.slots(state)) <= {jnp.dtype(of_slots)}
    # All but the slots is as it was.
    assert jax.tree.structure(state) == jax.tree.structure(usual)
    for ours, theirs in zip(links(state), links(usual), strict=True):
        chex.assert_trees_all_equal(avals((ours.count, ours.shared)), avals(theirs[::2]))
    for grads in (dense_grads(x), cast(row_grads(x), of_params)):
        updates, after = jax.eval_shape(tx.update, grads, state, x)
        assert avals(after) == avals(state)
        assert dtypes(updates) - {jnp.dtype("int32")} == {jnp.dtype(of_params)}


def links(state):
    is_link = lambda s: isinstance(s, LeafwiseState)
    return [s for s in jax.tree.leaves(state, is_leaf=is_link) if is_link(s)]


def test_half_precision_parameters_train_with_the_slots_of_single_precision(entry):
    """Step by step what the same numbers give in float32; only the update is rounded."""
    tx, wide = slots_dtype(entry.make(), "float32"), entry.make()
    x = cast(params(), "bfloat16")
    state, wide_state = tx.init(x), wide.init(cast(x, "float32"))
    # LARS has a link, and so a rounding, in front of its slots.
    rtol = 1e-2 if entry.factory is optzoo.lars else 1e-6
    for grads in (dense_grads(x), cast(ROWS, "bfloat16"), dense_grads(x)):
        if isinstance(grads["table"], SparseRows):
            grads["table"] = grads["table"].coalesce()
        wide_grads = {**cast(grads, "float32"), "table": grads["table"].astype("float32")}
        updates, state = tx.update(grads, state, x)
        wanted, wide_state = wide.update(wide_grads, wide_state, cast(x, "float32"))
        chex.assert_trees_all_close(
            samples.slots(state), samples.slots(wide_state), rtol=rtol, atol=1e-7
        )
        chex.assert_trees_all_close(dense(updates), dense(wanted), rtol=2e-2, atol=1e-5)
        x = optax.apply_updates(x, updates)


def dense(updates):
    table = updates["table"]
    table = table.to_dense() if isinstance(table, SparseRows) else table
    return cast({**updates, "table": table}, "float32")


def test_slots_start_with_the_precision_they_keep():
    """In float16 this value would be zero, and the first step NaN."""
    tx, x = slots_dtype(optzoo.adagrad(1.0, 1e-10), "float32"), jnp.ones(3, jnp.float16)
    state = tx.init(x)
    np.testing.assert_array_equal(state[0].slots.accumulator, jnp.float32(1e-10))
    updates, _ = tx.update(jnp.zeros_like(x), state, x)
    np.testing.assert_array_equal(updates, 0)


@pytest.mark.parametrize("rows", [False, True], ids=["dense", "rows"])
def test_sums_do_not_stall(rows):
    """Squares of 1/1024 on a sum of 1: in bfloat16 it would stay at 1."""
    x, g = jnp.ones(3, jnp.bfloat16), jnp.full(3, 1 / 32, jnp.bfloat16)
    grads = SparseRows(jnp.arange(3), g, 3, coalesced=True) if rows else g
    for dtype, total in (("bfloat16", 1), ("float32", 2)):
        tx = slots_dtype(optzoo.adagrad(1.0, initial_accumulator_value=1.0), dtype)
        update = lambda state, _, tx=tx: (tx.update(grads, state, x)[1], None)
        state, _ = jax.lax.scan(update, tx.init(x), length=1024)
        np.testing.assert_array_equal(state[0].slots.accumulator, total)
        updates, _ = tx.update(grads, state, x)
        assert updates.dtype == jnp.bfloat16


def test_compiles_once_and_takes_donated_buffers():
    tx, x = slots_dtype(optzoo.lazy_adam(), "bfloat16"), params()
    train = jax.jit(functools.partial(step, tx), donate_argnums=(1, 2))
    state = tx.init(x)
    grads = row_grads(x)
    for _ in range(3):
        x, state = train(grads, x, state)
    assert train._cache_size() == 1 and dtypes(samples.slots(state)) == {jnp.dtype("bfloat16")}


LABELS = {"table": "a", "layer": ("b", "a")}
ADAM = lambda: optzoo.adam(0.1)
NESTED = {
    "chain": lambda: optax.chain(optax.clip(1.0), ADAM()),
    "masked": lambda: optax.masked(ADAM(), {"table": True, "layer": (False, True)}),
    "partition": lambda: optax.partition({"a": ADAM(), "b": optzoo.momentum(0.1, 0.9)}, LABELS),
    "multi_steps": lambda: optax.MultiSteps(ADAM(), 2).gradient_transformation(),
    "injected": lambda: optax.inject_hyperparams(optzoo.adam)(0.1),
    "moving_average": lambda: optzoo.moving_average(ADAM(), 0.9),
    "variable_clipping": lambda: optzoo.variable_clipping(ADAM(), {"table": (1,)}, 1.0),
    "decoupled_weight_decay": lambda: optzoo.decoupled_weight_decay(ADAM(), 0.1),
    "multitask": lambda: optzoo.multitask(ADAM()),
    "beside optax": lambda: optax.chain(optax.trace(0.9), ADAM()),
}


@pytest.mark.parametrize("nested", NESTED.values(), ids=list(NESTED))
def test_slots_are_found_anywhere(nested):
    tx, x = slots_dtype(nested(), "bfloat16"), params()
    state = tx.init(x)
    for link in links(state):
        if hasattr(link.slots, "v"):
            assert dtypes(link.slots) == {jnp.dtype("bfloat16")}
    assert avals(tx.update(dense_grads(x), state, x)[1]) == avals(state)
    assert avals(jax.eval_shape(tx.init, x)) == avals(state)
    marked = optax.tree.map_params(tx, lambda _: "slot", state)
    assert jax.tree.structure(marked) == jax.tree.structure(state)


def test_an_average_beside_short_slots_stays_exact():
    """With the wrapper outside, the slots of the inner optimizer alone are short."""
    tx = optzoo.moving_average(slots_dtype(optzoo.adam(1e-3), "bfloat16"), 0.999)
    x = jax.tree.map(jnp.ones_like, params())
    x, state = step(tx, x, x)
    np.testing.assert_allclose(optzoo.eval_params(x, state)["table"], 1 - 1e-6, rtol=1e-7)


def test_arguments_pass():
    tx, x = slots_dtype(optzoo.adam_gs(lambda k: 1.0 / (1 + k)), "float32"), params()
    plain = optzoo.adam_gs(0.25)
    got, _ = step(tx, dense_grads(x), x, global_step=3)
    chex.assert_trees_all_close(got, step(plain, dense_grads(x), x, global_step=3)[0], rtol=1e-6)


@pytest.mark.parametrize("dtype", [int, "int8", jnp.bool_, "complex64"])
def test_dtype_must_be_floating(dtype):
    with pytest.raises(TypeError, match="dtype must be a floating-point dtype, got"):
        slots_dtype(optzoo.adam(), dtype)


@pytest.mark.parametrize("foreign", [optax.adam(0.1), optax.sgd(0.1), optax.identity()])
def test_foreign_optimizers_are_refused(foreign):
    with pytest.raises(ValueError, match="finds no slots of optzoo"):
        slots_dtype(foreign, "bfloat16").init(params())
