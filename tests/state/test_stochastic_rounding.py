"""Stochastic rounding: unbiased over all random bits; the bits are in test_random_rounding.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from optzoo.state.storage.at_random import (
    first_place,
    first_places_of_rows,
    random_bits,
    round_at_random,
)

DTYPES = pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
ALL_BITS = jnp.arange(2**16, dtype=jnp.uint32)
EDGES = [1.0, -1.0, 1.001, -3.7, 1 / 3, 6.1e-5, -5.9e-5, 1.3e-6, 7e-8, -2e-8, 0.0, 65000.0]


@DTYPES
@pytest.mark.parametrize("value", EDGES)
def test_the_mean_over_all_bits_is_the_value(dtype, value):
    value = np.float32(value)
    got = np.asarray(round_at_random(jnp.full(2**16, value), ALL_BITS, dtype), np.float64)
    # Below 2**-14 the result for float16 is exact to 2**-13 of the spacing of float16.
    np.testing.assert_allclose(got.mean(), value, rtol=1e-12, atol=dtype == jnp.float16 and 2**-37)
    below, above = got.min(), got.max()
    assert below <= value <= above
    between = (np.array([below, above], dtype).view(np.int16) & 0x7FFF).astype(int)
    assert abs(np.diff(between * np.sign([below, above]))).max() <= 1  # neighbours


@DTYPES
def test_what_can_be_represented_stays(dtype):
    exact = lax.bitcast_convert_type(jnp.arange(2**16, dtype=jnp.uint16), dtype)
    bits = random_bits(first_place(0, 1, "2"), exact.shape)
    got = round_at_random(exact.astype(jnp.float32), bits, dtype)
    # XLA on the CPU flushes subnormal float32 values to zero, here and elsewhere.
    want = np.asarray(exact.astype(jnp.float32).astype(dtype), np.float32)
    np.testing.assert_array_equal(np.asarray(got, np.float32), want)


@DTYPES
def test_the_finite_stays_finite(dtype):
    top, inf = np.finfo(np.float32).max, np.inf
    most = float(jnp.finfo(dtype).max)
    given = jnp.array([top, -top, most, np.nextafter(np.float32(most), inf), inf, -inf, np.nan])
    for bits in (0, 2**16 - 1, 2**32 - 1):
        got = round_at_random(given, jnp.full(7, bits, jnp.uint32), dtype).astype(jnp.float32)
        np.testing.assert_array_equal(got, [most, -most, most, most, inf, -inf, np.nan])


@pytest.mark.parametrize("shape", [(5, 3), (5, 2, 3), (5,), (5, 0)])
def test_rows_have_the_bits_that_they_have_in_the_whole(shape):
    start = first_place(3, 1, "4")
    whole, rows = random_bits(start, shape), first_places_of_rows(start, shape)
    few = jnp.array([3, 0])
    np.testing.assert_array_equal(random_bits(rows, shape), whole)
    np.testing.assert_array_equal(random_bits(rows[few], (2, *shape[1:])), whole[few])
    assert len(np.unique(whole)) == whole.size


def test_bits_of_what_has_no_rows():
    rows = first_places_of_rows(first_place(3, 1, "4"), (5, 2))
    assert random_bits(rows, ()).shape == () and random_bits(rows, (2, 3)).shape == (2, 3)


def test_every_program_computes_the_same():
    bits = lambda step: random_bits(first_place(0, step, "5"), (3, 4))
    want = jnp.stack([bits(jnp.int32(k)) for k in range(4)])
    for got in (
        jax.jit(jax.vmap(bits))(jnp.arange(4)),
        lax.scan(lambda _, k: (None, bits(k)), None, jnp.arange(4))[1],
    ):
        np.testing.assert_array_equal(got, want)
