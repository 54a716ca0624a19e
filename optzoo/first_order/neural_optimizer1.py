"""NeuralOptimizer1: smaller steps where the signs of the gradient and its mean differ."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import optax

from ..core.checks import check_decays, check_finite
from ..core.optimizer import recorded
from ..rules.leafwise import leafwise, zeros
from ..rules.learning_rate import descend
from ..rules.policies import touched
from ..state.types import Signed


class NeuralOptimizer1Slots(NamedTuple):
    """The slots of NeuralOptimizer1."""

    m: Signed  # mean of the gradient


@recorded
def scale_by_neural_optimizer1(
    b1: float = 0.9, decrease_factor: float = 0.1
) -> optax.GradientTransformationExtraArgs:
    """The direction of :func:`optzoo.neural_optimizer1`."""
    [b1] = check_decays(b1=b1)
    check_finite(decrease_factor=decrease_factor)

    def rule(g, x, s, t):
        agree = lambda m: jnp.sign(m) == jnp.sign(g)
        update = lambda s: g * jnp.where(agree(s.m), 1, decrease_factor)
        return update, NeuralOptimizer1Slots(b1 * s.m + (1 - b1) * g)

    return leafwise(rule, slots=NeuralOptimizer1Slots(zeros), rows=touched)


@recorded
def neural_optimizer1(
    learning_rate: optax.ScalarOrSchedule, b1: float = 0.9, decrease_factor: float = 0.1
) -> optax.GradientTransformationExtraArgs:
    r"""A variant of PowerSign, as in ``returnn.tf.updater.NeuralOptimizer1``.

    .. math::
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1)\, g_t \\
        x_t &= x_{t-1} - \eta_t\, g_t \cdot \begin{cases}
               1 & \text{if } \mathrm{sgn}(m_t) = \mathrm{sgn}(g_t) \\
               f & \text{otherwise} \end{cases}

    With :math:`f = e^{-2}` this is :func:`optzoo.power_sign` at a learning rate divided by
    :math:`e`. With row-sparse gradients the mean decays in all rows, but only rows with a gradient
    move (:func:`optzoo.rules.touched`).

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.neural_optimizer1(0.1, decrease_factor=0.1)
        >>> params = jnp.array([1.0, -2.0])
        >>> state = tx.init(params)
        >>> updates, state = tx.update(jnp.array([1.0, 1.0]), state, params)
        >>> updates, state = tx.update(jnp.array([1.0, -0.1]), state, params)
        >>> print(updates)  # a tenth of the step where the sign is not that of the mean
        [-0.1    0.001]

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        b1: decay of the mean, in [0, 1).
        decrease_factor: :math:`f`.

    References:
        Bello et al., `Neural Optimizer Search with Reinforcement Learning
        <https://arxiv.org/abs/1709.07417>`_, 2017.

    Differences from the original:
        Rows that share an index are summed; the original makes a step for each of them.
    """
    return descend(learning_rate, scale_by_neural_optimizer1(b1, decrease_factor))
