"""Weight decay where it has the sign of the update, around any optimizer."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax

from ..core.checks import check_not_negative, with_decay_per_step
from ..core.gradients import check_gradients
from ..core.optimizer import Optimizer, reads_of, recorded
from ..core.paths import check_mask, only_for
from ..rules.leafwise import leafwise
from ..state.inner import fitting, inner_transformation


@recorded
@with_decay_per_step
def cautious_weight_decay(
    inner: optax.GradientTransformation,
    *,
    weight_decay_per_step: optax.ScalarOrSchedule,
    mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Weight decay of the elements that the update does not move away from zero.

    .. math::
        x_t = x_{t-1} + u_t - \lambda_t\, \mathbb{1}[u_t\, x_{t-1} \le 0]\, x_{t-1}

    where :math:`u_t` is the update of ``inner``, which is added; its sign is opposite to the
    direction that the paper subtracts. An element with an update of zero decays. The decay is not
    multiplied by the learning rate: if the rate is a schedule, give ``lambda step: weight_decay *
    rate(step)``. If an update is row-sparse, only its rows decay; a parameter without a gradient
    does not decay.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> sgd = optzoo.gradient_descent(0.1)
        >>> tx = optzoo.cautious_weight_decay(sgd, weight_decay_per_step=0.01)
        >>> params = jnp.array([1.0, -1.0])
        >>> updates, state = tx.update(jnp.ones(2), tx.init(params), params)
        >>> print(updates)  # the second element moves away from zero, and does not decay
        [-0.11 -0.1 ]

    Args:
        inner: a complete optimizer, including its learning rate.
        weight_decay_per_step: :math:`\lambda`, the fraction of an element that is removed at each
            update, at least 0: a number, or a schedule called with the number of updates before
            this one (or with ``update(..., global_step=)``).
        mask: the parameters that decay, a mask such as ``"kernel"`` or ``("kernel", "embedding")``
            (:func:`optzoo.param_groups`); None for all.

    Raises:
        TypeError: if ``mask`` is of another type, if ``inner`` is not a transformation, or if
            ``weight_decay`` is given.
        ValueError: if ``weight_decay_per_step`` is negative or not finite; in ``update`` if no
            params are given, or if a pattern of ``mask`` matches no parameter.

    References:
        Chen et al., `Cautious Weight Decay <https://arxiv.org/abs/2510.12402>`_, 2025;
        ``train_gpt.py`` of `modded-nanogpt <https://github.com/KellerJordan/modded-nanogpt>`_
    """
    inner = inner_transformation(inner=inner)
    check_not_negative(schedule=True, weight_decay_per_step=weight_decay_per_step)
    check_mask(mask=mask)

    def rule(u, x, s, t, weight_decay_per_step):
        return u - weight_decay_per_step * jnp.where(u * x <= 0, x, 0), s

    scheduled = {"weight_decay_per_step": weight_decay_per_step}
    decay = only_for(mask, leafwise(rule, scheduled=scheduled, needs_params=True))
    both = optax.chain(inner, decay)

    def update(updates, state, params=None, **extra_args):
        check_gradients(updates, params)
        return both.update(updates, state, params, **extra_args)

    about = inner.about._replace(deferral=None, reads=reads_of(inner, decay))
    return fitting(Optimizer(both.init, update, about), moves="cautious_weight_decay")
