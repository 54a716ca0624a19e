"""Gradient descent."""

from __future__ import annotations

import optax

from ..core.optimizer import recorded
from ..rules.learning_rate import row_wise, scale_by_learning_rate


@recorded
def gradient_descent(
    learning_rate: optax.ScalarOrSchedule,
) -> optax.GradientTransformationExtraArgs:
    r"""Gradient descent, as in ``tf.train.GradientDescentOptimizer``.

    .. math::
        x_t = x_{t-1} - \eta_t\, g_t

    Rows without a gradient keep their parameters (:func:`optzoo.rules.linear`).

    Example:
        >>> import jax.numpy as jnp, optax, optzoo
        >>> tx = optzoo.gradient_descent(optax.linear_schedule(1.0, 0.0, 2))
        >>> params = jnp.array([1.0, -2.0])
        >>> state = tx.init(params)
        >>> updates, state = tx.update(params, state, params)
        >>> updates, state = tx.update(params, state, params)
        >>> print(updates)  # the second step has half of the rate
        [-0.5  1. ]

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.

    References:
        Robbins and Monro, `A Stochastic Approximation Method
        <https://doi.org/10.1214/aoms/1177729586>`_, 1951.
    """
    return row_wise(scale_by_learning_rate(learning_rate))
