"""Adam and lazy Adam: one rule, two policies for rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import optax
from jax import Array

from ..core.checks import check_decays, check_not_negative
from ..core.numerics import safe_divide, sqrt
from ..core.optimizer import known, recorded
from ..rules.leafwise import leafwise, zeros
from ..rules.learning_rate import descend
from ..rules.policies import RowsRule, Rule, dense, lazy
from ..state.decay_rule import DecayRule, Deferral
from ..state.types import NotNegative, Signed


class AdamSlots(NamedTuple):
    """The slots of Adam."""

    m: Signed  # mean of the gradient
    v: NotNegative  # mean of the squared gradient


def next_slots(g: Array, s: AdamSlots, b1: float, b2: float) -> AdamSlots:
    """Both means after one more gradient."""
    return AdamSlots(m=b1 * s.m + (1 - b1) * g, v=b2 * s.v + (1 - b2) * g**2)


def bias_correction(beta1_power: Array, beta2_power: Array) -> Array:
    """The bias correction of both means."""
    return jnp.sqrt(1 - beta2_power) / (1 - beta1_power)


def corrected(t: Array, beta1_power: Array, beta2_power: Array) -> dict[str, Array]:
    """The bias correction that replaces the powers of the decays in the arguments of the rule."""
    del t
    return {"correction": bias_correction(beta1_power, beta2_power)}


def adam_rule(b1: float, b2: float, eps: float) -> Rule:
    """The rule of Adam for one array."""
    check_not_negative(eps=eps)

    def rule(g, x, s, t, correction):
        update = lambda s: correction * safe_divide(s.m, sqrt(s.v) + eps, eps)
        return update, next_slots(g, s, b1, b2)

    return rule


def adam_deferral(
    learning_rate: optax.ScalarOrSchedule, b1: float, b2: float, eps: float
) -> Deferral:
    """How rows move without a gradient, for :func:`optzoo.caught_up`."""
    decays = (("m", float(b1)), ("v", float(b2)))
    size = lambda rate, t, powers: rate * bias_correction(**powers)
    return Deferral(DecayRule(decays, "m", "v", eps=float(eps)), learning_rate, size)


@recorded
def scale_by_adam(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8
) -> optax.GradientTransformationExtraArgs:
    """The direction of :func:`optzoo.adam`."""
    return _scale_by_adam(b1, b2, eps, dense)


@recorded
def scale_by_lazy_adam(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8
) -> optax.GradientTransformationExtraArgs:
    """The direction of :func:`optzoo.lazy_adam`."""
    return _scale_by_adam(b1, b2, eps, lazy)


@recorded
def adam(
    learning_rate: optax.ScalarOrSchedule = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
) -> optax.GradientTransformationExtraArgs:
    r"""Adam, as in ``tf.train.AdamOptimizer``.

    .. math::
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1)\, g_t \\
        v_t &= \beta_2 v_{t-1} + (1 - \beta_2)\, g_t^2 \\
        x_t &= x_{t-1} - \eta_t\, \frac{\sqrt{1 - \beta_2^t}}{1 - \beta_1^t} \cdot
               \frac{m_t}{\sqrt{v_t} + \hat\epsilon}

    This is the paper's "epsilon hat": it is added to :math:`\sqrt{v_t}` before the bias correction,
    unlike in ``optax.adam``. A row-sparse gradient is treated as dense
    (:func:`optzoo.rules.dense`): for rows without a gradient the slots decay and the parameters
    move. See :func:`optzoo.lazy_adam` for an update whose cost grows with the touched rows only.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.adam(0.1)
        >>> params = {"w": jnp.array([1.0, -2.0])}
        >>> state = tx.init(params)
        >>> updates, state = tx.update({"w": jnp.array([0.01, -5.0])}, state, params)
        >>> print(updates["w"])  # the first step is as long as the rate
        [-0.1  0.1]

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        b1: decay of the mean, in [0, 1).
        b2: decay of the squared mean, in [0, 1).
        eps: :math:`\hat\epsilon`, at least 0.

    References:
        Kingma and Ba, `Adam: A Method for Stochastic Optimization
        <https://arxiv.org/abs/1412.6980>`_, 2015, end of section 2.

    Differences from the original:
        With ``eps=0``, an element is unchanged while :math:`v_t` is zero (gradients or their
        squares are zero); the original divides by zero. If a square overflows (in float32 that of
        2e19), :math:`v_t` stays infinite and the element no longer changes; in the original both
        become NaN one step later.
    """
    tx = descend(learning_rate, scale_by_adam(b1, b2, eps))
    return known(tx, deferral=lambda dense: adam_deferral(learning_rate, b1, b2, eps))


@recorded
def lazy_adam(
    learning_rate: optax.ScalarOrSchedule = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
) -> optax.GradientTransformationExtraArgs:
    r"""Adam for embeddings, as in ``tf.contrib.opt.LazyAdamOptimizer``.

    .. math::
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1)\, g_t \\
        v_t &= \beta_2 v_{t-1} + (1 - \beta_2)\, g_t^2 \\
        x_t &= x_{t-1} - \eta_t\, \frac{\sqrt{1 - \beta_2^t}}{1 - \beta_1^t} \cdot
               \frac{m_t}{\sqrt{v_t} + \hat\epsilon}

    Rows without a gradient keep their parameters and slots (:func:`optzoo.rules.lazy`), but
    :math:`t` counts every update. For dense gradients it is :func:`optzoo.adam`.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.lazy_adam(0.1)
        >>> table = jnp.ones((3, 2))
        >>> gradient = optzoo.SparseRows(jnp.array([2]), jnp.full((1, 2), 5.0), 3)
        >>> updates, state = tx.update(gradient, tx.init(table), table)
        >>> print((table + updates))  # rows 0 and 1 are unchanged
        [[1.  1. ]
         [1.  1. ]
         [0.9 0.9]]

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        b1: decay of the mean, in [0, 1).
        b2: decay of the squared mean, in [0, 1).
        eps: :math:`\hat\epsilon`, at least 0.

    References:
        Kingma and Ba, `Adam: A Method for Stochastic Optimization
        <https://arxiv.org/abs/1412.6980>`_, 2015.

    Differences from the original:
        With ``eps=0``, an element whose gradients were all zero is unchanged; the original divides
        zero by zero and gives NaN.
    """
    return descend(learning_rate, scale_by_lazy_adam(b1, b2, eps))


def _scale_by_adam(b1: float, b2: float, eps: float, rows: Callable[[Rule], RowsRule]):
    b1, b2 = check_decays(b1=b1, b2=b2)
    powers = {"beta1_power": b1, "beta2_power": b2}
    slots = AdamSlots(zeros, zeros)
    return leafwise(
        adam_rule(b1, b2, eps), slots=slots, rows=rows, powers=powers, precompute=corrected
    )
