"""Adadelta."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import optax

from ..core.checks import check_decays, check_not_negative
from ..core.numerics import safe_divide, sqrt
from ..core.optimizer import recorded
from ..rules.leafwise import leafwise, zeros
from ..rules.learning_rate import descend
from ..state.types import NotNegative


class AdadeltaSlots(NamedTuple):
    """The slots of Adadelta."""

    accum: NotNegative  # mean of the squared gradient
    accum_update: NotNegative  # mean of the squared step


@recorded
def scale_by_adadelta(b2: float = 0.95, eps: float = 1e-8) -> optax.GradientTransformationExtraArgs:
    """The direction of :func:`optzoo.adadelta`."""
    [b2] = check_decays(b2=b2)
    check_not_negative(eps=eps)

    def factor(mean, divisor, eps):
        if isinstance(eps, float | int) and eps < 1e-18:  # even the scaled quotient underflows
            return safe_divide(jnp.sqrt(mean), jnp.sqrt(divisor), eps)
        # The root of the quotient, which would underflow for a large gradient: then scaled.
        is_large = divisor > 1e10
        scaled = divisor * jnp.where(is_large, 2.0**-64, 1)
        return sqrt(safe_divide(mean, scaled, eps)) * jnp.where(is_large, 2.0**-32, 1)

    def rule(g, x, s, t):
        accum = b2 * s.accum + (1 - b2) * g**2
        d = factor(s.accum_update + eps, accum + eps, eps) * g  # 0 if g**2 overflows

        def update(s):
            # From the new accum_update: XLA would copy the slot if the old one were read, too.
            divisor = b2 * (s.accum + eps) + (1 - b2) * g**2
            return factor(s.accum_update + b2 * eps, divisor, b2 * eps) * g

        new = AdadeltaSlots(accum, b2 * s.accum_update + (1 - b2) * d**2)
        # With 0 the new slots do not depend on the old ones, which the update needs.
        return (d if isinstance(b2, float | int) and b2 == 0 else update), new

    return leafwise(rule, slots=AdadeltaSlots(zeros, zeros))


@recorded
def adadelta(
    learning_rate: optax.ScalarOrSchedule = 1e-3, b2: float = 0.95, eps: float = 1e-8
) -> optax.GradientTransformationExtraArgs:
    r"""Adadelta, as in ``tf.train.AdadeltaOptimizer``.

    .. math::
        A_t &= \rho\, A_{t-1} + (1 - \rho)\, g_t^2 \\
        d_t &= \frac{\sqrt{U_{t-1} + \epsilon}}{\sqrt{A_t + \epsilon}}\, g_t \\
        U_t &= \rho\, U_{t-1} + (1 - \rho)\, d_t^2 \\
        x_t &= x_{t-1} - \eta_t\, d_t

    The paper has no learning rate (:math:`\eta = 1`); the default is the original's. Rows without a
    gradient keep their parameters and slots (:func:`optzoo.rules.lazy`).

    ``optax.adadelta`` is the same formula with the defaults 0.9 and 1e-6 and no default rate.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.adadelta(1.0, b2=0.9, eps=1e-2)
        >>> params = jnp.array([1.0, -2.0])
        >>> updates, state = tx.update(params, tx.init(params), params)
        >>> print(updates)
        [-0.3015  0.3123]
        >>> print(optzoo.get_slot(state, "accum_update"))  # mean of the squared updates
        [0.0091 0.0098]

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        b2: :math:`\rho`, decay of both means, in [0, 1).
        eps: :math:`\epsilon`, inside the roots, at least 0. With 0, all steps are zero.

    References:
        Zeiler, `ADADELTA: An Adaptive Learning Rate Method <https://arxiv.org/abs/1212.5701>`_,
        2012.

    Differences from the original:
        With ``eps=0``, an element whose gradients were all zero is unchanged; the original gives
        NaN. With ``b2=0`` given as an array (``optax.inject_hyperparams``), an element whose
        squared gradient underflows is also unchanged.
    """
    return descend(learning_rate, scale_by_adadelta(b2, eps))
