"""The Adam of BERT: no bias correction, and a weight decay times the learning rate."""

from __future__ import annotations

from typing import Any, NamedTuple

import optax
from jax import Array

from ..core.checks import check_decays, check_not_negative
from ..core.numerics import safe_divide, sqrt
from ..core.optimizer import Optimizer, recorded
from ..core.paths import check_mask, except_for
from ..rules.leafwise import leafwise, without_state, zeros
from ..rules.learning_rate import chain, descend
from ..rules.policies import dense
from ..state.tf1_names import TF1Names
from ..state.types import NotNegative, Signed


class BERTSlots(NamedTuple):
    """The slots of BERT's optimizers, with the names of their variables."""

    adam_m: Signed  # mean of the gradient
    adam_v: NotNegative  # mean of its square

    tf1 = TF1Names(by_field="/")


def next_slots(g: Array, s: BERTSlots, b1: Any, b2: Any) -> BERTSlots:
    """Both means after one more gradient."""
    return BERTSlots(b1 * s.adam_m + (1 - b1) * g, b2 * s.adam_v + (1 - b2) * g**2)


def add_decay(weight_decay: Any, skip: Any) -> Optimizer:
    """Adds a fraction of each parameter to its direction, except where ``skip`` is true."""
    check_not_negative(weight_decay=weight_decay)
    check_mask(skip=skip)
    rule = lambda g, x, s, t: (g + weight_decay * x, s)
    return except_for(skip, without_state(leafwise(rule, rows=dense, needs_params=True)))


@recorded
def scale_by_adam_weight_decay(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    skip: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """The direction of :func:`optzoo.adam_weight_decay`."""
    return chain(*_directions(b1, b2, eps, weight_decay, skip))


@recorded
def adam_weight_decay(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    skip: Any = None,
) -> optax.GradientTransformationExtraArgs:
    r"""The Adam of BERT, as in ``bert.optimization.AdamWeightDecayOptimizer``.

    .. math::
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1)\, g_t \\
        v_t &= \beta_2 v_{t-1} + (1 - \beta_2)\, g_t^2 \\
        x_t &= x_{t-1} - \eta_t \left( \frac{m_t}{\sqrt{v_t} + \epsilon} + \lambda\, x_{t-1} \right)

    There is no bias correction, unlike in :func:`optzoo.adam` and ``optax.adamw``: at the default
    decays the first step is 3.2 times as long as Adam's. BERT uses a warm-up of the rate. Both
    slots have the shape of the parameter; they are called ``adam_m`` and ``adam_v``, as in BERT's
    checkpoints. A row-sparse gradient is treated as dense (:func:`optzoo.rules.dense`), as in BERT:
    rows without a gradient move and decay.

    :func:`optzoo.create` takes the original's arguments. Its ``exclude_from_weight_decay`` is a
    list of regular expressions that are searched for in the names of parameters; an expression may
    match no name.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.create(
        ...     "bert.AdamWeightDecayOptimizer",
        ...     learning_rate=0.1,
        ...     weight_decay_rate=0.01,
        ...     exclude_from_weight_decay=["LayerNorm", "layer_norm", "bias"],
        ... )
        >>> params = {"dense": {"kernel": jnp.ones(2), "bias": jnp.ones(2)}}
        >>> gradients = {"dense": {"kernel": jnp.zeros(2), "bias": jnp.zeros(2)}}
        >>> updates, state = tx.update(gradients, tx.init(params), params)
        >>> print(updates["dense"]["kernel"], updates["dense"]["bias"])
        [-0.001 -0.001] [-0. -0.]

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        b1: decay of the mean, in [0, 1).
        b2: decay of the squared mean, in [0, 1).
        eps: :math:`\epsilon`, at least 0.
        weight_decay: :math:`\lambda`, multiplied by the learning rate; at least 0.
        skip: the parameters without decay, as a mask (:func:`optzoo.param_groups`); None for none.

    Raises:
        ValueError: if no params are given to ``update``.

    References:
        ``optimization.py`` of `BERT <https://github.com/google-research/bert>`_; Devlin et al.,
        `BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding
        <https://arxiv.org/abs/1810.04805>`_, 2019.

    Differences from the original:
        With ``eps=0``, an element whose gradients were all zero is changed by the decay only; the
        original divides zero by zero. Parameters may have any floating dtype; the original accepts
        float32 only.
    """
    return descend(learning_rate, *_directions(b1, b2, eps, weight_decay, skip))


def _directions(b1: Any, b2: Any, eps: Any, weight_decay: Any, skip: Any) -> tuple[Optimizer, ...]:
    b1, b2 = check_decays(b1=b1, b2=b2)
    check_not_negative(eps=eps)

    def rule(g, x, s, t):
        update = lambda s: safe_divide(s.adam_m, sqrt(s.adam_v) + eps, eps)
        return update, next_slots(g, s, b1, b2)

    adam = leafwise(rule, slots=BERTSlots(zeros, zeros), rows=dense)
    return adam, add_decay(weight_decay, skip)
