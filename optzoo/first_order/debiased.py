"""Adam's direction with the bias correction of each mean, as of the paper and of FBGEMM."""

import math
from typing import Any

import jax.numpy as jnp
from jax import Array

from ..core.numerics import safe_divide, sqrt


def debiased_direction(m: Array, v: Array, t: Any, b1: Any, b2: Any, eps: Any) -> Array:
    """The mean over the root of the mean square plus epsilon, both without their bias.

    Args:
        m: the mean of the gradient.
        v: the mean of its square, of each element or with one number for each row.
        t: the number of updates in the means, of all or of each row.
        b1: the decay of ``m``.
        b2: the decay of ``v``.
        eps: outside of the root.
    """
    t = jnp.asarray(t, m.dtype)
    root = sqrt(v / _one_minus_power(b2, t)) + eps
    return safe_divide(m / _one_minus_power(b1, t), root, eps)


def _one_minus_power(b: Any, t: Array) -> Array:
    """``1 - b**t``, without the rounding error of the power."""
    log = math.log(b) if isinstance(b, float | int) and b > 0 else jnp.log(jnp.asarray(b, t.dtype))
    return -jnp.expm1(t * log)
