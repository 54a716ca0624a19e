"""Arithmetic in at least float32, and without 0 / 0."""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike


def wide_dtype(x: Any) -> Any:
    """The dtype of ``x``, or float32 if that is wider."""
    return jnp.promote_types(jnp.result_type(x), jnp.float32)


def upcast(a: Any) -> Any:
    """An array, or rows, in at least float32: the dtype to compute in."""
    return a.astype(jnp.promote_types(a.dtype, jnp.float32))


def saturating_cast(a: Any, dtype: DTypeLike) -> Array:
    """Casts; finite values stay finite (a squared gradient easily overflows float16)."""
    if jnp.promote_types(a.dtype, dtype) != dtype:
        top = jnp.finfo(dtype).max.astype(a.dtype)
        a = jnp.where(jnp.isfinite(a), jnp.clip(a, -top, top), a)
    return a.astype(dtype)


def saturating_cast_like(old: Array, new: Array) -> Array:
    """``new`` in the dtype of ``old``; raises ``ValueError`` if the shapes differ."""
    if new.shape != old.shape:
        raise ValueError(
            f"the rule made an array of shape {new.shape} of one of shape {old.shape}: "
            "the gradient does not fit its slots, or the rule is wrong"
        )
    return saturating_cast(new, old.dtype)


def safe_divide(a: Array, b: Array, eps: Any = 0.0) -> Array:
    """``a / b``, and 0 where ``b`` is 0: an element that never had a gradient takes no step.

    Args:
        a: the numerator.
        b: the denominator.
        eps: a term of ``b``, of which the other terms are not negative. If it is a positive Python
            number, ``b`` is never 0, and the check is left out of the program.
    """
    if isinstance(eps, float | int) and eps >= 1e-30:  # denormals count as zero
        return a / b
    return jnp.where(b == 0, 0, a / jnp.where(b == 0, 1, b))


def norm(a: Array) -> Array:
    """The Euclidean norm of all elements."""
    return jnp.sqrt(jnp.sum(a**2))
