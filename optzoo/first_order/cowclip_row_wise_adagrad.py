"""Row-wise Adagrad with CowClip: each row's gradient is clipped by its counter and its norm."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
import optax

from ..core.checks import check_choice, check_not_negative, check_rate, check_size
from ..core.numerics import safe_divide, sqrt
from ..core.optimizer import recorded
from ..rules.leafwise import leafwise
from ..rules.learning_rate import row_wise
from .counter_row_wise_adagrad import CounterSlots, counter_slots, next_counter
from .row_wise import gap_since, of_rows, row_means, row_norms, shrunk_and_moved

DecayMode = Literal["none", "l2", "decoupled"]


@recorded
def cowclip_row_wise_adagrad(
    learning_rate: optax.ScalarOrSchedule = 0.01,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    weight_decay_mode: DecayMode = "none",
    half_life: int = -1,
    weight_norm_coefficient: float = 1.0,
    lower_bound: float = 1e-5,
) -> optax.GradientTransformationExtraArgs:
    r"""Row-wise Adagrad with CowClip, for large batches.

    .. math::
        n_t &= \begin{cases}
            1 + 2^{-(t - p) / H}\, n_{t-1} & H > 0 \\
            1 & H = 0 \\
            n_{t-1} + 1 & H < 0
        \end{cases} \\
        A_t &= A_{t-1} + \operatorname{mean}(h_t^2), \qquad
            m_t = \frac{\eta_t}{\sqrt{A_t} + \epsilon} \\
        M_t &= m_t \min\left(1,
            \frac{n_t \max(r \lVert x_{t-1} \rVert, \zeta)}{\lVert h_t \rVert}\right) \\
        x_t &= c_t\, x_{t-1} - M_t\, g_t

    for each row, where :math:`p` is the last update in which it had a gradient (:math:`t - p` is 1
    at its first). :math:`h = g + \lambda x` and :math:`c = 1 - \lambda M` with ``"l2"``; otherwise
    :math:`h = g`, and :math:`c = 1 - \lambda \eta` with ``"decoupled"``, 1 with ``"none"``. The
    accumulator sums the squares of gradients before clipping. Rows without a gradient keep their
    parameters and slots (:func:`optzoo.rules.lazy`).

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.interop.fbgemm.cowclip_row_wise_adagrad(0.1, lower_bound=0.5)
        >>> table = jnp.array([[3.0, 4.0], [0.3, 0.4]])
        >>> updates, state = tx.update(jnp.full((2, 2), 100.0), tx.init(table), table)
        >>> print(updates)  # gradients are clipped by the norm of their row
        [[-0.0035 -0.0035]
         [-0.0004 -0.0004]]

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        eps: :math:`\epsilon`, at least 0.
        weight_decay: :math:`\lambda`, in both modes multiplied by the learning rate; at least 0.
        weight_decay_mode: ``"none"``, ``"l2"`` or ``"decoupled"``.
        half_life: :math:`H`, an int, at least -2: the number of updates after which a count is
            halved; 0 sets each counter to 1; a negative value counts without forgetting. A static
            argument: it cannot be injected.
        weight_norm_coefficient: :math:`r`, at least 0.
        lower_bound: :math:`\zeta`, at least 0. If it is zero, a row of zeros never moves; if
            :math:`r` is also zero, rows move by their decay only.

    Raises:
        ValueError: if no params are given to ``update``.

    References:
        Zheng et al., `CowClip: Reducing CTR Prediction Model Training Time from 12 Hours to 10
        Minutes on 1 GPU <https://arxiv.org/abs/2204.06240>`_, 2022; ``WeightDecayMode.COWCLIP`` of
        `FBGEMM <https://github.com/pytorch/FBGEMM>`_.
    """
    check_rate(learning_rate)
    half_life = check_size(-2, half_life=half_life)
    check_not_negative(
        eps=eps,
        weight_decay=weight_decay,
        weight_norm_coefficient=weight_norm_coefficient,
        lower_bound=lower_bound,
    )
    check_choice(DecayMode, weight_decay_mode=weight_decay_mode)

    def rule(g, x, s, t, learning_rate):
        now = t.astype(s.prev_iter.dtype)
        n = next_counter(s.row_counter, gap_since(s.prev_iter, now), half_life)
        h = g + weight_decay * x if weight_decay_mode == "l2" else g
        a = s.accumulator + row_means(h**2)
        limit = n * jnp.maximum(weight_norm_coefficient * row_norms(x), lower_bound)
        norm = row_norms(h)
        clip = jnp.where(norm == 0, 1, jnp.minimum(1, limit / jnp.where(norm == 0, 1, norm)))
        M = clip * safe_divide(learning_rate, sqrt(a) + eps, eps)
        u = -of_rows(M, g) * g
        if weight_decay_mode != "none":
            by = M if weight_decay_mode == "l2" else jnp.full_like(M, learning_rate)
            u = shrunk_and_moved(x, 1 - weight_decay * by, M, g)
        return u, CounterSlots(a, jnp.maximum(s.prev_iter, now), n)

    tx = leafwise(
        rule,
        slots=counter_slots(),
        scheduled={"learning_rate": learning_rate},
        needs_params=True,
    )
    return row_wise(tx)
