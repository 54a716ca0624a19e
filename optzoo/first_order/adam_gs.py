"""AdamGS and lazy AdamGS: Adam with the step count given as an argument."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import optax

from ..core.checks import check_decays
from ..core.optimizer import recorded
from ..rules.leafwise import leafwise, zeros
from ..rules.learning_rate import descend
from ..rules.policies import RowsRule, Rule, dense, lazy
from .adam import AdamSlots, adam_rule, corrected


@recorded
def scale_by_adam_gs(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8
) -> optax.GradientTransformationExtraArgs:
    """The direction of :func:`optzoo.adam_gs`."""
    return _scale_by_adam_gs(b1, b2, eps, dense)


@recorded
def scale_by_lazy_adam_gs(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8
) -> optax.GradientTransformationExtraArgs:
    """The direction of :func:`optzoo.lazy_adam_gs`."""
    return _scale_by_adam_gs(b1, b2, eps, lazy)


@recorded
def adam_gs(
    learning_rate: optax.ScalarOrSchedule = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
) -> optax.GradientTransformationExtraArgs:
    r"""Adam with an explicit global step, as in ``tf.contrib.opt.AdamGSOptimizer``.

    .. math::
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1)\, g_t \\
        v_t &= \beta_2 v_{t-1} + (1 - \beta_2)\, g_t^2 \\
        x_t &= x_{t-1} - \eta_t\, \frac{\sqrt{1 - \beta_2^{n+1}}}{1 - \beta_1^{n+1}} \cdot
               \frac{m_t}{\sqrt{v_t} + \hat\epsilon}

    where :math:`n` is ``update(..., global_step=n)``, the number of updates before this one, which
    is required. If :math:`n` starts at 0, this is :func:`optzoo.adam`. If it starts later, the bias
    correction does not match the means, which start at zero: with the default decays the first step
    has length :math:`0.98\, \eta` at :math:`n = 100` and :math:`2.5\, \eta` at :math:`n = 1000`. A
    row-sparse gradient is treated as dense (:func:`optzoo.rules.dense`).

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.adam_gs(0.1)
        >>> params = jnp.array([1.0, -2.0])
        >>> updates, state = tx.update(params, tx.init(params), params, global_step=99)
        >>> print(updates)  # the bias correction is that of step 100
        [-0.0976  0.0976]

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        b1: decay of the mean, in [0, 1).
        b2: decay of the squared mean, in [0, 1).
        eps: :math:`\hat\epsilon`, at least 0.

    Raises:
        ValueError: if ``update`` is called without ``global_step``.

    References:
        Kingma and Ba, `Adam: A Method for Stochastic Optimization
        <https://arxiv.org/abs/1412.6980>`_, 2015.

    Differences from the original:
        The global step is an argument of the update and must be given; the original's default is a
        constant 0, which keeps the correction of the first step permanently. With ``eps=0``, an
        element whose gradients were all zero is unchanged; the original gives NaN.
    """
    return descend(learning_rate, scale_by_adam_gs(b1, b2, eps))


@recorded
def lazy_adam_gs(
    learning_rate: optax.ScalarOrSchedule = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
) -> optax.GradientTransformationExtraArgs:
    r"""Lazy Adam with an explicit global step, as in ``tf.contrib.opt.LazyAdamGSOptimizer``.

    .. math::
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1)\, g_t \\
        v_t &= \beta_2 v_{t-1} + (1 - \beta_2)\, g_t^2 \\
        x_t &= x_{t-1} - \eta_t\, \frac{\sqrt{1 - \beta_2^{n+1}}}{1 - \beta_1^{n+1}} \cdot
               \frac{m_t}{\sqrt{v_t} + \hat\epsilon}

    where :math:`n` is ``update(..., global_step=n)``, the number of updates before this one, which
    is required. Rows without a gradient keep their parameters and slots
    (:func:`optzoo.rules.lazy`). For dense gradients it is :func:`optzoo.adam_gs`.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.lazy_adam_gs(0.1)
        >>> table = jnp.ones((3, 2))
        >>> gradient = optzoo.SparseRows(jnp.array([2]), jnp.full((1, 2), 5.0), 3)
        >>> updates, state = tx.update(gradient, tx.init(table), table, global_step=0)
        >>> print((table + updates))
        [[1.  1. ]
         [1.  1. ]
         [0.9 0.9]]

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        b1: decay of the mean, in [0, 1).
        b2: decay of the squared mean, in [0, 1).
        eps: :math:`\hat\epsilon`, at least 0.

    Raises:
        ValueError: if ``update`` is called without ``global_step``.

    References:
        Kingma and Ba, `Adam: A Method for Stochastic Optimization
        <https://arxiv.org/abs/1412.6980>`_, 2015.

    Differences from the original:
        The global step is an argument of the update and must be given; the original's default is a
        constant 0, which keeps the correction of the first step permanently. With ``eps=0``, an
        element whose gradients were all zero is unchanged; the original gives NaN.
    """
    return descend(learning_rate, scale_by_lazy_adam_gs(b1, b2, eps))


def _scale_by_adam_gs(b1: float, b2: float, eps: float, rows: Callable[[Rule], RowsRule]):
    b1, b2 = check_decays(b1=b1, b2=b2)
    # In float32 for all dtypes of parameters, as in the original.
    power = lambda base: lambda n: jnp.float32(base) ** (jnp.float32(n) + 1)
    return leafwise(
        adam_rule(b1, b2, eps),
        slots=AdamSlots(zeros, zeros),
        rows=rows,
        scheduled={"beta1_power": power(b1), "beta2_power": power(b2)},
        precompute=corrected,
        needs_global_step=True,
    )
