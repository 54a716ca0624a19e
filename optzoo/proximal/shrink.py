"""The proximal operators of L1 and L2 penalties."""

import jax.numpy as jnp
from jax import Array


def soft_threshold(z: Array, l1: Array | float) -> Array:
    """``sign(z) * max(|z| - l1, 0)``."""
    return z - jnp.clip(z, -l1, l1)


def shrink(z: Array, rate: Array, l1: float, l2: float) -> Array:
    """The proximal operator of both penalties; ``rate`` may have a value for each element."""
    return soft_threshold(z, rate * l1) / (1 + rate * l2)
