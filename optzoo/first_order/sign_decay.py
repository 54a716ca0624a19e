"""Schedules that decay the sign term of AddSign and PowerSign."""

from __future__ import annotations

import jax.numpy as jnp
import optax

from ..core.checks import check_finite, check_positive


def linear_sign_decay(decay_steps: int) -> optax.Schedule:
    r"""Linear decay from 1 to 0, as ``tf.contrib.opt.get_linear_decay_fn``.

    .. math::
        \delta_k = 1 - \min(k, N) / N

    Example:
        >>> import optzoo
        >>> decay = optzoo.linear_sign_decay(100)
        >>> print([round(float(decay(step)), 3) for step in (0, 50, 100)])
        [1.0, 0.5, 0.0]

    Args:
        decay_steps: :math:`N`, positive.
    """
    check_positive(decay_steps=decay_steps)
    return lambda k: (decay_steps - _until(decay_steps, k)) / decay_steps


def cosine_sign_decay(
    decay_steps: int, num_periods: float = 0.5, zero_after: float | None = None
) -> optax.Schedule:
    r"""Cosine decay between 1 and 0, as ``tf.contrib.opt.get_cosine_decay_fn``.

    .. math::
        \delta_k = \tfrac12 (1 + \cos \pi f), \qquad f = 2P \min(k, N) / N

    and 0 where :math:`f \ge 2Z`. After :math:`N` steps the value is constant.

    Example:
        >>> import optzoo
        >>> decay = optzoo.cosine_sign_decay(100)
        >>> print([round(float(decay(step)), 3) for step in (0, 50, 100)])
        [1.0, 0.5, 0.0]

    Args:
        decay_steps: :math:`N`, positive.
        num_periods: :math:`P`; with 0.5 the value ends at 0.
        zero_after: :math:`Z`, the number of periods after which the value is 0; None for never.
    """
    check_positive(decay_steps=decay_steps)
    check_finite(num_periods=num_periods)
    check_finite(none=True, zero_after=zero_after)

    def decay(k):
        f = 2 * num_periods * (_until(decay_steps, k) / decay_steps)
        value = 0.5 * (1 + jnp.cos(jnp.pi * f))
        return value if zero_after is None else jnp.where(f >= 2 * zero_after, 0.0, value)

    return decay


def restart_sign_decay(
    decay_steps: int, num_periods: float = 1, zero_after: float | None = None
) -> optax.Schedule:
    r"""Repeated half cosines from 1 to 0, as ``tf.contrib.opt.get_restart_decay_fn``.

    .. math::
        \delta_k = \tfrac12 (1 + \cos \pi f), \qquad f = (P \min(k, N) \bmod N) / N

    and 0 where :math:`P \min(k, N) / N \ge Z`. If :math:`P` is an integer, the value returns to 1
    at :math:`k = N` and remains constant, as in the original.

    Example:
        >>> import optzoo
        >>> decay = optzoo.restart_sign_decay(100, num_periods=2)
        >>> print([round(float(decay(step)), 3) for step in (0, 25, 50, 75)])
        [1.0, 0.5, 1.0, 0.5]

    Args:
        decay_steps: :math:`N`, positive.
        num_periods: :math:`P`.
        zero_after: :math:`Z`, the number of periods after which the value is 0; None for never.
    """
    check_positive(decay_steps=decay_steps)
    check_finite(num_periods=num_periods)
    check_finite(none=True, zero_after=zero_after)

    def decay(k):
        periods = num_periods * _until(decay_steps, k)
        value = 0.5 * (1 + jnp.cos(jnp.pi * (periods % decay_steps) / decay_steps))
        if zero_after is None:
            return value
        return jnp.where(periods / decay_steps >= zero_after, 0.0, value)

    return decay


def _until(decay_steps, k):
    """``min(k, decay_steps)`` in float32, as in the original, also for float64 training."""
    return jnp.minimum(jnp.asarray(k, jnp.float32), decay_steps)
