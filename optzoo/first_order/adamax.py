"""AdaMax: Adam with the infinity norm."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import optax

from ..core.checks import check_decays, check_not_negative
from ..core.numerics import safe_divide
from ..core.optimizer import known, recorded
from ..rules.leafwise import leafwise, zeros
from ..rules.learning_rate import descend
from ..state.decay_rule import DecayRule, Deferral
from ..state.types import NotNegative, Signed


class AdaMaxSlots(NamedTuple):
    """The slots of AdaMax."""

    m: Signed  # mean of the gradient
    v: NotNegative  # decaying maximum of its magnitude


@recorded
def scale_by_adamax(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8
) -> optax.GradientTransformationExtraArgs:
    """The direction of :func:`optzoo.adamax`."""
    b1, b2 = check_decays(b1=b1, b2=b2)
    check_not_negative(eps=eps)

    def rule(g, x, s, t, correction):
        m = b1 * s.m + (1 - b1) * g
        v = jnp.maximum(b2 * s.v, jnp.abs(g))
        update = lambda s: correction * safe_divide(s.m, s.v + eps, eps)
        return update, AdaMaxSlots(m, v)

    return leafwise(
        rule,
        slots=AdaMaxSlots(zeros, zeros),
        powers={"beta1_power": b1},
        precompute=lambda t, beta1_power: {"correction": 1 / (1 - beta1_power)},
    )


@recorded
def adamax(
    learning_rate: optax.ScalarOrSchedule = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
) -> optax.GradientTransformationExtraArgs:
    r"""AdaMax, as in ``tf.contrib.opt.AdaMaxOptimizer``.

    .. math::
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1)\, g_t \\
        v_t &= \max(\beta_2 v_{t-1}, |g_t|) \\
        x_t &= x_{t-1} - \frac{\eta_t}{1 - \beta_1^t} \cdot \frac{m_t}{v_t + \epsilon}

    Rows without a gradient keep their parameters and slots (:func:`optzoo.rules.lazy`).

    ``optax.adamax`` adds :math:`\epsilon` to the new gradient, not to the decaying maximum.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.adamax(0.1)
        >>> params = jnp.array([1.0, -2.0])
        >>> updates, state = tx.update(jnp.array([100.0, 1.0]), tx.init(params), params)
        >>> updates, state = tx.update(jnp.array([1.0, 1.0]), state, params)
        >>> print(optzoo.get_slot(state, "v"))  # the decaying maximum remembers the 100
        [99.9  1. ]

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        b1: decay of the mean, in [0, 1).
        b2: decay of the maximum, in [0, 1).
        eps: :math:`\epsilon`, at least 0; it prevents a division by zero before the first gradient.

    References:
        Kingma and Ba, `Adam: A Method for Stochastic Optimization
        <https://arxiv.org/abs/1412.6980>`_, 2015, section 7.1.

    Differences from the original:
        With ``eps=0``, an element whose gradients were all zero is unchanged; the original divides
        zero by zero and gives NaN.
    """

    def deferral(dense):
        rule = DecayRule((("m", float(b1)), ("v", float(b2))), "m", "v", root=False, eps=float(eps))
        size = lambda rate, t, powers: rate / (1 - powers["beta1_power"])
        return Deferral(rule, learning_rate, size) if dense else None

    return known(descend(learning_rate, scale_by_adamax(b1, b2, eps)), deferral=deferral)
