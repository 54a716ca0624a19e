"""Adafactor: mean squares as products of means over rows and over columns."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jax import Array, lax

from ..core.checks import (
    check_decays,
    check_flags,
    check_not_negative,
    check_positive,
    check_rate,
    check_size,
)
from ..core.meshes import zeros_without
from ..core.numerics import is_number, safe_divide, slot_dtype, sqrt
from ..core.optimizer import recorded
from ..rules.leafwise import leafwise, zeros
from ..rules.policies import dense
from ..state.inner import fitting
from ..state.tf1_names import TF1Names
from ..state.types import Exact, NotNegative, Signed


class AdafactorSlots(NamedTuple):
    """The slots of Adafactor: ``vr`` and ``vc``, or ``v``; ``m`` with momentum; the rest are ()."""

    m: Signed  # mean of the steps
    vr: Exact  # mean of the squared gradient over one axis
    vc: Exact  # the same over the other axis
    v: NotNegative  # mean of the squared gradient

    tf1 = TF1Names(by_field="_slot_", also_numbered=True)


@recorded
def adafactor(
    learning_rate: optax.ScalarOrSchedule | None = None,
    decay_rate: optax.ScalarOrSchedule | None = None,
    b1: float = 0.0,
    clipping_threshold: float | None = 1.0,
    factored: bool = True,
    multiply_by_parameter_scale: bool = True,
    eps: float = 1e-30,
    min_parameter_scale: float = 1e-3,
    min_dim_size_to_factor: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Adafactor, as in ``tensor2tensor.utils.adafactor.AdafactorOptimizer``.

    For a matrix, with :math:`\operatorname{rms}(a)` the root of the mean of all :math:`a^2`:

    .. math::
        r_t &= \beta_t r_{t-1} + (1 - \beta_t) \operatorname{mean}_j(g_{ij,t}^2 + \epsilon) \\
        c_t &= \beta_t c_{t-1} + (1 - \beta_t) \operatorname{mean}_i(g_{ij,t}^2 + \epsilon) \\
        u_t &= g_t \left( \frac{r_t}{\operatorname{mean}(r_t)}\, c_t^\top \right)^{-1/2} \\
        s_t &= \eta_t\, \max(\operatorname{rms}(x_{t-1}), \epsilon_2)\,
               \frac{u_t}{\max(1, \operatorname{rms}(u_t) / d)} \\
        x_t &= x_{t-1} - s_t
            \quad\text{or, with}\ \beta_1 > 0,\quad
            x_{t-1} - m_t, \quad m_t = \beta_1 m_{t-1} + (1 - \beta_1)\, s_t

    Other parameters have :math:`v_t = \beta_t v_{t-1} + (1 - \beta_t)(g_t^2 + \epsilon)` and
    :math:`u_t = g_t\, v_t^{-1/2}`. By default :math:`\beta_t = 1 - t^{-0.8}` and
    :math:`\eta_t = \min(t^{-1/2}, 0.01)`, a twentieth of it without
    ``multiply_by_parameter_scale``.

    tensor2tensor factors all parameters with two axes or more, over the last two. Mesh TensorFlow
    and T5 factor over the two longest axes, if both have at least ``min_dim_size_to_factor``
    elements; the first of equally long axes is regarded as the longest. The slot ``vr`` has the
    shape of the parameter without the last (the longest) axis, and ``vc`` without the second last
    (the second longest). In :func:`optzoo.create`, ``mesh_tensorflow.Adafactor`` and
    ``t5.Adafactor`` set ``min_dim_size_to_factor=128``; Mesh TensorFlow before 2020 had 32.

    ``optax.adafactor`` gives the same values at the same ``min_dim_size_to_factor`` (128 by
    default), unless the second and the third longest axes are equal, as in shapes (4, 4, 4) and
    (8, 4, 4): of equal axes it takes the last. Its ``decay_rate`` is the exponent 0.8, its
    ``momentum`` is ``b1``, and its rate is 1 without a ``learning_rate``.

    A row-sparse gradient is treated as dense (:func:`optzoo.rules.dense`), as in the original.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.adafactor(0.01)
        >>> params = jnp.full((1000, 500), 2.0)
        >>> state = tx.init(params)
        >>> print(optzoo.get_slot(state, "vr").shape, optzoo.get_slot(state, "vc").shape)
        (1000,) (500,)
        >>> updates, state = tx.update(jnp.ones((1000, 500)), state, params)
        >>> print(updates[0, 0])  # the rate times the size of the parameters
        -0.02

    Args:
        learning_rate: :math:`\eta`, a number or a schedule; None for the default above.
        decay_rate: :math:`\beta`, a number in [0, 1) or a schedule of the number of updates before
            this one; None for the default above. The original's ``adafactor_decay_rate_pow(p)`` is
            ``lambda k: 1 - (k + 1.0) ** -p``, and ``adafactor_decay_rate_adam(b)`` is
            ``lambda k: b * (1 - b**k) / (1 - b ** (k + 1))``.
        b1: :math:`\beta_1`, decay of the mean of the steps, in [0, 1); 0 for no mean and no slot.
        clipping_threshold: :math:`d`, positive; None for no clipping.
        factored: whether parameters are factored.
        multiply_by_parameter_scale: whether the step is multiplied by
            :math:`\max(\operatorname{rms}(x), \epsilon_2)`.
        eps: :math:`\epsilon`, added to squared gradients; at least 0.
        min_parameter_scale: :math:`\epsilon_2`, at least 0. With 0 a parameter of zeros stays zero.
        min_dim_size_to_factor: None to factor as tensor2tensor; a number to factor as Mesh
            TensorFlow does.

    Raises:
        ValueError: with ``multiply_by_parameter_scale``, if no params are given to ``update``.

    References:
        Shazeer and Stern, `Adafactor: Adaptive Learning Rates with Sublinear Memory Cost
        <https://arxiv.org/abs/1804.04235>`_, 2018; ``utils/adafactor.py`` of `tensor2tensor
        <https://github.com/tensorflow/tensor2tensor>`_; ``optimize.py`` of `Mesh TensorFlow
        <https://github.com/tensorflow/mesh>`_.

    Differences from the original:
        The original adds the mean squared gradient times 1e-30 to both rates, which has no effect
        unless gradients exceed 1e11. Before September 2018 tensor2tensor factored matrices only.
        With ``eps=0``, an element whose row or column never had a gradient is unchanged; the
        original divides by zero. ``simulated_quantize_bits``, a ``parameter_encoding`` of bfloat16,
        and Mesh TensorFlow's ``stacked_dim_names`` and ``exclude_from_parameter_scale`` are missing
        (:func:`optzoo.param_groups` gives parameters their own arguments).
    """
    if learning_rate is None:
        learning_rate = _default_rate if multiply_by_parameter_scale else _small_rate
    decay_rate = _default_decay if decay_rate is None else decay_rate
    check_rate(learning_rate)
    if not callable(decay_rate):
        [decay_rate] = check_decays(decay_rate=decay_rate)
    [b1] = check_decays(b1=b1)
    check_flags(factored=factored, multiply_by_parameter_scale=multiply_by_parameter_scale)
    check_not_negative(eps=eps, min_parameter_scale=min_parameter_scale)
    if clipping_threshold is not None:
        check_positive(clipping_threshold=clipping_threshold)
    if min_dim_size_to_factor is not None:
        min_dim_size_to_factor = check_size(1, min_dim_size_to_factor=min_dim_size_to_factor)
    axes_of = lambda x: _factored_axes(x.shape, min_dim_size_to_factor) if factored else None
    has_momentum = not is_number(b1, 0)

    def rule(g, x, s, t, learning_rate, decay_rate):
        squares = g**2 + eps
        mean = lambda old, new: decay_rate * old + (1 - decay_rate) * new
        if (axes := axes_of(g)) is None:
            s = s._replace(v=mean(s.v, squares))
            u = safe_divide(g, sqrt(s.v), eps)
        else:
            first, second = axes
            vr, vc = (mean(old, _mean(squares, a)) for old, a in ((s.vr, first), (s.vc, second)))
            s = s._replace(vr=vr, vc=vc)
            vr, vc = jnp.expand_dims(vr, first), jnp.expand_dims(vc, second)
            # Where a row of vr is far below the mean this is zero, whatever eps is.
            relative = safe_divide(vr, jnp.expand_dims(_mean(vr, second), second))
            u = safe_divide(safe_divide(g, sqrt(relative)), sqrt(vc), eps)
        if clipping_threshold is not None:
            u = u / jnp.maximum(1, _rms(u) / clipping_threshold)
        if multiply_by_parameter_scale:
            learning_rate = learning_rate * jnp.maximum(_rms(x), min_parameter_scale)
        step = learning_rate * u
        if has_momentum:
            step = b1 * s.m + (1 - b1) * step
            s = s._replace(m=step)
        return -step, s

    def without(position):
        """A slot of factored parameters, without one of the two axes."""

        def slot(x):
            axes = axes_of(x)
            return () if axes is None else zeros_without(x, [axes[position]], slot_dtype(x))

        return slot

    none = lambda x: ()
    slots = AdafactorSlots(
        m=zeros if has_momentum else none,
        vr=without(0),
        vc=without(1),
        v=lambda x: zeros(x) if axes_of(x) is None else (),
    )
    tx = leafwise(
        rule,
        slots=slots,
        rows=dense,
        scheduled={"learning_rate": learning_rate, "decay_rate": decay_rate},
        needs_params=multiply_by_parameter_scale,
    )
    return fitting(tx)


def _factored_axes(shape: tuple[int, ...], min_size: int | None) -> tuple[int, int] | None:
    """The axes over which ``vr`` and ``vc`` are means; None if a parameter is not factored."""
    if len(shape) < 2:
        return None
    if min_size is None:
        return len(shape) - 1, len(shape) - 2
    first, second, *_ = sorted(range(len(shape)), key=lambda axis: -shape[axis])
    return (first, second) if shape[second] >= min_size else None


def _default_rate(step: Any) -> Array:
    return jnp.minimum(lax.rsqrt(jnp.asarray(step, jnp.float32) + 1), 0.01)


def _small_rate(step: Any) -> Array:
    return 0.05 * _default_rate(step)


def _default_decay(step: Any) -> Array:
    return 1 - (jnp.asarray(step, jnp.float32) + 1) ** -0.8


def _mean(a: Array, axis: int) -> Array:
    return jnp.sum(a, axis=axis) / max(1, a.shape[axis])


def _rms(a: Array) -> Array:
    return sqrt(jnp.sum(a**2) / max(1, math.prod(a.shape)))
