"""PowerSign: gradients scaled up or down by whether their sign agrees with that of their mean."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import optax

from ..core.checks import check_decays, check_finite, check_positive
from ..core.optimizer import known, recorded
from ..rules.leafwise import leafwise, zeros
from ..rules.learning_rate import descend
from ..rules.policies import touched
from ..state.decay_rule import DecayRule, Deferral
from ..state.types import Signed


class PowerSignSlots(NamedTuple):
    """The slots of PowerSign."""

    m: Signed  # mean of the gradient


@recorded
def scale_by_power_sign(
    base: float = math.e, b1: float = 0.9, sign_decay: optax.ScalarOrSchedule | None = None
) -> optax.GradientTransformationExtraArgs:
    """The direction of :func:`optzoo.power_sign`."""
    check_positive(base=base)
    check_finite(schedule=True, none=True, sign_decay=sign_decay)
    [b1] = check_decays(b1=b1)

    def rule(g, x, s, t, sign_decay):
        # For a Python number the logarithm is in double precision; an injected base is an array.
        log_base = math.log(base) if isinstance(base, float | int) else jnp.log(base)
        update = lambda s: jnp.exp(log_base * sign_decay * jnp.sign(g) * jnp.sign(s.m)) * g
        return update, PowerSignSlots(b1 * s.m + (1 - b1) * g)

    scheduled = {"sign_decay": 1.0 if sign_decay is None else sign_decay}
    return leafwise(rule, slots=PowerSignSlots(zeros), rows=touched, scheduled=scheduled)


@recorded
def power_sign(
    learning_rate: optax.ScalarOrSchedule = 0.1,
    base: float = math.e,
    b1: float = 0.9,
    sign_decay: optax.ScalarOrSchedule | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""PowerSign, as in ``tf.contrib.opt.PowerSignOptimizer``.

    .. math::
        m_t &= \beta\, m_{t-1} + (1 - \beta)\, g_t \\
        x_t &= x_{t-1} - \eta_t\, b^{\,\delta_t\, \mathrm{sgn}(g_t)\, \mathrm{sgn}(m_t)}\, g_t

    The mean starts at zero, without bias correction. With row-sparse gradients the mean decays in
    all rows, but only rows with a gradient move (:func:`optzoo.rules.touched`).

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.power_sign(0.1, base=2.0)
        >>> params = jnp.array([1.0, -2.0])
        >>> state = tx.init(params)
        >>> updates, state = tx.update(jnp.array([1.0, 1.0]), state, params)
        >>> updates, state = tx.update(jnp.array([1.0, -0.1]), state, params)
        >>> print(updates)  # 2 times the gradient, and half of it
        [-0.2    0.005]

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        base: :math:`b`, positive.
        b1: decay of the mean, in [0, 1).
        sign_decay: :math:`\delta`, a number or a schedule such as
            :func:`optzoo.cosine_sign_decay`; None for 1.

    References:
        Bello et al., `Neural Optimizer Search with Reinforcement Learning
        <https://arxiv.org/abs/1709.07417>`_, 2017.

    Differences from the original:
        Row-sparse gradients are always accepted; the original refuses them for resource variables.
    """
    tx = descend(learning_rate, scale_by_power_sign(base, b1, sign_decay))
    return known(tx, deferral=lambda dense: Deferral(DecayRule((("m", float(b1)),))))
