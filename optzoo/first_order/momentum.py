"""Momentum and Nesterov momentum."""

from __future__ import annotations

from typing import NamedTuple

import optax

from ..core.checks import check_flags, check_not_negative
from ..core.optimizer import known, recorded
from ..rules.leafwise import leafwise, zeros
from ..rules.learning_rate import descend
from ..state.decay_rule import DecayRule, Deferral
from ..state.types import Signed


class MomentumSlots(NamedTuple):
    """The slots of momentum."""

    momentum: Signed  # decaying sum of the gradients


@recorded
def scale_by_momentum(
    momentum: float, nesterov: bool = False
) -> optax.GradientTransformationExtraArgs:
    """The direction of :func:`optzoo.momentum`; ``optax.trace`` with support for SparseRows."""
    check_not_negative(momentum=momentum)
    check_flags(nesterov=nesterov)

    def rule(g, x, s, t):
        update = lambda s: g + momentum * s.momentum if nesterov else s.momentum
        return update, MomentumSlots(momentum * s.momentum + g)

    return leafwise(rule, slots=MomentumSlots(zeros))


@recorded
def momentum(
    learning_rate: optax.ScalarOrSchedule, momentum: float, nesterov: bool = False
) -> optax.GradientTransformationExtraArgs:
    r"""Gradient descent with momentum, as in ``tf.train.MomentumOptimizer``.

    .. math::
        a_t &= \mu\, a_{t-1} + g_t \\
        x_t &= x_{t-1} - \eta_t\, a_t
            \quad\text{or, with Nesterov,}\quad x_{t-1} - \eta_t\, (g_t + \mu\, a_t)

    Rows without a gradient keep their parameters and slots (:func:`optzoo.rules.lazy`).

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.momentum(0.1, 0.9)
        >>> params = jnp.array([1.0, -2.0])
        >>> state = tx.init(params)
        >>> for _ in range(2):
        ...     updates, state = tx.update(jnp.ones(2), state, params)
        >>> print(updates)  # 1 + 0.9 times the rate
        [-0.19 -0.19]

    Args:
        learning_rate: :math:`\eta`, a number or a schedule. It is not part of the sum: a change of
            the rate applies to the whole sum immediately.
        momentum: :math:`\mu`, at least 0, usually below 1.
        nesterov: use Nesterov momentum.

    References:
        Polyak, `Some methods of speeding up the convergence of iteration methods
        <https://doi.org/10.1016/0041-5553(64)90137-5>`_, 1964; Sutskever et al., `On the
        importance of initialization and momentum in deep learning
        <https://proceedings.mlr.press/v28/sutskever13.html>`_, 2013.
    """

    def deferral(dense):
        rule = DecayRule((("momentum", float(momentum)),), "momentum")
        size = lambda rate, t, powers: rate * momentum if nesterov else rate
        return Deferral(rule, learning_rate, size) if dense else None

    return known(descend(learning_rate, scale_by_momentum(momentum, nesterov)), deferral=deferral)
