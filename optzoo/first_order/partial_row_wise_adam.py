"""Adam with one mean square for each row."""

from __future__ import annotations

from typing import NamedTuple

import optax

from ..core.checks import check_decays, check_not_negative
from ..core.numerics import is_number
from ..core.optimizer import recorded
from ..rules.leafwise import leafwise, zeros
from ..rules.learning_rate import descend
from ..state.types import NotNegative, Signed
from .debiased import debiased_direction
from .row_wise import of_rows, row_means, zero_for_each_row


class PartialRowWiseAdamSlots(NamedTuple):
    """The slots of partially row-wise Adam."""

    m: Signed  # mean of the gradient
    v: NotNegative  # mean over time of the mean square of each row's gradient


@recorded
def scale_by_partial_row_wise_adam(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0
) -> optax.GradientTransformationExtraArgs:
    """The direction of :func:`optzoo.partial_row_wise_adam`."""
    b1, b2 = check_decays(b1=b1, b2=b2)
    check_not_negative(eps=eps)
    check_not_negative(weight_decay=weight_decay)
    decays = not is_number(weight_decay, 0)

    def rule(g, x, s, t):
        m = b1 * s.m + (1 - b1) * g
        v = b2 * s.v + (1 - b2) * row_means(g**2)
        update = lambda s: debiased_direction(s.m, of_rows(s.v, g), t, b1, b2, eps)
        if decays:
            decay = weight_decay * x
            update = lambda s: debiased_direction(s.m, of_rows(s.v, g), t, b1, b2, eps) + decay
        return update, PartialRowWiseAdamSlots(m, v)

    slots = PartialRowWiseAdamSlots(zeros, zero_for_each_row)
    return leafwise(rule, slots=slots, needs_params=decays)


@recorded
def partial_row_wise_adam(
    learning_rate: optax.ScalarOrSchedule = 0.01,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    r"""Adam for large embeddings: one mean square for each row.

    .. math::
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1)\, g_t \\
        v_{i,t} &= \beta_2 v_{i,t-1} + (1 - \beta_2)\, \frac{1}{d} \sum_{j=1}^{d} g_{ij,t}^2 \\
        x_t &= x_{t-1} - \eta_t \left( \frac{m_t / (1 - \beta_1^t)}
               {\sqrt{v_{i,t} / (1 - \beta_2^t)} + \epsilon} + \lambda\, x_{t-1} \right)

    where :math:`i` is the row, an index of the first axis, and a row has :math:`d` elements. Rows
    without a gradient keep their parameters and slots (:func:`optzoo.rules.lazy`), but :math:`t`
    counts every update.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.partial_row_wise_adam(0.1)
        >>> table = jnp.ones((3, 2))
        >>> gradient = jnp.array([[1.0, 1.0], [3.0, 4.0], [0.0, 2.0]])
        >>> updates, state = tx.update(gradient, tx.init(table), table)
        >>> print({name: optzoo.get_slot(state, name).shape for name in optzoo.slot_names(state)})
        {'m': (3, 2), 'v': (3,)}
        >>> print(updates)
        [[-0.1    -0.1   ]
         [-0.0849 -0.1131]
         [-0.     -0.1414]]

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        b1: decay of the mean, in [0, 1).
        b2: decay of the mean square, in [0, 1).
        eps: :math:`\epsilon`, at least 0.
        weight_decay: :math:`\lambda`, multiplied by the learning rate; at least 0.

    Raises:
        ValueError: if there is a decay and no params are given to ``update``.

    References:
        ``EmbOptimType.PARTIAL_ROWWISE_ADAM`` of `FBGEMM <https://github.com/pytorch/FBGEMM>`_. It
        needs a GPU and was not run for comparison: the formula follows its source code.
    """
    direction = scale_by_partial_row_wise_adam(b1, b2, eps, weight_decay)
    return descend(learning_rate, direction)
