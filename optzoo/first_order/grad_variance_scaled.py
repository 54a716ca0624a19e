"""GradVarianceScaled: smaller steps where the gradient is far from its mean."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import optax

from ..core.checks import check_decays, check_not_negative
from ..core.optimizer import recorded
from ..rules.leafwise import leafwise, zeros
from ..rules.learning_rate import descend
from ..rules.policies import touched
from ..state.types import NotNegative, Signed


class GradVarianceScaledSlots(NamedTuple):
    """The slots of GradVarianceScaled."""

    m: Signed  # mean of the gradient
    v: NotNegative  # mean of the squared distance from it


@recorded
def scale_by_grad_variance(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8
) -> optax.GradientTransformationExtraArgs:
    """The direction of :func:`optzoo.grad_variance_scaled`."""
    b1, b2 = check_decays(b1=b1, b2=b2)
    check_not_negative(eps=eps)

    def rule(g, x, s, t, has_gradient=1.0):
        distance = lambda m: (g - m) ** 2
        ratio = lambda v, d: jnp.where(v < d + eps, v / (d + eps), 1)
        update = lambda s: g * ratio(s.v, distance(s.m))
        m = b1 * s.m + (1 - b1) * g
        # The distance counts as zero in rows without a gradient.
        squares = jnp.where(has_gradient > 0, distance(m), 0)
        return update, GradVarianceScaledSlots(m, b2 * s.v + (1 - b2) * squares)

    def rows(rule):
        def on_rows(g, x, s, t):
            g = g.coalesce()
            ones = g.with_values(jnp.ones((len(g.indices), *(1,) * (g.values.ndim - 1))))
            return touched(rule)(g, x, s, t, has_gradient=ones.to_dense())

        return on_rows

    return leafwise(rule, slots=GradVarianceScaledSlots(zeros, zeros), rows=rows)


@recorded
def grad_variance_scaled(
    learning_rate: optax.ScalarOrSchedule, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8
) -> optax.GradientTransformationExtraArgs:
    r"""Variance-scaled gradients, as in ``returnn.tf.updater.GradVarianceScaledOptimizer``.

    .. math::
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1)\, g_t \\
        d_t &= (g_t - m_t)^2 \\
        v_t &= \beta_2 v_{t-1} + (1 - \beta_2)\, d_t \\
        x_t &= x_{t-1} - \eta_t\, g_t\, \min\left(\frac{v_t}{d_t + \epsilon}, 1\right)

    There is no bias correction, so the first steps are :math:`(1 - \beta_2)\, \eta\, g`. With
    row-sparse gradients the means decay in all rows, but only rows with a gradient move
    (:func:`optzoo.rules.touched`); :math:`d_t` is zero in the other rows.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.grad_variance_scaled(0.1)
        >>> params = jnp.array([1.0, -2.0])
        >>> state = tx.init(params)
        >>> for g in [1.0, 1.2, 0.8]:
        ...     updates, state = tx.update(jnp.array([1.0, g]), state, params)
        >>> print(updates)
        [-0.0004 -0.0006]

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        b1: decay of the mean, in [0, 1).
        b2: decay of the squared distance, in [0, 1).
        eps: :math:`\epsilon`, at least 0; it is added to a squared quantity.

    References:
        ``returnn.tf.updater`` of `RETURNN <https://github.com/rwth-i6/returnn>`_; there is
        no paper.

    Differences from the original:
        Rows that share an index are summed; the original makes a step for each of them. With
        ``eps=0``, an element whose gradient always equalled its mean takes the full step; the
        original gives NaN.
    """
    return descend(learning_rate, scale_by_grad_variance(b1, b2, eps))
