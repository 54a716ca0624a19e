"""Slots in 8 bits: codes, and everything that reads a state."""

import functools
import pathlib
from typing import Any, NamedTuple

import chex
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import optzoo
from optzoo import SparseRows, slots_dtype
from optzoo.native import engine
from optzoo.rules import Exact, NotNegative, Signed, Sum
from optzoo.state.storage.codes import (
    apart,
    decoded,
    encoded,
    is_coded,
    shape_of,
    stored,
    takes_codes,
)
from optzoo.state.storage.eight_bits import RootCodes, SignedCodes
from optzoo.state.types import LeafwiseState, holds, nodes_of
from optzoo.testing import samples

WIDTH = 40  # a group of 32 and one of 8
SHAPE = (6, WIDTH)
# One program for each shape, where operations one by one would be many.
encode, decode, split = jax.jit(encoded, static_argnums=0), jax.jit(decoded), jax.jit(apart)


def numbers(seed, shape=SHAPE):
    """With magnitudes from 1e-3 to 1e3."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * 10 ** rng.uniform(-3, 3, shape)).astype(np.float32)


# The published formulas, in NumPy.


def groups(x):
    """The groups of 32 of the last axis, filled up with zeros."""
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 32)])
    return padded.reshape(*x.shape[:-1], -1, 32)


def published(kind, x):
    """The codes before they are rounded, and the scales."""
    x = np.sqrt(x) if kind is RootCodes else x
    scale = abs(groups(x)).max(-1, keepdims=True)
    x = groups(x) / np.where(scale > 0, scale, 1)
    y = 255 * x if kind is RootCodes else 127 * (2 * x / (1 + abs(x)))
    return y.reshape(*y.shape[:-2], -1), scale[..., 0].astype(np.float16)


def published_values(kind, codes, scales):
    codes, scales = groups(codes.astype(np.float32)), scales.astype(np.float32)[..., None]
    if kind is RootCodes:
        x = np.square(scales * (codes / 255))
    else:
        y = codes / 127
        x = scales * (y / (2 - abs(y)))
    return x.reshape(*x.shape[:-2], -1)


def check_codes(kind, x, found):
    """The codes are those of the formulas, but where a tie may be rounded to either side."""
    want, scales = (a[..., : x.shape[-1]] for a in published(kind, x))
    found_codes, found_scales = split(found)
    codes = np.asarray(found_codes, np.float32)
    if kind is RootCodes:  # see encoded
        want = np.where((x > 0) & (want < 1), 1, want)
    assert abs(codes - want).max() <= 0.5 + 1e-3
    exact = np.asarray(decode(kind(np.ones_like(found_codes), found_scales)))
    unit = published_values(kind, np.ones_like(x), scales)[..., : x.shape[-1]]
    np.testing.assert_allclose(exact, unit, rtol=1e-6)  # the scales are those of float16


@pytest.mark.parametrize("kind", [SignedCodes, RootCodes])
def test_codes_are_the_published_ones(kind):
    x = numbers(0)
    x = x**2 if kind is RootCodes else x
    found = encode(kind, x)
    assert found.codes.dtype == (jnp.uint8 if kind is RootCodes else jnp.int8)
    assert found.scales.shape == (6, 2) and found.scales.dtype == jnp.uint16
    check_codes(kind, x, found)
    values = published_values(kind, np.asarray(found.codes), published(kind, x)[1])[..., :WIDTH]
    np.testing.assert_allclose(decode(found), values, rtol=2e-6)
    again = encode(kind, decode(found))
    chex.assert_trees_all_equal(again, found)


@pytest.mark.parametrize("kind", [SignedCodes, RootCodes])
@pytest.mark.parametrize("scale", [1e-12, 1e-7, 1.0, 1e4])
def test_the_error_is_a_fraction_of_the_greatest_one(kind, scale):
    """In float16 scales below 6e-8 would be zero."""
    x = scale * np.linspace(0.01, 1, WIDTH, dtype=np.float32)
    found = np.asarray(decode(encode(kind, x[None] ** (2 if kind is RootCodes else 1))))[0]
    found = np.sqrt(found) if kind is RootCodes else found
    np.testing.assert_allclose(found, x, atol=scale / 100)


@pytest.mark.parametrize("kind", [SignedCodes, RootCodes])
def test_zero_infinity_and_nan(kind):
    x = np.zeros((4, 8), np.float32)
    x[1, 2], x[2, 0], x[3, 5] = np.inf, np.nan, 1
    zero, infinite, nan, one = np.asarray(decode(encode(kind, x)))
    assert not zero.any() and np.isnan(nan).all()
    np.testing.assert_array_equal(one, x[3])  # zeros beside another number
    assert np.isfinite(infinite).all() and infinite[2] > 6e4  # as saturating casts to 16 bits


def test_scales_are_rounded_as_in_float16():
    """At a tie to the even neighbour."""
    ties = np.float32([[1 + 2**-11] * 8, [1 + 3 * 2**-11] * 8, [-1.0001] * 8])
    scales = np.asarray(decode(encode(SignedCodes, ties)))[:, 0]
    np.testing.assert_array_equal(scales, ties[:, 0].astype(np.float16))


def test_no_small_square_becomes_zero():
    """An update is divided by its root."""
    x = np.full((1, 32), 1e-12, np.float32)
    x[0, 0], x[0, 1] = 1, 0
    for bits in (None, np.zeros((1, 32), np.uint32)):
        codes = np.asarray(encode(RootCodes, x, bits).codes)
        np.testing.assert_array_equal(codes, [[255, 0] + [1] * 30])


@pytest.mark.parametrize("kind", [SignedCodes, RootCodes])
def test_random_bits_round_in_proportion(kind):
    """Over all 16 bits the mean of the codes is the exact one; a tie to the nearest is none."""
    x = np.abs(numbers(1, (1, 32))) + 30
    x = x**2 if kind is RootCodes else -x
    every = np.arange(0, 2**16, 2**6, dtype=np.uint32)
    bits = np.broadcast_to(every[:, None, None], (len(every), 1, 32))
    codes = jax.jit(jax.vmap(lambda b: encoded(kind, x, b).codes))(bits)
    mean = np.asarray(codes, np.float64).mean(0)
    np.testing.assert_allclose(mean, published(kind, x)[0], atol=2e-3)


@pytest.mark.parametrize("kind", [SignedCodes, RootCodes])
def test_random_bits_do_not_pass_the_greatest_code(kind):
    x = np.random.default_rng(5).normal(size=(500, 32)).astype(np.float32)
    x = x**2 if kind is RootCodes else x
    codes = np.asarray(encode(kind, x, np.full(x.shape, 0xFFFF, np.uint32)).codes)
    greatest = np.take_along_axis(codes, abs(x).argmax(-1)[:, None], -1)
    np.testing.assert_array_equal(abs(greatest), 255 if kind is RootCodes else 127)


def test_the_least_width():
    """Of the last axis, of two axes or more."""
    shapes = [(4, 0), (4, 1), (4, 7), (4, 8), (4, 9), (2, 2, 7), (2, 2, 8), (8,), (9,)]
    found = [takes_codes(jax.ShapeDtypeStruct(shape, jnp.float32)) for shape in shapes]
    assert found == [len(shape) > 1 and shape[-1] >= 8 for shape in shapes]


# The ends of the range of scales: 2**-46 and below, and the greatest.

LEAST, GREATEST = 2.0**-47, 2.0**17 - 2.0**7  # of scales; that of LEAST itself is 0


def test_scales_around_the_ends():
    """Next to each end, at it, and beyond it: the nearest scale that there is, or 0."""
    least = LEAST * (1 + 2.0**-10)
    small = [0, 2.0**-126, 1e-30, LEAST / 4, LEAST / 2, 0.999 * LEAST, LEAST]
    small += [LEAST * (1 + 2.0**-12), LEAST * (1 + 2.0**-11) * 1.0001, least]
    middle = [2 * LEAST * (1 - 2.0**-12), 2 * LEAST, 3 * LEAST, 1, GREATEST * (1 - 2.0**-11)]
    x = np.float32([*small, *middle, GREATEST, GREATEST * 1.01, 2.0**17, 2.0**18, 3e38, np.inf])
    step = lambda a: 2.0 ** (np.floor(np.log2(np.maximum(a, 2.0**-140))) - 10)
    wide = np.minimum(np.float64(x), GREATEST)
    want = np.where(wide < LEAST * (1 + 2.0**-11), 0, np.round(wide / step(wide)) * step(wide))
    for sign in (1, -1):
        groups = np.tile(sign * x[:, None], (1, 8))
        np.testing.assert_allclose(decode(encode(SignedCodes, groups))[:, 0], sign * want, 1e-6)
    x = np.minimum(x, np.float32(2.0**18))  # its square is no infinity
    roots = np.asarray(decode(encode(RootCodes, np.tile(x[:, None], (1, 8)) ** 2)))[:, 0]
    normal = (x == 0) | (x > 2.0**-62)  # others have no square in float32
    np.testing.assert_allclose(roots[normal], want[normal] ** 2, rtol=1e-6)


@pytest.mark.parametrize("kind", [SignedCodes, RootCodes])
def test_infinity_is_the_greatest_number(kind):
    """The codes of the group are those beside it."""
    power = 1 if kind is SignedCodes else 2
    x = GREATEST * np.random.default_rng(13).uniform(size=(500, 32))
    x[:, 0] = GREATEST
    beside = np.where(np.arange(32) == 0, np.inf, x**power).astype(np.float32)
    chex.assert_trees_all_equal(encode(kind, beside), encode(kind, np.float32(x**power)))


LONG = 800


def multiplied(kind, factor):
    """The greatest element of a group after each of many multiplications, in codes each time."""
    x = jnp.array([[1.0, -1.0 if kind is SignedCodes else 1.0] * 4])

    @jax.jit
    def run():
        def body(codes, _):
            codes = encoded(kind, decoded(codes) * np.float32(factor))
            return codes, decoded(codes)[0]

        return jax.lax.scan(body, encoded(kind, x), length=LONG)[1]

    return np.asarray(run(), np.float64)


@pytest.mark.parametrize("factor", [0.5, 0.8, 0.95, 1.05, 1.25, 2.0])
@pytest.mark.parametrize("kind", [SignedCodes, RootCodes])
def test_hundreds_of_steps_in_one_direction(kind, factor):
    """To nothing, where it stays; or to the greatest number, where it stays."""
    of_scale = 1 if kind is SignedCodes else 2
    found = multiplied(kind, factor**of_scale)
    t = np.arange(1, LONG + 1)
    # The scale is rounded to 11 bits in each step.
    low, high = (factor**t * (1 + e * 2.0**-11) ** t for e in (-1.001, 1.001))
    scales = np.abs(found) ** (1 / of_scale)
    assert (np.abs(scales - scales[:, :1]) <= 1e-6 * scales).all()  # of the whole group
    scales = scales[:, 0]
    is_within = (low > 2 * LEAST) & (high < GREATEST)
    assert (scales[is_within] >= low[is_within] * (1 - 1e-6)).all()
    assert (scales <= np.minimum(high, GREATEST) * (1 + 1e-6)).all()
    is_over = (high < LEAST) | (low > GREATEST)
    assert is_over.any() and not is_over.all()
    end = 0 if factor < 1 else GREATEST
    np.testing.assert_allclose(scales[is_over], end, rtol=1e-6)
    sign = [1, -1] * 4 if kind is SignedCodes else [1] * 8
    assert (found * sign >= 0).all()


@pytest.mark.parametrize("kind", [SignedCodes, RootCodes])
def test_scales_beside_codes(kind):
    """Matrices of 128 columns or less have them in their rows, and no other array has."""
    xs = {width: abs(numbers(width, (5, width))) for width in (8, 32, 33, 40, 96, 97, 128)}
    for x in xs.values():
        x[1] *= 1e-9
        x[2, -1] = np.nan

    @jax.jit
    def in_each_form(xs):
        from_numbers = {width: encoded(kind, x) for width, x in xs.items()}
        found = {width: stored(codes) for width, codes in from_numbers.items()}
        return from_numbers, found, {width: apart(codes) for width, codes in found.items()}

    from_numbers, found, parts = in_each_form(xs)
    for width, x in xs.items():
        codes, scales = found[width]
        assert codes.shape == (5, width + 2 * -(-width // 32)) and scales == ()
        assert codes.dtype == from_numbers[width].codes.dtype
        assert shape_of(found[width]) == x.shape
        chex.assert_trees_all_equal(parts[width], tuple(from_numbers[width]))
        # Not compiled: other fusions round otherwise.
        chex.assert_trees_all_equal(decoded(found[width]), decoded(from_numbers[width]))
    for shape in ((5, 129), (2, 5, 64)):
        x = jax.ShapeDtypeStruct(shape, jnp.float32)
        found = jax.eval_shape(lambda x: stored(encoded(kind, x)), x)
        assert found.codes.shape == shape == shape_of(found) and found.scales.dtype == jnp.uint16


def test_codes_are_decoded_once_for_each_shape(monkeypatch):
    """Decoding takes longer to trace than the rest of the update."""
    shapes, decode = [], RootCodes.decode
    counted = lambda codes, scale: shapes.append(codes.shape) or decode(codes, scale)
    monkeypatch.setattr(RootCodes, "decode", staticmethod(counted))
    tx, params = slots_dtype(optzoo.adam(0.1), "int8"), {i: jnp.ones((11, 64)) for i in range(3)}
    jax.jit(tx.update).trace(params, jax.eval_shape(tx.init, params))
    assert shapes == [(11, 2, 32)]


def test_codes_have_no_derivative():
    tx, x = slots_dtype(optzoo.adam(0.1), "int8"), jnp.ones(SHAPE)
    with pytest.raises(TypeError, match="no derivative"):
        jax.eval_shape(jax.grad(lambda g: jnp.sum(tx.update(g, tx.init(x), x)[0])), x)


# Optimizers: each step from the state before by the formulas, for a thousand steps.


class LionSlots(NamedTuple):
    """The slot of Lion."""

    m: Signed


def optzoo_lion(rate):
    """Not an optimizer of this library: as a user would write it."""

    def rule(g, x, s, t):
        return -rate * jnp.sign(0.9 * s.m + 0.1 * g), LionSlots(0.99 * s.m + 0.01 * g)

    return optzoo.rules.leafwise(rule, slots=LionSlots(optzoo.rules.zeros))


def adam(g, s, t):
    m, v = 0.9 * s["m"] + 0.1 * g, 0.999 * s["v"] + 0.001 * g * g
    size = np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
    return -0.01 * size * m / (np.sqrt(v) + 1e-8), {"m": m, "v": v}


def momentum(g, s, t):
    m = 0.9 * s["momentum"] + g
    return -0.01 * m, {"momentum": m}


def lion(g, s, t):
    return -0.01 * np.sign(0.9 * s["m"] + 0.1 * g), {"m": 0.99 * s["m"] + 0.01 * g}


REPLAYS = {
    "adam": (optzoo.adam(0.01), adam, 0.0),
    "adamw": (optzoo.adamw(0.01, weight_decay_per_step=1e-3), adam, 1e-3),
    "momentum": (optzoo.momentum(0.01, 0.9), momentum, 0.0),
    "lion": (optzoo_lion(0.01), lion, 0.0),
}
STEPS = 1000


@pytest.mark.parametrize("name", REPLAYS)
def test_a_thousand_steps_by_the_formulas(name):
    """On a quadratic with noise. Each step starts where ours is, so errors do not add up."""
    tx, formula, decay = REPLAYS[name]
    tx = slots_dtype(tx, "int8")
    x, noise = numbers(3) / 100, np.random.default_rng(4)
    noise = noise.normal(size=(STEPS, *SHAPE)).astype(np.float32) * 10.0 ** noise.integers(
        -4, 2, SHAPE
    )
    gradients = lambda x, noise: 0.1 * x + noise

    @jax.jit
    def run(x, noise):
        def body(carry, noise):
            x, _ = carry
            after, state = samples.step_of(tx)(*carry, gradients(x, noise))
            return (after, state), (x, state, after)

        return jax.lax.scan(body, (x, tx.init(x)), noise)[1]

    befores, states, afters = run(x, noise.astype(np.float32))
    [found] = nodes_of(LeafwiseState, states)
    slots = {k: jax.tree.map(np.asarray, a) for k, a in found.slots._asdict().items()}
    for t in range(1, STEPS, 7):
        before = {k: jax.tree.map(lambda x, t=t: x[t - 1], a) for k, a in slots.items()}
        loaded = {k: np.asarray(decode(a)) for k, a in before.items()}
        g = np.asarray(gradients(befores[t], noise[t].astype(np.float32)))
        u, want = formula(g, loaded, t + 1)
        for k, a in slots.items():
            check_codes(
                type(a), np.asarray(want[k], np.float32), jax.tree.map(lambda x, t=t: x[t], a)
            )
        np.testing.assert_allclose(
            afters[t], befores[t] + u - decay * befores[t], rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_zero_gradients_until_slots_are_nothing(name):
    """After one gradient: a step moves no element more than in float32."""
    tx, formula, _ = REPLAYS[name]
    grads = np.zeros((600, 2, 8), np.float32)
    grads[0] = [[1] * 8, [-1e-3] * 8]
    got, _ = samples.run(slots_dtype(tx, "int8"), grads)
    slots, want = dict.fromkeys(("m", "v", "momentum"), 0.0), []
    for t, g in enumerate(np.float64(grads), 1):
        update, slots = formula(g, slots, t)
        want.append(update)
    want = np.array(want)
    assert np.isfinite(got).all() and (np.abs(got) <= 1.2 * np.abs(want)).all()
    np.testing.assert_allclose(got[:50], want[:50], rtol=0.05)


@pytest.mark.skipif(engine.problem() is not None, reason=str(engine.problem()))
def test_native_code_at_the_ends():
    """The same codes where scales become 0, and where they are the greatest."""
    tx = slots_dtype(optzoo.momentum(0.1, 0.5), "int8")
    g = np.outer(np.float32([0, 3e-14, 1.5e-14, 7e-15, 7.2e-15, 1e5, 1.3e5, 3e38]), np.ones(160))
    g, zeros = g.astype(np.float32), np.zeros_like(g, np.float32)
    native, plain = optzoo.native_step(tx, required=True), jax.jit(samples.step_of(tx))
    (x, state), (y, other) = ((jnp.zeros(g.shape), tx.init(zeros)) for _ in range(2))
    for now in (g, g, zeros, zeros, zeros, zeros):
        x, state = native(x, state, now)
        y, other = plain(y, other, now)
        chex.assert_trees_all_equal(state, other)
        np.testing.assert_allclose(x, y, rtol=1e-6)


# Which slots

SUMS = "adagrad adagrad_da adagrad_eps counter_row_wise_adagrad cowclip_row_wise_adagrad ftrl"
SUMS += " global_decay_row_wise_adagrad proximal_adagrad reg_adagrad row_wise_adagrad"
# The last ones have numbers for each row, and for each column.
REFUSED = {*SUMS.split(), "row_wise_rmsprop", "adafactor"}
CODED = {
    "adadelta": "accum accum_update",
    "adam_weight_decay": "adam_m adam_v",
    "adamax": "m v",
    "add_sign": "m",
    "amsgrad": "m v v_hat",
    "blocked_shampoo": "gbar",
    "ggt": "moment1",
    "gradient_descent": "",
    "lamb": "adam_m adam_v",
    "lars": "momentum",
    "momentum": "momentum",
    "momentumw": "momentum",
    "muon": "momentum_buffer",
    "neural_optimizer1": "m",
    "normalized_sgd": "",
    "partial_row_wise_adam": "m",
    "partial_row_wise_lamb": "m",
    "power_sign": "m",
    "proximal_gradient_descent": "",
    "rmsprop": "rms momentum",
    "row_wise_lars": "momentum",
    "shampoo": "gbar",
}  # all others: m and v
PARAMS = {"w": jnp.ones((4, 16)), "b": jnp.ones(16), "few": jnp.ones((4, 2))}


def test_which_slots_are_in_8_bits(entry):
    """Means and decaying sums of arrays with 8 columns or more, and nothing else."""
    tx, name = slots_dtype(samples.make(entry), "int8"), entry.factory.__name__
    if name in REFUSED:
        with pytest.raises(ValueError, match="dtype=int8 applies to no slot of inner"):
            tx.init(PARAMS)
        return
    state = tx.init(PARAMS)
    found = {
        slot
        for node in nodes_of(LeafwiseState, state)
        for slot, tree in node.slots._asdict().items()
        if any(map(is_coded, jax.tree.leaves(tree, is_leaf=is_coded)))
    }
    assert found == {*CODED.get(name, "m v").split()}
    for slot in found:
        assert {path for path, a in tree_of(state, slot).items() if is_coded(a)} == {"w"}
    updates, after = tx.update(jax.tree.map(jnp.cos, PARAMS), state, PARAMS)
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
    chex.assert_tree_all_finite(updates)


def tree_of(state, slot):
    """The arrays of a slot as they are stored, by parameter."""
    [tree] = [
        n.slots._asdict()[slot] for n in nodes_of(LeafwiseState, state) if slot in n.slots._fields
    ]
    return tree


# What reads and writes states


def table_and_kernel(width=WIDTH):
    return {"t": numbers(5, (12, width)), "w": numbers(6, (width, 8)) / 100}


def loss(params, ids):
    rows = optzoo.lookup(params["t"], ids) / 100
    return jnp.mean((rows @ params["w"] - 1) ** 2)


IDS = np.array([[1, 5, 1, 7], [3, 5, 11, 1], [0, 2, 2, 5]])


def train(tx, params, state=None, **options):
    params = jax.tree.map(jnp.array, params)
    state = jax.jit(tx.init)(params) if state is None else state
    step = optzoo.minimize(loss, tx, **options)
    for ids in IDS:
        params, state, _ = step(params, state, ids)
    return params, state


@pytest.fixture(scope="module")
def trained():
    tx = slots_dtype(optzoo.lazy_adam(0.1), "int8")
    return tx, *train(tx, table_and_kernel())


def test_rows_are_those_of_the_touched_rows_alone(trained):
    """Codes and scales of others do not change; those of touched rows are as in a smaller table."""
    tx, params, state = trained
    touched = np.unique(IDS)
    for slot in ("m", "v"):
        for a in split(tree_of(state, slot)["t"]):
            np.testing.assert_array_equal(np.asarray(a).any(1), np.isin(np.arange(12), touched))
    small = {**table_and_kernel(), "t": table_and_kernel()["t"][touched]}
    step, small_state = optzoo.minimize(loss, tx), jax.jit(tx.init)(small)
    for ids in IDS:
        small, small_state, _ = step(small, small_state, np.searchsorted(touched, ids))
    chex.assert_trees_all_close(small["t"], params["t"][touched], rtol=1e-5)
    for slot in ("m", "v"):
        rows = jax.tree.map(lambda a: a[touched], tree_of(state, slot)["t"])
        chex.assert_trees_all_close(
            decode(tree_of(small_state, slot)["t"]), decode(rows), rtol=0.02
        )


class Two(NamedTuple):
    """Slots that hold the same."""

    a: Signed
    b: Signed


def rule_of_two(g, x, s, t):
    return -g, Two(g, g)


def test_random_rounding_is_the_same_for_rows_and_arrays():
    tx = slots_dtype(optzoo.lazy_adam(0.1), "int8", stochastic=True, seed=3)
    x, g = jnp.ones(SHAPE), np.random.default_rng(7).normal(size=SHAPE).astype(np.float32)
    _, dense = tx.update(g, tx.init(x), x)
    rows = SparseRows(jnp.arange(6)[::-1], jnp.asarray(g[::-1]), 6)
    _, sparse = tx.update(rows, tx.init(x), x)
    chex.assert_trees_all_equal(sparse[0].slots, dense[0].slots)
    _, nearest = slots_dtype(optzoo.lazy_adam(0.1), "int8").update(g, tx.init(x), x)
    for a, b in zip(dense[0].slots, nearest[0].slots, strict=True):
        assert 0.15 < np.mean(np.asarray(a.codes) != b.codes) < 0.35  # a quarter
    twice = slots_dtype(
        optzoo.rules.leafwise(rule_of_two, slots=Two(optzoo.rules.zeros, optzoo.rules.zeros)),
        "int8",
        stochastic=True,
    )
    _, two = twice.update(g, twice.init(x), x)
    assert (two.slots.a.codes != two.slots.b.codes).any()  # each slot has random bits of its own
    _, again = tx.update(g, tx.init(x), x, rounding_seed=4)
    assert (again[0].slots.m.codes != dense[0].slots.m.codes).any()


@pytest.mark.skipif(engine.problem() is not None, reason=str(engine.problem()))
@pytest.mark.parametrize("stochastic", [False, True])
def test_native_code_makes_the_same_codes(stochastic):
    """Rows with one and with several groups, with scales beside codes and apart; arrays."""
    rng = np.random.default_rng(11)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    tables = {"filled": (50, 72), "one": (50, 9), "several": (50, 64), "wide": (50, 160)}
    shapes = {**tables, "w": (6, 160), "w3": (2, 3, 96), "b": (5,)}
    params = {name: draw(*shape) for name, shape in shapes.items()}
    tx = slots_dtype(optzoo.lazy_adam(0.1), "int8", stochastic=stochastic, seed=3)
    native = jax.jit(optzoo.native_step(tx, required=True))

    plain = jax.jit(samples.step_of(tx))
    got = expected = params, jax.jit(tx.init)(params)
    for _ in range(3):
        grads = {name: draw(*shape) for name, shape in shapes.items()}
        for name in tables:
            ids = jnp.asarray(rng.integers(-1, 51, 80), jnp.int32)
            grads[name] = SparseRows(ids, draw(80, shapes[name][1]), 50)
        got, expected = native(*got, grads), plain(*expected, grads)
    chex.assert_trees_all_close(got[0], expected[0], rtol=1e-5, atol=1e-6)
    leaves = functools.partial(jax.tree.leaves, is_leaf=is_coded)
    parts = jax.jit(lambda state: [apart(a) if is_coded(a) else a for a in leaves(state)])
    for a, b in zip(parts(got[1]), parts(expected[1]), strict=True):
        if not isinstance(a, tuple):
            np.testing.assert_allclose(a, b, rtol=1e-6)
            continue
        codes, scales = zip(a, b, strict=True)
        np.testing.assert_array_equal(*scales)
        differ = abs(np.subtract(*(np.asarray(x, int) for x in codes)))
        # A number may be rounded to another one where XLA contracts other products and sums.
        assert differ.max() <= 1 and differ.mean() < 1e-3


@pytest.mark.parametrize("stochastic", [False, True])
def test_no_rows(stochastic):
    """Of a gradient none is listed, or of a parameter none is there: nothing changes."""
    tx = slots_dtype(optzoo.lazy_adam(0.1), "int8", stochastic=stochastic)
    x = {"t": jnp.ones(SHAPE), "none": jnp.zeros((0, 16))}
    none = SparseRows(jnp.zeros(0, jnp.int32), jnp.zeros((0, WIDTH)), 6)

    @jax.jit
    def step(x, state):
        updates, state = tx.update({"t": none, "none": x["none"]}, state, x)
        return updates["t"].to_dense(), updates["none"], state

    state = tx.init(x)
    *updates, after = step(x, state)
    assert not updates[0].any() and updates[1].shape == (0, 16)
    chex.assert_trees_all_equal(after[0].slots, state[0].slots)
    assert optzoo.get_slot(after, "m")["none"].shape == (0, 16)


@pytest.mark.skipif(engine.problem() is not None, reason=str(engine.problem()))
def test_no_rows_in_native_code():
    tx, x = slots_dtype(optzoo.lazy_adam(0.1), "int8"), jnp.ones((12, 8))
    step = optzoo.minimize(lambda x, ids: jnp.sum(optzoo.lookup(x, ids)), tx, native=True)
    after, _, _ = step(x + 0, tx.init(x), jnp.zeros(0, jnp.int32))
    np.testing.assert_array_equal(after, x)


@pytest.mark.parametrize("width", [40, 64, 136])
def test_arrays_with_other_groups_are_left_to_xla(width):
    """Those with scales beside their codes, and those whose groups are filled up."""
    tx, x = slots_dtype(optzoo.adam(0.1), "int8"), jnp.ones((3, width))
    step, state = optzoo.native_step(tx, required=True), jax.eval_shape(tx.init, x)
    with pytest.raises(ValueError, match="native code is required"):
        jax.eval_shape(step, x, state, x)


def test_tables_in_lines(trained):
    tx, params, state = trained
    like = {**table_and_kernel(), "t": optzoo.rows.to_lines(table_and_kernel()["t"])}
    lines, in_lines = train(tx, like)
    assert tree_of(in_lines, "m")["t"].value.codes.value.shape == (2, 384)  # eight rows in each
    chex.assert_trees_all_close(optzoo.rows.from_lines(lines), params, rtol=1e-5)
    chex.assert_trees_all_close(
        optzoo.get_slot(optzoo.rows.from_lines(in_lines), "m"),
        optzoo.get_slot(state, "m"),
        rtol=0.02,
        atol=1e-6,
    )


@pytest.mark.parametrize("lines", [False, True])
def test_sharded_tables(trained, lines):
    """Four devices, each with a part of the batch, and several rounds: as one device."""
    tx, params, state = trained
    mesh, sharding = (
        Mesh(np.array(jax.devices()[:4]), ("shard",)),
        optzoo.sharded.RowSharding(12, 4, multiple=4 * 3 * 8 if lines else 1),
    )
    start = jax.tree.map(jnp.asarray, table_and_kernel())
    rows_of = lambda ids: start["t"].at[ids].get(mode="fill", fill_value=0)
    everywhere = jax.device_put(start["w"], NamedSharding(mesh, PartitionSpec()))
    sharded = {
        "t": optzoo.sharded.create_table(sharding, mesh, rows_of, lines=lines),
        "w": everywhere,
    }
    shardings = optzoo.state_sharding(tx, sharded)
    sharded_state = jax.jit(tx.init, out_shardings=shardings)(sharded)
    step = optzoo.sharded_minimize(loss, tx, mesh, {"t": sharding}, capacity_factor=0.25)
    for ids in IDS:
        sharded, sharded_state, _ = step(sharded, sharded_state, ids)
    sharded, sharded_state = optzoo.rows.from_lines((sharded, sharded_state))
    found = optzoo.sharded.in_order_of_ids((sharded, sharded_state), {"t": sharding}, sharded)
    found[0]["t"] = found[0]["t"][:12]  # the others fill up the shards
    chex.assert_trees_all_close(found[0], params, rtol=1e-5, atol=1e-6)
    for slot in ("m", "v"):
        ours, theirs = (tree_of(s, slot)["t"] for s in (found[1], state))
        ours, theirs = np.asarray(decode(ours))[:12], decode(theirs)
        np.testing.assert_allclose(ours, theirs, rtol=0.02, atol=1e-7)


def test_get_and_set_by_name(trained):
    _, _, state = trained
    m = optzoo.get_slot(state, "m")
    np.testing.assert_array_equal(m["t"], decoded(tree_of(state, "m")["t"]))
    again = optzoo.set_slot(optzoo.set_slot(state, "m", jax.tree.map(jnp.zeros_like, m)), "m", m)
    chex.assert_trees_all_equal(again, state)


def test_flax_serialization(trained):
    tx, params, state = trained
    read = flax.serialization.from_bytes(tx.init(params), flax.serialization.to_bytes(state))
    chex.assert_trees_all_equal(read, state)


def test_from_one_storage_to_another(trained):
    """By one call; a step with the state in float32 starts from the same numbers."""
    tx, params, state = trained
    plain = optzoo.lazy_adam(0.1)
    wide = optzoo.state.slots_like(state, jax.eval_shape(plain.init, params))
    assert jax.tree.structure(wide) == jax.tree.structure(plain.init(params))
    chex.assert_trees_all_equal(optzoo.get_slot(wide, "v"), optzoo.get_slot(state, "v"))
    chex.assert_trees_all_equal(
        optzoo.state.slots_like(wide, jax.eval_shape(tx.init, params)), state
    )
    half = slots_dtype(plain, "bfloat16", packed=True)
    packed = optzoo.state.slots_like(state, jax.eval_shape(half.init, params))
    chex.assert_trees_all_close(
        optzoo.get_slot(packed, "v"),
        jax.tree.map(lambda a: a.astype("bfloat16"), optzoo.get_slot(state, "v")),
    )
    with pytest.raises(ValueError, match=r"expected MomentumSlots\(momentum\), got AdamSlots"):
        optzoo.state.slots_like(state, optzoo.momentum(0.1, 0.9).init(params))


def test_tables_that_grow(trained):
    tx, params, state = trained
    _, larger = optzoo.growing.resize_table(params, state, {"t": 15}, tx=tx)
    for slot in ("m", "v"):
        pairs = zip(*(split(tree_of(s, slot)["t"]) for s in (larger, state)), strict=True)
        for new, old in pairs:
            new = np.asarray(new)
            np.testing.assert_array_equal(new[:12], old)
            assert len(new) == 15 and not new[12:].any()
    _, reset = optzoo.growing.reset_rows(params, state, {"t": jnp.array([5])}, tx=tx)
    assert not tree_of(reset, "m")["t"].codes[5].any() and tree_of(reset, "m")["t"].codes[1].any()


def test_shardings_of_states():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("d", "e"))
    placed = lambda shape, *spec: jax.ShapeDtypeStruct(
        shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec))
    )
    params = {
        "rows": placed((8, 64), "d"),
        "long": placed((8, 256), None, "d"),
        "short": placed((8, 160), None, "d"),
        "deep": placed((8, 3, 160), "d", None, "e"),
        "beside": placed((8, 64), None, "d"),  # its rows have their scales in them
    }
    tx = slots_dtype(optzoo.adam(0.1), "int8")
    with pytest.warns(UserWarning, match=r"8-bit slots of .beside.*short. are not divided"):
        places = optzoo.state_sharding(tx, params)
    specs = jax.tree.map(lambda s: s.spec, places[0].slots.m)
    assert specs["rows"] == (PartitionSpec("d"), ())
    assert specs["beside"] == (PartitionSpec(), ())
    assert specs["long"] == (PartitionSpec(None, "d"), PartitionSpec(None, "d"))
    assert specs["short"] == (PartitionSpec(None, "d"), PartitionSpec())
    assert specs["deep"] == (PartitionSpec("d", None, "e"), PartitionSpec("d"))
    zeros = jax.tree.map(lambda x: jax.device_put(jnp.zeros(x.shape), x.sharding), params)
    jax.jit(tx.init, out_shardings=places)(zeros)


def test_shards_that_lines_do_not_divide():
    """Lines of codes have 8 rows with 40 elements, those of the table 3."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("shard",))
    table = optzoo.sharded.create_table(
        optzoo.sharded.RowSharding(12, 4, multiple=12),
        mesh,
        lambda ids: jnp.zeros((len(ids), 40)),
        lines=True,
    )
    with pytest.raises(
        ValueError, match=r"12 rows in a shard.* the 8 rows of a line.*multiple= of 8 times"
    ):
        optzoo.state_sharding(slots_dtype(optzoo.lazy_adam(0.1), "int8"), {"t": table})


def test_stacked_leaves():
    params = {f"w{i}": jnp.asarray(numbers(i)) for i in range(3)}
    grads = jax.tree.map(lambda x: x / 3, params)
    one, many = (
        slots_dtype(tx, "int8") for tx in (optzoo.stacked(optzoo.adam(0.1)), optzoo.adam(0.1))
    )
    found, state = one.update(grads, one.init(params), params)
    want, usual = many.update(grads, many.init(params), params)
    chex.assert_trees_all_close(found, want, rtol=1e-6)
    chex.assert_trees_all_equal(optzoo.get_slot(state, "v"), optzoo.get_slot(usual, "v"))


RATIOS = 1 / np.array([1, 10, 100, 250, 500, 1000, 10_000])


@functools.cache
def gradients_of_groups():
    """1,000 gradients of groups whose first element is greater than the others by a ratio each."""
    draw = np.random.default_rng(0).normal(size=(1000, len(RATIOS), 16, 32))
    size = np.broadcast_to(RATIOS[:, None, None], draw.shape[1:]).copy()
    size[..., 0] = 1
    return np.float32(size * (1 + draw)).reshape(1000, -1, 32)


def distances(moved):
    return np.abs(np.reshape(moved, (len(RATIOS), 16, 32)))[..., 1:].mean((1, 2))


@functools.cache
def distances_of_adam():
    """How far the other elements move, by NumPy."""
    m = v = x = 0.0
    for t, g in enumerate(np.float64(gradients_of_groups()), 1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        x = x - 1e-3 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    return distances(x)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("stochastic", [False, True])
def test_small_elements_of_a_group_move_less(dtype, stochastic):
    """By the factors of the page; not as float8."""
    tx = optzoo.slots_dtype(optzoo.adam(1e-3), dtype, stochastic=stochastic)
    x = jnp.zeros(gradients_of_groups().shape[1:])

    def one(carry, g):
        updates, state = tx.update(g, carry[1], carry[0])
        return (carry[0] + updates, state), None

    (moved, _), _ = jax.lax.scan(one, (x, tx.init(x)), gradients_of_groups())
    got = distances(moved) / distances_of_adam()
    page = (pathlib.Path(__file__).parents[2] / "docs/tasks/little_memory.md").read_text()
    name = f'`"{dtype}"`' + (", `stochastic=True`" if stochastic else "")
    [row] = [line for line in page.splitlines() if line.startswith(f"| {name} |")]
    np.testing.assert_allclose(got, [float(cell) for cell in row.split("|")[2:-1]], rtol=0.05)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("stochastic", [False, True])
def test_strict_promotion(dtype, stochastic):
    """Of a table whose scales are beside codes, and of an array whose scales are apart."""
    tx = slots_dtype(optzoo.lazy_adam(0.1), dtype, stochastic=stochastic)
    x = {"table": jnp.ones((5, 40), jnp.bfloat16), "w": jnp.ones((2, 3, 64))}
    rows = SparseRows(jnp.array([3, 1]), jnp.ones((2, 40), jnp.bfloat16), 5)
    with jax.numpy_dtype_promotion("strict"):
        state = jax.eval_shape(tx.init, x)
        _, after = jax.eval_shape(tx.update, {"table": rows, "w": x["w"]}, state, x)
    assert samples.avals(after) == samples.avals(state)


@pytest.mark.parametrize("stochastic", [False, True])
def test_mean_squares_of_constant_gradients_stop(stochastic):
    """As the page says: a step would be the rate, and a mean square 1."""
    tx = optzoo.slots_dtype(optzoo.adam(1e-3), "int8", stochastic=stochastic)
    g = jnp.ones((2, 32))

    def one(state, _):
        updates, state = tx.update(g, state, g)
        return state, updates[0, 0]

    state, updates = jax.lax.scan(one, tx.init(g), length=5000)
    np.testing.assert_allclose(optzoo.get_slot(state, "v"), 0.62, rtol=0.01)
    np.testing.assert_allclose(updates[-1], -1.27e-3, rtol=0.01)


def test_sizes():
    """Codes and two bytes for each group."""
    found = optzoo.describe(slots_dtype(optzoo.lazy_adam(0.1), "int8"), table_and_kernel(64))
    sizes = {(s.slot, s.parameter): (s.dtype, s.nbytes) for s in found.slots}
    assert sizes["m", "t"] == ("int8", 12 * (64 + 2 * 2)) and sizes["v", "t"][0] == "uint8"


def test_states_of_other_parameters():
    tx = slots_dtype(optzoo.adam(0.1), "int8")
    state = tx.init({"w": jnp.ones((4, 16))})
    with pytest.raises(ValueError, match=r"real numbers of shape \(4, 24\).*got.*\(4, 16\)"):
        tx.update({"w": jnp.ones((4, 24))}, state, {"w": jnp.ones((4, 24))})


def test_refused():
    momentum = optzoo.momentum(0.1, 0.9)
    with pytest.raises(ValueError, match=r"packed, got 'int8'"):
        slots_dtype(momentum, "int8", packed=True)
    with pytest.raises(ValueError, match="inner already stores its slots packed or in 8 bits"):
        slots_dtype(slots_dtype(momentum, "int8"), "int8").init(jnp.ones(SHAPE))
    with pytest.raises(TypeError, match="slots_dtype except int8"):
        optzoo.caught_up(slots_dtype(momentum, "int8"), dense=True)

    class Unsaid(NamedTuple):
        a: Any

    unsaid = optzoo.rules.leafwise(lambda g, x, s, t: (g, s), slots=Unsaid(optzoo.rules.zeros))
    with pytest.raises(ValueError, match=r"Unsaid\.a: annotate a mean or a decaying sum as optzoo"):
        slots_dtype(unsaid, "int8").init(jnp.ones(SHAPE))


def test_what_a_slot_holds_is_in_its_class():
    class Slots(NamedTuple):
        a: Signed
        b: NotNegative
        c: Sum
        d: Exact

    assert holds(Slots(0, 0, 0, 0)) == {"a": Signed, "b": NotNegative, "c": Sum, "d": Exact}
