"""The proximal operators of L1 and L2 penalties."""

import jax.numpy as jnp
from jax import Array

from ..core.compat import custom_jvp


@custom_jvp
def soft_threshold(z: Array, l1: Array | float) -> Array:
    """``sign(z) * max(|z| - l1, 0)``; its derivative by ``z`` is 1 for ``|z| >= l1``, else 0."""
    return z - jnp.clip(z, -l1, l1)


@soft_threshold.defjvp
def _(primals, tangents):
    # Not the derivative of clip: with l1 = 0 it is wrong at z = 0, where both bounds are reached.
    (z, l1), (d_z, d_l1) = primals, tangents
    change = jnp.where(jnp.abs(z) >= l1, d_z - jnp.sign(z) * d_l1, 0)
    return soft_threshold(z, l1), change.astype(z.dtype)


def shrink(z: Array, rate: Array, l1: float, l2: float) -> Array:
    """The proximal operator of both penalties; ``rate`` may have a value for each element."""
    return soft_threshold(z, rate * l1) / (1 + rate * l2)
