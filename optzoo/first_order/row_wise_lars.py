"""LARS with a trust ratio for each row."""

from __future__ import annotations

from typing import NamedTuple

import optax

from ..core.checks import check_not_negative, check_rate
from ..core.numerics import safe_divide
from ..core.optimizer import recorded
from ..rules.leafwise import leafwise, zeros
from ..rules.learning_rate import row_wise
from ..state.types import Signed
from .row_wise import of_rows, row_norms


class RowWiseLARSSlots(NamedTuple):
    """The slots of row-wise LARS."""

    momentum: Signed  # decaying sum of the steps

    zero_rows_stay = True  # optzoo.growing warns of it


@recorded
def row_wise_lars(
    learning_rate: optax.ScalarOrSchedule = 0.01,
    momentum: float = 0.9,
    l2_weight_decay: float = 0.0,
    trust_coefficient: float = 1e-3,
) -> optax.GradientTransformationExtraArgs:
    r"""LARS for embeddings: one trust ratio for each row.

    .. math::
        r_t &= \gamma\, \frac{\lVert x_{t-1} \rVert}
                         {\lVert g_t \rVert + \lambda\, \lVert x_{t-1} \rVert} \\
        a_t &= \mu\, a_{t-1} + \eta_t\, r_t\, (g_t + \lambda\, x_{t-1}) \\
        x_t &= x_{t-1} - a_t

    where the norms are those of a row, along the first axis; :func:`optzoo.lars` uses those of the
    whole parameter, and no trust ratio for row-sparse gradients. A row of zeros moves by its
    momentum only: a row that starts at zero never moves. Rows without a gradient keep their
    parameters and slots (:func:`optzoo.rules.lazy`). The learning rate is part of the sum
    :math:`a_t`, so LARS applies it itself.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.row_wise_lars(1.0, momentum=0.0, trust_coefficient=0.01)
        >>> table = jnp.array([[3.0, 4.0], [0.3, 0.4]])
        >>> updates, state = tx.update(jnp.ones((2, 2)), tx.init(table), table)
        >>> print(jnp.linalg.norm(updates, axis=1))  # a hundredth of the norm of each row
        [0.05  0.005]

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        momentum: :math:`\mu`, at least 0.
        l2_weight_decay: :math:`\lambda`, L2 weight decay, added to the gradient before the ratio
            and the learning rate are applied; at least 0.
        trust_coefficient: :math:`\gamma`, at least 0.

    Raises:
        ValueError: if no params are given to ``update``.

    References:
        You et al., `Large Batch Training of Convolutional Networks
        <https://arxiv.org/abs/1708.03888>`_, 2017; ``EmbOptimType.LARS_SGD`` of `FBGEMM
        <https://github.com/pytorch/FBGEMM>`_. It needs a GPU and was not run for comparison: the
        formula follows its source code, which gives NaN where it divides zero by zero.
    """
    check_rate(learning_rate)
    check_not_negative(
        momentum=momentum, l2_weight_decay=l2_weight_decay, trust_coefficient=trust_coefficient
    )

    def rule(g, x, s, t, learning_rate):
        x_norm = row_norms(x)
        ratio = safe_divide(trust_coefficient * x_norm, row_norms(g) + l2_weight_decay * x_norm)
        step = learning_rate * of_rows(ratio, g) * (g + l2_weight_decay * x)
        return lambda s: -s.momentum, RowWiseLARSSlots(momentum * s.momentum + step)

    tx = leafwise(
        rule,
        slots=RowWiseLARSSlots(zeros),
        scheduled={"learning_rate": learning_rate},
        needs_params=True,
    )
    return row_wise(tx)
