"""LAMB with a trust ratio for each parameter."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax

from ..core.checks import check_decays, check_not_negative
from ..core.numerics import norm, safe_divide
from ..core.optimizer import Optimizer, recorded
from ..rules.leafwise import leafwise, without_state, zeros
from ..rules.learning_rate import chain, descend
from ..rules.policies import dense
from .adam_weight_decay import BERTSlots, add_decay, next_slots
from .debiased import debiased_direction


@recorded
def scale_by_lamb(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    skip: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """The direction of :func:`optzoo.lamb`."""
    return chain(*_directions(b1, b2, eps, weight_decay, skip))


@recorded
def lamb(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    skip: Any = None,
) -> optax.GradientTransformationExtraArgs:
    r"""LAMB with a trust ratio for each parameter, as in ``nvidia.LAMBOptimizer``.

    .. math::
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1)\, g_t \\
        v_t &= \beta_2 v_{t-1} + (1 - \beta_2)\, g_t^2 \\
        r_t &= \frac{m_t / (1 - \beta_1^t)}{\sqrt{v_t / (1 - \beta_2^t)} + \epsilon}
               + \lambda\, x_{t-1} \\
        x_t &= x_{t-1} - \eta_t\, \frac{\lVert x_{t-1} \rVert}{\lVert r_t \rVert}\, r_t

    where the norms are over a whole parameter. If one of them is zero, the ratio is 1: a parameter
    of zeros takes Adam's step, unlike a row of zeros in :func:`optzoo.row_wise_lamb`. Both slots
    have the shape of the parameter; they are called ``adam_m`` and ``adam_v``, as in the
    checkpoints of the original. A row-sparse gradient is treated as dense
    (:func:`optzoo.rules.dense`), as in the original: rows without a gradient move and decay.

    ``optax.lamb`` gives the same values at the same arguments; its ``mask`` is the opposite of
    ``skip``, its state has other names, and its gradients are dense. :func:`optzoo.create` takes
    the original's arguments, as for :func:`optzoo.adam_weight_decay`.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.lamb(0.1)
        >>> params = jnp.array([3.0, 4.0])
        >>> updates, state = tx.update(jnp.array([0.01, -5.0]), tx.init(params), params)
        >>> print(jnp.linalg.norm(updates))  # the rate times the norm of the parameter
        0.5

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        b1: decay of the mean, in [0, 1).
        b2: decay of the squared mean, in [0, 1).
        eps: :math:`\epsilon`, at least 0.
        weight_decay: :math:`\lambda`, multiplied by the learning rate and by the ratio of the
            norms; at least 0.
        skip: the parameters without decay, as a mask (:func:`optzoo.param_groups`); None for none.
            Their trust ratio is still applied.

    Raises:
        ValueError: if no params are given to ``update``.

    References:
        You et al., `Large Batch Optimization for Deep Learning: Training BERT in 76 minutes
        <https://arxiv.org/abs/1904.00962>`_, 2020; ``optimization.py`` of BERT in NVIDIA's
        `DeepLearningExamples <https://github.com/NVIDIA/DeepLearningExamples>`_.

    Differences from the original:
        :math:`t` is 1 at the first update; the original reads the global step before or after its
        increment, in undefined order (until February 2020 it counted variables, not steps). With
        ``eps=0``, an element whose gradients were all zero gives no NaN. Parameters may have any
        floating dtype; the original accepts float32, and float16 with float32 copies.
    """
    return descend(learning_rate, *_directions(b1, b2, eps, weight_decay, skip))


def _directions(b1: Any, b2: Any, eps: Any, weight_decay: Any, skip: Any) -> tuple[Optimizer, ...]:
    b1, b2 = check_decays(b1=b1, b2=b2)
    check_not_negative(eps=eps)

    def rule(g, x, s, t):
        update = lambda s: debiased_direction(s.adam_m, s.adam_v, t, b1, b2, eps, rounded=True)
        return update, next_slots(g, s, b1, b2)

    def trust(g, x, s, t):
        x_norm, g_norm = norm(x), norm(g)
        ratio = jnp.where((x_norm > 0) & (g_norm > 0), safe_divide(x_norm, g_norm), 1)
        return ratio * g, s

    return (
        leafwise(rule, slots=BERTSlots(zeros, zeros), rows=dense),
        add_decay(weight_decay, skip),
        without_state(leafwise(trust, rows=dense, needs_params=True)),
    )
