"""Arithmetic at its edges."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optzoo import SparseRows
from optzoo.core.numerics import norm, power, safe_divide, saturating_cast, sqrt, upcast

INF, NAN = np.inf, np.nan


def test_upcast(x64):
    for dtype in ("float16", "bfloat16", "float32"):
        assert upcast(jnp.ones(2, dtype)).dtype == jnp.float32
    rows = upcast(SparseRows(jnp.array([1]), jnp.ones((1, 2), jnp.bfloat16), 3))
    assert rows.dtype == jnp.float32 and rows.indices.dtype == jnp.int32
    with x64(True):
        assert upcast(jnp.ones(2, "float64")).dtype == jnp.float64


def test_saturating_cast_keeps_finite_values_finite_and_all_else():
    given = jnp.array([1e30, -1e30, 1.5, INF, -INF, NAN])
    top = 65504
    cast = jax.jit(saturating_cast, static_argnums=1)
    got = cast(given, jnp.float16)
    np.testing.assert_array_equal(got, np.array([top, -top, 1.5, INF, -INF, NAN], np.float16))
    top = float(jnp.finfo(jnp.bfloat16).max)
    largest = np.float32([1, -1]) * np.finfo("float32").max
    np.testing.assert_array_equal(
        np.asarray(cast(largest, jnp.bfloat16)).astype("float32"), [top, -top]
    )


@pytest.mark.parametrize(("of", "to"), [("float32", "float32"), ("bfloat16", "float32")])
def test_saturating_cast_to_something_wider_is_a_cast(of, to):
    given = jnp.array([jnp.finfo(of).max, 1.5, -INF, NAN], of)
    got = saturating_cast(given, to)
    assert got.dtype == to
    np.testing.assert_array_equal(got, given.astype(to))


def test_safe_divide():
    a = jnp.array([6.0, 0, 5, -5, NAN, 0, INF])
    b = jnp.array([3.0, 0, 0, -0.0, 0, NAN, 2])
    np.testing.assert_array_equal(safe_divide(a, b), [2, 0, 0, 0, 0, NAN, INF])


@pytest.mark.parametrize("eps", [1e-8, 1e-16, 1e-30, 1e-40])
def test_safe_divide_by_no_more_than_epsilon(eps):
    """Also where it is so small that it counts as zero."""
    quotient = jax.jit(lambda a, b: safe_divide(a, b + eps, eps))
    np.testing.assert_array_equal(quotient(jnp.zeros(2), jnp.array([0.0, 1])), 0)
    np.testing.assert_allclose(quotient(1.0, 1.0), 1, rtol=1e-6)


def test_safe_divide_has_a_gradient_at_zero():
    """No NaN comes out of the branch that is not taken."""
    slopes = jax.jit(jax.grad(lambda a, b: jnp.sum(safe_divide(a, b)), argnums=(0, 1)))
    got = slopes(jnp.array([0.0, 6]), jnp.array([0.0, 3]))
    np.testing.assert_allclose(got, [[0, 1 / 3], [0, -2 / 3]], rtol=1e-6)


@pytest.mark.parametrize(
    ("a", "want"), [([[3.0, 0], [0, 4]], 5), (-7.0, 7), (np.zeros((0, 2), "float32"), 0)]
)
def test_norm(a, want):
    np.testing.assert_array_equal(norm(jnp.array(a)), want)


def test_derivatives_at_zero():
    """Of roots they are 0, not infinite; elsewhere they are what they are, the second ones too."""
    a = jnp.array([0.0, 4.0])
    slopes = lambda f: jax.jit(jax.vmap(jax.grad(f)))(a)
    np.testing.assert_allclose(slopes(sqrt), [0, 1 / 4])
    np.testing.assert_allclose(slopes(jax.grad(sqrt)), [0, -1 / 32])
    np.testing.assert_allclose(slopes(lambda a: sqrt(a**2)), [0, 1])
    np.testing.assert_allclose(jax.jit(lambda a: jax.jvp(sqrt, (a,), (a,))[1])(a), [0, 1])
    np.testing.assert_allclose(jax.jit(jax.grad(norm))(np.zeros((2, 3), "f")), np.zeros((2, 3)))


@pytest.mark.parametrize(
    ("exponent", "at_zero"), [(0.3, 0), (0.0, 0), (0, 0), (1, 1), (1.0, 1), (1.5, 0), (2, 0)]
)
def test_derivatives_of_a_power(exponent, at_zero):
    a = jnp.array([0.0, 4.0])
    f = lambda a: power(a, exponent)

    @jax.jit
    def run(a, e):
        by_exponent = jax.jvp(lambda e: power(a, e), (e,), (1.0,))[1]
        return f(a), a**exponent, jax.vmap(jax.grad(f))(a), by_exponent

    value, want, got, by_exponent = run(a, float(exponent))
    np.testing.assert_array_equal(value, want)
    np.testing.assert_allclose(got, [at_zero, exponent * 4.0 ** (exponent - 1)], rtol=1e-6)
    np.testing.assert_allclose(by_exponent, [0, 4.0**exponent * np.log(4)], rtol=1e-6)


@pytest.mark.optimized
def test_roots_change_no_program():
    """Their derivatives cost the update itself nothing."""
    programs = [jax.jit(lambda x, f=f: f(x)).lower(jnp.ones(3)).compile() for f in (sqrt, jnp.sqrt)]
    with_name = [p.as_text().replace("jit__sqrt", "jit_sqrt") for p in programs]
    without_source = [re.sub(r", metadata=.*", "", text).split("ENTRY")[1] for text in with_name]
    assert without_source[0] == without_source[1]
