"""Eigenvectors, also inside derivatives, and calls of LAPACK."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..core.compat import LAPACK_WAITS_FOR_THREADS, custom_jvp, eigh_by_jacobi

# Above 256 JAX takes QDWH on a TPU, which compiles for 30 s at each place. Up to 768 the Jacobi
# iteration of XLA is one kernel on v5e, v5p, v6e and tpu7x. At 1,024 on v5e it is loops over main
# memory: 171,712 cycles by the compiler's estimate for each of the 1,023 rounds of a sweep.
_QDWH, _KERNEL = 256, 768


def decompose(a: Array, **options: Any) -> tuple[Array, Array]:
    """``jnp.linalg.eigh`` with a short compile time on TPUs."""
    usual = lambda a: tuple(jnp.linalg.eigh(a, **options))
    special = dict[str, Callable[..., Any]]()
    if _QDWH < a.shape[-1] <= _KERNEL:
        special["tpu"] = functools.partial(eigh_by_jacobi, **options)
    return by_platform(usual, a, special=special)


def by_platform(
    f: Callable[..., Any],
    *arrays: Array,
    is_linear: bool = False,
    special: Mapping[str, Callable[..., Any]] | None = None,
) -> Any:
    """``f``, an operation of LAPACK, applied to stacks of matrices ``(..., m, n)``.

    On the CPU, matrices are processed one by one where a batched call may never end.

    Args:
        f: a function of the arrays, which also accepts single matrices.
        arrays: with the same leading axes, which the results of ``f`` also have.
        is_linear: whether derivatives of ``f`` are needed. Under ``vmap``, ``f`` is then batched.
        special: replacements of ``f`` by platform.
    """
    special = dict(special or {})
    if LAPACK_WAITS_FOR_THREADS:
        one = f if is_linear else jax.custom_batching.sequential_vmap(f)
        several = math.prod(arrays[0].shape[:-2]) > 1
        special["cpu"] = functools.partial(one_by_one, one) if several else one
    return jax.lax.platform_dependent(*arrays, **special, default=f) if special else f(*arrays)


def one_by_one(f: Callable[..., Any], *arrays: Array) -> Any:
    """``f`` applied to stacks of matrices, one matrix after the other."""
    leading = arrays[0].shape[:-2]
    matrices = [a.reshape(-1, *a.shape[-2:]) for a in arrays]
    out = jax.lax.map(lambda each: f(*each), matrices)
    return jax.tree.map(lambda x: x.reshape(*leading, *x.shape[1:]), out)


@functools.partial(custom_jvp, nondiff_argnums=(1,))
def eigh(a: Array, optimizer: str) -> tuple[Array, Array]:
    """Eigenvalues in ascending order, and eigenvectors, of symmetric matrices ``(..., d, d)``.

    For use in derivatives of functions of a matrix. Eigenvectors have no derivative where
    eigenvalues are equal; JAX gives NaN in this case.

    Args:
        a: the matrices, of which only the lower triangle is read.
        optimizer: name of the optimizer, for the error.

    Raises:
        NotImplementedError: if the result is differentiated.
    """
    return decompose(a, symmetrize_input=False)


@eigh.defjvp
def _(optimizer, primals, tangents):
    raise NotImplementedError(
        f"{optimizer} has first derivatives only: differentiate its update once, or put "
        "jax.lax.stop_gradient around it"
    )
