"""Proximal Adagrad."""

from __future__ import annotations

from typing import NamedTuple

import optax

from ..core.checks import check_not_negative, check_positive, check_rate
from ..core.numerics import safe_divide, sqrt
from ..core.optimizer import recorded
from ..rules.leafwise import full, leafwise
from ..rules.learning_rate import row_wise
from ..state.types import Sum
from .shrink import shrink


class ProximalAdagradSlots(NamedTuple):
    """The slots of proximal Adagrad."""

    accumulator: Sum  # sum of the squared gradients


@recorded
def proximal_adagrad(
    learning_rate: optax.ScalarOrSchedule,
    initial_accumulator_value: float = 0.1,
    l1_regularization_strength: float = 0.0,
    l2_regularization_strength: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    r"""Adagrad with L1 and L2 shrinkage, as in ``tf.train.ProximalAdagradOptimizer``.

    .. math::
        A_t &= A_{t-1} + g_t^2, \qquad e_t = \eta_t / \sqrt{A_t} \\
        u_t &= x_{t-1} - e_t\, g_t \\
        x_t &= \frac{\mathrm{sgn}(u_t)\, \max(|u_t| - e_t \lambda_1, 0)}{1 + e_t \lambda_2}

    Many parameters become exactly zero for :math:`\lambda_1 > 0`. Rows without a gradient keep
    their parameters and slots; the penalties do not shrink them (:func:`optzoo.rules.lazy`).

    The transformation computes new parameters from the old ones: it applies the learning rate
    itself and must be the last of a chain.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.proximal_adagrad(0.1, l1_regularization_strength=1.0)
        >>> params = jnp.array([1.0, -0.01])
        >>> updates, state = tx.update(jnp.array([2.0, 0.001]), tx.init(params), params)
        >>> print((params + updates))
        [0.8518 0.    ]

    Args:
        learning_rate: :math:`\eta`, a positive number or a schedule.
        initial_accumulator_value: :math:`A_0`, positive.
        l1_regularization_strength: :math:`\lambda_1`, at least 0.
        l2_regularization_strength: :math:`\lambda_2`, at least 0.

    Raises:
        ValueError: if no params are given to ``update``.

    References:
        Duchi et al., `Adaptive Subgradient Methods for Online Learning and Stochastic
        Optimization <https://jmlr.org/papers/v12/duchi11a.html>`_, 2011; Duchi and Singer,
        `Efficient Online and Batch Learning using Forward Backward Splitting
        <https://jmlr.org/papers/v10/duchi09a.html>`_, 2009.
    """
    check_rate(learning_rate, positive=True)
    check_positive(initial_accumulator_value=initial_accumulator_value)
    check_not_negative(
        l1_regularization_strength=l1_regularization_strength,
        l2_regularization_strength=l2_regularization_strength,
    )
    l1, l2 = l1_regularization_strength, l2_regularization_strength

    def rule(g, x, s, t, learning_rate):
        def update(s):
            rate = safe_divide(learning_rate, sqrt(s.accumulator))
            return shrink(x - rate * g, rate, l1, l2) - x

        return update, ProximalAdagradSlots(s.accumulator + g**2)

    tx = leafwise(
        rule,
        slots=ProximalAdagradSlots(full(initial_accumulator_value)),
        scheduled={"learning_rate": learning_rate},
        needs_params=True,
    )
    return row_wise(tx)
