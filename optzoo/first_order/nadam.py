"""Nadam: Adam with Nesterov momentum."""

from __future__ import annotations

import optax

from ..core.checks import check_decays, check_not_negative
from ..core.numerics import safe_divide, sqrt
from ..core.optimizer import known, recorded
from ..rules.leafwise import leafwise, zeros
from ..rules.learning_rate import descend
from ..rules.policies import touched
from ..state.decay_rule import DecayRule
from .adam import AdamSlots, adam_deferral, corrected, next_slots


@recorded
def scale_by_nadam(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8
) -> optax.GradientTransformationExtraArgs:
    """The direction of :func:`optzoo.nadam`."""
    b1, b2 = check_decays(b1=b1, b2=b2)
    check_not_negative(eps=eps)

    def rule(g, x, s, t, correction):
        ahead = lambda m: b1 * m + (1 - b1) * g
        update = lambda s: correction * safe_divide(ahead(s.m), sqrt(s.v) + eps, eps)
        return update, next_slots(g, s, b1, b2)

    powers = {"beta1_power": b1, "beta2_power": b2}
    slots = AdamSlots(zeros, zeros)
    return leafwise(rule, slots=slots, rows=touched, powers=powers, precompute=corrected)


@recorded
def nadam(
    learning_rate: optax.ScalarOrSchedule = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
) -> optax.GradientTransformationExtraArgs:
    r"""Nadam, as in ``tf.contrib.opt.NadamOptimizer``.

    .. math::
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1)\, g_t \\
        v_t &= \beta_2 v_{t-1} + (1 - \beta_2)\, g_t^2 \\
        x_t &= x_{t-1} - \eta_t\, \frac{\sqrt{1 - \beta_2^t}}{1 - \beta_1^t} \cdot
               \frac{\beta_1 m_t + (1 - \beta_1)\, g_t}{\sqrt{v_t} + \hat\epsilon}

    This is neither the paper's formula nor ``optax.nadam``: there is no momentum schedule, and both
    terms have the same bias correction: the first step is :math:`(1 + \beta_1)\, \eta`. With
    row-sparse gradients the means decay in all rows, but only rows with a gradient move
    (:func:`optzoo.rules.touched`).

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.nadam(0.1)
        >>> params = jnp.array([1.0, -2.0])
        >>> updates, state = tx.update(jnp.array([0.01, -5.0]), tx.init(params), params)
        >>> print(updates)  # Nesterov's look-ahead: almost twice the step of Adam
        [-0.19  0.19]

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        b1: decay of the mean, in [0, 1).
        b2: decay of the squared mean, in [0, 1).
        eps: :math:`\hat\epsilon`, at least 0.

    References:
        Dozat, `Incorporating Nesterov Momentum into Adam
        <https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ>`_, 2016.

    Differences from the original:
        With ``eps=0``, an element whose gradients were all zero is unchanged; the original gives
        NaN.
    """

    def deferral(dense):
        of_adam = adam_deferral(learning_rate, b1, b2, eps)
        if not dense:  # the means decay, but rows do not move
            return of_adam._replace(rule=DecayRule(of_adam.rule.decays))
        size = lambda rate, t, powers: b1 * of_adam.size(rate, t, powers)
        return of_adam._replace(size=size)

    return known(descend(learning_rate, scale_by_nadam(b1, b2, eps)), deferral=deferral)
