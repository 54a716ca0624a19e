"""What is computed from 16-bit numbers is what NumPy computes in float64, rounded once.

Rounding in between, or a sum or norm in 16 bits, changes many elements by one unit in the last
place, or overflows. float32, in which the library computes, is at a tie of 16 bits in few of them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo import SparseRows
from optzoo.core.numerics import saturating_cast
from optzoo.testing import samples

SHAPE = (40, 5)
DTYPES = {name: jnp.dtype(name) for name in ("bfloat16", "float16")}


def units(got, want):
    """The distance of each element from the rounded one, in units in the last place."""
    want = np.asarray(want, np.float64).astype(got.dtype)
    position = lambda a: np.where((n := a.view(np.int16).astype(int)) < 0, -(n & 0x7FFF), n)
    return np.abs(position(np.asarray(got)) - position(want))


def check(got, want, differ=0.02):
    """All are within one unit, and all but this fraction the same."""
    assert all(np.isfinite(np.asarray(a, np.float64)).all() for a in want)
    far = np.concatenate([np.ravel(units(a, b)) for a, b in zip(got, want, strict=True)])
    assert far.max() <= 1, f"{far.max()} units from the rounded value"
    assert np.mean(far > 0) <= differ, f"{np.mean(far > 0):.0%} differ from the rounded value"


@functools.cache
def numbers(dtype, seed=0, shape=SHAPE, scale=1.0):
    """Normal numbers that the dtype has; their float64."""
    draw = scale * np.random.default_rng(seed).normal(size=shape)
    return draw.astype(DTYPES[dtype])


def wide(*arrays):
    return [np.asarray(a, np.float64) for a in arrays]


# Optimizers: all that they do to a gradient, compared with themselves in float64.

NOT_ONCE = {  # the reason, and the fraction of updates that may differ by one unit
    "adamw": ("weight decay is around any optimizer, whose update is rounded", 0.5),
    "momentumw": ("weight decay is around any optimizer, whose update is rounded", 0.5),
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_updates_in_16_bits(entry, dtype, x64):
    name = entry.factory.__name__
    tx = samples.make(entry)
    x = {"table": numbers(dtype, 1, (5, 2)), "layer": numbers(dtype, 2, (3,))}
    grads = {"table": numbers(dtype, 3, (3, 5, 2)), "layer": numbers(dtype, 4, (3, 3))}
    as_float64 = functools.partial(jax.tree.map, lambda a: a.astype(np.float64))
    with x64(True):
        got, _ = samples.run(tx, grads, x)
        want, _ = samples.run(tx, as_float64(grads), as_float64(x))
    check(jax.tree.leaves(got), jax.tree.leaves(want), NOT_ONCE.get(name, ("", 0.06))[1])


LARGE = {
    "momentum": optzoo.momentum(1e-3, 0.9),
    "momentumw": optzoo.momentumw(1e-3, 0.9, weight_decay_per_step=1e-4),
    "lars": optzoo.lars(1e-3, 0.9, skip=True),
    "scale": optax.chain(optzoo.transforms.scale(1e-3), optzoo.momentum(1.0, 0.9)),
}


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("name", LARGE)
def test_directions_above_the_greatest_number(name, rows):
    """A sum of gradients does not fit into float16, and the step along it does."""
    tx, x, g = LARGE[name], np.zeros((5, 2), np.float16), np.full((5, 2), 6e4, np.float16)
    state, step, total = tx.init(x), jax.jit(tx.update), 0.0
    for _ in range(5):
        update, state = step(SparseRows(jnp.arange(5), g, 5) if rows else g, state, x)
        update, total = update.to_dense() if rows else update, 0.9 * total + 6e4
        np.testing.assert_allclose(update, np.full((5, 2), -1e-3 * total), rtol=2**-10)


# Transformations and wrappers, by their formulas.


def by_norm(limit):
    return lambda g: g * min(1, limit / np.sqrt(np.sum(g**2)))


def clip_variable(g, x):
    new = x + g
    norms = np.sqrt(np.sum(new**2, 1, keepdims=True))
    return new * (1 / np.maximum(norms, 1)) - x


OF_GRADIENTS = {
    "clip_by_norm": (optzoo.transforms.clip_by_norm(7.0), lambda g, x: by_norm(7.0)(g)),
    "clip_by_global_norm": (optzoo.clip_by_global_norm(7.0), lambda g, x: by_norm(7.0)(g)),
    "clip_by_average_norm": (
        optzoo.transforms.clip_by_average_norm(0.03),
        lambda g, x: by_norm(0.03 * g.size)(g),
    ),
    "scale": (optzoo.transforms.scale(0.3), lambda g, x: 0.3 * g),
    "scale by a schedule": (
        optzoo.transforms.scale_by_schedule(lambda step: 0.3),
        lambda g, x: 0.3 * g,
    ),
    "weight_decay": (
        optzoo.decoupled_weight_decay(optax.identity(), weight_decay_per_step=0.3),
        lambda g, x: g - 0.3 * x,
    ),
    "variable_clipping": (
        optzoo.variable_clipping(optax.identity(), (1,), 1.0),
        clip_variable,
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 3e3])
@pytest.mark.parametrize("name", OF_GRADIENTS)
def test_gradients(name, scale, dtype):
    """The squares of large ones are infinite in float16."""
    tx, formula = OF_GRADIENTS[name]
    g, x = numbers(dtype, 5, scale=scale), numbers(dtype, 6)
    got, _ = jax.jit(tx.update)(g, tx.init(x), x)
    check([got], [formula(*wide(g, x))])
    rows, _ = jax.jit(tx.update)(SparseRows(np.arange(40)[::-1], g[::-1], 40), tx.init(x), x)
    check([rows.to_dense()], [formula(*wide(g, x))])


@pytest.mark.parametrize("scale", [1.0, 2e4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_accumulate(dtype, scale):
    """The sum of three may be infinite in float16, and the mean is not."""
    tx = optzoo.accumulate(optax.identity(), 3, use_mean=True)
    g = numbers(dtype, 7, (3, *SHAPE), scale)
    check([samples.last(samples.run(tx, g)[0])], [wide(g)[0].mean(0)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_moving_average(dtype):
    tx = optzoo.moving_average(optax.identity(), 0.9)
    x, g = numbers(dtype, 8), numbers(dtype, 9, (4, *SHAPE))
    _, states = samples.run(tx, g, x)
    average, (x, g) = None, wide(x, g)
    average = x
    for each in g:
        average = 0.9 * average + 0.1 * (x + each)
    check([optzoo.eval_params(x.astype(dtype), samples.last(states))], [average])


# Rows.


def repeated(dtype, seed=10, number=400):
    ids = np.random.default_rng(seed).integers(0, SHAPE[0], number)
    values = numbers(dtype, seed, (number, SHAPE[1]))
    want = np.zeros(SHAPE)
    np.add.at(want, ids, values.astype(np.float64))
    return SparseRows(jnp.asarray(ids), values, SHAPE[0]), want


def quarters(dtype):
    """Rows of float32 with more bits than the dtype has."""
    values = numbers(dtype, 11).astype(np.float32) * np.float32(1 / 3)
    return SparseRows(jnp.arange(40), values, 40), wide(values)[0]


OF_ROWS = {
    "coalesce": lambda rows, x: (rows.coalesce().to_dense(), 0),
    "coalesce, deterministic": lambda rows, x: (rows.coalesce(deterministic=True).to_dense(), 0),
    "to_dense": lambda rows, x: (rows.to_dense(), 0),
    "params + rows": lambda rows, x: (x + rows, 1),
    "apply_updates": lambda rows, x: (optax.apply_updates(x, rows), 1),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OF_ROWS)
def test_rows(name, dtype):
    (rows, want), x = repeated(dtype), numbers(dtype, 12)
    got, times = OF_ROWS[name](rows, jnp.asarray(x))
    check([got], [want + times * wide(x)[0]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("merged", [False, True])
def test_rows_of_more_bits(merged, dtype):
    (rows, want), x = quarters(dtype), jnp.asarray(numbers(dtype, 13))
    rows = rows.coalesce() if merged else rows
    for got in (x + rows, optax.apply_updates(x, rows), optzoo.rows.add(x, rows)):
        check([got], [wide(x)[0] + want])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_by_a_number(dtype):
    """Also by a number above the greatest one of float16."""
    g, small = numbers(dtype, 14), numbers(dtype, 14, scale=1e-2)
    rows = lambda g: SparseRows(jnp.arange(40), g, 40)
    check([(0.37 * rows(g)).values], [0.37 * wide(g)[0]])
    check([(rows(g) / 0.37).values], [wide(g)[0] / 0.37])
    check([(rows(g) / np.float32(0.37)).values], [wide(g)[0] / np.float64(np.float32(0.37))])
    check([(rows(small) * 1e5).values], [wide(small)[0] * 1e5])
    large = numbers(dtype, 14, scale=1e4)
    check([(rows(large) / 1e5).values], [wide(large)[0] / 1e5])


@pytest.mark.parametrize("dtype", DTYPES)
def test_conversions(dtype):
    """To the nearest, at a tie to the even one; finite values stay finite."""
    info = jnp.finfo(dtype)
    ties = np.float32(1 + np.arange(8) * float(info.eps) / 2)
    x = np.concatenate([numbers("float16", 15).astype(np.float32).ravel() / 3, ties])
    np.testing.assert_array_equal(saturating_cast(jnp.asarray(x), dtype), x.astype(dtype))
    large = np.float32([float(info.max), 3e38, -3e38, np.inf])
    want = np.append(np.clip(large[:3], -info.max, info.max).astype(dtype), np.inf)
    np.testing.assert_array_equal(saturating_cast(large, dtype), want.astype(dtype))


@pytest.mark.parametrize(("bits", "error"), [(32, 0), (24, 2.0**-16)])
def test_split_params(bits, error):
    """The parts of a float32 number are it, to the precision of what corrects it."""
    x = np.random.default_rng(16).normal(size=SHAPE).astype(np.float32)
    tx = optzoo.master_weights(optzoo.gradient_descent(1.0), bits=bits)
    params, state = optzoo.split_params(x, tx)
    np.testing.assert_allclose(optzoo.wide_params(params, state), x, rtol=error)
    check([params], wide(x))
