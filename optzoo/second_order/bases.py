"""Orthonormal bases of eigenvectors, with first derivatives.

Eigenvectors have no derivative where eigenvalues are equal, for example in a matrix without full
rank. JAX gives NaN in this case; here the vectors of one eigenvalue do not rotate into each other.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from ..core.compat import custom_jvp
from .eigh import by_platform, decompose, eigh, one_by_one

matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)

EQUAL = (
    1e-6  # eigenvalues with a smaller difference, relative to the largest, are regarded as equal
)
# Above this size matrices are decomposed one after the other on a TPU: XLA needs four to five times
# as long to compile a QR decomposition of several matrices of 512 or 768 as of one.
ONE_BY_ONE = 256


def by_eigh(a: Array, old: Array) -> tuple[Array, Array]:
    """The eigenvectors of a stack of symmetric matrices, in columns, and a mask of the usable ones.

    Args:
        a: the matrices, of shape ``(n, d, d)``.
        old: the previous bases (unused).
    """
    basis = _eigenvectors(a)
    return basis, _finite(basis)


def by_qr(a: Array, old: Array) -> tuple[Array, Array]:
    r"""Bases refined by one power iteration, and a mask of the usable ones.

    :math:`\mathrm{QR}(A\, Q)`, with the columns of the old basis sorted by :math:`q^\top A\, q`,
    the largest first. Each new column has the position of the old column from which it was
    computed.

    Args:
        a: symmetric matrices, of shape ``(n, d, d)``.
        old: the previous bases.
    """
    powers = matmul(a, old)
    order = jnp.argsort(-jnp.sum(old * powers, axis=1), axis=1)
    basis = _orthogonal(jnp.take_along_axis(powers, order[:, None], axis=2))
    basis = jnp.take_along_axis(basis, jnp.argsort(order, axis=1)[:, None], axis=2)
    return basis, _finite(basis)


def unchanged(a: Array, old: Array) -> tuple[Array, Array]:
    """The previous bases, and a mask of the usable ones."""
    return old, _finite(old)


def _finite(a: Array) -> Array:
    return jnp.all(jnp.isfinite(a), axis=(1, 2))


@custom_jvp
def _eigenvectors(a: Array) -> Array:
    return decompose(a)[1]


@_eigenvectors.defjvp
def _(primals, tangents):
    [a] = primals
    values, v = eigh(a, "soap")
    gaps = values[:, None] - values[:, :, None]
    differ = jnp.abs(gaps) > EQUAL * jnp.max(jnp.abs(values), axis=1)[:, None, None]
    turn = jnp.where(differ, matmul(matmul(v.mT, tangents[0]), v) / jnp.where(differ, gaps, 1), 0)
    return v, matmul(v, turn)


@custom_jvp
def _orthogonal(a: Array) -> Array:
    """The orthogonal factor of a QR decomposition."""
    factor = lambda a: jnp.linalg.qr(a)[0]
    many = {"tpu": functools.partial(one_by_one, factor)} if a.shape[-1] > ONE_BY_ONE else {}
    return by_platform(factor, a, special=many)


@_orthogonal.defjvp
def _(primals, tangents):
    [a] = primals
    q = _orthogonal(a)
    r = matmul(q.mT, a)
    sizes = jnp.abs(jnp.diagonal(r, axis1=1, axis2=2))
    is_zero = sizes <= EQUAL * jnp.max(sizes, axis=1, keepdims=True)
    r = r + jax.vmap(jnp.diag)(is_zero.astype(a.dtype))
    solve = functools.partial(jax.lax.linalg.triangular_solve, left_side=False, lower=False)
    turn = jnp.tril(by_platform(solve, r, matmul(q.mT, tangents[0]), is_linear=True), -1)
    return q, matmul(q, turn - turn.mT)
