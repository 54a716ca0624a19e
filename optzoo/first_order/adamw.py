"""AdamW: Adam with decoupled weight decay."""

from __future__ import annotations

from typing import Any

import optax

from ..core.checks import with_decay_per_step
from ..core.optimizer import recorded
from ..wrappers.weight_decay import decoupled_weight_decay
from .adam import adam


@recorded
@with_decay_per_step
def adamw(
    learning_rate: optax.ScalarOrSchedule = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    *,
    weight_decay_per_step: float,
    mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Adam with decoupled weight decay, as in ``tf.contrib.opt.AdamWOptimizer``.

    .. math::
        x_t = x_{t-1} - \lambda\, x_{t-1} + u_t

    where :math:`u_t` is the update of :func:`optzoo.adam`. Unlike in ``optax.adamw``, the decay is
    not multiplied by the learning rate: ``adamw(rate, weight_decay_per_step=rate * decay)``
    corresponds to ``optax.adamw(rate, weight_decay=decay)``. (:func:`optzoo.sparse_adamw`
    multiplies it, as optax does. :func:`optzoo.create` keeps TensorFlow's name, ``weight_decay``.)
    Adam treats a row-sparse gradient as dense (:func:`optzoo.rules.dense`), but only the rows of
    the gradient decay.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.adamw(0.1, weight_decay_per_step=0.01)
        >>> params = jnp.array([1.0, -2.0])
        >>> updates, state = tx.update(jnp.zeros(2), tx.init(params), params)
        >>> print(updates)  # the decay alone; the rate does not scale it
        [-0.01  0.02]

    Args:
        learning_rate: :math:`\eta` of Adam, a number or a schedule.
        b1: decay of the mean, in [0, 1).
        b2: decay of the squared mean, in [0, 1).
        eps: :math:`\hat\epsilon`, at least 0.
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
        ``mask`` is always applied; the original's ``minimize`` ignores its ``decay_var_list``. With
        ``eps=0``, an element whose gradients were all zero is changed by the weight decay only; the
        original gives NaN.
    """
    inner = adam(learning_rate, b1, b2, eps)
    return decoupled_weight_decay(inner, weight_decay_per_step=weight_decay_per_step, mask=mask)
