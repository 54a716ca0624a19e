"""LAMB with a trust ratio for each row, with full or row-wise mean squares."""

from __future__ import annotations

from typing import NamedTuple

import optax

from ..core.checks import check_decays, check_not_negative
from ..core.numerics import safe_divide
from ..core.optimizer import recorded
from ..rules.leafwise import leafwise, zeros
from ..rules.learning_rate import descend
from ..state.types import NotNegative, Signed
from .debiased import debiased_direction
from .row_wise import of_rows, row_means, row_norms, zero_for_each_row


class RowWiseLAMBSlots(NamedTuple):
    """The slots of row-wise LAMB."""

    m: Signed  # mean of the gradient
    v: NotNegative  # mean of its square

    zero_rows_stay = True  # optzoo.growing warns of it


class PartialRowWiseLAMBSlots(NamedTuple):
    """The slots of LAMB with one mean square for each row."""

    m: Signed  # mean of the gradient
    v: NotNegative  # mean of the mean square of each row

    zero_rows_stay = True


@recorded
def scale_by_row_wise_lamb(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0
) -> optax.GradientTransformationExtraArgs:
    """The direction of :func:`optzoo.row_wise_lamb`."""
    slots = RowWiseLAMBSlots(zeros, zeros)
    return _scale_by_lamb(b1, b2, eps, weight_decay, slots, lambda a: a, lambda a, x: a)


@recorded
def scale_by_partial_row_wise_lamb(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0
) -> optax.GradientTransformationExtraArgs:
    """The direction of :func:`optzoo.partial_row_wise_lamb`."""
    slots = PartialRowWiseLAMBSlots(zeros, zero_for_each_row)
    return _scale_by_lamb(b1, b2, eps, weight_decay, slots, row_means, of_rows)


@recorded
def row_wise_lamb(
    learning_rate: optax.ScalarOrSchedule = 0.01,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    r"""LAMB for embeddings: one trust ratio for each row.

    .. math::
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1)\, g_t \\
        v_t &= \beta_2 v_{t-1} + (1 - \beta_2)\, g_t^2 \\
        r_t &= \frac{m_t / (1 - \beta_1^t)}{\sqrt{v_t / (1 - \beta_2^t)} + \epsilon}
               + \lambda\, x_{t-1} \\
        x_t &= x_{t-1} - \eta_t\, \frac{\lVert x_{t-1} \rVert}{\lVert r_t \rVert}\, r_t

    where the norms are those of a row, along the first axis; ``optax.lamb`` uses those of the whole
    parameter. A row of zeros stays zero, and a row with :math:`r = 0` does not move. Rows without a
    gradient keep their parameters and slots (:func:`optzoo.rules.lazy`), but :math:`t` counts every
    update.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.row_wise_lamb(0.1)
        >>> table = jnp.array([[3.0, 4.0], [0.3, 0.4]])
        >>> updates, state = tx.update(jnp.ones((2, 2)), tx.init(table), table)
        >>> print(jnp.linalg.norm(updates, axis=1))  # the rate times the norm of each row
        [0.5  0.05]

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        b1: decay of the mean, in [0, 1).
        b2: decay of the squared mean, in [0, 1).
        eps: :math:`\epsilon`, at least 0.
        weight_decay: :math:`\lambda`, multiplied by the learning rate and by the ratio of the
            norms; at least 0.

    Raises:
        ValueError: if no params are given to ``update``.

    References:
        You et al., `Large Batch Optimization for Deep Learning: Training BERT in 76 minutes
        <https://arxiv.org/abs/1904.00962>`_, 2020; ``EmbOptimType.LAMB`` of `FBGEMM
        <https://github.com/pytorch/FBGEMM>`_. It needs a GPU and was not run for comparison: the
        formula follows its source code, which gives NaN where it divides zero by zero.
    """
    return descend(learning_rate, scale_by_row_wise_lamb(b1, b2, eps, weight_decay))


@recorded
def partial_row_wise_lamb(
    learning_rate: optax.ScalarOrSchedule = 0.01,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    r"""LAMB for large embeddings: one trust ratio and one mean square for each row.

    .. math::
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1)\, g_t \\
        v_{i,t} &= \beta_2 v_{i,t-1} + (1 - \beta_2)\, \frac{1}{d} \sum_{j=1}^{d} g_{ij,t}^2 \\
        r_t &= \frac{m_t / (1 - \beta_1^t)}{\sqrt{v_{i,t} / (1 - \beta_2^t)} + \epsilon}
               + \lambda\, x_{t-1} \\
        x_t &= x_{t-1} - \eta_t\, \frac{\lVert x_{t-1} \rVert}{\lVert r_t \rVert}\, r_t

    where :math:`i` is the row, an index of the first axis, a row has :math:`d` elements, and the
    norms are those of a row. A row of zeros stays zero, and a row with :math:`r = 0` does not move.
    Rows without a gradient keep their parameters and slots (:func:`optzoo.rules.lazy`), but
    :math:`t` counts every update.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.partial_row_wise_lamb(0.1)
        >>> table = jnp.array([[3.0, 4.0], [0.3, 0.4]])
        >>> updates, state = tx.update(jnp.ones((2, 2)), tx.init(table), table)
        >>> print(jnp.linalg.norm(updates, axis=1))  # the rate times the norm of each row
        [0.5  0.05]

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        b1: decay of the mean, in [0, 1).
        b2: decay of the mean square, in [0, 1).
        eps: :math:`\epsilon`, at least 0.
        weight_decay: :math:`\lambda`, multiplied by the learning rate and by the ratio of the
            norms; at least 0.

    Raises:
        ValueError: if no params are given to ``update``.

    References:
        ``EmbOptimType.PARTIAL_ROWWISE_LAMB`` of `FBGEMM <https://github.com/pytorch/FBGEMM>`_. It
        needs a GPU and was not run for comparison: the formula follows its source code, which gives
        NaN where it divides zero by zero.
    """
    return descend(learning_rate, scale_by_partial_row_wise_lamb(b1, b2, eps, weight_decay))


def _scale_by_lamb(b1, b2, eps, weight_decay, slots, of_squares, expanded):
    b1, b2 = check_decays(b1=b1, b2=b2)
    check_not_negative(eps=eps, weight_decay=weight_decay)
    Slots = type(slots)

    def rule(g, x, s, t):
        new = Slots(b1 * s.m + (1 - b1) * g, b2 * s.v + (1 - b2) * of_squares(g**2))

        def update(s):
            r = debiased_direction(s.m, expanded(s.v, g), t, b1, b2, eps) + weight_decay * x
            return of_rows(safe_divide(row_norms(x), row_norms(r)), g) * r

        return update, new

    return leafwise(rule, slots=slots, needs_params=True)
