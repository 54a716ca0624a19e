"""The shrink that L1 and L2 penalties come down to."""

import jax.numpy as jnp
from jax import Array


def soft_threshold(z: Array, l1: Array | float) -> Array:
    """``z`` moved towards zero by ``l1``, and no further than zero."""
    return z - jnp.clip(z, -l1, l1)


def shrink(z: Array, rate: Array, l1: float, l2: float) -> Array:
    """The proximal step of both penalties, at a rate for each element."""
    return soft_threshold(z, rate * l1) / (1 + rate * l2)
