"""Adam on touched rows, with decoupled weight decay times the learning rate."""

from __future__ import annotations

from typing import NamedTuple

import optax

from ..core.checks import check_decays, check_flags, check_not_negative
from ..core.numerics import is_number
from ..core.optimizer import recorded
from ..rules.leafwise import leafwise, zeros
from ..rules.learning_rate import descend
from ..state.types import Exact, NotNegative, Signed
from .adam import AdamSlots
from .debiased import debiased_direction
from .row_wise import count_for_each_row, of_rows


class CountedAdamSlots(NamedTuple):
    """The slots of Adam with a bias correction for each row."""

    m: Signed  # mean of the gradient
    v: NotNegative  # mean of the squared gradient
    row_counter: Exact  # updates of each row


@recorded
def scale_by_sparse_adamw(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    row_wise_bias_correction: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """The direction of :func:`optzoo.sparse_adamw`."""
    b1, b2 = check_decays(b1=b1, b2=b2)
    check_not_negative(eps=eps)
    check_not_negative(weight_decay=weight_decay)
    decays = not is_number(weight_decay, 0)
    check_flags(row_wise_bias_correction=row_wise_bias_correction)

    def rule(g, x, s, t):
        m, v = b1 * s.m + (1 - b1) * g, b2 * s.v + (1 - b2) * g**2
        new = AdamSlots(m, v)
        if row_wise_bias_correction:
            new = CountedAdamSlots(m, v, s.row_counter + 1)
            t = of_rows(new.row_counter, g)
        update = lambda s: debiased_direction(s.m, s.v, t, b1, b2, eps)
        if decays:
            decay = weight_decay * x
            update = lambda s: debiased_direction(s.m, s.v, t, b1, b2, eps) + decay
        return update, new

    slots = AdamSlots(zeros, zeros)
    if row_wise_bias_correction:
        slots = CountedAdamSlots(zeros, zeros, count_for_each_row)
    return leafwise(rule, slots=slots, needs_params=decays)


@recorded
def sparse_adamw(
    learning_rate: optax.ScalarOrSchedule = 0.01,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    row_wise_bias_correction: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Adam for embeddings, with decoupled weight decay times the learning rate.

    .. math::
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1)\, g_t \\
        v_t &= \beta_2 v_{t-1} + (1 - \beta_2)\, g_t^2 \\
        x_t &= x_{t-1} - \eta_t \left( \frac{m_t / (1 - \beta_1^t)}
               {\sqrt{v_t / (1 - \beta_2^t)} + \epsilon} + \lambda\, x_{t-1} \right)

    This is ``optax.adamw`` on the rows that have a gradient; other rows keep their parameters and
    slots (:func:`optzoo.rules.lazy`). :math:`t` counts all updates, or those of the row with
    ``row_wise_bias_correction``. (:func:`optzoo.lazy_adam`, which is TensorFlow's, adds
    :math:`\epsilon` before the bias is corrected.)

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.sparse_adamw(0.1, weight_decay=0.5)
        >>> table = jnp.ones((3, 2))
        >>> gradient = optzoo.SparseRows(jnp.array([2]), jnp.zeros((1, 2)), 3)
        >>> updates, state = tx.update(gradient, tx.init(table), table)
        >>> print((table + updates))  # only the touched row decays
        [[1.   1.  ]
         [1.   1.  ]
         [0.95 0.95]]

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        b1: decay of the mean, in [0, 1).
        b2: decay of the squared mean, in [0, 1).
        eps: :math:`\epsilon`, at least 0.
        weight_decay: :math:`\lambda`, multiplied by the learning rate as in ``optax.adamw``; at
            least 0.
        row_wise_bias_correction: whether :math:`t` counts the updates of each row.

    Raises:
        ValueError: if there is a decay and no params are given to ``update``.

    References:
        ``EmbOptimType.ADAM`` of `FBGEMM <https://github.com/pytorch/FBGEMM>`_. It needs a GPU and
        was not run for comparison: the formula follows its source code. Loshchilov and Hutter,
        `Decoupled Weight Decay Regularization <https://arxiv.org/abs/1711.05101>`_, 2019.
    """
    direction = scale_by_sparse_adamw(b1, b2, eps, weight_decay, row_wise_bias_correction)
    return descend(learning_rate, direction)
