"""Eigenvectors, also inside of a derivative."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..core.compat import EIGH_WAITS_FOR_THREADS, custom_jvp, eigh_by_jacobi

# Above 256 JAX takes QDWH on a TPU, which compiles for 30 s at each place. Up to 768 the Jacobi
# iteration of XLA is one kernel on v5e, v5p, v6e and tpu7x. At 1,024 on v5e it is loops over main
# memory: 171,712 cycles by the compiler's estimate for each of the 1,023 rounds of a sweep.
_QDWH, _KERNEL = 256, 768


def decompose(a: Array, **options: Any) -> tuple[Array, Array]:
    """``jnp.linalg.eigh``, but quickly compiled for TPUs."""
    usual = lambda a: tuple(jnp.linalg.eigh(a, **options))
    special = dict[str, Callable[[Array], tuple[Array, Array]]]()
    if _QDWH < a.shape[-1] <= _KERNEL:
        special["tpu"] = functools.partial(eigh_by_jacobi, **options)
    if EIGH_WAITS_FOR_THREADS and math.prod(a.shape[:-2]) > 1:
        special["cpu"] = functools.partial(_one_by_one, usual)
    return jax.lax.platform_dependent(a, **special, default=usual) if special else usual(a)


def _one_by_one(f: Callable[[Array], tuple[Array, Array]], a: Array) -> tuple[Array, Array]:
    """``f`` of stacks of one matrix, one after the other."""
    values, vectors = jax.lax.map(f, a.reshape(-1, 1, *a.shape[-2:]))
    return values.reshape(a.shape[:-1]), vectors.reshape(a.shape)


@functools.partial(custom_jvp, nondiff_argnums=(1,))
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
    return decompose(a, symmetrize_input=False)


@eigh.defjvp
def _(optimizer, primals, tangents):
    raise NotImplementedError(
        f"{optimizer} has first derivatives only: differentiate its update once, or put "
        "jax.lax.stop_gradient around it"
    )
