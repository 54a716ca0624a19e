"""Adam's direction with the bias correction of each mean, as in the paper and in FBGEMM."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from ..core.numerics import one_minus_power, safe_divide, sqrt


def debiased_direction(
    m: Array, v: Array, t: Any, b1: Any, b2: Any, eps: Any, *, rounded: bool = False
) -> Array:
    """The bias-corrected mean, divided by the root of the corrected mean square plus epsilon.

    Args:
        m: the mean of the gradient.
        v: the mean of its square, one number for each element or for each row.
        t: the number of updates of the means, for all rows or for each row.
        b1: the decay of ``m``.
        b2: the decay of ``v``.
        eps: added outside the root.
        rounded: whether the powers of the decays are rounded before they are subtracted from one,
            as LAMB and optax do. In float32 the first correction of 0.999 is then off by 1.3e-5.
    """
    t = jnp.asarray(t, m.dtype)
    rest = (lambda b, t: 1 - jnp.asarray(b, m.dtype) ** t) if rounded else one_minus_power
    root = sqrt(v / rest(b2, t)) + eps
    return safe_divide(m / rest(b1, t), root, eps)
