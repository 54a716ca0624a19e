"""Adagrad."""

from __future__ import annotations

from typing import NamedTuple

import optax

from ..core.checks import check_positive
from ..core.numerics import safe_divide, sqrt
from ..core.optimizer import recorded
from ..rules.leafwise import full, leafwise
from ..rules.learning_rate import descend
from ..state.types import Sum


class AdagradSlots(NamedTuple):
    """The slots of Adagrad."""

    accumulator: Sum  # sum of the squared gradients


@recorded
def scale_by_adagrad(
    initial_accumulator_value: float = 0.1,
) -> optax.GradientTransformationExtraArgs:
    """The direction of :func:`optzoo.adagrad`."""
    check_positive(initial_accumulator_value=initial_accumulator_value)

    def rule(g, x, s, t):
        update = lambda s: safe_divide(g, sqrt(s.accumulator))
        return update, AdagradSlots(s.accumulator + g**2)

    return leafwise(rule, slots=AdagradSlots(full(initial_accumulator_value)))


@recorded
def adagrad(
    learning_rate: optax.ScalarOrSchedule, initial_accumulator_value: float = 0.1
) -> optax.GradientTransformationExtraArgs:
    r"""Adagrad, as in ``tf.train.AdagradOptimizer``.

    .. math::
        A_t &= A_{t-1} + g_t^2 \\
        x_t &= x_{t-1} - \eta_t\, \frac{g_t}{\sqrt{A_t}}

    There is no epsilon; the accumulator starts above zero instead. Rows without a gradient keep
    their parameters and slots (:func:`optzoo.rules.lazy`).

    ``optax.adagrad`` adds 1e-7 inside the root, unless ``eps=0``.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.adagrad(0.1, initial_accumulator_value=1e-6)
        >>> params, gradient = jnp.array([1.0, -2.0]), jnp.array([3.0, 4.0])
        >>> state = tx.init(params)
        >>> for _ in range(4):
        ...     updates, state = tx.update(gradient, state, params)
        >>> print(updates)  # the rate divided by the root of 4
        [-0.05 -0.05]

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        initial_accumulator_value: :math:`A_0`, positive.

    References:
        Duchi et al., `Adaptive Subgradient Methods for Online Learning and Stochastic
        Optimization <https://jmlr.org/papers/v12/duchi11a.html>`_, 2011.
    """
    return descend(learning_rate, scale_by_adagrad(initial_accumulator_value))
