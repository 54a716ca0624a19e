"""Slots in 8 bits as float8, with a scale for each group: values, rounding, rows, states."""

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import optzoo
from optzoo import SparseRows, slots_dtype
from optzoo.state.storage.codes import decoded, encoded
from optzoo.state.storage.float8 import Float8Codes, Float8RootCodes
from optzoo.testing import samples

WIDTH = 40  # a group of 32 and one of 8
KINDS = [Float8Codes, Float8RootCodes]
encode, decode = jax.jit(encoded, static_argnums=0), jax.jit(decoded)


def numbers(seed, shape=(6, WIDTH)):
    """With magnitudes from 1e-3 to 1e3."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * 10 ** rng.uniform(-3, 3, shape)).astype(np.float32)


def of_ml_dtypes(kind, x):
    """The values as float8 of ml_dtypes and scales of float16 store them, in float64."""
    x = np.sqrt(x, dtype=np.float64) if kind is Float8RootCodes else x.astype(np.float64)
    parts = [x[:, :32], x[:, 32:]]
    greatest = [abs(part).max(-1, keepdims=True) for part in parts]
    stored = [
        (448 * part / top).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
        for part, top in zip(parts, greatest, strict=True)
    ]
    scales = [top.astype(np.float16).astype(np.float64) for top in greatest]
    if kind is Float8RootCodes:  # no number above zero becomes zero
        stored = [np.where(y == 0, 2.0**-9, y) for y in stored]
    values = np.concatenate([s * y / 448 for s, y in zip(scales, stored, strict=True)], -1)
    return np.square(values) if kind is Float8RootCodes else values


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_ml_dtypes(kind):
    x = numbers(0)
    x = x**2 if kind is Float8RootCodes else x
    found = encode(kind, x)
    assert found.codes.dtype == jnp.int8 and found.codes.shape == x.shape
    # Where a product is rounded to the other side of a tie in float32, one element differs.
    near = np.isclose(decode(found), of_ml_dtypes(kind, x), rtol=2e-6, atol=0)
    assert near.mean() > 0.99
    chex.assert_trees_all_equal(encode(kind, decode(found)).codes, found.codes)


def test_small_elements_keep_their_magnitudes():
    """Down to 1/200,000 of the greatest one; integers of 8 bits lose those below 1/250."""
    x = np.float32(10.0 ** -np.arange(8))[None]
    found = np.asarray(decode(encode(Float8RootCodes, x**2)))
    np.testing.assert_allclose(np.sqrt(found[0, :5]), x[0, :5], rtol=0.07)
    assert (found > 0).all()  # an update is divided by its root
    np.testing.assert_allclose(decode(encode(Float8Codes, x))[0, :5], x[0, :5], rtol=0.07)


@pytest.mark.parametrize("kind", KINDS)
def test_zero_infinity_and_nan(kind):
    x = np.zeros((4, 8), np.float32)
    x[1, 2], x[2, 0], x[3, 5] = np.inf, np.nan, 1
    zero, infinite, nan, one = np.asarray(decode(encode(kind, x)))
    assert not zero.any() and np.isnan(nan).all()
    np.testing.assert_array_equal(one, x[3])  # zeros beside another number
    assert np.isfinite(infinite).all() and infinite[2] > 6e4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("element", [0.7, 0.013, 1e-5])
def test_random_bits_round_in_proportion(kind, element):
    """Normal and subnormal float8: the mean over all bits is the element."""
    power = 2 if kind is Float8RootCodes else 1
    bits = np.linspace(0, 2**16 - 1, 4096).astype(np.uint32)[:, None] * np.ones(8, np.uint32)
    x = np.tile(np.float32([1, *[element] * 7]) ** power, (4096, 1))
    found = np.asarray(decode(encode(kind, x, bits)), np.float64) ** (1 / power)
    np.testing.assert_array_equal(found[:, 0], 1)
    assert len(np.unique(found[:, 1])) == 2
    np.testing.assert_allclose(found[:, 1].mean(), element, rtol=2e-3)


def test_two_tables_beside_layers_with_rows():
    """Rows that are not touched keep their codes; the others are those of a smaller table."""
    tx = slots_dtype(optzoo.lazy_adam(0.1), "float8_e4m3fn")
    params = {"users": numbers(1, (9, 16)), "items": numbers(2, (5, WIDTH)), "b": numbers(3, (8,))}
    ids = {"users": np.array([7, 2, 7]), "items": np.array([4, 0])}
    values = {k: numbers(4, (len(i), params[k].shape[1])) for k, i in ids.items()}
    rows = lambda k, i, num: SparseRows(jnp.asarray(i), jnp.asarray(values[k]), num)
    state = tx.init(params)
    grads = {k: rows(k, i, len(params[k])) for k, i in ids.items()} | {"b": params["b"]}
    news, after = samples.step(tx, grads, params, state)
    for name, touched in (("users", [2, 7]), ("items", [0, 4])):
        touched = np.array(touched)
        small = params[name][touched]
        of = np.searchsorted(touched, ids[name])
        alone, of_small = samples.step(tx, rows(name, of, 2), small)
        np.testing.assert_allclose(news[name][touched], alone, rtol=1e-6)
        for slot in ("m", "v"):
            whole = np.asarray(optzoo.get_slot(after, slot)[name])
            np.testing.assert_allclose(whole[touched], optzoo.get_slot(of_small, slot), rtol=1e-6)
            others = np.delete(np.arange(len(whole)), touched)
            np.testing.assert_array_equal(whole[others], 0)


def test_states_are_converted():
    """From float32 and integers of 8 bits, and by get_slot and set_slot."""
    params = {"w": numbers(5)}
    plain, float8 = optzoo.adam(0.1), slots_dtype(optzoo.adam(0.1), "float8_e4m3fn")
    _, state = samples.step(plain, params, params)
    like = jax.eval_shape(float8.init, params)
    found = optzoo.state.slots_like(state, like)
    chex.assert_trees_all_equal_shapes_and_dtypes(found, like)
    for slot, kind in (("m", Float8Codes), ("v", Float8RootCodes)):
        want = of_ml_dtypes(kind, np.asarray(optzoo.get_slot(state, slot)["w"]))
        got = optzoo.get_slot(found, slot)["w"]
        assert np.isclose(got, want, rtol=2e-6, atol=0).mean() > 0.99
    again = optzoo.set_slot(float8.init(params), "m", optzoo.get_slot(found, "m"))
    chex.assert_trees_all_equal(again[0].slots.m, found[0].slots.m)
    int8 = slots_dtype(plain, "int8").init(params)
    chex.assert_trees_all_equal_shapes_and_dtypes(optzoo.state.slots_like(int8, like), like)


def test_on_a_mesh():
    mesh = jax.make_mesh((8,), ("d",))
    tx = slots_dtype(optzoo.adam(0.1), "float8_e4m3fn", stochastic=True)
    start = {"w": numbers(6, (16, 256)), "t": numbers(7, (8, 64))}
    place = lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec("d")))
    want, _ = samples.step(tx, start, start)
    params = jax.tree.map(place, start)
    state = jax.jit(tx.init, out_shardings=optzoo.state_sharding(tx, params))(params)
    codes = state[0].slots.v["w"]
    assert {x.sharding.spec[0] for x in codes} == {"d"}
    found, _ = samples.step(tx, params, params, state)
    chex.assert_trees_all_close(jax.device_get(found), jax.device_get(want), rtol=1e-6)


def test_training_with_columns_of_unlike_scales():
    """Integers of 8 bits stop features whose gradients are a thousandth of those beside them."""
    scales = np.float32(10.0 ** np.linspace(0, -2, 32))[None]

    def loss(w):
        return jnp.sum(((w - 1) * scales) ** 2)

    def trained(tx):
        w, state = jnp.zeros((4, 32)), tx.init(jnp.zeros((4, 32)))
        step = jax.jit(lambda w, s: samples.step(tx, jax.grad(loss)(w), w, s))
        for _ in range(60):
            w, state = step(w, state)
        return np.asarray(w)

    rate = optax.cosine_decay_schedule(0.05, 60)
    exact = trained(optzoo.adam(rate))
    error = lambda dtype: abs(trained(slots_dtype(optzoo.adam(rate), dtype)) - exact).max()
    assert error("float8_e4m3fn") < 0.1
    assert error("int8") > 0.5


def test_refused():
    with pytest.raises(ValueError, match="packed, got 'float8_e4m3fn'"):
        slots_dtype(optzoo.adam(0.1), "float8_e4m3fn", packed=True)
    with pytest.raises(ValueError, match=r"dtype=float8_e4m3fn applies to no slot of inner"):
        slots_dtype(optzoo.adagrad(0.1), "float8_e4m3fn").init(jnp.ones((8, 8)))
