"""A moving average of the parameters, around any optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import optax

from ..core.checks import check_decays, check_not_negative
from ..core.gradients import check_gradients
from ..core.optimizer import About, Optimizer, reads_of, recorded
from ..rules.leafwise import leafwise
from ..state.averages import MovingAverageSlots, start_of_average
from ..state.decay_rule import Deferral
from ..state.deferred import has_deferred
from ..state.inner import fitting, inner_transformation


@recorded
def moving_average(
    inner: optax.GradientTransformation,
    average_decay: float = 0.9999,
    num_updates: float | Literal["count"] | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Averages the parameters, as in ``tf.contrib.opt.MovingAverageOptimizer``.

    .. math::
        x_t &= x_{t-1} + u_t \\
        a_t &= d_t\, a_{t-1} + (1 - d_t)\, x_t, \qquad a_0 = x_0

    where :math:`u_t` is the update of ``inner`` and :math:`d_t` is the decay or, with
    ``num_updates`` :math:`N`, :math:`\min(d, \frac{1 + N}{10 + N})`, so that the first averages
    follow the parameters closely. :func:`optzoo.eval_params` returns the averages,
    :func:`optzoo.state.swap_averages` exchanges them with the parameters. Every step updates the
    averages of all rows of a table, also with row-sparse gradients, so its cost grows with the size
    of the table; ``caught_up(moving_average(optimizer))`` also defers the averages
    (:func:`optzoo.caught_up`). A parameter without a gradient keeps its average.

    The wrapper must be the last transformation of a chain, since it averages the parameters plus
    this update.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.moving_average(optzoo.gradient_descent(1.0), average_decay=0.5)
        >>> params = jnp.zeros(1)
        >>> updates, state = tx.update(jnp.array([1.0]), tx.init(params), params)
        >>> params = params + updates
        >>> print(params, optzoo.eval_params(params, state))
        [-1.] [-0.5]

    Args:
        inner: a complete optimizer, including its learning rate.
        average_decay: :math:`d`, in [0, 1).
        num_updates: :math:`N`, at least 0, or ``"count"`` for the number of updates so far,
            including this one (counted by the wrapper, or ``update(..., global_step=)`` plus one).

    Raises:
        ValueError: in ``update``, if no params are given, or if ``inner`` has deferred rows: put
            this wrapper inside :func:`optzoo.caught_up`.

    References:
        Polyak and Juditsky, `Acceleration of Stochastic Approximation by Averaging
        <https://doi.org/10.1137/0330046>`_, 1992; ``tf.train.ExponentialMovingAverage``.

    Differences from the original:
        The average is always of the new parameters, as with ``sequential_update=True``; otherwise
        the original's order is undefined. The average of 16-bit parameters is float32, and is of
        the sums :math:`x_{t-1} + u_t` before rounding, also for deferred rows.
    """
    inner = inner_transformation(inner=inner)
    [average_decay] = check_decays(average_decay=average_decay)
    if isinstance(num_updates, str) and num_updates != "count":
        raise ValueError(f"num_updates must be a number, 'count' or None, got {num_updates!r}")
    if not isinstance(num_updates, str):
        check_not_negative(none=True, num_updates=num_updates)

    def decay_at(step):
        n = jnp.float32(step + 1 if num_updates == "count" else num_updates)
        return jnp.minimum(jnp.float32(average_decay), (1 + n) / (10 + n))

    def rule(u, x, s, t, average_decay):
        return u, MovingAverageSlots(s.average - (s.average - (x + u)) * (1 - average_decay))

    def rows(rule):
        return lambda u, x, s, t, **decay: (u, rule(u.to_dense(x), x, s, t, **decay)[1])

    average = leafwise(
        rule,
        slots=MovingAverageSlots(start_of_average),
        rows=rows,
        scheduled={"average_decay": average_decay if num_updates is None else decay_at},
        needs_params=True,
    )
    both = optax.chain(inner, average)

    def update(updates, state, params=None, **extra_args):
        check_gradients(updates, params)
        if has_deferred(state):
            raise ValueError(
                "moving_average cannot be around deferred rows: put one inside optzoo.caught_up, "
                "as in caught_up(moving_average(adam(rate), decay)), and one around other "
                "optimizers"
            )
        return both.update(updates, state, params, **extra_args)

    def of_both(dense, deferral):
        decay = average_decay
        if num_updates is not None and num_updates != "count":  # as in each step, in float32
            n = np.float32(num_updates)
            decay = min(np.float32(average_decay), (1 + n) / (10 + n))
        return _with_average(deferral, decay, decay_at if num_updates == "count" else None)

    deferral = inner.about.with_deferral(of_both).deferral
    about = About(deferral=deferral, reads=reads_of(inner, average))
    return fitting(Optimizer(both.init, update, about), moves="moving_average")


def _with_average(
    deferral: Deferral | None, average_decay: Any, decays: Callable[[Any], Any] | None
) -> Deferral | None:
    """The deferral of rows that have an average, for :func:`optzoo.caught_up`.

    Args:
        deferral: the deferral of the optimizer.
        average_decay: the decay, or the largest one.
        decays: the decay of each step, a function of the number of steps before; None if constant.
    """
    if deferral is None:
        return None
    if deferral.rule.shrink or deferral.rule.average is not None:
        raise TypeError(
            "deferred rows may have only one average, and no weight decay of all rows inside it"
        )
    rule = deferral.rule._replace(average=float(average_decay), varies=decays is not None)
    return deferral._replace(rule=rule, average=decays)
