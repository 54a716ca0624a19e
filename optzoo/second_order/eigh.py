"""Eigenvectors inside of a derivative."""

import functools

import jax
import jax.numpy as jnp
from jax import Array


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def eigh(a: Array, optimizer: str) -> tuple[Array, Array]:
    """Eigenvalues in ascending order, and eigenvectors, of symmetric matrices ``(..., d, d)``.

    For the derivative of a function of a matrix. Eigenvectors themselves have none where
    eigenvalues are equal; JAX gives NaN there.

    Args:
        a: the matrices, of which only the lower triangle is read.
        optimizer: its name, for the error.

    Raises:
        NotImplementedError: if they are differentiated.
    """
    return jnp.linalg.eigh(a, symmetrize_input=False)


@eigh.defjvp
def _(optimizer, primals, tangents):
    raise NotImplementedError(
        f"{optimizer} has first derivatives only: differentiate its update once, or put "
        "jax.lax.stop_gradient around it"
    )
