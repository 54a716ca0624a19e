"""AMSGrad: Adam with a non-decreasing second moment."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import optax

from ..core.checks import check_decays, check_flags, check_not_negative
from ..core.numerics import safe_divide, sqrt
from ..core.optimizer import known, recorded
from ..rules.leafwise import leafwise, zeros
from ..rules.learning_rate import chain, scale_by_learning_rate
from ..state.decay_rule import DecayRule, Deferral
from ..state.tf1_names import TF1Names
from ..state.types import NotNegative, Signed


class AMSGradSlots(NamedTuple):
    """The slots of AMSGrad."""

    m: Signed  # mean of the gradient
    v: NotNegative  # mean of the squared gradient
    v_hat: NotNegative  # its maximum so far

    tf1 = TF1Names(
        hint="; RETURNN's AMSGrad does not name its variables: map them by "
        "variables={'0/slots/m/w': 'Variable_1', ...}"
    )


@recorded
def scale_by_amsgrad(
    b1: float = 0.9, b2: float = 0.99, eps: float = 0.0, decay_learning_rate: bool = False
) -> optax.GradientTransformationExtraArgs:
    """The direction of :func:`optzoo.amsgrad`."""
    b1, b2 = check_decays(b1=b1, b2=b2)
    check_not_negative(eps=eps)
    check_flags(decay_learning_rate=decay_learning_rate)

    def rule(g, x, s, t):
        m = b1 * s.m + (1 - b1) * g
        v = b2 * s.v + (1 - b2) * g**2
        divisor = jnp.sqrt(t.astype(g.dtype)) if decay_learning_rate else 1
        update = lambda s: safe_divide(s.m, sqrt(s.v_hat) + eps, eps) / divisor
        return update, AMSGradSlots(m, v, jnp.maximum(s.v_hat, v))

    return leafwise(rule, slots=AMSGradSlots(zeros, zeros, zeros))


@recorded
def amsgrad(
    learning_rate: optax.ScalarOrSchedule = 1e-3,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 0.0,
    decay_learning_rate: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""AMSGrad, as in ``returnn.tf.updater.AMSGradOptimizer``.

    .. math::
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1)\, g_t \\
        v_t &= \beta_2 v_{t-1} + (1 - \beta_2)\, g_t^2 \\
        \hat v_t &= \max(\hat v_{t-1}, v_t) \\
        x_t &= x_{t-1} - \frac{\eta_t}{\sqrt{t}} \cdot \frac{m_t}{\sqrt{\hat v_t} + \epsilon}

    where :math:`\sqrt{t}` is replaced by 1 if ``decay_learning_rate`` is false. There is no bias
    correction. Rows without a gradient keep their parameters and slots (:func:`optzoo.rules.lazy`).

    ``optax.amsgrad`` corrects the bias of both means, and its default :math:`\beta_2` is 0.999.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.amsgrad(0.1, eps=1e-8)
        >>> params = jnp.array([1.0])
        >>> state = tx.init(params)
        >>> for g in [100.0, 1.0, 1.0]:
        ...     updates, state = tx.update(jnp.array([g]), state, params)
        >>> print(optzoo.get_slot(state, "v_hat"))  # the maximum does not decay
        [100.]

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        b1: decay of the mean, in [0, 1).
        b2: decay of the squared mean, in [0, 1).
        eps: :math:`\epsilon`, at least 0.
        decay_learning_rate: divide the learning rate by the square root of the number of updates. A
            static argument: it cannot be injected.

    References:
        Reddi et al., `On the Convergence of Adam and Beyond
        <https://openreview.net/forum?id=ryQu7f-RZ>`_, 2018.

    Differences from the original:
        With ``eps=0``, the default, an element whose gradients were all zero is unchanged; the
        original divides zero by zero and its parameter stays NaN. Row-sparse gradients and float64
        are accepted; the original raises a TypeError.
    """
    # Two counts: in RETURNN the rate depends on the global step, and the decay on its own step.
    direction = scale_by_amsgrad(b1, b2, eps, decay_learning_rate)

    def deferral(dense):  # v_hat, the largest v so far, does not decay
        rule = DecayRule((("m", float(b1)), ("v", float(b2))), "m", "v_hat", eps=float(eps))
        size = lambda rate, t, powers: (
            rate / (jnp.sqrt(t.astype(rate.dtype)) if decay_learning_rate else 1)
        )
        return Deferral(rule, learning_rate, size) if dense else None

    return known(chain(direction, scale_by_learning_rate(learning_rate)), deferral=deferral)
