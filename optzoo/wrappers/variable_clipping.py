"""Clips the norms of parameters, around any optimizer."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax

from ..core.checks import check_params, check_positive
from ..core.gradients import check_gradients
from ..core.optimizer import About, Optimizer, recorded
from ..core.rows import SparseRows, is_rows, map_rows
from ..state.inner import fitting, inner_transformation
from ._dims import check_dims, norms, update_to, with_axes


@recorded
def variable_clipping(
    inner: optax.GradientTransformation, dims: Any, max_norm: float
) -> optax.GradientTransformationExtraArgs:
    r"""Clips parameters after each update, as in ``tf.contrib.opt.VariableClippingOptimizer``.

    .. math::
        x' &= x_{t-1} + u_t \\
        x_t &= x' \cdot \frac{c}{\max(c, \lVert x' \rVert)}

    where :math:`u_t` is the update of ``inner`` and the norm is over the given axes: ``(1,)`` for
    an embedding table means the norm of each row. If a gradient is row-sparse, only its rows are
    clipped, unless axis 0 is among the axes: then the whole parameter is clipped. A parameter
    without a gradient is not clipped.

    The wrapper must be the last transformation of a chain, since it clips the parameters plus this
    update.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> inner = optzoo.gradient_descent(0.1)
        >>> tx = optzoo.variable_clipping(inner, {"table": (1,)}, max_norm=1.0)
        >>> params = {"table": jnp.array([[3.0, 4.0], [0.3, 0.4]])}
        >>> updates, state = tx.update({"table": jnp.zeros((2, 2))}, tx.init(params), params)
        >>> print(params["table"] + updates["table"])  # rows of norm 1 at most
        [[0.6 0.8]
         [0.3 0.4]]

    Args:
        inner: a complete optimizer, including its learning rate.
        dims: a dict from patterns to axes, such as ``{".*/embedding": (1,)}``, by patterns of
            names (:func:`optzoo.param_groups`); or a tree like the parameters with a tuple of axes,
            or None, for each. An empty tuple clips the absolute value of each element.
        max_norm: :math:`c`, positive.

    Raises:
        ValueError: if ``max_norm`` is not positive, if no params are given to ``update``, or, at
            trace time, if a pattern matches no parameter, if two patterns with different axes match
            the same parameter, or if a parameter has no such axis.

    References:
        Hinton et al., `Improving neural networks by preventing co-adaptation of feature detectors
        <https://arxiv.org/abs/1207.0580>`_, 2012 (the bound on norms); ``tf.clip_by_norm``.

    Differences from the original:
        Rows that share an index are clipped once; the original subtracts the excess once for each
        of them, which makes the row too short or reverses its sign. ``max_norm`` must be positive.
    """
    inner = inner_transformation(inner=inner)
    check_positive(max_norm=max_norm)
    check_dims(dims)

    def clip(g, u, x, axes):
        """The update that results in the clipped parameter."""

        def clipped(u, x):
            [norm] = norms(g, axes, new := x + u)
            return new * (max_norm / jnp.maximum(norm, max_norm))

        if is_rows(g) and not is_rows(u) and 0 not in axes:  # only its rows are clipped
            few = update_to(clipped, g, g.gather(u), g.gather(x), axes)
            return g.scatter(u.astype(g.dtype), few)
        return update_to(clipped, g, u, x, axes)

    def update(updates, state, params=None, **extra_args):
        check_params(params)
        check_gradients(updates, params)
        given = map_rows(SparseRows.coalesce, updates)
        updates, state = inner.update(given, state, params, **extra_args)
        return with_axes(clip, dims, given, updates, params), state

    about = About(reads=inner.about.reads)
    return fitting(Optimizer(inner.init, update, about), moves="variable_clipping")
