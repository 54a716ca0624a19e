"""GGT: full-matrix adaptive regularization with a window of past moments."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from ..core.checks import check_decays, check_not_negative, check_positive, check_size
from ..core.compat import custom_jvp
from ..core.meshes import axis_size
from ..core.numerics import promote_types, saturating_cast, upcast
from ..core.optimizer import recorded
from ..core.rows import is_rows
from ..rules.leafwise import zeros
from ..rules.learning_rate import chain, scale_by_learning_rate
from ..rules.on_stored import in_float32
from ..rules.treewise import treewise
from ..state.tf1_names import TF1Names
from ..state.types import Signed, Slot
from .eigh import eigh


def _gram_matrix(slots: Any) -> np.ndarray:
    """The products of all rows of a window, in float64."""
    windows = [np.asarray(w, np.float64) for w in jax.tree.leaves(slots.grad_buffer)]
    rows = [w.reshape(len(w), -1) for w in windows]
    return np.sum([w @ w.T for w in rows], axis=0)


class GGTSlots(NamedTuple):
    """The slots of GGT, in addition to the Gram matrix of the window."""

    moment1: Signed  # mean of the gradient
    grad_buffer: Slot  # the last moments: a ring buffer along a leading axis

    tf1 = TF1Names(
        concatenated=True,
        count="global_step",
        unread=("flat_grad",),
        not_in_tf1={"gram": _gram_matrix},
    )


@recorded
def scale_by_ggt(
    b1: float = 0.9,
    window: int = 10,
    eps: float = 1e-4,
    svd_eps: float = 1e-6,
    sigma_eps: float = 1e-2,
    *,
    window_dtype: DTypeLike | None = None,
    axis_name: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The direction of :func:`optzoo.ggt`."""
    window = check_size(1, window=window)
    if window_dtype is not None and not jnp.issubdtype(window_dtype, jnp.floating):
        raise TypeError(f"window_dtype must be a floating-point dtype, got {window_dtype!r}")
    check_positive(svd_eps=svd_eps)
    check_not_negative(eps=eps, sigma_eps=sigma_eps)
    [b1] = check_decays(b1=b1)

    def empty(x):
        row = zeros(x)
        row = row if window_dtype is None else row.astype(window_dtype)
        return jnp.broadcast_to(row, (window, *row.shape))

    mean = in_float32(lambda g, x, m, t: (g, b1 * m + (1 - b1) * g))

    def moment(leaf, t):
        g = leaf.g.to_dense() if is_rows(leaf.g) else leaf.g
        return None if g is None else mean(g, None, leaf.slots.moment1, t)[1]

    def finish(leaf, m, w, y):
        if m is None:
            return None, leaf.slots
        return saturating_cast(_combine(y, w), leaf.g.dtype), GGTSlots(m, w)

    def rule(leaves, shared, t):
        if axis_name is not None:
            axis_size(axis_name)  # its error names the argument
        p = (t - 1) % window
        moments = [moment(leaf, t) for leaf in leaves]
        windows = _push([leaf.slots.grad_buffer for leaf in leaves], moments, p)
        real = filter(jnp.isrealobj, windows)  # a complex parameter is frozen: all zeros
        row = jnp.zeros(window, shared["gram"].dtype)
        row = sum((_products(w, p).astype(row.dtype) for w in real), row)
        row = row if axis_name is None else lax.psum(row, axis_name)
        is_p = jnp.arange(window, dtype=p.dtype) == p
        gram = jnp.where(is_p[None], row[:, None], shared["gram"])
        gram = jnp.where(is_p[:, None], row[None], gram)
        # Computed from the window alone, even where its dtype rounds the moment: the last term
        # would magnify a difference of the two by up to 1 / sqrt(svd_eps).
        y = _coefficients(
            gram / jnp.minimum(t, window).astype(gram.dtype), p, (eps, svd_eps, sigma_eps)
        )
        parts = zip(leaves, moments, windows, strict=True)
        return [finish(*part, y) for part in parts], {"gram": gram}

    return treewise(
        rule,
        slots=GGTSlots(zeros, empty),
        shared=lambda: {"gram": jnp.zeros((window, window))},
        shared_varies=axis_name is None,
        cycle=window,
    )


@recorded
def ggt(
    learning_rate: optax.ScalarOrSchedule = 1e-3,
    b1: float = 0.9,
    window: int = 10,
    eps: float = 1e-4,
    svd_eps: float = 1e-6,
    sigma_eps: float = 1e-2,
    *,
    window_dtype: DTypeLike | None = None,
    axis_name: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Full-matrix AdaGrad with a window of moments, as in ``tf.contrib.opt.GGTOptimizer``.

    .. math::
        m_t &= \beta_1\, m_{t-1} + (1 - \beta_1)\, g_t \\
        M_t &= (m_t, m_{t-1}, \dots, m_{t-w+1}) \,/ \sqrt{\min(t, w)} \\
        U\, \mathrm{diag}(\sigma)\, U^\top &= M_t^\top M_t + \delta I,
            \qquad c_t = U^\top M_t^\top m_t \\
        d_t &= M_t U\, \frac{c_t}{(\sqrt\sigma + \epsilon_\sigma)^3} + [\sqrt{\sigma_{\min}}
            > \epsilon]\, \frac{m_t - M_t U\, (c_t / \sigma)}{\sqrt{\sigma_{\min}}} \\
        x_t &= x_{t-1} - \eta_t\, d_t

    where :math:`m_t` is the vector of all parameters together. There is no bias correction.
    Row-sparse gradients become dense (:func:`optzoo.rules.dense`), and the update is an array.

    A step reads the window twice and computes the products of every row with the newest one: only
    that row of the Gram matrix :math:`M_t^\top M_t`, kept in the state, changes. The window needs
    :math:`w` times the memory of the parameters; if the state is donated, it is updated in place.

    The slots of a parameter without a gradient are unchanged, and the oldest moment of its window,
    at the current position, is used as :math:`m_t`.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.ggt(0.1, window=2)
        >>> params = jnp.array([1.0, -2.0])
        >>> updates, state = tx.update(params, tx.init(params), params)
        >>> print(updates.shape, float(jnp.sum(params * updates)) < 0)
        (2,) True

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        b1: :math:`\beta_1`, in [0, 1).
        window: :math:`w`, an int, positive. It determines shapes: ``optax.inject_hyperparams``
            needs ``static_args=("window",)``.
        eps: :math:`\epsilon`, at least 0. With the defaults :math:`\sqrt{\sigma_{\min}}` is
            always larger.
        svd_eps: :math:`\delta`, positive.
        sigma_eps: :math:`\epsilon_\sigma`, at least 0.
        window_dtype: dtype of the window; None for that of the other slot. ``"bfloat16"`` halves
            its memory; XLA on the CPU makes a float32 copy to compute with it.
        axis_name: within ``jax.shard_map``, the mesh axis along which every parameter is split.
            Sharded parameters under ``jit`` do not need it.

    Raises:
        TypeError: if the rate is neither a number nor a schedule, the window not an int or its
            dtype not floating-point.
        ValueError: if an argument is out of its range.
        NotImplementedError: if an update is differentiated twice. First derivatives with respect to
            gradients and arguments are those of the formula.

    References:
        Agarwal et al., `Efficient Full-Matrix Adaptive Regularization
        <https://proceedings.mlr.press/v97/agarwal19b.html>`_, 2019 (ICML).

    Differences from the original:
        Scalars, parameters of different dtypes, row-sparse and missing gradients are accepted.
        ``svd_eps=0`` raises an error. The last term is simplified, :math:`1 - (\sigma - \delta) /
        \sigma = \delta / \sigma`: in float32 the original, which loses digits to cancellation, has
        an error 3 to 10 times as large.
    """
    direction = scale_by_ggt(
        b1, window, eps, svd_eps, sigma_eps, window_dtype=window_dtype, axis_name=axis_name
    )
    # Two counts: in TensorFlow the rate depends on the global step, and GGT on its own step.
    return chain(direction, scale_by_learning_rate(learning_rate))


@custom_jvp
def _coefficients(gram: Array, p: Array, epsilons: tuple[Any, Any, Any]) -> Array:
    """The coefficients of the rows of the window in the update.

    The moment is row ``p`` of the window, so they are column ``p`` of a function of the Gram
    matrix.
    """
    values, u = _eigh(gram)
    f = _of_eigenvalues(values, values[0], epsilons)
    return jnp.matmul(u, f * u[p], precision=lax.Precision.HIGHEST)


@_coefficients.defjvp
def _jvp_of_coefficients(primals, tangents):
    # JAX differentiates the eigenvectors, which do not exist where eigenvalues are equal, as they
    # are until the window is full. A function of the matrix has a derivative there: in the basis
    # of the eigenvectors that of the matrix, times the divided differences of the function.
    gram, p, epsilons = primals
    d_gram, _, d_epsilons = tangents
    dot = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    values, u = _eigh(gram)
    turned = dot(dot(u.T, d_gram), u)
    of_least = functools.partial(_of_eigenvalues, values)
    f, d_f = jax.jvp(of_least, (values[0], epsilons), (turned[0, 0], d_epsilons))
    d_f = dot(_divided_differences(values, epsilons) * turned, u[p]) + d_f * u[p]
    return dot(u, f * u[p]), dot(u, d_f)


def _eigh(gram: Array) -> tuple[Array, Array]:
    """Eigenvalues, the smallest first, and eigenvectors."""
    values, u = eigh(gram, "ggt")
    return jnp.maximum(values, 0), u


def _of_eigenvalues(values: Array, least: Array, epsilons: tuple[Any, Any, Any]) -> Array:
    """The function of the Gram matrix, on its eigenvalues; the last term uses the smallest one."""
    eps, svd_eps, sigma_eps = epsilons
    # In the last term of the formula 1 - values / sigma is svd_eps / sigma.
    sigma, least = values + svd_eps, least + svd_eps
    root = jnp.sqrt(sigma) + sigma_eps
    first = (jnp.sqrt(values) / root) ** 2 / root  # a third power would overflow
    last = svd_eps / sigma * lax.rsqrt(least)
    return first + jnp.where(jnp.sqrt(least) > eps, last, 0)


def _divided_differences(values: Array, epsilons: tuple[Any, Any, Any]) -> Array:
    """``(f(v) - f(w)) / (v - w)`` for all pairs of eigenvalues, and ``f'(v)`` where they are equal.

    With ``q = sqrt(sigma)`` and ``b = 1 / (q + sigma_eps)`` the first term of ``f(v)`` is
    ``v b_v^3``. Its difference is ``b_v^3 - w b_v b_w (b_v^2 + b_v b_w + b_w^2) / (q_v + q_w)``,
    written so that nothing is divided by ``v - w``.
    """
    eps, svd_eps, sigma_eps = epsilons
    sigma, w = values + svd_eps, values[None]
    q = jnp.sqrt(sigma)
    b = 1 / (q + sigma_eps)
    q_v, q_w, b_v, b_w = q[:, None], q[None], b[:, None], b[None]
    first = b_v**3 - w * b_v * b_w * (b_v**2 + b_v * b_w + b_w**2) / (q_v + q_w)
    last = -svd_eps / sigma[:, None] / sigma[None] * lax.rsqrt(sigma[0])
    return first + jnp.where(q[0] > eps, last, 0)


@jax.jit  # outside jit a conditional is compiled at each call
def _push(windows, rows, p):
    """The windows, each with its row of ``rows`` at position ``p``; unchanged for a row of None."""

    def at(p):
        pairs = zip(windows, rows, strict=True)
        put = lambda w, row: lax.dynamic_update_index_in_dim(w, saturating_cast(row, w.dtype), p, 0)
        return [w if row is None else put(w, row) for w, row in pairs]

    # Both branches do the same. But without a conditional XLA repeats the push for every reader, on
    # copies of the window.
    return lax.cond(p == 0, lambda: at(0), lambda: at(p))


def _products(window: Array, p: Array) -> Array:
    """The products of all rows with row ``p``, without a reshape, which would move shards."""
    row = lax.dynamic_index_in_dim(window, p, 0, keepdims=False)
    replicated = NamedSharding(jax.typeof(row).sharding.mesh, PartitionSpec(None))
    axes = tuple(range(window.ndim))
    return _dot(window, row, ((axes[1:], axes[:-1]), ((), ())), out_sharding=replicated)


def _combine(y: Array, window: Array) -> Array:
    """The sum of the rows of a window, each times its coefficient."""
    window = upcast(window)
    return _dot(y.astype(window.dtype), window, (((0,), (0,)), ((), ())))


def _dot(a, b, dimensions, out_sharding=None):
    return lax.dot_general(
        a,
        b,
        dimensions,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=promote_types(b.dtype, jnp.float32),
        out_sharding=out_sharding,
    )
