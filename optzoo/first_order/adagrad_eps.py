"""Adagrad with an epsilon."""

from __future__ import annotations

import optax

from ..core.checks import check_not_negative
from ..core.numerics import safe_divide, sqrt
from ..core.optimizer import recorded
from ..rules.leafwise import full, leafwise
from ..rules.learning_rate import descend
from .adagrad import AdagradSlots


@recorded
def scale_by_adagrad_eps(
    eps: float = 1e-8, initial_accumulator_value: float = 0.0
) -> optax.GradientTransformationExtraArgs:
    """The direction of :func:`optzoo.adagrad_eps`."""
    check_not_negative(eps=eps, initial_accumulator_value=initial_accumulator_value)

    def rule(g, x, s, t):
        update = lambda s: safe_divide(g, sqrt(s.accumulator) + eps, eps)
        return update, AdagradSlots(s.accumulator + g**2)

    return leafwise(rule, slots=AdagradSlots(full(initial_accumulator_value)))


@recorded
def adagrad_eps(
    learning_rate: optax.ScalarOrSchedule = 0.01,
    eps: float = 1e-8,
    initial_accumulator_value: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    r"""Adagrad with an accumulator that starts at zero, and an epsilon outside the root.

    .. math::
        A_t &= A_{t-1} + g_t^2 \\
        x_t &= x_{t-1} - \eta_t\, \frac{g_t}{\sqrt{A_t} + \epsilon}

    :func:`optzoo.adagrad` is TensorFlow 1's Adagrad, which has no epsilon. Rows without a gradient
    keep their parameters and slots (:func:`optzoo.rules.lazy`).

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.adagrad_eps(0.1, eps=1e-8)
        >>> params = jnp.array([1.0, -2.0])
        >>> updates, state = tx.update(jnp.array([3.0, 0.0]), tx.init(params), params)
        >>> print(updates)
        [-0.1 -0. ]

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        eps: :math:`\epsilon`, at least 0.
        initial_accumulator_value: :math:`A_0`, at least 0.

    References:
        ``EmbOptimType.EXACT_ADAGRAD`` of `FBGEMM <https://github.com/pytorch/FBGEMM>`_; Duchi et
        al., `Adaptive Subgradient Methods for Online Learning and Stochastic Optimization
        <https://jmlr.org/papers/v12/duchi11a.html>`_, 2011.
    """
    return descend(learning_rate, scale_by_adagrad_eps(eps, initial_accumulator_value))
