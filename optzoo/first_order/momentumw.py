"""MomentumW: momentum with decoupled weight decay."""

from __future__ import annotations

from typing import Any

import optax

from ..core.checks import with_decay_per_step
from ..core.optimizer import recorded
from ..wrappers.weight_decay import decoupled_weight_decay
from .momentum import momentum as _momentum


@recorded
@with_decay_per_step
def momentumw(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float,
    nesterov: bool = False,
    *,
    weight_decay_per_step: float,
    mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Momentum with decoupled weight decay, as in ``tf.contrib.opt.MomentumWOptimizer``.

    .. math::
        x_t = x_{t-1} - \lambda\, x_{t-1} + u_t

    where :math:`u_t` is the update of :func:`optzoo.momentum`. The decay is not multiplied by the
    learning rate: it corresponds to ``decay * rate`` of ``optax.adamw``, which multiplies both.
    (:func:`optzoo.create` keeps TensorFlow's name, ``weight_decay``.) Rows without a gradient keep
    their parameters and slots, and do not decay (:func:`optzoo.rules.lazy`).

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> mask = {"kernel": True, "bias": False}
        >>> tx = optzoo.momentumw(0.1, 0.9, weight_decay_per_step=0.01, mask=mask)
        >>> params = {"kernel": jnp.ones(2), "bias": jnp.ones(2)}
        >>> gradients = {"kernel": jnp.zeros(2), "bias": jnp.zeros(2)}
        >>> updates, state = tx.update(gradients, tx.init(params), params)
        >>> print(updates["kernel"], updates["bias"] + 0)
        [-0.01 -0.01] [0. 0.]

    Args:
        learning_rate: :math:`\eta` of momentum, a number or a schedule.
        momentum: :math:`\mu`, at least 0, usually below 1.
        nesterov: use Nesterov momentum.
        weight_decay_per_step: :math:`\lambda`, the fraction of a parameter that is removed at each
            update, at least 0.
        mask: the parameters that decay, a mask such as ``"kernel"`` or ``("kernel", "embedding")``
            (:func:`optzoo.param_groups`); None for all.

    Raises:
        TypeError: if ``weight_decay`` is given.
        ValueError: if no params are given to ``update``.

    References:
        Loshchilov and Hutter, `Decoupled Weight Decay Regularization
        <https://arxiv.org/abs/1711.05101>`_, 2019.

    Differences from the original:
        ``mask`` is always applied; the original's ``minimize`` ignores its ``decay_var_list``.
    """
    inner = _momentum(learning_rate, momentum, nesterov)
    return decoupled_weight_decay(inner, weight_decay_per_step=weight_decay_per_step, mask=mask)
