"""Adagrad with one accumulator for each row."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from ..core.checks import check_not_negative
from ..core.numerics import safe_divide, sqrt
from ..rules.leafwise import leafwise, zeros
from ..rules.learning_rate import descend
from ..state.types import Slot


class RowWiseAdagradSlots(NamedTuple):
    """The slots of row-wise Adagrad."""

    accumulator: Slot  # sum of the mean squares of each row's gradients


def scale_by_row_wise_adagrad(eps: float = 1e-8) -> optax.GradientTransformationExtraArgs:
    """The direction of :func:`optzoo.row_wise_adagrad`."""
    check_not_negative(eps=eps)

    def rule(g, x, s, t):
        root = lambda a: jnp.expand_dims(sqrt(a) + eps, _inner_axes(g))
        update = lambda s: safe_divide(g, root(s.accumulator), eps)
        return update, RowWiseAdagradSlots(s.accumulator + _row_means(g**2))

    return leafwise(rule, slots=RowWiseAdagradSlots(_zero_for_each_row))


def row_wise_adagrad(
    learning_rate: optax.ScalarOrSchedule, eps: float = 1e-8
) -> optax.GradientTransformationExtraArgs:
    r"""Adagrad for large embeddings: one accumulator for each row.

    .. math::
        A_{i,t} &= A_{i,t-1} + \frac{1}{d} \sum_{j=1}^{d} g_{ij,t}^2 \\
        x_{ij,t} &= x_{ij,t-1} - \eta_t\, \frac{g_{ij,t}}{\sqrt{A_{i,t}} + \epsilon}

    where :math:`i` counts the rows, along the first axis, and a row has :math:`d` elements. For a
    table of width 64 the slots are 64 times smaller than those of :func:`optzoo.adagrad`, and an
    update of few rows writes little more than the rows themselves. In a vector each element is a
    row; a scalar is one row. Rows without a gradient keep their parameters and slots
    (:func:`optzoo.lazy`); rows that share an index are summed first.

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        eps: :math:`\epsilon`, at least 0.

    Raises:
        TypeError: if the rate is neither a number nor a schedule.
        ValueError: if eps is negative.

    References:
        ``EmbOptimType.EXACT_ROWWISE_ADAGRAD`` of `FBGEMM <https://github.com/pytorch/FBGEMM>`_,
        which TorchRec uses, without its weight decay; Duchi et al., `Adaptive Subgradient Methods
        for Online Learning and Stochastic Optimization
        <https://jmlr.org/papers/v12/duchi11a.html>`_, 2011.
    """
    return descend(learning_rate, scale_by_row_wise_adagrad(eps))


def _inner_axes(x: Any) -> tuple[int, ...]:
    """The axes within a row."""
    return tuple(range(1, jnp.ndim(x)))


def _row_means(x: Array) -> Array:
    return jnp.sum(x, axis=_inner_axes(x)) / max(1, math.prod(x.shape[1:])) if x.ndim > 1 else x


def _zero_for_each_row(x: Any) -> Array:
    if isinstance(x, jax.ShapeDtypeStruct):
        return zeros(jax.ShapeDtypeStruct(x.shape[:1], x.dtype))
    return zeros(jnp.sum(x, axis=_inner_axes(x)))  # sharded like the rows
