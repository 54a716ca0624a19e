"""LARS: a learning rate for each layer."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from ..core.checks import check_flags, check_not_negative, check_rate
from ..core.numerics import norm, safe_divide
from ..core.optimizer import Optimizer, recorded
from ..core.paths import check_mask, except_for
from ..rules.leafwise import leafwise, without_state, zeros
from ..rules.learning_rate import rounded_once
from ..rules.on_stored import in_float32
from ..rules.policies import lazy
from ..state.inner import fitting
from ..state.types import Signed


class LARSSlots(NamedTuple):
    """The slots of LARS."""

    momentum: Signed  # decaying sum of the steps


@recorded
def scale_by_lars_trust_ratio(
    l2_weight_decay: float = 1e-4, trust_coefficient: float = 1e-3, eps: float = 0.0
) -> optax.GradientTransformationExtraArgs:
    """Scales the decayed gradient by the trust ratio of :func:`optzoo.lars`.

    Row-sparse gradients pass unchanged.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.transforms.scale_by_lars_trust_ratio(
        ...     l2_weight_decay=0.0, trust_coefficient=0.01
        ... )
        >>> params = jnp.array([0.6, 0.8])
        >>> updates, state = tx.update(jnp.array([30.0, 40.0]), tx.init(params), params)
        >>> print(updates)
        [0.006 0.008]
    """
    check_not_negative(
        l2_weight_decay=l2_weight_decay, trust_coefficient=trust_coefficient, eps=eps
    )

    def rule(g, x, s, t):
        x_norm, g_norm = norm(x), norm(g)
        ratio = safe_divide(
            trust_coefficient * x_norm, g_norm + l2_weight_decay * x_norm + eps, eps
        )
        ratio = jnp.where((x_norm > 0) & (g_norm > 0), ratio, 1)
        return ratio * (g + l2_weight_decay * x), s

    unchanged = lambda _: lambda g, x, s, t: (g, s)
    return without_state(leafwise(rule, rows=unchanged, needs_params=True))


@recorded
def lars(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float = 0.9,
    l2_weight_decay: float = 1e-4,
    trust_coefficient: float = 1e-3,
    eps: float = 0.0,
    nesterov: bool = False,
    skip: Any = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Layer-wise adaptive rates, as in ``tf.contrib.opt.LARSOptimizer``.

    .. math::
        r_t &= \gamma\, \frac{\lVert x_{t-1} \rVert}
                         {\lVert g_t \rVert + \lambda\, \lVert x_{t-1} \rVert + \epsilon} \\
        s_t &= \eta_t\, r_t\, (g_t + \lambda\, x_{t-1}) \\
        a_t &= \mu\, a_{t-1} + s_t \\
        x_t &= x_{t-1} - a_t
            \quad\text{or, with Nesterov,}\quad x_{t-1} - (s_t + \mu\, a_t)

    where the norms are over a whole parameter. If one of them is zero, :math:`r_t = 1`. For a
    skipped parameter :math:`s_t = \eta_t\, g_t`. The learning rate is part of the sum :math:`a_t`,
    so LARS applies it itself. A parameter with row-sparse gradients is updated as by
    :func:`optzoo.momentum` (the learning rate is outside the sum, and there is no decay): rows
    without a gradient keep their parameters and slots (:func:`optzoo.rules.lazy`).

    ``optax.lars`` divides by the norm of the gradient plus decay, not by the sum of both norms, and
    has separate masks for decay and ratio.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.lars(1.0, momentum=0.0, l2_weight_decay=0.0, trust_coefficient=0.01)
        >>> params = {"small": jnp.array([0.6, 0.8]), "large": jnp.array([60.0, 80.0])}
        >>> gradients = {"small": jnp.array([3.0, 4.0]), "large": jnp.array([3.0, 4.0])}
        >>> updates, state = tx.update(gradients, tx.init(params), params)
        >>> print(updates["small"], updates["large"])  # a hundredth of the norm of each parameter
        [-0.006 -0.008] [-0.6 -0.8]

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        momentum: :math:`\mu`, at least 0.
        l2_weight_decay: :math:`\lambda`, L2 weight decay, added to the gradient before the ratio
            and the learning rate are applied; at least 0.
        trust_coefficient: :math:`\gamma`, at least 0.
        eps: :math:`\epsilon`, at least 0.
        nesterov: use Nesterov momentum.
        skip: the parameters without trust ratio and decay, as a mask
            (:func:`optzoo.param_groups`), such as ``("bias", "norm/.*")``; None for none.

    Raises:
        ValueError: if no params are given to ``update``.

    References:
        You et al., `Large Batch Training of Convolutional Networks
        <https://arxiv.org/abs/1708.03888>`_, 2017.

    Differences from the original:
        A negative ``trust_coefficient`` or ``eps`` is an error.
    """
    check_rate(learning_rate)
    check_not_negative(momentum=momentum)
    check_flags(nesterov=nesterov)
    check_mask(skip=skip)

    def rule(g, x, s, t, learning_rate):
        step = learning_rate * g
        ahead = lambda a: step + momentum * a if nesterov else a
        return lambda s: -ahead(s.momentum), LARSSlots(momentum * s.momentum + step)

    def rows_rule(g, x, s, t, learning_rate):
        ahead = lambda a: g + momentum * a if nesterov else a
        update = lambda s: -learning_rate * ahead(s.momentum)
        return update, LARSSlots(momentum * s.momentum + g)

    trust = scale_by_lars_trust_ratio(l2_weight_decay, trust_coefficient, eps)
    steps = leafwise(
        rule,
        slots=LARSSlots(zeros),
        rows=lambda _: lazy(in_float32(rows_rule)),
        scheduled={"learning_rate": learning_rate},
    )
    init, update = optax.chain(except_for(skip, trust), steps)
    return fitting(Optimizer(init, rounded_once(update), steps.about._replace(rows=None)))
