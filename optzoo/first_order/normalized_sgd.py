"""NormalizedSGD: a step of given length for each parameter."""

import jax.numpy as jnp
import optax

from ..core.numerics import norm
from ..rules.leafwise import leafwise
from ..rules.learning_rate import descend


def scale_by_own_norm() -> optax.GradientTransformationExtraArgs:
    """The direction of :func:`optzoo.normalized_sgd`."""

    def rule(g, x, s, t):
        return g / jnp.maximum(norm(g), 1e-6), s

    return leafwise(rule)


def normalized_sgd(
    learning_rate: optax.ScalarOrSchedule,
) -> optax.GradientTransformationExtraArgs:
    r"""Gradient descent by normed gradients, as in ``returnn.tf.updater.NormalizedSGD``.

    .. math::
        x_t = x_{t-1} - \eta_t\, \frac{g_t}{\max(\lVert g_t \rVert_2, 10^{-6})}

    The norm is that of one parameter's gradient, so each parameter moves by :math:`\eta` unless
    its gradient vanishes, and a scalar by exactly :math:`\pm\eta`. Clipping by a norm in front
    has no effect. Of a row-sparse gradient the norm is over the summed rows; rows without a
    gradient keep their parameters (:func:`optzoo.lazy`).

    Args:
        learning_rate: :math:`\eta`, a number or a schedule; the length of a step.

    Raises:
        TypeError: if the rate is neither a number nor a schedule.

    References:
        RETURNN's source; Cortés, `Finite-time convergent gradient flows with applications to
        network consensus <https://doi.org/10.1016/j.automatica.2006.06.015>`_, 2006.

    Differences from the original:
        The norm is over the summed rows; in the original rows that share an index count one by
        one in the norm.
    """
    return descend(learning_rate, scale_by_own_norm())
