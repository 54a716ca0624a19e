"""CustomAdam: the Adam of RETURNN."""

from __future__ import annotations

import optax

from ..core.optimizer import recorded
from .adam import lazy_adam


@recorded
def custom_adam(
    learning_rate: optax.ScalarOrSchedule, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8
) -> optax.GradientTransformationExtraArgs:
    r"""RETURNN's Adam, as in ``returnn.tf.updater.CustomAdamOptimizer``.

    .. math::
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1)\, g_t \\
        v_t &= \beta_2 v_{t-1} + (1 - \beta_2)\, g_t^2 \\
        x_t &= x_{t-1} - \eta_t\, \frac{\sqrt{1 - \beta_2^t}}{1 - \beta_1^t} \cdot
               \frac{m_t}{\sqrt{v_t} + \hat\epsilon}

    It is the same as :func:`optzoo.lazy_adam`: rows without a gradient keep their parameters and
    slots (:func:`optzoo.rules.lazy`).

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.custom_adam(0.1)
        >>> table = jnp.ones((3, 2))
        >>> gradient = optzoo.SparseRows(jnp.array([2]), jnp.full((1, 2), 5.0), 3)
        >>> updates, state = tx.update(gradient, tx.init(table), table)
        >>> print((table + updates))  # unlike in adam, rows 0 and 1 are unchanged
        [[1.  1. ]
         [1.  1. ]
         [0.9 0.9]]

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        b1: decay of the mean, in [0, 1).
        b2: decay of the squared mean, in [0, 1).
        eps: :math:`\hat\epsilon`, at least 0. RETURNN's updater passes 1e-16 by default.

    References:
        Kingma and Ba, `Adam: A Method for Stochastic Optimization
        <https://arxiv.org/abs/1412.6980>`_, 2015.

    Differences from the original:
        Rows that share an index are summed; the original makes a step for each of them and keeps
        the slots of the last one. With ``eps=0``, an element whose gradients were all zero is
        unchanged; the original gives NaN.
    """
    return lazy_adam(learning_rate, b1, b2, eps)
