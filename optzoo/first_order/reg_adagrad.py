"""RegAdagrad: Adagrad whose accumulator can be left unchanged by an update."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import optax

from ..core.checks import check_positive
from ..core.numerics import safe_divide, sqrt
from ..core.optimizer import recorded
from ..rules.leafwise import full, leafwise
from ..rules.learning_rate import descend
from ..state.types import Sum


class RegAdagradSlots(NamedTuple):
    """The slots of RegAdagrad."""

    accumulator: Sum  # sum of the squared gradients


@recorded
def scale_by_reg_adagrad(
    initial_accumulator_value: float = 0.1,
) -> optax.GradientTransformationExtraArgs:
    """The direction of :func:`optzoo.reg_adagrad`."""
    check_positive(initial_accumulator_value=initial_accumulator_value)

    def rule(g, x, s, t, update_slots):
        accumulator = jnp.where(update_slots == 0, s.accumulator, s.accumulator + g**2)
        update = lambda s: safe_divide(g, sqrt(s.accumulator))
        return update, RegAdagradSlots(accumulator)

    slots = RegAdagradSlots(full(initial_accumulator_value))
    return leafwise(rule, slots=slots, scheduled={"update_slots": True})


@recorded
def reg_adagrad(
    learning_rate: optax.ScalarOrSchedule, initial_accumulator_value: float = 0.1
) -> optax.GradientTransformationExtraArgs:
    r"""Adagrad with optional slot updates, as in ``tf.contrib.opt.RegAdagradOptimizer``.

    .. math::
        A_t &= A_{t-1} + g_t^2 \quad\text{unless } \mathtt{update\_slots=False} \\
        x_t &= x_{t-1} - \eta_t\, \frac{g_t}{\sqrt{A_t}}

    ``update(..., update_slots=False)`` moves the parameters and leaves the accumulator unchanged.
    This is useful for the gradient of a regularizer, which should not be accumulated together with
    that of the loss. The flag may be traced. Rows without a gradient keep their parameters and
    slots (:func:`optzoo.rules.lazy`).

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.reg_adagrad(0.1)
        >>> params = jnp.array([1.0, -2.0])
        >>> state = tx.init(params)
        >>> updates, state = tx.update(params, state, params, update_slots=False)
        >>> print(optzoo.get_slot(state, "accumulator"))  # as before
        [0.1 0.1]

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        initial_accumulator_value: :math:`A_0`, positive.

    References:
        Duchi et al., `Adaptive Subgradient Methods for Online Learning and Stochastic
        Optimization <https://jmlr.org/papers/v12/duchi11a.html>`_, 2011.

    Differences from the original:
        ``update_slots`` is an argument of the update; the original has the context manager
        ``opt.avoid_updating_slots()``, in which the order of two updates is undefined.
    """
    return descend(learning_rate, scale_by_reg_adagrad(initial_accumulator_value))
