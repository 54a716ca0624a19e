"""Proximal gradient descent."""

from __future__ import annotations

import optax

from ..core.checks import check_not_negative, check_rate
from ..core.optimizer import recorded
from ..rules.leafwise import leafwise
from ..rules.learning_rate import row_wise
from .shrink import shrink


@recorded
def proximal_gradient_descent(
    learning_rate: optax.ScalarOrSchedule,
    l1_regularization_strength: float = 0.0,
    l2_regularization_strength: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    r"""Forward-backward splitting, as in ``tf.train.ProximalGradientDescentOptimizer``.

    .. math::
        u_t &= x_{t-1} - \eta_t\, g_t \\
        x_t &= \frac{\mathrm{sgn}(u_t)\, \max(|u_t| - \eta_t \lambda_1, 0)}{1 + \eta_t \lambda_2}

    Many parameters become exactly zero for :math:`\lambda_1 > 0`. Rows without a gradient keep
    their parameters; the penalties do not shrink them (:func:`optzoo.rules.lazy`).

    The transformation computes new parameters from the old ones: it applies the learning rate
    itself and must be the last of a chain.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.proximal_gradient_descent(0.1, l1_regularization_strength=1.0)
        >>> params = jnp.array([1.0, -0.05])
        >>> updates, state = tx.update(jnp.array([2.0, 0.0]), tx.init(params), params)
        >>> print((params + updates))  # the rate times the strength nearer to zero
        [0.7 0. ]

    Args:
        learning_rate: :math:`\eta`, a positive number or a schedule.
        l1_regularization_strength: :math:`\lambda_1`, at least 0.
        l2_regularization_strength: :math:`\lambda_2`, at least 0.

    Raises:
        ValueError: if no params are given to ``update``.

    References:
        Duchi and Singer, `Efficient Online and Batch Learning using Forward Backward Splitting
        <https://jmlr.org/papers/v10/duchi09a.html>`_, 2009.

    Differences from the original:
        A negative strength is an error; the original treats a negative :math:`\lambda_1` as zero
        and uses a negative :math:`\lambda_2` unchanged.
    """
    check_rate(learning_rate, positive=True)
    check_not_negative(
        l1_regularization_strength=l1_regularization_strength,
        l2_regularization_strength=l2_regularization_strength,
    )
    l1, l2 = l1_regularization_strength, l2_regularization_strength

    def rule(g, x, s, t, learning_rate):
        return shrink(x - learning_rate * g, learning_rate, l1, l2) - x, s

    tx = leafwise(rule, scheduled={"learning_rate": learning_rate}, needs_params=True)
    return row_wise(tx)
