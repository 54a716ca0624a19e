"""NormalizedSGD: a step of fixed length for each parameter."""

from __future__ import annotations

import jax.numpy as jnp
import optax

from ..core.norms import norm
from ..core.numerics import upcast
from ..core.optimizer import recorded
from ..rules.leafwise import leafwise
from ..rules.learning_rate import descend


@recorded
def scale_by_own_norm() -> optax.GradientTransformationExtraArgs:
    """The direction of :func:`optzoo.normalized_sgd`."""

    def rule(g, x, s, t):
        return g / jnp.maximum(norm(g), 1e-6), s

    def of_merged_rows(g, x, s, t):  # of all rows together, on all devices
        g = g.coalesce()
        return rule(upcast(g), x, s, t)[0].astype(g.dtype), s

    return leafwise(rule, rows=lambda _: of_merged_rows)


@recorded
def normalized_sgd(
    learning_rate: optax.ScalarOrSchedule,
) -> optax.GradientTransformationExtraArgs:
    r"""Gradient descent with normalized gradients, as in ``returnn.tf.updater.NormalizedSGD``.

    .. math::
        x_t = x_{t-1} - \eta_t\, \frac{g_t}{\max(\lVert g_t \rVert_2, 10^{-6})}

    The norm is over the gradient of one parameter. Each parameter moves by a distance of
    :math:`\eta`, unless its gradient is almost zero; a scalar moves by :math:`\pm\eta`. Clipping
    gradients by their norms first has no effect. The norm of a row-sparse gradient is computed
    after rows that share an index are summed; rows without a gradient keep their parameters
    (:func:`optzoo.rules.lazy`).

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.normalized_sgd(0.1)
        >>> params = jnp.array([1.0, -2.0])
        >>> updates, state = tx.update(jnp.array([300.0, 400.0]), tx.init(params), params)
        >>> print(updates)  # always of length 0.1
        [-0.06 -0.08]

    Args:
        learning_rate: :math:`\eta`, a number or a schedule; the length of a step.

    References:
        ``returnn.tf.updater`` of `RETURNN <https://github.com/rwth-i6/returnn>`_; Cortés,
        `Finite-time convergent gradient flows with applications to network consensus
        <https://doi.org/10.1016/j.automatica.2006.06.015>`_, 2006.

    Differences from the original:
        Rows that share an index are summed before the norm is computed; the original computes the
        norm without summing them.
    """
    return descend(learning_rate, scale_by_own_norm())
