"""Arithmetic in at least float32, and without 0 / 0, in values and in derivatives."""

import functools
import math
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from .compat import custom_jvp


def promote_types(a: Any, b: Any) -> Any:
    """Like ``jnp.promote_types``, also if ``jax_numpy_dtype_promotion`` is ``"strict"``."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(a, b)


def dtype_of(x: Any) -> Any:
    """Like ``jnp.result_type(x)``, which is slow even for JAX arrays."""
    return x.dtype if isinstance(x, jax.Array) else jnp.result_type(x)


def wide_dtype(*xs: Any) -> Any:
    """The widest dtype of some arrays, at least float32."""
    return functools.reduce(promote_types, map(jnp.result_type, xs), jnp.dtype(jnp.float32))


def has_16_bits(dtype: Any) -> bool:
    """Whether the dtype is bfloat16 or float16."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits == 16


def has_keys(dtype: Any) -> bool:
    """Whether the dtype is that of random keys; False for None."""
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def words_of(a: Any) -> Any:
    """The words of random keys; another array is unchanged."""
    return jax.random.key_data(a) if has_keys(a.dtype) else a


def from_words(like: Any) -> Callable[[Any], Any]:
    """The inverse of :func:`words_of`, for arrays with the dtype of ``like``."""
    if not has_keys(like.dtype):
        return lambda words: words
    return functools.partial(jax.random.wrap_key_data, impl=jax.random.key_impl(like))


def is_real(x: Any) -> bool:
    """Whether an array has real numbers, floating-point or integers."""
    return any(jnp.issubdtype(x.dtype, kind) for kind in (jnp.floating, jnp.integer))


def has_derivative(x: Any) -> bool:
    """Whether an array is real or complex, and so can have a gradient."""
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def is_trainable(x: Any) -> bool:
    """Whether optimizers support an array: it is real, with at least 16 bits."""
    dtype = jnp.result_type(x)
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= 16


def slot_dtype(x: Any) -> Any:
    """The dtype of a slot of the parameter ``x``: its own, or float32 for 16 bits.

    A mean with decay 0.999 changes by a thousandth per step, which bfloat16 does not resolve.
    """
    dtype = jnp.result_type(x)
    return jnp.dtype(jnp.float32) if has_16_bits(dtype) else dtype


def upcast(a: Any) -> Any:
    """An array, or rows, in at least float32, the dtype of computations; integers are unchanged."""
    return cast(a, upcast_dtype(a.dtype))


@functools.cache
def upcast_dtype(dtype: Any) -> Any:
    """The dtype of :func:`upcast`."""
    return promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.inexact) else dtype


def cast(a: Any, dtype: Any) -> Any:
    """``a.astype(dtype)``, which is slow in JAX even without a conversion."""
    done = a.dtype == dtype and not getattr(a, "weak_type", True)
    return a if done else a.astype(dtype)


def saturating_cast(a: Any, dtype: DTypeLike) -> Array:
    """Casts; finite values stay finite (a squared gradient easily overflows float16)."""
    if a.dtype != dtype and promote_types(a.dtype, dtype) != dtype:
        top = jnp.finfo(dtype).max.astype(a.dtype)
        a = jnp.where(jnp.isfinite(a), jnp.clip(a, -top, top), a)
    return cast(a, dtype)


def next_count(count: Any, cycle: int = 1) -> Array:
    """The count after one more step.

    At the largest integer it goes back by one cycle, which keeps its position in the cycle. With a
    cycle of 1 it stops, like ``optax.safe_increment``: an action at every multiple of a larger
    number would then happen at each step, or never again.

    Args:
        count: an array of integers.
        cycle: the modulus of positions; :func:`common_cycle` for several periods.
    """
    count = jnp.asarray(count)
    most = jnp.iinfo(count.dtype).max
    return jnp.where(count < most, count + 1, jnp.asarray(most + 1 - cycle, count.dtype))


def common_cycle(*periods: Any) -> int:
    """A common multiple of some numbers of steps, as the cycle of :func:`next_count`.

    A schedule has no multiple: the count goes back by about 2**30, which leaves multiples of all
    its periods, and changes the length of one period at the largest integer. This is also used if
    the least common multiple exceeds 2**30, since a larger cycle would return to the counts of the
    first steps.

    Args:
        *periods: ints, or schedules.
    """
    known = [int(n) for n in periods if isinstance(n, numbers.Integral)]
    cycle = math.lcm(*known)
    if cycle > 2**30:
        return max(known)
    return cycle if len(known) == len(periods) else 2**30 // cycle * cycle


def rounding_cast(x: Array, dtype: DTypeLike) -> Array:
    """An array in another dtype, rounded to bfloat16 here and nowhere else.

    XLA moves and removes conversions: for TPUs it converts a whole table before it gathers rows,
    outside of the loop of the gather, and it may skip the rounding of a number that is converted
    back. Both are prevented by rounding to 8 bits of mantissa in the wider dtype, after which the
    conversion changes no value.
    """
    if x.dtype in (jnp.float32, jnp.float64) and jnp.dtype(dtype) == jnp.bfloat16:
        x = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x.astype(dtype)


def saturating_cast_like(old: Array, new: Array) -> Array:
    """``new`` in the dtype of ``old``.

    Raises:
        ValueError: if the shapes differ, or integers were converted to another kind of numbers.
    """
    if new.shape != old.shape:
        raise ValueError(
            f"the rule returned an array of shape {new.shape} for one of shape {old.shape}: the "
            "gradient does not match its slots, or the rule is wrong"
        )
    if not jnp.issubdtype(old.dtype, jnp.inexact):
        if promote_types(new.dtype, old.dtype) != old.dtype:
            raise ValueError(
                f"the rule returned {new.dtype} for a slot of {old.dtype}: return it in its "
                "own dtype"
            )
        return new.astype(old.dtype)
    return saturating_cast(new, old.dtype)


def safe_divide(a: Array, b: Array, eps: Any = 0.0) -> Array:
    """``a / b``, and 0 where ``b`` is 0: elements without any gradient are not updated.

    Args:
        a: the numerator.
        b: the denominator.
        eps: a term of ``b`` whose other terms are not negative. If it is a positive Python number,
            ``b`` is never 0, and the program has no check.
    """
    if isinstance(eps, float | int) and eps >= 1e-30:  # denormals count as zero
        return a / b
    is_zero = b == 0
    return jnp.where(is_zero, 0, a / jnp.where(is_zero, 1, b))


@custom_jvp
def sqrt(a: Array) -> Array:
    """The square root, with the derivative 0 at 0.

    This is for derivatives through an update: the derivative of the root of a squared gradient is
    multiplied by 0 where the gradient is 0, and infinity times 0 would be NaN.
    """
    return jnp.sqrt(a)


@sqrt.defjvp
def _(primals, tangents):
    root = sqrt(*primals)
    return root, tangents[0] * jnp.where(root == 0, 0, 0.5 / jnp.where(root == 0, 1, root))


def one_minus_power(b: Any, t: Array) -> Array:
    """``1 - b**t`` for a number ``t``, in its dtype, without the rounding error of the power."""
    log = math.log(b) if isinstance(b, float | int) and b > 0 else jnp.log(jnp.asarray(b, t.dtype))
    return -jnp.expm1(t * log)


def power(a: Array, exponent: Any) -> Array:
    """``a ** exponent`` for ``a`` at least 0, with the derivative 0 where it would be infinite."""
    return a**exponent if isinstance(exponent, int) else _power(a, exponent)


@custom_jvp
def _power(a: Array, exponent: Any) -> Array:
    return a**exponent


@_power.defjvp
def _(primals, tangents):
    a, exponent = primals
    is_infinite = (a == 0) & (exponent < 1)
    nearby = jnp.where(is_infinite, 1, a), exponent
    _, slope = jax.jvp(jnp.power, nearby, tangents)
    return _power(a, exponent), jnp.where(is_infinite, 0, slope)


def norm(a: Array) -> Array:
    """The Euclidean norm of all elements; its derivative at 0 is 0."""
    return sqrt(jnp.sum(a**2))


def is_number(value: Any, number: float) -> bool:
    """Whether ``value`` is a plain number, known at trace time, and equals ``number``."""
    return isinstance(value, numbers.Real) and value == number
