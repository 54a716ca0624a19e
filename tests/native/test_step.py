"""Native steps compute what XLA computes, in place, and leave to XLA what they cannot do."""

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optzoo
from optzoo import CATALOG, SparseRows
from optzoo.jaxprs.graph import Graph
from optzoo.native import engine
from optzoo.state.storage.stored import unpack_state
from optzoo.testing.samples import step_of, with_global_step

from ..selection import KINDS, chosen_first
from .of_users import greatest

ROWS, WIDTH, IDS = 50, 6, 24
# Where XLA's fused loops contract other products and sums, results differ by roundings: at most so
# many of the size of the array's values.
ROUNDINGS = 16 * np.finfo(np.float32).eps

SECOND_ORDER = {name for name, e in CATALOG.items() if e.family == "second_order"}
# They update rows that have no gradient, or read all rows.
NOT_LAZY = {"adam", "adam_gs", "adamw", "add_sign", "global_decay_row_wise_adagrad"}
NOT_LAZY |= {"adafactor", "adam_weight_decay", "lamb"}
NOT_LAZY |= {"grad_variance_scaled", "nadam", "neural_optimizer1", "power_sign"}
LAZY = sorted(CATALOG.keys() - SECOND_ORDER - NOT_LAZY)
BY_ELEMENT = sorted(CATALOG.keys() - SECOND_ORDER - {"adafactor"})  # which has means of columns
# Norms of each row, or values for each row.
BY_ROW = [name for name in BY_ELEMENT if "row_wise" in name]
# On arrays, equal to the bit. In the others some version of XLA contracts other operations, on some
# processor.
EQUAL = {"adagrad_eps", "adam", "adam_gs", "adamax", "custom_adam", "gradient_descent"}
EQUAL |= {"lazy_adam", "lazy_adam_gs", "momentum", "nadam", "proximal_adagrad"}
EQUAL |= {"proximal_gradient_descent"}


def make(name, **kwargs):
    return with_global_step(CATALOG[name].make)(**kwargs)


def table(rng=0, shape=(ROWS, WIDTH)):
    return jnp.asarray(np.random.default_rng(rng).normal(size=shape), jnp.float32)


def rows(seed, shape=(ROWS, WIDTH), ids=IDS):
    """Gradients of rows: some repeat, some are out of range."""
    rng = np.random.default_rng(seed)
    chosen = jnp.asarray(rng.integers(-2, 20, ids).astype(np.int32) % (shape[0] + 3) - 1)
    return SparseRows(
        chosen, jnp.asarray(rng.normal(size=(ids, *shape[1:])), jnp.float32), shape[0]
    )


def arrays(seed):
    rng = np.random.default_rng(seed)
    shapes = {"a": (8, 5), "b": (7,), "c": (), "d": (2, 3, 4)}
    return {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in shapes.items()}


def calls_in(step, *args):
    """How many native calls a program has."""
    return jax.jit(step).lower(*args).as_text().count("@optzoo_native_")


def both(tx, params, draw, steps=3, required=True):
    """The parameters and the state after some steps, by XLA and natively."""
    tx = optax.with_extra_args_support(tx)
    found = []
    for step in (step_of(tx), optzoo.native_step(tx, required=required)):
        now, run = (params, tx.init(params)), jax.jit(step)
        for seed in range(steps):
            now = run(*now, draw(seed))
        found.append(now)
    return found


def check_close(expected, got, limit=ROUNDINGS):
    """Equal up to roundings, relative to the size of the values of each array."""
    assert jax.tree.structure(expected) == jax.tree.structure(got)
    expected, got = map(unpack_state, (expected, got))  # each slot has a scale of its own
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert jnp.result_type(a, jnp.float32) == jnp.result_type(b, jnp.float32)
        if not jnp.issubdtype(a.dtype, jnp.inexact):
            np.testing.assert_array_equal(a, b)
            continue
        a, b = np.asarray(a).astype(np.float64), np.asarray(b).astype(np.float64)
        finite = np.abs(a[np.isfinite(a)])
        scale = np.sqrt(np.mean(finite**2)) if finite.size else 0.0
        np.testing.assert_allclose(a, b, rtol=limit, atol=limit * scale)


# Results


@pytest.mark.parametrize("name", chosen_first(LAZY, [n for n in KINDS if n in LAZY]))
def test_rows(name):
    expected, got = both(make(name), {"t": table()}, lambda seed: {"t": rows(seed)})
    check_close(expected, got)


@pytest.mark.parametrize("name", chosen_first(BY_ELEMENT, [n for n in KINDS if n in BY_ELEMENT]))
def test_arrays(name):
    expected, got = both(make(name), arrays(99), arrays)
    check_close(expected, got)


# Rows of one element, of several, of more than a task has; one row; none.
SHAPES_OF_ROWS = [(7,), (9, 1), (8, 5), (2, 3, 4), (3, 40_000), (1, 6), (0, 3)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize(
    "name", chosen_first(BY_ROW, ["partial_row_wise_lamb", "row_wise_adagrad"])
)
def test_numbers_of_each_row_of_arrays(name, dtype, x64):
    with x64(dtype == "float64"):
        draw = lambda seed: [table(seed, shape).astype(dtype) for shape in SHAPES_OF_ROWS]
        tx = optzoo.slots_dtype(make(name), "bfloat16") if dtype == "bfloat16" else make(name)
        has_power = (name, dtype) == ("global_decay_row_wise_adagrad", "float64")
        expected, got = both(tx, draw(99), draw, required=not has_power)
        check_close(expected, got, 2**-7 if dtype == "bfloat16" else 16 * np.finfo(dtype).eps)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
        lambda tx: optax.chain(tx, optax.clip_by_global_norm(0.01)),
        lambda tx: optzoo.moving_average(tx, 0.9),
        lambda tx: optzoo.accumulate(tx, 2),
        lambda tx: optzoo.slots_dtype(tx, "float16", stochastic=True),
    ],
    ids=["clipped", "clipped after", "averaged", "in a branch", "rounded at random"],
)
def test_numbers_of_each_row_in_wrappers(wrap):
    expected, got = both(wrap(optzoo.partial_row_wise_lamb(0.1)), arrays(99), arrays)
    check_close(expected, got, 2**-9)


def test_numbers_of_each_row_that_a_norm_of_the_update_needs():
    """The norm needs what the loop makes, which it scales by the norm."""
    tx = optax.chain(optzoo.partial_row_wise_lamb(0.1), optax.clip_by_global_norm(0.01))
    grads = lambda seed: {"a": table(seed, (8, 5))}
    expected, got = both(tx, grads(99), grads, steps=2)
    check_close(expected, got, 2**-9)


def test_arrays_with_as_long_rows_share_a_call():
    tx, params = optzoo.row_wise_lamb(0.1), [table(k, (k, 5)) for k in (2, 3, 4)]
    step = optzoo.native_step(tx, required=True)
    assert calls_in(step, params, tx.init(params), params) == 1


def test_arrays_in_unlike_groups_share_no_call():
    """By one formula; groups are longer, or another operand has a number for each of them."""
    shapes = {"a": ((2, 6), (2,)), "b": ((3, 4), (3,)), "c": ((3, 4, 1), (3, 4))}
    rng = np.random.default_rng(0)
    draw = lambda which: {k: rng.integers(1, 9, v[which]) for k, v in shapes.items()}
    params, grads, factors = (
        jax.tree.map(lambda a: jnp.asarray(a, "float32"), draw(which)) for which in (0, 0, 1)
    )

    def of_leaf(g, factor):
        fill = lambda a: jax.lax.broadcast_in_dim(a, g.shape, range(a.ndim))
        scaled = g * fill(factor)
        return scaled + fill(jnp.sum(scaled, range(1, g.ndim)))

    update = lambda g, factors, params: (jax.tree.map(of_leaf, g, factors), factors)
    tx = optax.with_extra_args_support(optax.GradientTransformation(lambda x: factors, update))
    step = optzoo.native_step(tx, required=True)
    calls = calls_in(step, params, factors, grads)
    assert calls == 3
    got, _ = step(params, factors, grads)
    for name, x in params.items():
        scaled = np.asarray(grads[name]).reshape(len(x), -1)
        scaled = scaled * np.asarray(factors[name]).reshape(len(x), -1)
        want = scaled + scaled.sum(1, keepdims=True) + np.asarray(x).reshape(len(x), -1)
        np.testing.assert_array_equal(got[name], want.reshape(x.shape))  # of integers


NORMED = {
    "columns": (lambda x: x / jnp.sum(x**2, 0)[:, None], (5, 5), "`reduce_sum`"),
    "repeated in part": (
        lambda x: x / jnp.broadcast_to(jnp.sum(x**2, (1, 2), keepdims=True), (2, 3, 1)),
        (2, 3, 4),
        "have several lengths",
    ),
    "two lengths": (
        lambda x: x / jnp.sum(x**2, 2, keepdims=True) / jnp.sum(x**2, (1, 2), keepdims=True),
        (2, 3, 4),
        "have several lengths",
    ),
    "a sum of one": (
        lambda x: x * jnp.sum(jnp.sum(x, 1, keepdims=True), 1, keepdims=True),
        (2, 3),
        "have several lengths",
    ),
}


@pytest.mark.parametrize("name", NORMED)
def test_groups_that_are_left_to_xla(name):
    change, shape, reason = NORMED[name]
    tx, params = optax.stateless(lambda u, p: change(u + p)), table(shape=shape)
    with pytest.raises(ValueError, match=reason):
        jax.make_jaxpr(optzoo.native_step(tx, required=True))(params, tx.init(params), params)
    draw = functools.partial(table, shape=shape)
    check_close(*both(tx, params, draw, required=False))


def test_a_slot_that_is_read_for_all_elements_of_a_row():
    def update(g, s, params):
        new = s + jnp.sum(g * params, 1)
        return -0.01 * g * s[:, None] * new[:, None], new

    tx = optax.GradientTransformation(lambda x: jnp.ones(len(x)), update)
    check_close(*both(tx, table(), table))


def test_a_slot_of_rows_beside_groups_in_them_is_left_to_xla():
    """Two groups in each row, and a number for each row."""

    def update(g, s, params):
        scaled = jax.lax.broadcast_in_dim(s, g.shape, (0,)) * g * params
        return -scaled / jnp.max(jnp.abs(scaled), 2, keepdims=True), s

    tx = optax.GradientTransformation(lambda x: jnp.arange(1.0, 1 + len(x)), update)
    draw = functools.partial(table, shape=(3, 2, 4))
    with pytest.raises(ValueError, match="have several lengths"):
        jax.make_jaxpr(optzoo.native_step(tx, required=True))(draw(), tx.init(draw()), draw(1))
    check_close(*both(tx, draw(), draw, required=False))


def test_a_slot_of_rows_alone_is_left_to_xla():
    update = lambda g, state, params: (-g, state + jnp.sum((g + params) ** 2, 1))
    tx = optax.GradientTransformation(lambda x: jnp.zeros(len(x)), update)
    with pytest.raises(
        ValueError, match="updates 1 arrays: 'state': it has values with one number for each group"
    ):
        jax.make_jaxpr(optzoo.native_step(tx, required=True))(table(), tx.init(table()), table(1))
    check_close(*both(tx, table(), table, required=False))


@pytest.mark.optimized
@pytest.mark.parametrize(
    "name", chosen_first(sorted(EQUAL), {"adam", "momentum", "gradient_descent"})
)
def test_arrays_are_equal_to_the_bit(name):
    expected, got = both(make(name), arrays(99), arrays)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        np.testing.assert_array_equal(a, b)


def adam(**kwargs):
    return optzoo.slots_dtype(optzoo.lazy_adam(0.1), **kwargs)


@pytest.mark.parametrize(
    ("tx", "limit"),
    {
        "packed": (adam(dtype="float32", packed=True), ROUNDINGS),
        # A value near the middle of two may be rounded to the other one.
        "bfloat16": (adam(dtype="bfloat16"), 2**-8),
        "float16": (adam(dtype="float16", stochastic=True), 2**-9),
        "words": (adam(dtype="bfloat16", packed=True, stochastic=True), 2**-7),
    }.values(),
    ids=["packed", "bfloat16", "float16", "words"],
)
def test_stored_slots(tx, limit):
    expected, got = both(tx, table(), rows)
    check_close(expected, got, limit)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_parameters_in_16_bits(dtype):
    tx = optzoo.slots_dtype(optzoo.adagrad(0.1), "float32")
    draw = lambda seed: rows(seed).astype(dtype)
    expected, got = both(tx, table().astype(dtype), draw)
    check_close(expected, got, 2**-7 if dtype == "bfloat16" else 2**-10)


def test_float64(x64):
    with x64(True):
        draw = lambda seed: rows(seed).astype(jnp.float64)
        expected, got = both(optzoo.lazy_adam(0.1), table().astype(jnp.float64), draw)
        check_close(expected, got, 16 * np.finfo(np.float64).eps)
        assert got[0].dtype == jnp.float64


@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, 1), (ROWS, 2, 3), (1, 4)])
def test_rows_of_any_shape(shape):
    draw = functools.partial(rows, shape=shape)
    tx = optzoo.slots_dtype(optzoo.lazy_adam(0.1), "bfloat16", packed=True, stochastic=True)
    expected, got = both(tx, table(shape=shape), draw)
    check_close(expected, got, 2**-7)


class Turned(NamedTuple):
    """The last gradient with its elements in another order, and the longest of both orders."""

    turned: optzoo.state.Slot
    both: optzoo.state.Slot


def test_parts_of_rows():
    """A rule that cuts rows and joins them, at no place where slots are joined."""

    def rule(g, x, s, t):
        turned = jnp.concatenate([g[..., 2:], g[..., :2]], axis=-1)
        both = jnp.max(jnp.concatenate([s.turned, 2 * g[..., 1:]], axis=-1), -1, keepdims=True)
        return -turned, Turned(turned, s.both + both)

    tx = optzoo.rules.leafwise(
        rule, slots=Turned(optzoo.rules.zeros, optzoo.rules.zeros), rows=optzoo.rules.lazy
    )
    expected, got = both(tx, table(), rows)
    check_close(expected, got)


class Flags(NamedTuple):
    """A slot that is replaced by a constant, and read by the update."""

    seen: optzoo.state.Slot


@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, 1), (ROWS, 3)])
def test_slots_are_read_before_they_are_replaced(shape):
    def rule(g, x, slots, t):
        return g * (1 - slots.seen) - 0.5 * slots.seen, Flags(jnp.ones_like(slots.seen))

    tx = optzoo.rules.leafwise(rule, slots=Flags(optzoo.rules.zeros))
    draw = functools.partial(rows, shape=shape)
    expected, got = both(tx, table(shape=shape), draw)
    check_close(expected, got)


def test_rows_are_merged_before_a_norm():
    tx = optax.chain(optzoo.clip_by_global_norm(0.1), optzoo.lazy_adam(0.1))
    expected, got = both(tx, table(), rows)
    check_close(expected, got)


def test_several_tables_and_arrays():
    params = {"one": table(1), "two": table(2), "w": arrays(3)}
    draw = lambda seed: {"one": rows(seed), "two": rows(seed + 9), "w": arrays(seed)}
    tx = optax.chain(optzoo.clip_by_global_norm(1.0), optzoo.lazy_adam(0.1))
    expected, got = both(tx, params, draw)
    check_close(expected, got)


@pytest.mark.parametrize(
    ("tx", "draw", "params"),
    [
        (optzoo.on_rows(optax.adamw(0.1)), rows, table()),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)), arrays, arrays(9)),
        (optzoo.moving_average(optzoo.adam(0.1), 0.9), arrays, arrays(9)),
        (optzoo.moving_average(optzoo.lazy_adam(0.1), 0.9), rows, table()),
    ],
    ids=["on_rows", "clip and adamw", "moving_average", "moving_average of rows"],
)
def test_other_transformations(tx, draw, params):
    expected, got = both(tx, params, draw)
    check_close(expected, got)


@pytest.mark.parametrize("draw", [rows, arrays])
def test_averages_and_decay_are_in_the_pass_of_the_update(draw):
    """One call for all arrays; of rows one, and one for the average, which has all of them."""
    tx = optzoo.decoupled_weight_decay(optzoo.lazy_adam(0.1), weight_decay_per_step=0.1)
    tx = optzoo.moving_average(tx, 0.9)
    params = table() if draw is rows else arrays(9)
    step = optzoo.native_step(tx, required=True)
    assert calls_in(step, params, tx.init(params), draw(0)) == (2 if draw is rows else 1)
    check_close(*both(tx, params, draw))


def clipped(tx, clip):
    return optax.chain(tx, clip, optax.scale(-0.1))


OF_NORMS = {
    "lamb": optax.lamb(0.1, weight_decay=0.1),
    "lars": optax.lars(0.1, weight_decay=0.1),
    "fromage": optax.fromage(0.1),
    "novograd": optax.novograd(0.1),
    "the norm of all updates": clipped(optax.scale_by_adam(), optax.clip_by_global_norm(0.1)),
    "of each": clipped(optzoo.transforms.scale_by_lazy_adam(), optax.clip_by_block_rms(0.1)),
    "several": clipped(optax.lamb(0.1), optax.clip_by_global_norm(0.1)),
    "the largest": clipped(
        optax.scale_by_adam(),
        optax.stateless(lambda u, p: jax.tree.map(lambda x: x / jnp.max(jnp.abs(x)), u)),
    ),
    "in a branch": optzoo.accumulate(optax.lamb(0.1), 2),
}


@pytest.mark.parametrize("name", OF_NORMS)
def test_norms_of_updates(name):
    """The operations before a norm are done twice: for it, and in the update."""
    check_close(*both(OF_NORMS[name], {**arrays(9), "e": table()}, draw_with_table, steps=4))


def draw_with_table(seed):
    return {**arrays(seed), "e": table(seed)}


@pytest.mark.optimized
@pytest.mark.parametrize("name", ["lamb", "the norm of all updates"])
def test_norms_of_updates_take_no_memory(name):
    tx, params = OF_NORMS[name], {"a": table(shape=(200, 50)), "b": table(shape=(100, 100))}
    params, grads = jax.tree.map(jnp.copy, (params, params))
    state = tx.init(params)
    step = jax.jit(optzoo.native_step(tx, required=True), donate_argnums=(0, 1))
    program = step.lower(params, state, grads).compile()
    assert program.memory_analysis().temp_size_in_bytes <= 8192
    places = pointers((params, state))
    assert pointers(program(params, state, grads)) == places


def test_a_sum_of_no_array_does_not_keep_a_norm_from_native_code():
    def update(g, state, params=None):
        del params
        alike = jnp.sum(jnp.broadcast_to(state, g.shape))
        return g * alike * jnp.sum(g * g), state

    tx, x = optax.GradientTransformation(lambda x: jnp.ones(()), update), table(shape=(64, 64))
    tx = optax.with_extra_args_support(tx)
    assert calls_in(optzoo.native_step(tx), x, tx.init(x), x) == 2  # the norm, and the update


def test_norms_whose_update_stays_with_xla():
    """Slots stay with it, too: it would have to copy what the native loop overwrites."""
    tx = optax.chain(optax.scale_by_adam(), optax.stateless(lambda u, p: u @ u))
    step, params = optzoo.native_step(tx), table(shape=(8, 8))
    assert calls_in(step, params, tx.init(params), params) == 0
    with pytest.raises(ValueError, match=r"updates 3 arrays: 'params': .*: `dot_general`"):
        jax.make_jaxpr(optzoo.native_step(tx, required=True))(params, tx.init(params), params)


def test_what_reads_old_slots_comes_before_they_are_overwritten():
    """Nothing makes this median come first, so XLA would copy the old slots for it."""

    def update(g, state, params=None):
        mean = 0.9 * state[0].astype(jnp.float32) + g
        return -0.1 * mean, (mean.astype(jnp.bfloat16), jnp.sort(mean, 0)[len(mean) // 2])

    init = lambda x: (jnp.zeros_like(x, jnp.bfloat16), jnp.zeros(WIDTH))
    tx = optax.with_extra_args_support(optax.GradientTransformation(init, update))
    assert calls_in(optzoo.native_step(tx), table(), tx.init(table()), table(1)) == 0
    check_close(*both(tx, table(), table, required=False))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sums_of_many_elements_are_exact(dtype, x64):
    """4,096 at a time: one after the other they would lose digits."""
    with x64(True):
        x = jnp.asarray(np.random.default_rng(0).uniform(size=2_000_003), dtype)
        tx = optax.stateless(lambda u, p: u / jnp.sqrt(jnp.sum(u**2)))
        got, _ = optzoo.native_step(tx, required=True)(jnp.zeros_like(x), tx.init(x), x)
        wide = np.asarray(x, np.longdouble)
        error = np.max(np.abs(np.asarray(got) * np.sqrt(np.sum(wide**2)) / wide - 1))
        assert error < 4 * np.finfo(dtype).eps


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sums_of_long_rows_are_exact(dtype, x64):
    with x64(True):
        x = jnp.asarray(np.random.default_rng(0).uniform(size=(2, 1_000_003)), dtype)
        tx = optax.stateless(lambda u, p: u / jnp.linalg.norm(u + p, axis=1, keepdims=True))
        got, _ = optzoo.native_step(tx, required=True)(jnp.zeros_like(x), tx.init(x), x)
        wide = np.asarray(x, np.longdouble)
        norms = np.sqrt(np.sum(wide**2, 1, keepdims=True))
        error = np.max(np.abs(np.asarray(got) * norms / wide - 1))
        assert error < 4 * np.finfo(dtype).eps


def test_empty_arrays():
    params = {"none": jnp.zeros((0, 3)), "t": table(), "some": jnp.ones(4)}
    draw = lambda seed: {"none": jnp.zeros((0, 3)), "t": rows(seed, ids=0), "some": jnp.ones(4)}
    expected, got = both(optzoo.lazy_adam(0.1), params, draw)
    check_close(expected, got)
    np.testing.assert_array_equal(got[0]["t"], params["t"])


@pytest.mark.parametrize("scale", [1e-38, 1e-20, 1e20, np.inf, np.nan])
def test_extreme_gradients(scale):
    tx = optzoo.adagrad(0.1)
    draw = lambda seed: rows(seed).with_values(rows(seed).values * scale)
    expected, got = both(tx, table(), draw)
    check_close(expected, got)
    expected, got = both(tx, table(), lambda seed: table(seed) * scale)
    check_close(expected, got)


def test_ids_of_64_bits(x64):
    with x64(True):
        ids = jnp.array([3, 2**32 + 3, -1, ROWS, 7], jnp.int64)
        grads = SparseRows(ids, jnp.ones((5, WIDTH), jnp.float32), ROWS)
        assert grads.indices.dtype == jnp.int64
        expected, got = both(optzoo.adagrad(0.1), table(), lambda seed: grads)
        check_close(expected, got)
        assert np.flatnonzero((got[0] != table()).any(axis=1)).tolist() == [3, 7]


def test_ids_outside_of_the_table_are_ignored():
    ids = jnp.array([-1, ROWS, 2**31 - 1, -(2**31), 3])
    grads = SparseRows(ids, jnp.ones((5, WIDTH)), ROWS)
    expected, got = both(optzoo.adagrad(0.1), table(), lambda seed: grads)
    check_close(expected, got)
    changed = np.flatnonzero((got[0] != table()).any(axis=1))
    assert changed.tolist() == [3]


def test_ids_of_the_last_bucket():
    """The hash table of the distinct ids has 64 buckets, and after the last one comes the first."""
    num_rows = 2000
    buckets = np.arange(num_rows, dtype=np.uint64) * 2654435761 % 2**32 >> 26
    last, first = (np.flatnonzero(buckets == k) for k in (63, 0))
    ids = np.concatenate([first[:4], last[:8], first[:4], last[:8]]).astype(np.int32)
    assert len(ids) == IDS
    grads = SparseRows(jnp.asarray(ids), rows(0).values[:, :1], num_rows)
    params = table(shape=(num_rows, 1))
    expected, got = both(optzoo.adagrad(0.1), params, lambda seed: grads)
    check_close(expected, got)
    changed = np.flatnonzero((got[0] != params).any(axis=1))
    np.testing.assert_array_equal(changed, np.unique(ids))


def test_sums_of_repeated_rows_are_repeatable():
    tx, params = optzoo.adagrad(0.1), table(shape=(3, WIDTH))
    step, grads = jax.jit(optzoo.native_step(tx)), rows(0, (3, WIDTH), 1000)
    first, second = (step(params, tx.init(params), grads)[0] for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_extra_arguments():
    tx, params = optzoo.adam(0.1), arrays(0)
    state, grads = tx.init(params), arrays(1)
    for run in (jax.jit, lambda f: f):  # outside of jit, too
        expected = run(step_of(tx))(params, state, grads, learning_rate=0.5)
        got = run(optzoo.native_step(tx))(params, state, grads, learning_rate=0.5)
        check_close(expected, got)


def test_a_run_can_switch_to_native_code_and_back():
    tx, now = optzoo.lazy_adam(0.1), (table(), optzoo.lazy_adam(0.1).init(table()))
    steps = [jax.jit(step_of(tx)), jax.jit(optzoo.native_step(tx))]
    for seed in range(4):
        now = steps[seed % 2](*now, rows(seed))
    check_close(both(tx, table(), rows, steps=4)[0], now)


# Memory


def pointers(tree):
    return [a.unsafe_buffer_pointer() for a in jax.tree.leaves(tree) if a.ndim]


@pytest.mark.optimized
@pytest.mark.parametrize("draw", [rows, arrays])
def test_donated_arrays_are_updated_in_place(draw):
    params = jax.tree.map(jnp.copy, table() if draw is rows else arrays(9))
    tx = optzoo.lazy_adam(0.1)
    state = tx.init(params)
    step = jax.jit(optzoo.native_step(tx, required=True), donate_argnums=(0, 1))
    program = step.lower(params, state, draw(0)).compile()
    before = pointers((params, state))
    assert pointers(program(params, state, draw(0))) == before
    scratch = 4 * (64 + 5 * IDS + IDS * WIDTH) + 4096 if draw is rows else 4096
    assert program.memory_analysis().temp_size_in_bytes <= scratch


def finite(tx):
    return optax.apply_if_finite(tx, 2)


ROWS_OF_CYCLE = optzoo.accumulate(optzoo.lazy_adam(0.1), 2, max_rows={"": IDS + 3})
MIXED = {"table": IDS}


TABLES = {"table": table(1), "other": table(2), **arrays(9)}


def mixed(seed):
    """Gradients of rows of two tables, and of arrays."""
    return {"table": rows(seed), "other": rows(seed + 9), **arrays(seed)}


# With the gradients, and how many native calls there are; of arrays, with how many in place.
BRANCHES = {
    "accumulate": (optzoo.accumulate(optzoo.lazy_adam(0.1), 2), arrays, 2, 12),  # sums and update
    "rows": (ROWS_OF_CYCLE, rows, 2, 4),  # ids of the last cycle, and update
    "mixed": (
        optzoo.accumulate(optzoo.lazy_adam(0.1), 3, use_mean=True, max_rows=MIXED), mixed, 4, 20
    ),
    "clipped": (
        optax.chain(
            optzoo.clip_by_global_norm(1.0),
            optzoo.accumulate(optzoo.momentum(0.1, 0.9), 3, max_rows=MIXED),
        ), mixed, 6, 15
    ),
    "finite": (finite(optzoo.lazy_adam(0.1)), arrays, 2, 9),  # are all finite, and update
    "nested": (
        optzoo.accumulate(finite(optzoo.lazy_adam(0.1)), 2), arrays, 3, 12
    ),
}  # fmt: skip


@pytest.mark.unique
@pytest.mark.optimized
@pytest.mark.parametrize("name", chosen_first(BRANCHES, {"clipped"}))
def test_branches_update_in_place_or_do_nothing(name):
    """A branch in which updates are zeros has no native call, and nothing is copied."""
    tx, draw, calls, aliases = BRANCHES[name]
    params = {rows: table(), arrays: arrays(9), mixed: TABLES}[draw]
    params = jax.tree.map(lambda x: jnp.where(x > 1, -0.0, x), params)
    state, before = tx.init(params), jax.tree.map(np.array, params)
    step = optzoo.native_step(tx, required=True)
    assert calls_in(step, params, state, draw(0)) == calls
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, draw(0))
    assert lowered.as_text().count("output_operand_alias<") == aliases
    program = lowered.compile()
    assert program.memory_analysis().temp_size_in_bytes <= 8192
    shapes = {str([*x.shape]) for x in jax.tree.leaves((params, state)) if x.ndim}
    copied = re.findall(r"= \w+(\[[\d,]+\])\S* copy\(", program.as_text())
    assert shapes.isdisjoint(shape.replace(",", ", ") for shape in copied)
    places = pointers((params, state))
    for _ in range(2):
        params, state = program(params, state, draw(0))
        assert pointers((params, state)) == places
    if name != "finite":
        params, state = program(before, tx.init(before), draw(0))
        for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(before), strict=True):
            np.testing.assert_array_equal(a.view(jnp.int32), b.view(np.int32))  # -0.0 is no 0.0


@pytest.mark.parametrize(("use_mean", "clip", "every"), [(True, False, 2), (False, True, 3)])
def test_rows_of_a_cycle(use_mean, clip, every):
    """Of two tables one keeps the rows, and a step begins in the middle of a cycle."""
    tx = optzoo.accumulate(optzoo.lazy_adam(0.1), every, use_mean=use_mean, max_rows=MIXED)
    tx = optax.chain(optzoo.clip_by_global_norm(1.0), tx) if clip else tx
    check_close(*both(tx, TABLES, mixed, steps=2 * every + 1))


def test_cycles_of_one_step():
    tx = optzoo.accumulate(optzoo.lazy_adam(0.1), 1, max_rows=MIXED)
    assert calls_in(optzoo.native_step(tx, required=True), TABLES, tx.init(TABLES), mixed(0)) == 3
    check_close(*both(tx, TABLES, mixed))


def replacing(kind):
    """A transformation that writes into a slice of its state."""

    def update(g, state, params=None):
        (seen, last), part = state, {"params": params}.get(kind, g)[None]
        new = jax.lax.dynamic_update_slice_in_dim(seen, part, 0, 0)
        rate = jnp.max(seen) if kind == "read" else 1
        return -rate * g, (new, seen if kind == "kept" else last)

    def init(x):
        return (jnp.ones((1 if kind == "all" else 3, *x.shape)),) * 2

    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize("kind", ["gradients", "params", "all", "read", "kept"])
def test_slices(kind):
    """XLA writes a slice of gradients in place, if nothing else needs the array."""
    tx, x = optax.with_extra_args_support(replacing(kind)), table()
    trace = lambda: jax.make_jaxpr(optzoo.native_step(tx, required=True))(x, tx.init(x), table(1))
    if kind == "gradients":
        trace()
    else:
        with pytest.raises(ValueError, match=r"updates 1 arrays: 'state 0': .*_slice"):
            trace()
    check_close(*both(tx, x, table, required=False))


@pytest.mark.unique
@pytest.mark.optimized
def test_averages_inside_of_a_cycle():
    """XLA's copy of an average in a branch is in its own place: there is no other memory for it."""
    averaged, params = optzoo.moving_average(optzoo.lazy_adam(0.1), 0.9), table(shape=(4000, WIDTH))
    tx = optzoo.accumulate(averaged, 2, max_rows={"": IDS + 3})
    draw = functools.partial(rows, shape=params.shape)
    check_close(*both(tx, params, draw, steps=4))
    params = jax.tree.map(jnp.copy, params)
    step = jax.jit(optzoo.native_step(tx, required=True), donate_argnums=(0, 1))
    program = step.lower(params, tx.init(params), draw(0)).compile()
    assert program.memory_analysis().temp_size_in_bytes <= params.nbytes // 8


def test_parameters_are_not_converted_where_nothing_is_added():
    tx, params = BRANCHES["accumulate"][0], jax.tree.map(jnp.bfloat16, arrays(9))
    step = optzoo.native_step(tx, required=True)
    assert calls_in(step, params, tx.init(params), arrays(0)) == 2
    check_close(*both(tx, params, arrays), limit=2**-7)


NORM_OF_A_CYCLE = optax.chain(
    optzoo.accumulate(optzoo.lazy_adam(0.1), 2), optzoo.clip_by_global_norm(0.1)
)


def test_operations_after_a_branch_that_need_more_than_it_has():
    """The norm of the updates of a branch: the slots are in it, the parameters are not."""
    tx = NORM_OF_A_CYCLE
    check_close(*both(tx, arrays(9), arrays, steps=4, required=False))


def test_what_leaves_a_branch():
    """The updates and the state, not their squares too, which a norm outside of it needs."""
    tx = NORM_OF_A_CYCLE
    state = tx.init(arrays(9))
    trace = lambda step: jax.make_jaxpr(step)(arrays(9), state, arrays(0))
    with pytest.raises(
        ValueError, match=r"updates 3 arrays: 'params a': .*: `cond` .*, `reduce_sum`"
    ):
        trace(optzoo.native_step(tx, required=True))
    program = trace(optzoo.native_step(tx))
    [branches] = [op for op in Graph.of(program.jaxpr).operations if op.name == "cond"]
    assert len(branches.outs) == len(arrays(0)) + len(jax.tree.leaves(state[0].inner))


@pytest.mark.unique
def test_two_branches_of_which_one_needs_the_other():
    tx = optax.chain(
        optzoo.accumulate(optzoo.lazy_adam(0.1), 2),
        optax.apply_if_finite(optzoo.momentum(1.0, 0.9), 2),
    )
    check_close(*both(tx, arrays(9), arrays, steps=4))


def test_rows_of_a_table_that_is_only_read():
    def update(g, state, params=None):
        del params
        g = g.coalesce()
        return g.with_values(-g.values * g.gather(state)), state

    tx = optax.GradientTransformation(lambda x: x + 0.5, update)
    check_close(*both(tx, table(), rows))


def test_arrays_that_are_not_donated_stay_as_they_are():
    tx, params = optzoo.lazy_adam(0.1), table()
    state, copy = tx.init(params), np.array(table())
    step = jax.jit(optzoo.native_step(tx))
    once, again = (step(params, state, rows(0))[0] for _ in range(2))
    np.testing.assert_array_equal(params, copy)
    np.testing.assert_array_equal(once, again)
    both_ways = jax.jit(lambda p, s, g: (optzoo.native_step(tx)(p, s, g), p + 1))
    (new, _), old = both_ways(params, state, rows(0))
    np.testing.assert_array_equal(old, copy + 1)
    np.testing.assert_array_equal(new, once)


def test_gradients_that_are_the_parameters():
    tx = optzoo.adam(0.1)
    steps = [step_of(tx), optzoo.native_step(tx, required=True)]
    expected, got = (
        jax.jit(lambda p, s, f=f: f(p, s, p))(arrays(0), tx.init(arrays(0))) for f in steps
    )
    check_close(expected, got)


@pytest.mark.optimized
def test_in_place_slots():
    """The new parameters then have memory of their own, beside the old ones."""
    tx, params = optzoo.adam(0.1), arrays(0)
    step = optzoo.native_step(tx, in_place="slots", required=True)
    expected = jax.jit(step_of(tx))(params, tx.init(params), arrays(1))
    check_close(expected, jax.jit(step)(params, tx.init(params), arrays(1)))
    aliases = lambda step: (
        jax.jit(step)
        .lower(params, tx.init(params), arrays(1))
        .as_text()
        .count("output_operand_alias<")
    )
    assert aliases(optzoo.native_step(tx)) == aliases(step) + len(params) - 1  # `c` is a scalar


# Transformations of JAX


def test_in_loops_and_branches():
    tx = optzoo.lazy_adam(0.1)

    def train(step, params, state):
        def body(carry, seed):
            grads = rows(0).with_values(rows(0).values * seed)
            return jax.lax.cond(seed > 1, lambda c: step(*c, grads), lambda c: c, carry), None

        return jax.lax.scan(body, (params, state), jnp.arange(4.0))[0]

    steps = [step_of(tx), optzoo.native_step(tx, required=True)]
    expected, got = (jax.jit(functools.partial(train, f))(table(), tx.init(table())) for f in steps)
    check_close(expected, got)


@pytest.mark.parametrize("draw", [rows, arrays])
def test_derivatives_and_vmap_are_those_of_the_operations(draw):
    params = table() if draw is rows else arrays(9)
    tx = optzoo.lazy_adam(0.1)
    state, grads = tx.init(params), draw(0)

    def loss(step, scale):
        scaled = jax.tree.map(lambda x: x * scale, params)
        new, _ = step(scaled, state, grads)
        return sum(jnp.sum(a**2) for a in jax.tree.leaves(new))

    steps = [step_of(tx), optzoo.native_step(tx)]
    for transform in (jax.grad, lambda f: jax.vmap(jax.grad(jax.checkpoint(f))), jax.jacfwd):
        at = jnp.ones(3) if transform not in (jax.grad, jax.jacfwd) else 1.5
        expected, got = (jax.jit(transform(functools.partial(loss, f)))(at) for f in steps)
        np.testing.assert_allclose(expected, got, rtol=1e-5)


def test_members_of_a_vmap():
    tx = optzoo.lazy_adam(0.1)
    params = jnp.stack([table(1), table(2)])
    state = jax.vmap(tx.init)(params)
    ids = jnp.stack([rows(1).indices, rows(2).indices])
    values = jnp.stack([rows(1).values, rows(2).values])
    one = lambda step, p, s, i, v: step(p, s, SparseRows(i, v, ROWS))
    steps = [step_of(tx), optzoo.native_step(tx)]
    expected, got = (
        jax.jit(jax.vmap(functools.partial(one, f)))(params, state, ids, values) for f in steps
    )
    check_close(expected, got)


# Many devices


def mesh_of(*shape):
    return jax.sharding.Mesh(np.array(jax.devices()).reshape(shape), ("x", "y")[: len(shape)])


COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


@pytest.mark.optimized
@pytest.mark.parametrize("shape", [(8,), (2, 4)])
def test_sharded_arrays_need_no_communication(shape):
    mesh = mesh_of(*shape)
    last = mesh.axis_names[-1]
    specs = [P("x"), P(None, last), P(), P(mesh.axis_names)]
    place = lambda spec: jax.device_put(table(shape=(16, 16)), NamedSharding(mesh, spec))
    params, tx = list(map(place, specs)), optzoo.adam(0.1)
    state = jax.jit(tx.init, out_shardings=optzoo.state_sharding(tx, params))(params)
    grads = [jnp.sin(x) for x in params]
    expected = jax.jit(step_of(tx))(params, state, grads)
    step = jax.jit(optzoo.native_step(tx, required=True), donate_argnums=(0, 1))
    program = step.lower(params, state, grads).compile()
    text = program.as_text()
    assert "optzoo_native_" in text and not any(name in text for name in COLLECTIVES)
    got = program(params, state, grads)
    assert [x.sharding.spec for x in got[0]] == specs
    check_close(expected, got)


def test_a_table_that_xla_shards_is_left_to_xla():
    mesh, tx = mesh_of(8), optzoo.lazy_adam(0.1)
    params = jax.device_put(table(shape=(64, WIDTH)), NamedSharding(mesh, P("x")))
    state = jax.jit(tx.init, out_shardings=optzoo.state_sharding(tx, params))(params)
    grads = rows(0, (64, WIDTH))
    expected = jax.jit(step_of(tx))(params, state, grads)
    program = jax.jit(optzoo.native_step(tx)).lower(params, state, grads).compile()
    assert "optzoo_native_" not in program.as_text()
    check_close(expected, program(params, state, grads))


def test_arrays_with_numbers_of_rows_that_xla_shards_are_left_to_xla():
    mesh, tx = mesh_of(8), optzoo.partial_row_wise_lamb(0.1)
    place = lambda x: jax.device_put(x, NamedSharding(mesh, P("x")))
    params, grads = place(table(shape=(16, 6))), place(table(1, (16, 6)))
    state = jax.jit(tx.init, out_shardings=optzoo.state_sharding(tx, params))(params)
    expected = jax.jit(step_of(tx))(params, state, grads)
    program = jax.jit(optzoo.native_step(tx)).lower(params, state, grads).compile()
    assert "optzoo_native_" not in program.as_text()
    check_close(expected, program(params, state, grads))
    with pytest.raises(RuntimeError, match="of arrays that it divides over devices"):
        jax.jit(optzoo.native_step(tx, required=True)).lower(params, state, grads)


@pytest.mark.optimized
@pytest.mark.parametrize("axes", [{"x"}, {"x", "y"}])
@pytest.mark.parametrize("branches", [False, True])
def test_inside_of_shard_map(axes, branches):
    mesh, tx = mesh_of(2, 4), optzoo.lazy_adam(0.1)
    tx = optax.conditionally_mask(tx, lambda step: step < 9) if branches else tx
    params = table(shape=(8, 8))
    spec = lambda tree: jax.tree.map(lambda a: P("x") if a.ndim else P(), tree)
    state = tx.init(params)
    specs = spec(params), spec(state), P("x")

    def program(step):
        options = {"mesh": mesh, "in_specs": specs, "out_specs": specs[:2], "axis_names": axes}
        return jax.jit(jax.shard_map(step, **options)).lower(params, state, params).compile()

    expected, got = map(program, (step_of(tx), optzoo.native_step(tx, required=True)))
    text = got.as_text()
    assert "optzoo_native_" in text and not any(name in text for name in COLLECTIVES)
    check_close(expected(params, state, params), got(params, state, params))


# Where there is no native code


def test_without_llvmlite(monkeypatch):
    monkeypatch.setattr(engine.importlib.util, "find_spec", lambda name: None)
    engine.problem.cache_clear()
    engine.warn_once.cache_clear()
    tx, params = optzoo.adam(0.1), arrays(0)
    state, grads = tx.init(params), arrays(1)
    try:
        with pytest.warns(
            RuntimeWarning, match=r"llvmlite is missing: pip install 'optzoo\[native\]'"
        ):
            assert calls_in(optzoo.native_step(tx), params, state, grads) == 0
        assert calls_in(optzoo.native_step(tx), params, state, grads) == 0  # without a warning
        with pytest.raises(RuntimeError, match="native code is required: llvmlite is missing"):
            optzoo.native_step(tx, required=True)(params, state, grads)
    finally:
        engine.problem.cache_clear()
        engine.warn_once.cache_clear()


def test_on_other_systems(monkeypatch):
    monkeypatch.setattr(engine.sys, "platform", "plan9")
    assert "native code does not support plan9" in engine.problem.__wrapped__()


def test_code_that_computes_something_else_is_not_used(monkeypatch):
    from optzoo.native import machine

    right = machine.address
    wrong = lambda write: right(lambda name: write(name).replace("fsub contract", "fadd contract"))
    monkeypatch.setattr(machine, "address", wrong)
    assert "a native function returned [2. 2.5 1." in engine.problem.__wrapped__().replace(
        "  ", " "
    )


def test_code_that_cannot_be_compiled(monkeypatch):
    from optzoo.native import machine

    engine.problem()  # which compiles, too
    refuse = lambda text: exec("raise RuntimeError('LLVM IR parsing error')")
    monkeypatch.setattr(machine.Machine, "compile", lambda self, text: refuse(text))
    monkeypatch.setattr(machine, "_compiled", {})
    engine.warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="cannot be compiled: RuntimeError: LLVM IR parsing"):
        expected, got = both(optzoo.adam(0.1), arrays(9), arrays, steps=1, required=False)
    check_close(expected, got)
    with pytest.raises(RuntimeError, match=r"XLA updates .* native code cannot be compiled: Runt"):
        both(optzoo.adam(0.1), arrays(9), arrays, steps=1)
    engine.warn_once.cache_clear()


def test_tables_whose_type_is_weak():
    tx, x = optzoo.lazy_adam(0.1), jnp.full((ROWS, WIDTH), 0.5)
    assert x.weak_type
    expected, got = both(tx, {"t": x}, lambda seed: {"t": rows(seed)}, steps=2)
    check_close(expected, got)


TANH = optax.chain(
    optzoo.momentum(0.1, 0.9), optax.stateless(lambda u, p: jax.tree.map(jnp.tanh, u))
)


@pytest.mark.parametrize(
    ("tx", "reason"),
    [
        (TANH, "'params a': operations that are not supported .*: `tanh`"),
        (optzoo.accumulate(TANH, 2), r"'params a': in a branch: .*: `tanh` \(.*test_step.py:.*\)"),
        (optzoo.ggt(0.1), "operations that are not supported .* `dot_general`"),
        (optax.apply_if_finite(TANH, 3), "'params a': in a branch: .*: `tanh`"),
        (optax.chain(optax.stateless(lambda u, p: jax.debug.print("x") or u)), "side effects"),
    ],
    ids=["unknown", "accumulated", "matrices", "branches", "effects"],
)
def test_what_xla_does_is_an_error_where_native_code_is_required(tx, reason):
    tx, params = optax.with_extra_args_support(tx), arrays(0)
    with pytest.raises(ValueError, match=f"native code is required, but XLA updates .* {reason}"):
        jax.make_jaxpr(optzoo.native_step(tx, required=True))(params, tx.init(params), arrays(1))
    expected, got = both(tx, params, arrays, steps=1, required=False)
    check_close(expected, got)


def of_rows(
    merged=True, twice=False, width=None, more=0, dtype=jnp.float32, turned=False, smooth=False
):
    """An optimizer of two slots, the second one of another shape or dtype."""

    def update(g, state, params=None):
        g = g.coalesce() if merged else g
        sums, others = state
        old = g.gather(sums)
        old = jnp.roll(old, 3, axis=1) if turned else old
        new = old + (jax.nn.softplus(g.values) if smooth else g.values)
        written = g.scatter(sums, new)
        return g.with_values(-new), (
            g.scatter(written, g.values) if twice else written,
            g.scatter(others, g.gather(others) + 1),
        )

    def init(x):
        return jnp.zeros_like(x), jnp.zeros((len(x) + more, width or x.shape[1]), dtype)

    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"smooth": True}, None),  # of the gradients, which XLA computes before
        ({}, None),
        ({"merged": False}, "its rows may repeat, and are not merged"),
        ({"twice": True}, "its rows are written twice"),
        ({"turned": True}, "reads already written elements of its row"),
        ({"width": 5}, "its slots have rows of several shapes"),
        ({"width": 4}, "its slots have rows of several shapes"),
        ({"width": 3}, None),
        ({"width": 2 * WIDTH}, None),
        ({"more": 1}, "its slots have other numbers of rows"),
        ({"dtype": jnp.int16}, "the dtype int16 of `add` .* is not supported"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_rows_that_a_kernel_cannot_update(options, reason):
    tx, x = optax.with_extra_args_support(of_rows(**options)), table()
    trace = lambda: jax.make_jaxpr(optzoo.native_step(tx, required=True))(x, tx.init(x), rows(1))
    if reason is None:
        trace()
    else:
        with pytest.raises(ValueError, match=reason):
            trace()
    check_close(*both(tx, x, rows, steps=2, required=False))


def test_rows_that_need_a_norm_of_themselves_are_left_alone():
    def update(g, state, params=None):
        rows = g["table"].coalesce()
        new = rows.gather(state) + rows.values
        ratio = jnp.sqrt(jnp.sum(rows.drop_padding().values ** 2) + jnp.sum(new) ** 2)
        table = rows.with_values(-new / ratio)
        return {"table": table, "w": -0.1 * g["w"]}, rows.scatter(state, new)

    tx = optax.GradientTransformation(lambda p: p["table"] + 1, update)
    params = {"table": table(), "w": table(1)}
    draw = lambda seed: {"table": rows(seed), "w": table(seed)}
    assert calls_in(optzoo.native_step(tx), params, tx.init(params), draw(0)) == 1
    check_close(*both(tx, params, draw, required=False))


def test_rows_that_need_an_element_of_themselves():
    """It is read before the row is written."""

    def update(g, state, params):
        g = g.coalesce()
        x = g.gather(params)
        change = g.values - 0.1 * x[:, :1] * x
        return g.with_values(change), g.scatter(state, x[:, 2] + x[:, 5])

    tx = optax.GradientTransformation(lambda x: jnp.zeros(len(x)), update)
    check_close(*both(tx, table(), rows))


def test_groups_of_elements_of_rows():
    """Two in each row, which are split and joined."""

    def update(g, state, params=None):
        g = g.coalesce()
        pairs = (g.gather(state) + g.values).reshape(-1, 2, WIDTH // 2)
        pairs /= 1 + greatest(pairs)
        new = pairs.reshape(-1, WIDTH)
        return g.with_values(-new), g.scatter(state, new)

    tx = optax.GradientTransformation(jnp.ones_like, update)
    check_close(*both(tx, table(), rows, steps=2))


def test_rows_that_are_written_and_used_elsewhere():
    def update(g, state, params=None):
        g = g.coalesce()
        new = g.gather(state[0]) + g.values
        norm = jnp.sum(g.with_values(new).drop_padding().values ** 2)
        return g.with_values(-0.1 * new), (g.scatter(state[0], new), norm)

    tx = optax.GradientTransformation(lambda x: (jnp.zeros_like(x), jnp.zeros(())), update)
    check_close(*both(tx, table(), rows))
    step = jax.jit(optzoo.native_step(tx)).trace(table(), tx.init(table()), rows(0))
    assert "optzoo_native_" in step.lower(lowering_platforms=("cpu",)).as_text()
    # A kernel for TPUs gives no rows.
    assert "tpu_custom_call" not in step.lower(lowering_platforms=("tpu",)).as_text()


def test_as_many_ids_as_rows():
    draw = lambda seed: rows(seed, ids=ROWS)
    check_close(*both(optzoo.lazy_adam(0.1), table(), draw))


def test_arguments():
    with pytest.raises(TypeError, match="tx must be"):
        optzoo.native_step(0.1)
    with pytest.raises(ValueError, match="in_place must be 'all' or 'slots', got 'params'"):
        optzoo.native_step(optzoo.adam(0.1), in_place="params")
    with pytest.raises(ValueError, match="native must be False, True or 'require', got 'yes'"):
        optzoo.minimize(lambda p: 0.0, optzoo.adam(0.1), native="yes")


def test_a_wrong_state_is_the_same_error():
    tx, params = optzoo.adam(0.1), arrays(0)
    with pytest.raises(ValueError, match="the state does not match this transformation"):
        optzoo.native_step(tx)(params, optzoo.momentum(0.1, 0.9).init(params), arrays(1))


def test_nothing_is_marked_for_others():
    tx, params = optzoo.lazy_adam(0.1), table()
    text = str(jax.make_jaxpr(step_of(tx))(params, tx.init(params), rows(0)))
    assert "optzoo_rows" not in text


def test_programs_for_other_platforms():
    tx, params = optzoo.lazy_adam(0.1), table()
    traced, required = (
        jax.jit(optzoo.native_step(tx, required=flag)).trace(params, tx.init(params), rows(0))
        for flag in (False, True)
    )
    for each in (traced, required):
        assert "@optzoo_native_" in each.lower(lowering_platforms=("cpu",)).as_text()
        assert "tpu_custom_call" in each.lower(lowering_platforms=("tpu",)).as_text()
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "optzoo_native_" not in text and "custom_call" not in text and "scatter" in text
    with pytest.raises(
        RuntimeError, match="the update on cuda: native code supports CPUs and TPUs"
    ):
        required.lower(lowering_platforms=("cuda",))


def test_export_is_refused():
    tx, params = optzoo.lazy_adam(0.1), table()
    step = jax.jit(optzoo.native_step(tx))
    grads = rows(0).values  # an array: protected ids cannot be exported
    params = grads + 1
    with pytest.raises(ValueError, match=r"custom calls whose targets (.|\n)*optzoo_native_"):
        export.export(step)(params, tx.init(params), grads)


# Training steps


def loss(params, ids, y):
    return jnp.mean((optzoo.lookup(params["table"], ids) @ params["w"] - y) ** 2)


def test_minimize():
    params = {"table": table(), "w": table(shape=(WIDTH, 2))}
    batch = jnp.arange(IDS) % 7, jnp.ones((IDS, 2))
    tx, found = optzoo.lazy_adam(0.1), []
    for native in (False, "require"):
        step, now = optzoo.minimize(loss, tx, native=native), jax.tree.map(jnp.copy, params)
        state = tx.init(now)
        assert ("@optzoo_native_" in step.lower(now, state, *batch).as_text()) == bool(native)
        for _ in range(3):
            now, state, value = step(now, state, *batch, learning_rate=0.2)
        found.append((now, state, value))
    check_close(*found)


@pytest.mark.parametrize("capacity_factor", [1.0, None])
def test_sharded_minimize(capacity_factor):
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "shard"))
    sharding, tx, found = optzoo.sharded.RowSharding(ROWS, 4), optzoo.lazy_adam(0.1), []
    batch = jnp.arange(32) % 7, jnp.ones((32, 2))
    for native in (False, "require"):
        place = lambda x: jax.device_put(x, NamedSharding(mesh, P()))
        of_ids = lambda ids: jnp.sin(ids[:, None] + jnp.arange(WIDTH)[None])
        params = {"table": optzoo.sharded.create_table(sharding, mesh, of_ids)}
        params["w"] = place(table(shape=(WIDTH, 2)))
        state = jax.jit(tx.init, out_shardings=optzoo.state_sharding(tx, params))(params)
        step = optzoo.sharded_minimize(
            loss, tx, mesh, {"table": sharding}, capacity_factor=capacity_factor, native=native
        )
        for _ in range(2):
            params, state, value = step(params, state, *batch)
        found.append((params, state, value))
    check_close(*found)
    text = step.lower(params, state, *batch).as_text()
    assert text.count("@optzoo_native_") == 2


@pytest.mark.parametrize("is_sharded", [True, False])
def test_a_train_step_that_requires_native_code(is_sharded):
    """An array that XLA updates is an error; where native code is not required, it is none."""
    mesh, sharding = jax.make_mesh((4,), ("shard",)), optzoo.sharded.RowSharding(ROWS, 4)
    stored = sharding.stored_rows if is_sharded else ROWS
    shapes = {"table": (stored, WIDTH), "w": (WIDTH, 2)}
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    tx = optzoo.param_groups({"table": optzoo.lazy_adam(0.1), "w": TANH})
    args = params, jax.eval_shape(tx.init, params), jnp.arange(IDS), jnp.ones((IDS, 2))

    def trace(native):
        if is_sharded:
            tables = {"table": sharding}
            step = optzoo.sharded_minimize(loss, tx, mesh, tables, native=native)
        else:
            step = optzoo.minimize(loss, tx, native=native)
        jax.eval_shape(step, *args)

    with pytest.raises(ValueError, match=r"native code is required, .*: `tanh`"):
        trace("require")
    trace(True)
