"""Inverse p-th roots of stacks of symmetric positive semidefinite matrices.

Every method takes a stack ``a`` of shape ``(n, d, d)``, the order ``p``, and a ridge for the
diagonal: ``epsilon``, times the largest eigenvalue if ``relative``. It returns the stack of ``(a +
ridge I) ** (-1 / p)``, and for each matrix whether its root can be used. If a matrix is zero, its
relative ridge is 1, and its root is the identity. The pseudo-inverse adds no ridge: eigenvalues up
to the ridge have the root zero.

The derivatives of every method are those of the exact roots, computed by eigenvalues.
"""

import functools
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...core.compat import custom_jvp
from ..eigh import decompose, eigh

Method = Callable[[Array, Any, Any, bool], tuple[Array, Array]]

MAX_ITERATIONS = 100
TOLERANCE = 1e-6  # a Newton iteration with a smaller error has converged
USABLE = 0.1  # the largest error with which its result is used
RESIDUAL = 1e-3  # the largest error of eigenvectors, relative to the largest eigenvalue

matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def by_eigh(a: Array, p: Any, epsilon: float, relative: bool) -> tuple[Array, Array]:
    r"""By eigenvalues, :math:`V \max(\lambda + r, r)^{-1/p} V^\top`; the fastest on the CPU."""
    return _by_eigenvalues(a, functools.partial(_powers, p, epsilon, relative))


def by_pseudo_inverse(a: Array, p: Any, epsilon: float, relative: bool) -> tuple[Array, Array]:
    r"""By eigenvalues, :math:`V f(\lambda) V^\top`, where :math:`f` is zero up to :math:`r`."""
    return _by_eigenvalues(a, functools.partial(_pseudo_powers, p, epsilon, relative))


def _powers(p: Any, epsilon: Any, relative: bool, eigenvalues: Array) -> Array:
    ridge = _ridge(eigenvalues[:, -1:], epsilon, relative)
    return jnp.maximum(eigenvalues + ridge, ridge) ** jnp.asarray(-1 / p, eigenvalues.dtype)


def _pseudo_powers(p: Any, epsilon: Any, relative: bool, eigenvalues: Array) -> Array:
    least = _ridge(eigenvalues[:, -1:], epsilon, relative)
    kept = eigenvalues > least
    power = jnp.asarray(-1 / p, eigenvalues.dtype)
    return jnp.where(kept, jnp.where(kept, eigenvalues, 1) ** power, 0)


def _by_eigenvalues(a: Array, powers: Callable[[Array], Array]) -> tuple[Array, Array]:
    eigenvalues, v = decompose(a)
    roots = matmul(v * powers(eigenvalues)[:, None], v.mT)
    # Checks the eigenvectors by products with one vector, which cost little beside the roots.
    probe = _probe(a)
    error = matmul(a, probe) - matmul(v, eigenvalues[:, :, None] * matmul(v.mT, probe))
    allowed = RESIDUAL * jnp.sqrt(a.shape[-1]) * eigenvalues[:, -1:]
    return roots, _finite(roots) & jnp.all(jnp.abs(error[:, :, 0]) <= allowed, axis=1)


def by_newton(a: Array, p: int, epsilon: float, relative: bool) -> tuple[Array, Array]:
    """By the coupled Newton iteration, which needs matrix products only; for accelerators."""
    # Scaled to elements of about one no norm overflows. Powers of two cause no rounding.
    scale = jnp.max(jnp.abs(a), axis=(1, 2))
    scale = jnp.where(scale > 0, scale, 1) if relative else jnp.maximum(scale, epsilon)
    # Exactly, of the mantissa: in shard_map JAX 0.12 forgets on which axes the exponent varies.
    scale = (scale / (2 * jnp.frexp(scale)[0]))[:, None]
    a = a / scale[:, :, None]
    ridge = _ridge(_largest(a), epsilon, True) if relative else epsilon / scale
    roots, ok = jax.vmap(lambda a: _newton(a, p))(_add(a, ridge))
    roots = roots * (scale ** (-1 / p))[:, :, None]
    return roots, ok & _finite(roots)


def by_two_iterations(a: Array, p: int, epsilon: float, relative: bool) -> tuple[Array, Array]:
    """By a square root and the Newton iteration, as the original's ``use_iterative_root``."""
    a = _add(a, _ridge(_largest(a), epsilon, relative))
    roots, ok = jax.vmap(lambda a: _newton(_square_root(a), p // 2))(a)
    return roots, ok & _finite(roots)


def by_backend(a: Array, p: int, epsilon: float, relative: bool) -> tuple[Array, Array]:
    """By eigenvalues on the CPU, by the Newton iteration elsewhere."""
    eigh, newton = (lambda a, f=f: f(a, p, epsilon, relative) for f in (by_eigh, by_newton))
    return jax.lax.platform_dependent(a, cpu=eigh, default=newton)


def _with_derivative(method: Method, change: Callable[..., Array]) -> Method:
    """The method with the derivatives of exact roots with respect to matrix, order and epsilon.

    JAX would differentiate the eigenvectors, whose derivatives do not exist where eigenvalues are
    equal, or the iterations, which have no reverse-mode derivative.
    """

    @functools.wraps(method)
    def of_arguments(a, p, epsilon, relative):
        # A number is kept: Newton needs an int. Programs retain these functions: no arrays.
        plain = p if isinstance(p, numbers.Real) else None

        @custom_jvp
        def roots(a, order, epsilon):
            return method(a, order if plain is None else plain, epsilon, relative)

        @roots.defjvp
        def _(primals, tangents):
            new, ok = roots(*primals)
            changes = [t.astype(primals[0].dtype) for t in tangents]
            of_bools: Any = np.zeros(ok.shape, jax.dtypes.float0)
            return (new, ok), (change(ok, relative, *primals, *changes), of_bools)

        return roots(a, p if plain is None else float(plain), epsilon)

    return of_arguments


def _change(ok, relative, a, order, epsilon, d_a, d_order, d_epsilon):
    """The derivative of ``(a + ridge I) ** (-1 / order)``; undefined where the root is not used."""
    values, v, turned = _turned(ok, a, d_a)
    order, epsilon = (jnp.asarray(x, a.dtype) for x in (order, epsilon))
    ridge, d_ridge = jax.jvp(
        lambda largest, epsilon: _ridge(largest, epsilon, relative),
        (values[:, -1:], epsilon),
        (turned[:, -1:, -1], d_epsilon),
    )
    values, power = jnp.maximum(values + ridge, ridge), -1 / order
    by_power = values**power * jnp.log(values) * d_order / order**2
    turned = _divided_differences(values, power) * _add(turned, d_ridge)
    return matmul(matmul(v, _add(turned, by_power)), v.mT)


def _pseudo_change(ok, relative, a, order, epsilon, d_a, d_order, d_epsilon):
    """The derivative of the root of the kept eigenvalues; the threshold has no derivative."""
    values, v, turned = _turned(ok, a, d_a)
    order, power = jnp.asarray(order, a.dtype), -1 / jnp.asarray(order, a.dtype)
    kept = values > _ridge(values[:, -1:], epsilon, relative)
    x = jnp.where(kept, values, 1)
    powers = jnp.where(kept, x**power, 0)
    both, one = (op(kept[:, :, None], kept[:, None]) for op in (jnp.logical_and, jnp.not_equal))
    rise, run = (y[:, :, None] - y[:, None] for y in (powers, values))
    mixed = jnp.where(one, rise / jnp.where(one, run, 1), 0)
    turned = jnp.where(both, _divided_differences(x, power), mixed) * turned
    by_power = powers * jnp.log(x) * d_order / order**2
    return matmul(matmul(v, _add(turned, by_power)), v.mT)


def _turned(ok, a, d_a):
    """Eigenvalues and eigenvectors of the used matrices, and the changes in their basis."""
    identity = jnp.eye(a.shape[-1], dtype=a.dtype)[None]
    values, v = eigh(jnp.where(ok[:, None, None], a, identity), "shampoo")
    return values, v, matmul(matmul(v.mT, d_a), v)


def _divided_differences(x: Array, power: Array) -> Array:
    """``(x**power - y**power) / (x - y)`` for all pairs, and the derivative where they are equal.

    Computed with logarithms, to avoid a division by a small ``x - y``.
    """
    log = jnp.log(x)
    mean, half = (log[:, :, None] + log[:, None]) / 2, (log[:, :, None] - log[:, None]) / 2
    other = jnp.where(half == 0, 1, half)
    ratio = jnp.where(half == 0, power, jnp.sinh(power * other) / jnp.sinh(other))
    return jnp.exp((power - 1) * mean) * ratio


METHODS: dict[str, Method] = {
    "auto": _with_derivative(by_backend, _change),
    "eigh": _with_derivative(by_eigh, _change),
    "pseudo_inverse": _with_derivative(by_pseudo_inverse, _pseudo_change),
    "newton": _with_derivative(by_newton, _change),
    "two_iterations": _with_derivative(by_two_iterations, _change),
}
BY_EIGENVALUES = ("eigh", "pseudo_inverse")  # of any order


def _probe(a: Array) -> Array:
    """A fixed vector in a generic direction."""
    return jnp.cos(jnp.arange(a.shape[-1], dtype=a.dtype))[None, :, None]


def _largest(a: Array) -> Array:
    """The largest eigenvalue, by power iteration from weighted sums of the rows."""
    unit = lambda v: v / jnp.maximum(jnp.linalg.norm(v, axis=1, keepdims=True), 1e-30)
    # Weighted unevenly: [[1, -1], [-1, 1]], as two classes give, maps even sums to zero.
    v = unit(jnp.sum(jnp.abs(a), axis=2, keepdims=True) * (2 + _probe(a)))
    v = jax.lax.fori_loop(0, 20, lambda _, v: unit(matmul(a, v)), v)
    return jnp.linalg.norm(matmul(a, v), axis=1)


def _ridge(largest: Array, epsilon: Any, relative: bool) -> Array:
    if relative:
        return jnp.where(largest > 0, epsilon * largest, 1)
    return jnp.full_like(largest, epsilon)


def _add(a: Array, ridge: Array) -> Array:
    return a + ridge[:, :, None] * jnp.eye(a.shape[-1], dtype=a.dtype)[None]


def _finite(a: Array) -> Array:
    return jnp.all(jnp.isfinite(a), axis=(1, 2))


def _newton(a: Array, p: int) -> tuple[Array, Array]:
    """The inverse ``p``-th root, and whether it can be used.

    Guo and Higham, A Schur-Newton Method for the Matrix p-th Root and its Inverse, 2006.
    """
    if len(a) == 1:
        return a ** (-1 / p), jnp.isfinite(a[0, 0])
    identity = jnp.eye(len(a), dtype=a.dtype)
    distance = lambda m: jnp.max(jnp.abs(m - identity))
    z = (1 + p) / (2 * jnp.linalg.norm(a))

    def unfinished(carry):
        i, _, error, _, last, _ = carry
        return (i < MAX_ITERATIONS) & (error > TOLERANCE) & (error < 1.2 * last)

    def step(carry):
        i, m, error, h, _, _ = carry
        c = (1 + 1 / p) * identity - m / p
        m = matmul(_power(c, p), m)
        return i + 1, m, distance(m), matmul(h, c), error, h

    m, h = z * a, identity * z ** (1 / p)
    infinite = jnp.full_like(z, jnp.inf)
    begin = (0, m, distance(m), h, infinite, h)
    _, _, error, h, last, before = jax.lax.while_loop(unfinished, step, begin)
    # The error may have grown in the last step.
    return jnp.where(error < last, h, before), jnp.minimum(error, last) <= USABLE


def _square_root(a: Array) -> Array:
    """Higham, Stable Iterations for the Matrix Square Root, 1997.

    It stops as the original does: at the last iterate before the error grows. The first error is
    the norm.
    """
    # Computed from a: within shard_map the type of a states on which axes it varies.
    identity, norm = jnp.zeros_like(a) + jnp.eye(len(a), dtype=a.dtype), jnp.linalg.norm(a)

    def unfinished(carry):
        i, _, _, _, error, last = carry
        return (i < MAX_ITERATIONS) & (error < last)

    def step(carry):
        i, y, _, z, error, _ = carry
        c = 0.5 * (3 * identity - matmul(z, y))
        new = matmul(y, c)
        root = new * jnp.sqrt(norm)
        return i + 1, new, y, matmul(c, z), jnp.linalg.norm(a - matmul(root, root)) / norm, error

    y = a / norm
    begin = (0, y, y, identity, norm, norm + 1)
    _, _, before, *_ = jax.lax.while_loop(unfinished, step, begin)
    return before * jnp.sqrt(norm)


def _power(a: Array, p: int) -> Array:
    """A positive integer power, by squaring."""
    if p == 1:
        return a
    half = _power(matmul(a, a), p // 2)
    return matmul(a, half) if p % 2 else half
