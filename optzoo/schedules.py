"""Learning rate schedules of TensorFlow 1, as functions of the number of previous steps.

The argument ``global_step`` of the originals is the argument of the returned function. Values are
computed in float32, as in the originals. TensorFlow's graph multiplies by the inverse of a constant
instead of dividing by it, so that quotients may be slightly below or above an integer: with
``decay_steps=41`` a staircase decreases at step 42. These functions reproduce this rounding.
:func:`optzoo.create` makes schedules from configs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import optax

from .core.checks import check_finite, check_flags, check_positive, check_size

__all__ = [
    "cosine_decay",
    "cosine_decay_restarts",
    "cosine_decay_with_warmup",
    "exponential_decay",
    "exponential_decay_with_burnin",
    "inverse_time_decay",
    "linear_cosine_decay",
    "manual_stepping",
    "natural_exp_decay",
    "noam",
    "piecewise_constant",
    "polynomial_decay",
]

_F32 = np.float32


def exponential_decay(
    learning_rate: float, decay_steps: float, decay_rate: float, staircase: bool = False
) -> optax.Schedule:
    r"""Exponential decay, as ``tf.train.exponential_decay``.

    .. math::
        \eta_k = \eta r^{k / N}, \qquad \text{with staircase } \eta r^{\lfloor k / N \rfloor}

    Example:
        >>> import optzoo
        >>> schedule = optzoo.schedules.exponential_decay(1.0, 10, 0.5, staircase=True)
        >>> [float(schedule(step)) for step in (0, 9, 10, 25)]
        [1.0, 1.0, 0.5, 0.25]

    Args:
        learning_rate: :math:`\eta`.
        decay_steps: :math:`N`, positive.
        decay_rate: :math:`r`.
        staircase: whether the exponent is rounded down.
    """
    check_finite(learning_rate=learning_rate, decay_rate=decay_rate)
    p = _fraction(decay_steps, staircase)
    return lambda k: _F32(learning_rate) * jnp.power(_F32(decay_rate), p(k))


def natural_exp_decay(
    learning_rate: float, decay_steps: float, decay_rate: float, staircase: bool = False
) -> optax.Schedule:
    r"""Exponential decay to the base :math:`e`, as ``tf.train.natural_exp_decay``.

    .. math::
        \eta_k = \eta e^{-r k / N}, \qquad \text{with staircase } \eta e^{-r \lfloor k / N \rfloor}

    Example:
        >>> import optzoo
        >>> schedule = optzoo.schedules.natural_exp_decay(1.0, 10, 0.5)
        >>> [round(float(schedule(step)), 4) for step in (0, 10, 20)]
        [1.0, 0.6065, 0.3679]

    Args:
        learning_rate: :math:`\eta`.
        decay_steps: :math:`N`, positive.
        decay_rate: :math:`r`.
        staircase: whether :math:`k / N` is rounded down.
    """
    check_finite(decay_rate=decay_rate)
    rate = _F32(math.exp(-_F32(decay_rate)))
    return exponential_decay(learning_rate, decay_steps, float(rate), staircase)


def inverse_time_decay(
    learning_rate: float, decay_steps: float, decay_rate: float, staircase: bool = False
) -> optax.Schedule:
    r"""Inverse time decay, as ``tf.train.inverse_time_decay``.

    .. math::
        \eta_k = \frac{\eta}{1 + r k / N}

    with :math:`k / N` rounded down if ``staircase``.

    Example:
        >>> import optzoo
        >>> schedule = optzoo.schedules.inverse_time_decay(1.0, 10, 1.0)
        >>> [round(float(schedule(step)), 4) for step in (0, 10, 20)]
        [1.0, 0.5, 0.3333]

    Args:
        learning_rate: :math:`\eta`.
        decay_steps: :math:`N`, positive.
        decay_rate: :math:`r`.
        staircase: whether :math:`k / N` is rounded down.
    """
    check_finite(learning_rate=learning_rate, decay_rate=decay_rate)
    p = _fraction(decay_steps, staircase)
    return lambda k: _F32(learning_rate) / (1 + _F32(decay_rate) * p(k))


def polynomial_decay(
    learning_rate: float,
    decay_steps: float,
    end_learning_rate: float = 1e-4,
    power: float = 1.0,
    cycle: bool = False,
) -> optax.Schedule:
    r"""Polynomial decay, as ``tf.train.polynomial_decay``.

    .. math::
        \eta_k = (\eta - \eta_N) \left(1 - \frac{\min(k, N)}{N}\right)^p + \eta_N

    With ``cycle`` :math:`k` is not bounded, and :math:`N` is multiplied by :math:`\max(1, \lceil k
    / N \rceil)`: the rate increases after each multiple of :math:`N`.

    Example:
        >>> import optzoo
        >>> schedule = optzoo.schedules.polynomial_decay(1.0, 10, 0.0, cycle=True)
        >>> [round(float(schedule(step)), 4) for step in (0, 5, 10, 15, 20)]
        [1.0, 0.5, 0.0, 0.25, 0.0]

    Args:
        learning_rate: :math:`\eta`.
        decay_steps: :math:`N`, positive.
        end_learning_rate: :math:`\eta_N`.
        power: :math:`p`.
        cycle: whether the decay is repeated in cycles.
    """
    check_finite(learning_rate=learning_rate, end_learning_rate=end_learning_rate, power=power)
    check_positive(decay_steps=decay_steps)
    check_flags(cycle=cycle)
    end, steps = _F32(end_learning_rate), _F32(decay_steps)

    def schedule(k):
        k = _as_f32(k)
        if cycle:
            of = steps * jnp.where(k == 0, _F32(1), jnp.ceil(k * _inverse(steps)))
            p = k / of
        else:
            p = jnp.minimum(k, steps) * _inverse(steps)
        return (_F32(learning_rate) - end) * jnp.power(1 - p, _F32(power)) + end

    return schedule


def piecewise_constant(boundaries: Sequence[int], values: Sequence[float]) -> optax.Schedule:
    r"""One value up to each boundary, as ``tf.train.piecewise_constant``.

    The first value applies if :math:`k \le b_1`, the second if :math:`b_1 < k \le b_2`, and so on.
    At a boundary the value before it applies, unlike in ``optax.piecewise_constant_schedule``.

    Example:
        >>> import optzoo
        >>> schedule = optzoo.schedules.piecewise_constant([10, 20], [1.0, 0.5, 0.25])
        >>> [float(schedule(step)) for step in (0, 10, 11, 20, 21)]
        [1.0, 1.0, 0.5, 0.5, 0.25]

    Args:
        boundaries: :math:`b_1 < b_2 < \dots`, ints.
        values: the values, one more than boundaries.

    Raises:
        TypeError: if a boundary is not an int.
        ValueError: if boundaries do not increase, or the number of values is not one more.
    """
    bounds, rates = _checked_steps(0, "boundaries", boundaries, "values", values)
    return lambda k: jnp.asarray(rates)[jnp.sum(jnp.asarray(k) > bounds)]


def cosine_decay(learning_rate: float, decay_steps: float, alpha: float = 0.0) -> optax.Schedule:
    r"""Half a cosine, as ``tf.train.cosine_decay``.

    .. math::
        \eta_k = \eta \left((1 - \alpha) \tfrac12 (1 + \cos \pi f) + \alpha\right),
            \qquad f = \min(k, N) / N

    Example:
        >>> import optzoo
        >>> schedule = optzoo.schedules.cosine_decay(1.0, 10)
        >>> [round(float(schedule(step)), 4) for step in (0, 5, 10, 15)]
        [1.0, 0.5, 0.0, 0.0]

    Args:
        learning_rate: :math:`\eta`.
        decay_steps: :math:`N`, positive.
        alpha: :math:`\alpha`, the last rate as a fraction of the first.
    """
    check_finite(learning_rate=learning_rate, alpha=alpha)
    check_positive(decay_steps=decay_steps)

    def schedule(k):
        half = _half_cosine(jnp.minimum(_as_f32(k), _F32(decay_steps)) * _inverse(decay_steps))
        return _F32(learning_rate) * (_F32(1 - alpha) * half + _F32(alpha))

    return schedule


def cosine_decay_restarts(
    learning_rate: float,
    first_decay_steps: float,
    t_mul: float = 2.0,
    m_mul: float = 1.0,
    alpha: float = 0.0,
) -> optax.Schedule:
    r"""Repeated half cosines, as ``tf.train.cosine_decay_restarts``.

    .. math::
        \eta_k = \eta \left((1 - \alpha) \tfrac12 m^i (1 + \cos \pi f) + \alpha\right)

    where :math:`i` is the number of previous restarts and :math:`f` the fraction of the current
    period. The first period has :math:`N` steps, and each period :math:`t` times as many steps as
    the previous one.

    :math:`i` is the floor of a logarithm in float32: at a restart, rounding may select either
    period, and TensorFlow and XLA may differ.

    Example:
        >>> import optzoo
        >>> schedule = optzoo.schedules.cosine_decay_restarts(1.0, 10, t_mul=1.0, m_mul=0.5)
        >>> [round(float(schedule(step)), 4) for step in (0, 5, 10, 15)]
        [1.0, 0.5, 0.5, 0.25]

    Args:
        learning_rate: :math:`\eta`.
        first_decay_steps: :math:`N`, positive.
        t_mul: :math:`t`, at least 1.
        m_mul: :math:`m`.
        alpha: :math:`\alpha`.

    References:
        Loshchilov and Hutter, `SGDR: Stochastic Gradient Descent with Warm Restarts
        <https://arxiv.org/abs/1608.03983>`_, 2016
    """
    check_finite(learning_rate=learning_rate, m_mul=m_mul, alpha=alpha)
    check_positive(first_decay_steps=first_decay_steps, t_mul=t_mul)
    t, one = _F32(t_mul), _F32(1)

    def schedule(k):
        f = _as_f32(k) * _inverse(first_decay_steps)
        if t == 1:
            i = jnp.floor(f)
            f = f - i
        else:
            i = jnp.floor(jnp.log(one - f * (one - t)) / np.log(t))
            f = (f - (one - jnp.power(t, i)) / (one - t)) / jnp.power(t, i)
        decayed = jnp.power(_F32(m_mul), i) * _half_cosine(f)
        return _F32(learning_rate) * ((one - _F32(alpha)) * decayed + _F32(alpha))

    return schedule


def linear_cosine_decay(
    learning_rate: float,
    decay_steps: float,
    num_periods: float = 0.5,
    alpha: float = 0.0,
    beta: float = 0.001,
) -> optax.Schedule:
    r"""A line times a cosine, as ``tf.train.linear_cosine_decay``.

    .. math::
        \eta_k = \eta \left((\alpha + 1 - f) \tfrac12 (1 + \cos 2 \pi P f) + \beta\right),
            \qquad f = \min(k, N) / N

    ``tf.train.noisy_linear_cosine_decay`` is not available, since it draws random numbers of
    TensorFlow.

    Example:
        >>> import optzoo
        >>> schedule = optzoo.schedules.linear_cosine_decay(1.0, 10, beta=0.0)
        >>> [round(float(schedule(step)), 4) for step in (0, 5, 10)]
        [1.0, 0.25, 0.0]

    Args:
        learning_rate: :math:`\eta`.
        decay_steps: :math:`N`, positive.
        num_periods: :math:`P`.
        alpha: :math:`\alpha`.
        beta: :math:`\beta`.

    References:
        Bello et al., `Neural Optimizer Search with Reinforcement Learning
        <https://arxiv.org/abs/1709.07417>`_, 2017
    """
    check_finite(learning_rate=learning_rate, num_periods=num_periods, alpha=alpha, beta=beta)
    check_positive(decay_steps=decay_steps)
    n = _F32(decay_steps)

    def schedule(k):
        k = jnp.minimum(_as_f32(k), n)
        half = _half_cosine(_F32(2) * _F32(num_periods) * (k * _inverse(n)))
        return _F32(learning_rate) * ((_F32(alpha) + (n - k) * _inverse(n)) * half + _F32(beta))

    return schedule


def noam(learning_rate: float, model_dim: int, warmup_steps: int) -> optax.Schedule:
    r"""The schedule of the Transformer, as ``opennmt.schedules.NoamDecay``.

    .. math::
        \eta_k = \eta d^{-1/2} \min\left((k + 1)^{-1/2}, (k + 1) w^{-3/2}\right)

    tensor2tensor's ``noam`` is this schedule with :math:`\eta = 5000`, times its ``learning_rate``.

    Example:
        >>> import optzoo
        >>> schedule = optzoo.schedules.noam(2.0, model_dim=4, warmup_steps=4)
        >>> [round(float(schedule(step)), 4) for step in (0, 3, 15)]
        [0.125, 0.5, 0.25]

    Args:
        learning_rate: :math:`\eta`, called ``scale`` by OpenNMT-tf 2.
        model_dim: :math:`d`, the width of the model, positive.
        warmup_steps: :math:`w`, positive.

    References:
        Vaswani et al., `Attention Is All You Need <https://arxiv.org/abs/1706.03762>`_, 2017
    """
    check_finite(learning_rate=learning_rate)
    check_positive(model_dim=model_dim, warmup_steps=warmup_steps)
    width, warm = _F32(float(model_dim) ** -0.5), _F32(float(warmup_steps) ** -1.5)

    def schedule(k):
        t = _as_f32(k) + 1
        return _F32(learning_rate) * (width * jnp.minimum(jnp.power(t, _F32(-0.5)), t * warm))

    return schedule


def manual_stepping(
    boundaries: Sequence[int], rates: Sequence[float], warmup: bool = False
) -> optax.Schedule:
    r"""One rate between boundaries, as ``manual_stepping`` of object_detection.

    The first rate applies if :math:`k < b_1`, the second if :math:`b_1 \le k < b_2`, and so on.
    With ``warmup`` the rate increases linearly from the first to the second one before :math:`b_1`.

    Example:
        >>> import optzoo
        >>> schedule = optzoo.schedules.manual_stepping([10, 20], [0.0, 1.0, 0.5], warmup=True)
        >>> [float(schedule(step)) for step in (0, 5, 10, 19, 20)]
        [0.0, 0.5, 1.0, 1.0, 0.5]

    Args:
        boundaries: :math:`b_1 < b_2 < \dots`, positive ints.
        rates: the rates, one more than boundaries.
        warmup: whether there is a warm-up.

    Raises:
        TypeError: if a boundary is not an int.
        ValueError: if boundaries do not increase, or the number of rates is not one more.

    References:
        ``object_detection.utils.learning_schedules.manual_stepping`` of `TensorFlow's models
        <https://github.com/tensorflow/models>`_.
    """
    bounds, values = _checked_steps(1, "boundaries", boundaries, "rates", rates)
    check_flags(warmup=warmup)
    if not len(bounds):
        return lambda k: jnp.full((), values[0])
    if not warmup:
        return lambda k: jnp.asarray(values)[jnp.sum(jnp.asarray(k) >= bounds)]
    first, second = float(rates[0]), float(rates[1])
    rise = np.array([first + (second - first) / boundaries[0] * i for i in range(boundaries[0])])
    values = np.concatenate([rise.astype(_F32), values[1:]])

    def schedule(k):
        k = jnp.asarray(k)
        i = jnp.minimum(k, bounds[0]) + jnp.sum(k >= bounds[1:], dtype=k.dtype)
        return jnp.asarray(values)[i]

    return schedule


def exponential_decay_with_burnin(
    learning_rate: float,
    decay_steps: int,
    decay_rate: float,
    burnin_learning_rate: float = 0.0,
    burnin_steps: int = 0,
    min_learning_rate: float = 0.0,
    staircase: bool = True,
) -> optax.Schedule:
    r"""A constant, then exponential decay, as in object_detection.

    .. math::
        \eta_k = \max\left(\eta_{\min}, \begin{cases} \eta_b & \text{if } k < B \\
            \eta r^{\lfloor (k - B) / N \rfloor} & \text{otherwise} \end{cases}\right)

    Example:
        >>> import optzoo
        >>> schedule = optzoo.schedules.exponential_decay_with_burnin(1.0, 10, 0.5, 0.1, 5)
        >>> [round(float(schedule(step)), 4) for step in (0, 4, 5, 14, 15)]
        [0.1, 0.1, 1.0, 1.0, 0.5]

    Args:
        learning_rate: :math:`\eta`.
        decay_steps: :math:`N`, positive.
        decay_rate: :math:`r`.
        burnin_learning_rate: :math:`\eta_b`; 0 for ``learning_rate``, as in the original.
        burnin_steps: :math:`B`.
        min_learning_rate: :math:`\eta_{\min}`.
        staircase: whether :math:`(k - B) / N` is rounded down.

    Before 2019 object_detection used :math:`k` instead of :math:`k - B`.

    References:
        ``object_detection.utils.learning_schedules.exponential_decay_with_burnin`` of
        `TensorFlow's models <https://github.com/tensorflow/models>`_.
    """
    check_finite(burnin_learning_rate=burnin_learning_rate, min_learning_rate=min_learning_rate)
    check_size(burnin_steps=burnin_steps)
    after = exponential_decay(learning_rate, decay_steps, decay_rate, staircase)
    first = _F32(burnin_learning_rate or learning_rate)

    def schedule(k):
        k = jnp.asarray(k)
        rate = jnp.where(k < burnin_steps, first, after(k - burnin_steps))
        return jnp.maximum(rate, _F32(min_learning_rate))

    return schedule


def cosine_decay_with_warmup(
    learning_rate: float,
    total_steps: int,
    warmup_learning_rate: float = 0.0,
    warmup_steps: int = 0,
    hold_base_rate_steps: int = 0,
) -> optax.Schedule:
    r"""Linear warm-up, a constant, then half a cosine, as in object_detection.

    .. math::
        \eta_k = \begin{cases} \eta_w + (\eta - \eta_w) k / W & \text{if } k < W \\
            \eta & \text{if } W \le k \le W + H \text{ and } H > 0 \\
            \tfrac12 \eta \left(1 + \cos \pi \frac{k - W - H}{T - W - H}\right)
            & \text{if } k \le T \\ 0 & \text{otherwise} \end{cases}

    Example:
        >>> import optzoo
        >>> schedule = optzoo.schedules.cosine_decay_with_warmup(1.0, 30, 0.0, 10)
        >>> [round(float(schedule(step)), 4) for step in (0, 5, 10, 20, 30, 31)]
        [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]

    Args:
        learning_rate: :math:`\eta`, called ``learning_rate_base`` by object_detection.
        total_steps: :math:`T`, more than :math:`W + H`.
        warmup_learning_rate: :math:`\eta_w`, at most ``learning_rate``.
        warmup_steps: :math:`W`.
        hold_base_rate_steps: :math:`H`.

    Raises:
        ValueError: if ``total_steps`` is too small, or ``warmup_learning_rate`` too large.

    References:
        ``object_detection.utils.learning_schedules.cosine_decay_with_warmup`` of `TensorFlow's
        models <https://github.com/tensorflow/models>`_.
    """
    check_finite(learning_rate=learning_rate, warmup_learning_rate=warmup_learning_rate)
    warmup_steps = check_size(warmup_steps=warmup_steps)
    before = warmup_steps + check_size(hold_base_rate_steps=hold_base_rate_steps)
    if check_size(total_steps=total_steps) <= before:
        raise ValueError(
            f"total_steps must be more than warmup_steps + hold_base_rate_steps = {before}, got "
            f"{total_steps}"
        )
    if warmup_steps and learning_rate < warmup_learning_rate:
        raise ValueError(
            f"warmup_learning_rate must be at most learning_rate={learning_rate}, got "
            f"{warmup_learning_rate}"
        )
    slope = _F32((learning_rate - warmup_learning_rate) / warmup_steps if warmup_steps else 0)

    def schedule(k):
        k, f = jnp.asarray(k), _as_f32(k)
        angle = _F32(np.pi) * (f - _F32(warmup_steps) - _F32(hold_base_rate_steps))
        rate = _F32(0.5 * learning_rate) * (1 + jnp.cos(angle / _F32(total_steps - before)))
        if hold_base_rate_steps:
            rate = jnp.where(k > before, rate, _F32(learning_rate))
        rise = slope * f + _F32(warmup_learning_rate)
        rate = jnp.where(k < warmup_steps, rise, rate)
        return jnp.where(k > total_steps, _F32(0), rate)

    return schedule


def _as_f32(k):
    return jnp.asarray(k, jnp.float32)


def _inverse(n):
    return _F32(1) / _F32(n)


def _half_cosine(f):
    return _F32(0.5) * (1 + jnp.cos(_F32(np.pi) * f))


def _fraction(decay_steps, staircase):
    """``k / decay_steps`` as a function of the step."""
    check_positive(decay_steps=decay_steps)
    check_flags(staircase=staircase)
    p = lambda k: _as_f32(k) * _inverse(decay_steps)
    return (lambda k: jnp.floor(p(k))) if staircase else p


def _checked_steps(least, name, boundaries, name_of_values, values):
    """Boundaries with this minimum, and the values between them, as arrays."""
    for argument, numbers in ((name, boundaries), (name_of_values, values)):
        is_list = isinstance(numbers, Sequence) and not isinstance(numbers, str)
        if not is_list and not getattr(numbers, "shape", ()):
            raise TypeError(f"{argument} must be a list of numbers, got {numbers!r}")
    bounds = [check_size(least, **{name: b}) for b in boundaries]
    if any(b >= c for b, c in itertools.pairwise(bounds)):
        raise ValueError(f"{name} must increase, got {list(boundaries)}")
    if len(values) != len(bounds) + 1:
        raise ValueError(
            f"{name_of_values} must have one more element than {name}, got {len(values)} for "
            f"{len(bounds)}"
        )
    for value in values:
        check_finite(**{name_of_values: value})
    return np.array(bounds, np.int32), np.array(values, _F32)
