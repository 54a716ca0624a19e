"""Nesterov's look-ahead along the moving average of parameter changes, around any optimizer."""

from __future__ import annotations

from typing import Any

import optax

from ..core.checks import check_decays, check_not_negative
from ..core.gradients import check_gradients
from ..core.optimizer import About, Optimizer, reads_of, recorded
from ..core.paths import check_mask, only_for
from ..rules.leafwise import leafwise, zeros
from ..rules.policies import dense
from ..state.averages import EMANesterovSlots, start_of_average
from ..state.deferred import has_deferred
from ..state.inner import fitting, inner_transformation


@recorded
def ema_nesterov(
    inner: optax.GradientTransformation,
    lookahead: optax.ScalarOrSchedule,
    decay: float = 0.9,
    *,
    mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Nesterov's look-ahead along a moving average of the changes of the parameters.

    .. math::
        x_t &= y_{t-1} + u_t \\
        m_t &= \gamma\, m_{t-1} + (1 - \gamma)\, (x_t - x_{t-1}), \qquad m_0 = 0 \\
        y_t &= x_t + \beta_t\, m_t

    where :math:`u_t` is the update of ``inner``. The trained parameters, at which gradients are
    computed, are :math:`y`; :func:`optzoo.eval_params` returns :math:`x` for evaluation. The state
    has two copies of the parameters. Every step moves all rows of a table, also with row-sparse
    gradients: exclude tables with ``mask``. A parameter without a gradient keeps its value and
    slots.

    The wrapper must be the last transformation of a chain, since it uses the parameters plus this
    update.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.ema_nesterov(optzoo.gradient_descent(1.0), 0.5, decay=0.75)
        >>> params = jnp.zeros(1)
        >>> updates, state = tx.update(jnp.array([-8.0]), tx.init(params), params)
        >>> params = params + updates
        >>> print(params, optzoo.eval_params(params, state))  # 8, and half of a quarter of it ahead
        [9.] [8.]

    Args:
        inner: a complete optimizer, including its learning rate.
        lookahead: :math:`\beta`, at least 0: a number, or a schedule called with the number of
            updates before this one (or with ``update(..., global_step=)``). The original's follows
            the learning rate, and is zero in the first and last steps.
        decay: :math:`\gamma`, in [0, 1). With 0 and a constant ``lookahead`` the method is
            :func:`optzoo.diloco` with one replica, ``communication_period=1`` and
            ``outer=optax.sgd(1.0, momentum=lookahead, nesterov=True)``.
        mask: the parameters with look-ahead, a mask such as ``"kernel"`` or ``("kernel",
            "embedding")`` (:func:`optzoo.param_groups`); None for all.

    Raises:
        TypeError: if ``mask`` is of another type, or ``inner`` is not a transformation.
        ValueError: if ``lookahead`` is negative or not finite, or ``decay`` is not in [0, 1); in
            ``update`` if no params are given, if a pattern of ``mask`` matches no parameter, or if
            ``inner`` has deferred rows.

    References:
        Yau et al., `EMA-Nesterov: Stabilizing Nesterov's Lookahead for Accelerated Deep Learning
        Optimization <https://arxiv.org/abs/2605.25395>`_, 2026; ``EMA_Nesterov`` of
        `modded-nanogpt <https://github.com/KellerJordan/modded-nanogpt>`_

    Differences from the original:
        The look-ahead is made at the end of an update, not at the start of the next one, with the
        value of ``lookahead`` one step before. Use a schedule for ``prefill_steps`` and
        ``rest_steps``.
    """
    inner = inner_transformation(inner=inner)
    check_not_negative(schedule=True, lookahead=lookahead)
    [decay] = check_decays(decay=decay)
    check_mask(mask=mask)

    def rule(u, y, s, t, lookahead):
        change = u + (y - s.iterate)  # the difference is small, so u is not rounded to y's last bit
        direction = s.direction + (1 - decay) * (change - s.direction)
        return u + lookahead * direction, EMANesterovSlots(y + u, direction)

    ahead = leafwise(
        rule,
        slots=EMANesterovSlots(start_of_average, zeros),
        rows=dense,
        scheduled={"lookahead": lookahead},
        needs_params=True,
    )
    ahead = only_for(mask, ahead)
    both = optax.chain(inner, ahead)

    def update(updates, state, params=None, **extra_args):
        check_gradients(updates, params)
        if has_deferred(state):
            raise ValueError(
                "ema_nesterov moves all rows, which is incompatible with the deferred rows of "
                "optzoo.caught_up: leave caught_up out, or give each its own parameters by "
                "optzoo.param_groups"
            )
        return both.update(updates, state, params, **extra_args)

    about = About(reads=reads_of(inner, ahead))
    return fitting(Optimizer(both.init, update, about), moves="ema_nesterov")
