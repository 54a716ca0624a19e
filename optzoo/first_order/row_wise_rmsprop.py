"""RMSProp with one mean square for each row, and a decay that grows while a row has no gradient."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import optax

from ..core.checks import check_decays, check_fraction, check_not_negative, check_rate
from ..core.numerics import is_number, safe_divide, sqrt
from ..core.optimizer import recorded
from ..rules.leafwise import leafwise
from ..rules.learning_rate import row_wise
from ..state.types import Exact, NotNegative
from .row_wise import (
    count_for_each_row,
    gap_since,
    of_rows,
    row_means,
    shrunk_and_moved,
    zero_for_each_row,
)


class RowWiseRMSPropSlots(NamedTuple):
    """The slots of row-wise RMSProp."""

    rms: NotNegative  # mean over time of the mean square of each row's gradient
    prev_iter: Exact  # the number of the last update of each row, 0 before the first


@recorded
def row_wise_rmsprop(
    learning_rate: optax.ScalarOrSchedule = 0.01,
    b2: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    min_shrinkage: float = 0.1,
) -> optax.GradientTransformationExtraArgs:
    r"""RMSProp for large embeddings: one mean square for each row.

    .. math::
        v_{i,t} &= \rho\, v_{i,t-1} + (1 - \rho)\, \frac{1}{d} \sum_{j=1}^{d} g_{ij,t}^2 \\
        c_{i,t} &= \max(c, 1 - \min(1, \eta_t\, \lambda\, (t - p_i))) \\
        x_{ij,t} &= c_{i,t}\, x_{ij,t-1} - \eta_t\, \frac{g_{ij,t}}{\sqrt{v_{i,t}} + \epsilon}

    where :math:`i` is the row, an index of the first axis, a row has :math:`d` elements, and
    :math:`p_i` is the last update in which the row had a gradient (:math:`t - p_i` is 1 at its
    first). The decay of a row grows with the number of updates since its last one. There is no bias
    correction. Rows without a gradient keep their parameters and slots (:func:`optzoo.rules.lazy`).

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.row_wise_rmsprop(0.1)
        >>> table = jnp.ones((3, 2))
        >>> gradient = optzoo.SparseRows(jnp.array([2]), jnp.array([[3.0, 4.0]]), 3)
        >>> updates, state = tx.update(gradient, tx.init(table), table)
        >>> print((table + updates))
        [[ 1.      1.    ]
         [ 1.      1.    ]
         [ 0.1515 -0.1314]]

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        b2: :math:`\rho`, in [0, 1).
        eps: :math:`\epsilon`, at least 0.
        weight_decay: :math:`\lambda`, multiplied by the learning rate; at least 0.
        min_shrinkage: :math:`c`, the smallest factor of a row, in [0, 1].

    Raises:
        ValueError: if there is a decay and no params are given to ``update``.

    References:
        The operator ``rowwise_rmsprop_ar`` of `FBGEMM <https://github.com/pytorch/FBGEMM>`_.
    """
    check_rate(learning_rate)
    [b2] = check_decays(b2=b2)
    check_not_negative(eps=eps)
    check_not_negative(weight_decay=weight_decay)
    decays = not is_number(weight_decay, 0)
    check_fraction(min_shrinkage=min_shrinkage)

    def rule(g, x, s, t, learning_rate):
        rms = b2 * s.rms + (1 - b2) * row_means(g**2)
        now = t.astype(s.prev_iter.dtype)
        rates = lambda s: safe_divide(learning_rate, sqrt(s.rms) + eps, eps)
        update = lambda s: -of_rows(rates(s), g) * g
        if decays:
            lost = jnp.clip(learning_rate * weight_decay * gap_since(s.prev_iter, now), 0, 1)
            kept = jnp.maximum(min_shrinkage, 1 - lost)
            update = lambda s: shrunk_and_moved(x, kept, rates(s), g)
        return update, RowWiseRMSPropSlots(rms, jnp.maximum(s.prev_iter, now))

    tx = leafwise(
        rule,
        slots=RowWiseRMSPropSlots(zero_for_each_row, count_for_each_row),
        scheduled={"learning_rate": learning_rate},
        needs_params=decays,
    )
    return row_wise(tx)
