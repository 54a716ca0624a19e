"""AdagradDA: Adagrad with dual averaging."""

from __future__ import annotations

from typing import NamedTuple

import optax

from ..core.checks import check_not_negative, check_positive, check_rate
from ..core.numerics import safe_divide, sqrt
from ..core.optimizer import recorded
from ..rules.leafwise import full, leafwise, zeros
from ..rules.learning_rate import row_wise
from ..state.types import Sum
from .shrink import soft_threshold


class AdagradDASlots(NamedTuple):
    """The slots of AdagradDA."""

    gradient_accumulator: Sum  # sum of the gradients
    gradient_squared_accumulator: Sum  # sum of the squared gradients


@recorded
def adagrad_da(
    learning_rate: optax.ScalarOrSchedule,
    initial_accumulator_value: float = 0.1,
    l1_regularization_strength: float = 0.0,
    l2_regularization_strength: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    r"""Adagrad with dual averaging, as in ``tf.train.AdagradDAOptimizer``.

    .. math::
        G_t &= G_{t-1} + g_t, \qquad Q_t = Q_{t-1} + g_t^2 \\
        x_t &= -\eta_t\, \frac{\mathrm{sgn}(G_t)\, \max(|G_t| - \lambda_1 T, 0)}
                              {\eta_t\, \lambda_2\, T + \sqrt{Q_t}}, \qquad T = n + 1

    where :math:`n` counts the updates before this one, or is given by ``update(...,
    global_step=n)``. The method is meant for sparse linear models. The new parameters do not depend
    on the old ones: the initial values have no influence, and an element whose gradients were all
    zero becomes zero. Rows without a gradient keep their parameters and slots
    (:func:`optzoo.rules.lazy`), but :math:`T` counts every update.

    The transformation computes new parameters: it applies the learning rate itself and must be the
    last of a chain.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.adagrad_da(0.1, l1_regularization_strength=0.5)
        >>> params = jnp.array([1.0, -2.0])
        >>> updates, state = tx.update(jnp.array([2.0, 0.1]), tx.init(params), params)
        >>> print((params + updates))  # from all gradients, not from the old parameters
        [-0.0741  0.    ]

    Args:
        learning_rate: :math:`\eta`, a positive number or a schedule.
        initial_accumulator_value: :math:`Q_0`, positive.
        l1_regularization_strength: :math:`\lambda_1`, at least 0; its effect is relative to the
            mean of the gradients.
        l2_regularization_strength: :math:`\lambda_2`, at least 0.

    Raises:
        ValueError: if no params are given to ``update``.

    References:
        Duchi et al., `Adaptive Subgradient Methods for Online Learning and Stochastic
        Optimization <https://jmlr.org/papers/v12/duchi11a.html>`_, 2011.

    Differences from the original:
        The optimizer counts its steps unless ``global_step`` is given; the original reads a
        variable, and :math:`T` stays 1 if the variable is not also passed to ``apply_gradients``. A
        negative :math:`\lambda_1` is an error; the original treats it as zero.
    """
    check_rate(learning_rate, positive=True)
    check_positive(
        initial_accumulator_value=initial_accumulator_value,
    )
    check_not_negative(
        l1_regularization_strength=l1_regularization_strength,
        l2_regularization_strength=l2_regularization_strength,
    )
    l1, l2 = l1_regularization_strength, l2_regularization_strength

    def rule(g, x, s, t, learning_rate, steps):
        total = s.gradient_accumulator + g
        squares = s.gradient_squared_accumulator + g**2

        def update(s):
            total, squares = s
            scale = learning_rate * l2 * steps + sqrt(squares)
            return -learning_rate * safe_divide(soft_threshold(total, l1 * steps), scale) - x

        return update, AdagradDASlots(total, squares)

    tx = leafwise(
        rule,
        slots=AdagradDASlots(zeros, full(initial_accumulator_value)),
        scheduled={"learning_rate": learning_rate, "steps": lambda n: n + 1},
        needs_params=True,
    )
    return row_wise(tx)
