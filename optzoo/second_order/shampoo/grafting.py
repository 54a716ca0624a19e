"""Grafting: the direction of one optimizer with the step length of another."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jax import Array

from ...core.checks import check_transformation
from ...core.gradients import check_gradients
from ...core.numerics import norm, one_minus_power, safe_divide, saturating_cast, sqrt, upcast
from ...core.optimizer import About, Optimizer, reads_of, recorded
from ...core.rows import SparseRows, is_rows, map_rows, update_tree
from ...core.short import short_repr
from ...state.inner import fitting, inner_transformation
from .options import StepValues, UpdateOptions


class GraftState(NamedTuple):
    """The states of the two transformations of :func:`optzoo.transforms.graft`."""

    direction: Any
    length: Any

    __repr__ = short_repr


@recorded
def graft(
    direction: optax.GradientTransformation, length: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    r"""The direction of one transformation with the step length of another.

    .. math::
        u_t = \frac{\lVert l_t \rVert}{\lVert d_t \rVert}\, d_t

    for each parameter, where :math:`d_t` and :math:`l_t` are the updates that ``direction`` and
    ``length`` give for the same gradient, and the norms are Euclidean, over the whole parameter.
    Where :math:`\lVert d_t \rVert = 0` the update is 0. A learning rate that is tuned for one
    optimizer can be used with another: ``graft(optzoo.ggt(1.0), optzoo.adam(1e-3))`` moves each
    parameter as far as Adam does. The sign is that of ``direction``.

    Norms are computed in at least float32; an update has the dtype of :math:`d_t`. A missing
    gradient (None) has no update.

    Row-sparse gradients are allowed where both transformations accept them. Rows that share an
    index are summed first. An update has the form of :math:`d_t`: rows or an array. The norm of
    rows is that of the equivalent array, so :math:`l_t` may have the other form.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.transforms.graft(optzoo.gradient_descent(1.0), optzoo.adam(0.1))
        >>> params = jnp.ones(2)
        >>> updates, state = tx.update(jnp.array([3.0, 4.0]), tx.init(params), params)
        >>> print(updates, float(jnp.linalg.norm(updates)) < 0.15)  # the length of Adam's step
        [-0.0849 -0.1131] True

    Args:
        direction: the transformation that determines the direction. A constant factor, such as its
            learning rate, has no effect.
        length: the transformation that determines the norm of each parameter's update.

    Raises:
        TypeError: at trace time, if a gradient is neither real floating-point nor SparseRows.
        ValueError: at trace time, if a gradient does not have the shape of its parameter.

    References:
        Agarwal et al., `Disentangling Adaptive Gradient Methods from Learning Rates
        <https://arxiv.org/abs/2002.11803>`_, 2020.
    """
    check_transformation(direction=direction)
    direction, length = fitting(direction), inner_transformation(length=length)

    def init(params):
        return GraftState(direction.init(params), length.init(params))

    def update(updates, state, params=None, **extra_args):
        check_gradients(updates, params)
        updates = map_rows(SparseRows.coalesce, updates)
        d, of_direction = direction.update(updates, state.direction, params, **extra_args)
        step, of_length = length.update(updates, state.length, params, **extra_args)
        grafted = update_tree.map(_grafted, d, step)
        return grafted, GraftState(of_direction, of_length)

    about = About(reads=reads_of(direction, length))
    return fitting(Optimizer(init, update, about))


def match_norm(direction: Array, length: Array) -> Array:
    """``direction`` scaled to the Euclidean norm of ``length``; 0 where its own norm is 0."""
    return direction * safe_divide(norm(length), norm(direction))


def simple_step(
    options: UpdateOptions, now: StepValues, b: Array, g: Array, v: Any
) -> tuple[Array, Any]:
    """The step of the simpler optimizer that Shampoo is grafted to, and its new slot.

    Args:
        options: the options of Shampoo.
        now: the scheduled options at this step.
        b: the weighted sum of the gradients.
        g: the gradient.
        v: the slot ``graft``: mean or sum of ``g**2``, or ``()`` if it is not needed.
    """
    if not options.needs_squares:
        return b, v
    decay = jnp.asarray(options.grafting_b2, g.dtype)
    v = v + g**2 if options.grafting == "adagrad" else decay * v + (1 - decay) * g**2
    second = v
    if options.grafting == "adam":  # without the bias of both means
        b = b / (now.gbar_weight * _sum_of_weights(now.gbar_decay, now.t))
        second = v / ((1 - decay) * _sum_of_weights(decay, now.t))
    return safe_divide(b, sqrt(second) + options.grafting_eps, options.grafting_eps), v


def _grafted(direction: Any, length: Any) -> Any:
    """The update of one parameter: :func:`match_norm` in at least float32."""
    if direction is None or length is None:
        return None
    if is_rows(direction):
        direction = direction.coalesce()
        return direction.with_values(_grafted(direction.values, length))
    direction = jnp.asarray(direction)
    length = length.coalesce().values if is_rows(length) else jnp.asarray(length)
    return saturating_cast(match_norm(upcast(direction), upcast(length)), direction.dtype)


def _sum_of_weights(decay: Array, t: Array) -> Array:
    """The sum of ``decay**k`` for ``k`` from 0 to ``t - 1``."""
    t = t.astype(decay.dtype)
    return jnp.where(decay < 1, one_minus_power(decay, t) / (1 - decay), t)
