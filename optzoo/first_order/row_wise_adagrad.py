"""Adagrad with one accumulator for each row."""

from __future__ import annotations

from typing import NamedTuple

import optax

from ..core.checks import check_not_negative
from ..core.numerics import is_number, safe_divide, sqrt
from ..core.optimizer import recorded
from ..rules.leafwise import leafwise
from ..rules.learning_rate import descend
from ..state.types import Sum
from .row_wise import of_rows, row_means, zero_for_each_row


class RowWiseAdagradSlots(NamedTuple):
    """The slots of row-wise Adagrad."""

    accumulator: Sum  # sum of the mean squares of each row's gradients


@recorded
def scale_by_row_wise_adagrad(
    eps: float = 1e-8, weight_decay: float = 0.0, l2_weight_decay: float = 0.0
) -> optax.GradientTransformationExtraArgs:
    """The direction of :func:`optzoo.row_wise_adagrad`."""
    check_not_negative(eps=eps)
    check_not_negative(weight_decay=weight_decay, l2_weight_decay=l2_weight_decay)
    decays, decays_l2 = (not is_number(v, 0) for v in (weight_decay, l2_weight_decay))

    def rule(g, x, s, t):
        h = g + l2_weight_decay * x if decays_l2 else g
        root = lambda a: of_rows(sqrt(a) + eps, g)
        update = lambda s: safe_divide(h, root(s.accumulator), eps)
        if decays:
            update = lambda s: safe_divide(h, root(s.accumulator), eps) + weight_decay * x
        return update, RowWiseAdagradSlots(s.accumulator + row_means(h**2))

    slots = RowWiseAdagradSlots(zero_for_each_row)
    return leafwise(rule, slots=slots, needs_params=decays or decays_l2)


@recorded
def row_wise_adagrad(
    learning_rate: optax.ScalarOrSchedule = 0.01,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    l2_weight_decay: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    r"""Adagrad for large embeddings: one accumulator for each row.

    .. math::
        A_{i,t} &= A_{i,t-1} + \frac{1}{d} \sum_{j=1}^{d} g_{ij,t}^2 \\
        x_{ij,t} &= x_{ij,t-1} - \eta_t\, \frac{g_{ij,t}}{\sqrt{A_{i,t}} + \epsilon}
                    - \eta_t\, \lambda\, x_{ij,t-1}

    where :math:`i` is the row, an index of the first axis, and a row has :math:`d` elements. For a
    table of width 64 the slots are 64 times smaller than those of :func:`optzoo.adagrad`, and an
    update of few rows writes little more than the rows themselves. In a vector each element is a
    row; a scalar is one row. Rows without a gradient keep their parameters and slots
    (:func:`optzoo.rules.lazy`); rows that share an index are summed first. Only rows with a
    gradient decay. ``l2_weight_decay`` replaces :math:`g` by :math:`g + \lambda_2 x` everywhere.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.row_wise_adagrad(0.1)
        >>> table = jnp.ones((3, 2))
        >>> gradient = optzoo.SparseRows(jnp.array([2]), jnp.array([[3.0, 4.0]]), 3)
        >>> updates, state = tx.update(gradient, tx.init(table), table)
        >>> print(optzoo.get_slot(state, "accumulator"))  # one value for each row: the mean square
        [ 0.   0.  12.5]

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        eps: :math:`\epsilon`, at least 0.
        weight_decay: :math:`\lambda`, multiplied by the learning rate; at least 0.
        l2_weight_decay: :math:`\lambda_2`, L2 weight decay, added to the gradient; at least 0.

    Raises:
        ValueError: if there is a decay and no params are given to ``update``.

    References:
        ``EmbOptimType.EXACT_ROWWISE_ADAGRAD`` of `FBGEMM <https://github.com/pytorch/FBGEMM>`_,
        which TorchRec uses; :func:`optzoo.create` takes its arguments. Duchi et al., `Adaptive
        Subgradient Methods for Online Learning and Stochastic Optimization
        <https://jmlr.org/papers/v12/duchi11a.html>`_, 2011.
    """
    return descend(learning_rate, scale_by_row_wise_adagrad(eps, weight_decay, l2_weight_decay))
