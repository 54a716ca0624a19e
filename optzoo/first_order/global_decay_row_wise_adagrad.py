"""Row-wise Adagrad with a decay of all rows, applied when a row is touched."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import optax

from ..core.checks import check_fraction, check_not_negative, check_rate, check_size
from ..core.numerics import safe_divide, sqrt
from ..core.optimizer import recorded
from ..rules.leafwise import leafwise
from ..rules.learning_rate import row_wise
from ..state.types import Exact, Sum
from .row_wise import count_for_each_row, row_means, shrunk_and_moved, zero_for_each_row


class GlobalDecaySlots(NamedTuple):
    """The slots of row-wise Adagrad with a global decay."""

    accumulator: Sum  # sum of the mean squares of each row's gradients
    prev_iter: Exact  # the last update of each row from the start of the decay on; 0 before


@recorded
def global_decay_row_wise_adagrad(
    learning_rate: optax.ScalarOrSchedule = 0.01,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    start_step: int = 0,
    lower_bound: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    r"""Row-wise Adagrad with decoupled decay of all rows at every update.

    .. math::
        x' &= x_{t-1} \cdot \begin{cases}
            \max(b, (1 - \lambda \eta_t)^{t - p - 1}) & p > 0 \text{ and } t \ge s \\
            1 & \text{otherwise} \end{cases} \\
        A_t &= A_{t-1} + \operatorname{mean}(g_t^2) \\
        x_t &= (1 - \lambda \eta_t)\, x' - \frac{\eta_t}{\sqrt{A_t} + \epsilon}\, g_t

    for each row, where :math:`p` is the last update from :math:`s` on in which it had a gradient,
    or 0. Rows without a gradient keep their parameters and slots (:func:`optzoo.rules.lazy`); the
    decay that they miss is applied at their next gradient, with the rate of that update.

    The original also applies missed decay in lookups. Here a lookup returns rows as of their last
    update.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.interop.fbgemm.global_decay_row_wise_adagrad(0.1, weight_decay=0.1)
        >>> table = jnp.ones((3, 2))
        >>> gradient = optzoo.SparseRows(jnp.array([2]), jnp.full((1, 2), 5.0), 3)
        >>> updates, state = tx.update(gradient, tx.init(table), table)
        >>> print((table + updates))
        [[1.   1.  ]
         [1.   1.  ]
         [0.89 0.89]]

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        eps: :math:`\epsilon`, at least 0.
        weight_decay: :math:`\lambda`, multiplied by the learning rate; at least 0.
        start_step: :math:`s`, the first update that applies missed decay, an int, at least 0. A
            static argument: it cannot be injected.
        lower_bound: :math:`b`, the smallest factor, in [0, 1].

    Raises:
        ValueError: if no params are given to ``update``.

    References:
        ``WeightDecayMode.DECOUPLE_GLOBAL`` of `FBGEMM <https://github.com/pytorch/FBGEMM>`_. Before
        ``start_step`` results are compared with FBGEMM's; later updates need a GPU in FBGEMM, and
        the formula follows its source code.
    """
    check_rate(learning_rate)
    start_step = check_size(start_step=start_step)
    check_not_negative(eps=eps, weight_decay=weight_decay)
    check_fraction(lower_bound=lower_bound)

    def rule(g, x, s, t, learning_rate):
        now = t.astype(s.prev_iter.dtype)
        kept, is_on = 1 - weight_decay * learning_rate, now >= start_step
        skipped = jnp.where(s.prev_iter == 0, 0, jnp.maximum(now - s.prev_iter - 1, 0))
        missed = jnp.where(is_on, jnp.maximum(lower_bound, kept**skipped), 1)
        a = s.accumulator + row_means(g**2)
        m = safe_divide(learning_rate, sqrt(a) + eps, eps)
        u = shrunk_and_moved(x, kept * missed, m, g)
        prev_iter = jnp.where(is_on, jnp.maximum(s.prev_iter, now), s.prev_iter)
        return u, GlobalDecaySlots(a, prev_iter)

    tx = leafwise(
        rule,
        slots=GlobalDecaySlots(zero_for_each_row, count_for_each_row),
        scheduled={"learning_rate": learning_rate},
        needs_params=True,
    )
    return row_wise(tx)
