"""Parameters in bfloat16 that train as if they had 24 or 32 bits."""

import chex
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import optzoo
from optzoo import SparseRows, master_weights
from optzoo.state.types import nodes_of
from optzoo.testing import samples
from optzoo.wrappers.master_weights import MasterWeightsState

RATE = 1e-3
ROWS, WIDTH = 12, 8
IDS = np.array([[1, 5, 1, 7], [3, 5, 11, 1], [0, 2, 2, 5]])
LEAST = 2.0**-126  # below it the compiler may flush to zero


def numbers(seed, shape=(ROWS, WIDTH)):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def wide_start():
    return {"t": numbers(0), "w": numbers(1, (WIDTH, 3))}


def loss(params, ids):
    rows = optzoo.lookup(params["t"], ids).astype(jnp.float32)
    return jnp.mean((rows @ params["w"].astype(jnp.float32) - 1) ** 2)


def train(tx, params, state, steps=3, **options):
    step = optzoo.minimize(loss, tx, **options)
    for i in range(steps):
        params, state, _ = step(params, state, IDS[i % 3])
    return params, state


# One update, bit by bit.

patterns = st.lists(st.integers(0, 2**32 - 1), min_size=8, max_size=8)


def finite(pattern):
    x = np.uint32(pattern).view(np.float32)
    return x if np.isfinite(x) and LEAST < abs(x) < 1e38 else np.float32(pattern / 2**32 + 1)


@pytest.mark.parametrize(("bits", "kept"), [(24, 16), (32, 24)])
@given(olds=patterns, moves=patterns)
@settings(max_examples=60, deadline=None)
def test_the_sum_is_a_number_of_these_bits(bits, kept, olds, moves):
    """It loses at most half a unit of its last place; the model sees it rounded to bfloat16."""
    wide, moves = (np.array(list(map(finite, each))) for each in (olds, moves))
    tx = master_weights(optzoo.gradient_descent(1.0), bits)
    params, state = optzoo.split_params(jnp.asarray(wide), tx)
    start = np.asarray(optzoo.wide_params(params, state))
    close(start, wide, kept)
    updates, state = tx.update(jnp.asarray(-moves), state, params)
    after = optax.apply_updates(params, updates)
    assert after.dtype == jnp.bfloat16
    want, got = start + moves, np.asarray(optzoo.wide_params(after, state))
    is_normal = (abs(want) > LEAST) & (abs(want) < 1e38)
    close(got[is_normal], want[is_normal], kept)
    close(np.asarray(after, np.float32)[is_normal], got[is_normal], 8)


def close(got, want, kept):
    """With these bits of a number kept, it is off by half a unit of the last one at most."""
    error = abs(got.astype(np.float64) - want)
    unit = 2.0 ** (np.floor(np.log2(abs(want.astype(np.float64)))) - (kept - 1))
    assert (error <= unit / 2 if kept < 24 else error == 0).all()


@pytest.mark.parametrize("bits", [24, 32])
def test_special_numbers(bits):
    greatest = np.finfo(np.float32).max
    wide = np.float32([0, -0.0, np.inf, -np.inf, np.nan, greatest, -greatest])
    wide = np.append(wide, np.uint32([0x7F800001, 0xFFFFFFFF]).view(np.float32))  # NaN
    params, state = optzoo.split_params(jnp.asarray(wide), master_weights(optzoo.adam(), bits))
    shown = np.asarray(params, np.float32)
    np.testing.assert_array_equal(np.isfinite(shown), np.isfinite(wide))  # finite stays finite
    np.testing.assert_array_equal(shown[:5], wide[:5])
    np.testing.assert_allclose(optzoo.wide_params(params, state), wide, rtol=2**-8)


def test_small_updates_are_not_lost():
    """In bfloat16 none of them would move a parameter."""
    x = jnp.ones(1, jnp.bfloat16)
    for bits in (24, 32):
        tx = master_weights(optzoo.gradient_descent(1e-4), bits)
        params, state = x, tx.init(x)
        for _ in range(1000):
            params, state = samples.step(tx, jnp.ones(1), params, state)
        atol = 1000 * 2**-17 if bits == 24 else 1e-4  # each update is rounded
        np.testing.assert_allclose(optzoo.wide_params(params, state), 0.9, atol=atol)
        np.testing.assert_allclose(params, 0.9, atol=atol + 2**-9)


def test_parameters_that_were_changed_from_outside():
    """The sum is the new value, to half of its last place, whatever the correction is."""
    tx = master_weights(optzoo.gradient_descent(1.0))
    _, state = optzoo.split_params(jnp.linspace(1.0, 1.1, 64), tx)
    for value in (0.0, -0.0, 3.0, -1e-3, np.inf):
        params = jnp.full(64, value, jnp.bfloat16)
        wide = optzoo.wide_params(params, state)
        np.testing.assert_allclose(wide, np.asarray(params, np.float32), rtol=2**-8, atol=1e-37)
        near = (wide * (1 + 2**-20)).astype(jnp.bfloat16)  # at a tie away from zero
        np.testing.assert_array_equal(np.where(wide < 1e-37, params, near), params)


# Optimizers

INNER = {
    "adam": lambda: optzoo.adam(0.1),
    "lazy_adam": lambda: optzoo.lazy_adam(0.1),
    "sparse_adamw": lambda: optzoo.sparse_adamw(0.1, weight_decay=0.1),  # reads parameters
    "gradient_descent": lambda: optzoo.gradient_descent(0.1),  # rows that repeat
    "ftrl": lambda: optzoo.ftrl(0.1),
    "optax": lambda: optzoo.on_rows(optax.sgd(0.1, momentum=0.9)),
}


def grads(i):
    table = SparseRows(jnp.asarray(IDS[i % 3]), jnp.asarray(numbers(i, (4, WIDTH))), ROWS)
    return {"t": table, "w": jnp.asarray(numbers(i + 9, (WIDTH, 3)))}


@pytest.mark.parametrize("name", INNER)
def test_with_32_bits_it_is_float32(name):
    """To the last bit, with rows and arrays; only sums of repeated rows may be in another order."""
    plain, tx = INNER[name](), master_weights(INNER[name](), 32)
    wide = jax.tree.map(jnp.asarray, wide_start())
    params, state = optzoo.split_params(wide, tx)
    usual = plain.init(wide)
    for i in range(4):
        params, state = samples.step(tx, grads(i), params, state)
        wide, usual = samples.step(plain, grads(i), wide, usual)
    chex.assert_trees_all_close(optzoo.wide_params(params, state), wide, rtol=1e-6, atol=1e-7)
    chex.assert_trees_all_close(state.inner, usual, rtol=1e-6, atol=1e-7)


def test_a_run_in_float32_goes_on():
    plain, wide = optzoo.lazy_adam(0.1), jax.tree.map(jnp.asarray, wide_start())
    tx = master_weights(plain, 32)
    _, usual = plain.update(grads(0), plain.init(wide), wide)
    params, state = optzoo.split_params(wide, tx)
    found = optzoo.wide_params(*samples.step(tx, grads(1), params, state._replace(inner=usual)))
    want, _ = samples.step(plain, grads(1), wide, usual)
    chex.assert_trees_all_close(found, want, rtol=1e-6)


def test_gradients_in_bfloat16_are_given_in_float32():
    tx, x = master_weights(optzoo.gradient_descent(0.3), 32), jnp.ones(64, jnp.bfloat16)
    g = jnp.asarray(numbers(2, 64), jnp.bfloat16)
    wide = optzoo.wide_params(*samples.step(tx, g, x))
    np.testing.assert_allclose(wide, 1 - 0.3 * np.asarray(g, np.float32), rtol=2e-7)


def test_rows_without_a_gradient_stay():
    tx = master_weights(optzoo.lazy_adam(0.1))
    start = optzoo.split_params(jax.tree.map(jnp.asarray, wide_start()), tx)
    before = jax.tree.map(np.asarray, start)
    updates, _ = tx.update(grads(0), start[1], start[0])
    assert not updates["t"].values[updates["t"].indices == ROWS].any()  # padding is zero
    params, state = train(tx, *start)
    for a, b in ((params, before[0]), (state.corrections, before[1].corrections)):
        moved = (np.asarray(a["t"]) != b["t"]).any(1)
        np.testing.assert_array_equal(moved, np.isin(np.arange(ROWS), IDS))


def test_a_large_model_in_three_bytes():
    """What a compiled step of 100,000 rows takes: its arguments in place, and little besides."""
    tx = master_weights(optzoo.slots_dtype(optzoo.lazy_adam(0.1), "int8"))
    shape = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    params = {"t": shape(100_000, 64), "w": shape(64, 3)}
    step = optzoo.minimize(loss, tx).lower(params, jax.eval_shape(tx.init, params), IDS[0])
    found, table = step.compile().memory_analysis(), 100_000 * 64
    assert found.alias_size_in_bytes < (3 + 2 * 68 / 64) * table + 1e5  # table and both slots
    # Before, XLA scatters rows of 16 bits through a float32 copy of the table.
    limit = 1e5 if jax.__version_info__ >= (0, 11) else 4.1 * table
    assert found.temp_size_in_bytes < limit


def test_native_code_lines_and_shards():
    """Equal to a plain step; each reads the corrections of touched rows alone."""
    tx = master_weights(optzoo.lazy_adam(0.1), 32)
    wide = jax.tree.map(jnp.asarray, wide_start())
    split = lambda: optzoo.split_params(wide, tx)
    want = optzoo.wide_params(*train(tx, *split()))
    chex.assert_trees_all_close(
        optzoo.wide_params(*train(tx, *split(), native=True)), want, rtol=1e-5
    )

    params, state = split()
    like = {**params, "t": optzoo.rows.to_lines(params["t"])}
    lines = train(
        tx, *optzoo.rows.to_lines((params, state), like=(like, jax.eval_shape(tx.init, like)))
    )
    chex.assert_trees_all_close(optzoo.rows.from_lines(optzoo.wide_params(*lines)), want, rtol=1e-5)

    mesh, sharding = (
        Mesh(np.array(jax.devices()[:4]), ("shard",)),
        optzoo.sharded.RowSharding(ROWS, 4, multiple=1),
    )
    rows_of = lambda ids: params["t"].at[ids].get(mode="fill", fill_value=0)
    params, _ = split()
    everywhere = NamedSharding(mesh, PartitionSpec())
    shards = {
        "t": optzoo.sharded.create_table(sharding, mesh, rows_of),
        "w": jax.device_put(params["w"], everywhere),
    }
    start = jax.jit(tx.init, out_shardings=optzoo.state_sharding(tx, shards))(shards)
    step = optzoo.sharded_minimize(loss, tx, mesh, {"t": sharding}, capacity_factor=0.25)
    params, _ = split()
    for ids in IDS:
        shards, start, _ = step(shards, start, ids)
    plain = optzoo.wide_params(*train(tx, params, tx.init(params)))
    tables = {"t": sharding}
    found = optzoo.sharded.in_order_of_ids(optzoo.wide_params(shards, start), tables, shards)
    chex.assert_trees_all_close(found["t"][:ROWS], plain["t"], rtol=1e-4, atol=1e-6)


def test_mixed_parameters_and_missing_gradients():
    """A parameter in float32 has no correction; one without a gradient keeps it."""
    params = {"a": jnp.ones(3, jnp.bfloat16), "b": jnp.ones(3), "c": jnp.ones(3, jnp.bfloat16)}
    tx = master_weights(optzoo.momentum(1e-4, 0.9))
    state = tx.init(params)
    assert state.corrections["b"] == ()
    updates, after = tx.update({"a": jnp.ones(3), "b": jnp.ones(3), "c": None}, state, params)
    assert (
        updates["c"] is None
        and (after.corrections["a"] != 0).all()
        and not after.corrections["c"].any()
    )
    np.testing.assert_allclose(updates["b"], -1e-4)


def test_in_a_chain_a_mask_a_scan_and_a_file():
    params = {"a": jnp.linspace(1, 2, 8, dtype=jnp.bfloat16), "b": jnp.ones(3, jnp.bfloat16)}
    tx = optax.chain(
        optax.clip(0.1), optax.masked(master_weights(optzoo.adam(1e-4)), {"a": True, "b": False})
    )
    state = tx.init(params)
    gradients = jax.tree.map(jnp.ones_like, params)

    body = lambda carry, _: (samples.step(tx, gradients, *carry), None)
    (after, last), _ = jax.lax.scan(body, (params, state), length=5)
    chex.assert_trees_all_equal_shapes_and_dtypes(last, state)
    [node] = nodes_of(MasterWeightsState, last)
    np.testing.assert_allclose(
        optzoo.wide_params(
            {"a": after["a"]}, node._replace(corrections={"a": node.corrections["a"]})
        )["a"],
        np.asarray(params["a"], np.float32) - 5e-4,
        atol=5 * 2**-16,
    )
    read = flax.serialization.from_bytes(tx.init(params), flax.serialization.to_bytes(last))
    chex.assert_trees_all_equal(read, last)


def test_derivatives_and_batches():
    """An update has none; several models at once are as one after the other."""
    tx, x = master_weights(optzoo.adam(0.1)), jnp.ones((3, 4), jnp.bfloat16)
    update = lambda g, x: samples.step(tx, g, x)[0]
    with pytest.raises(TypeError, match="no derivative"):
        jax.grad(lambda g: jnp.sum(update(g, x[0]).astype(jnp.float32)))(jnp.ones(4))
    gs = jnp.asarray(numbers(3, (3, 4)))
    one_by_one = jnp.stack([update(g, row) for g, row in zip(gs, x, strict=True)])
    np.testing.assert_array_equal(jax.vmap(update)(gs, x), one_by_one)


def test_tables_that_grow():
    tx = master_weights(optzoo.lazy_adam(0.1))
    params, state = train(tx, *optzoo.split_params(jax.tree.map(jnp.asarray, wide_start()), tx))
    grown, larger = optzoo.growing.resize_table(params, state, {"t": 15}, tx=tx)
    assert grown["t"].dtype == jnp.bfloat16 and larger.corrections["t"].shape == (15, WIDTH)
    old = optzoo.wide_params(params, state)["t"]
    np.testing.assert_array_equal(optzoo.wide_params(grown, larger)["t"][:ROWS], old)


def test_steps_that_are_not_finite():
    """``optax.apply_if_finite`` goes inside; around, its two cases have different types."""
    params, nan = {"w": jnp.ones(3, jnp.bfloat16)}, {"w": jnp.full(3, jnp.nan, jnp.bfloat16)}
    loss = lambda params, x: jnp.sum((params["w"] * x).astype(jnp.float32))
    plain = master_weights(optax.sgd(1e-3))
    for inner in (plain, optzoo.accumulate(plain, 2)):
        tx = optax.chain(optax.apply_if_finite(inner, 3))
        with pytest.raises(ValueError, match=r"optzoo.master_weights\(optax.apply_if_finite\("):
            jax.eval_shape(optzoo.minimize(loss, tx), params, tx.init(params), jnp.ones(3))
    tx = master_weights(optax.apply_if_finite(optax.sgd(1e-3), 3))
    moved, state = samples.step(tx, {"w": jnp.ones(3)}, params)
    after, skipped = samples.step(tx, nan, moved, state)
    np.testing.assert_allclose(optzoo.wide_params(moved, state)["w"], 1 - 1e-3, atol=2**-16)
    chex.assert_trees_all_equal((after, skipped.corrections), (moved, state.corrections))


def test_refused():
    momentum = optzoo.momentum(0.1, 0.9)
    with pytest.raises(ValueError, match="bits must be one of 24, 32, got 16"):
        master_weights(momentum, 16)
    with pytest.raises(ValueError, match="no parameter is bfloat16"):
        master_weights(momentum).init(jnp.ones(3))
    with pytest.raises(TypeError, match="inner must be an optax transformation"):
        master_weights(0.1)
    params = jnp.ones(3, jnp.bfloat16)
    state = master_weights(momentum).init(params)
    with pytest.raises(ValueError, match="params"):
        master_weights(momentum).update(params, state)
    with pytest.raises(ValueError, match=r"one state of optzoo\.master_weights, got 0"):
        optzoo.wide_params(params, momentum.init(params))
    with pytest.raises(TypeError, match="no decay rule"):
        optzoo.caught_up(master_weights(momentum), dense=True)
