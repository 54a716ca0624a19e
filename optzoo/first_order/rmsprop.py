"""RMSProp, plain or centered, with momentum."""

from typing import NamedTuple

import jax.numpy as jnp
import optax

from ..core.checks import check_decays, check_not_negative, check_rate
from ..core.leafwise import full, leafwise, zeros
from ..core.numerics import divide
from ..core.treewise import Slot


class RMSPropSlots(NamedTuple):
    """What plain RMSProp keeps."""

    rms: Slot  # mean of the squared gradient
    momentum: Slot  # decaying sum of the steps


class CenteredRMSPropSlots(NamedTuple):
    """What centered RMSProp keeps."""

    rms: Slot  # mean of the squared gradient
    mg: Slot  # mean of the gradient
    momentum: Slot  # decaying sum of the steps


def rmsprop(
    learning_rate: optax.ScalarOrSchedule,
    decay: float = 0.9,
    momentum: float = 0.0,
    eps: float = 1e-10,
    centered: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""RMSProp, as in ``tf.train.RMSPropOptimizer``.

    .. math::
        r_t &= \rho\, r_{t-1} + (1 - \rho)\, g_t^2, \qquad r_0 = 1 \\
        c_t &= \rho\, c_{t-1} + (1 - \rho)\, g_t \\
        M_t &= \mu\, M_{t-1} + \eta_t\, \frac{g_t}{\sqrt{r_t - c_t^2 + \epsilon}} \\
        x_t &= x_{t-1} - M_t

    where :math:`c_t` is zero unless ``centered``. The mean square starts at one, so early steps
    are small. The rate is part of the momentum, where a change acts on new gradients only, so
    RMSProp owns its learning rate. Rows without a gradient keep their parameters and slots
    (:func:`optzoo.lazy`).

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        decay: :math:`\rho`, in [0, 1).
        momentum: :math:`\mu`, at least 0.
        eps: :math:`\epsilon`, inside the root, at least 0.
        centered: divide by the standard deviation instead of the root of the mean square.
            Structural: it cannot be injected.

    Raises:
        TypeError: if the rate is neither a number nor a schedule.
        ValueError: if an argument is out of its range.

    References:
        Tieleman and Hinton, `Lecture 6.5: rmsprop
        <https://www.cs.toronto.edu/~tijmen/csc321/slides/lecture_slides_lec6.pdf>`_, 2012;
        Graves, `Generating Sequences With Recurrent Neural Networks
        <https://arxiv.org/abs/1308.0850>`_, 2013 (centered, with momentum).

    Differences from the original:
        Where the root is zero (possible with ``eps=0``) the step is zero, and a variance that
        rounds below zero counts as zero; the original gives NaN in both cases.
    """
    check_rate(learning_rate)
    [decay] = check_decays(decay=decay)
    check_not_negative(momentum=momentum, eps=eps)

    def plain(g, x, s, t, learning_rate):
        rms = decay * s.rms + (1 - decay) * g**2
        step = momentum * s.momentum + learning_rate * divide(g, jnp.sqrt(rms + eps), eps)
        return -step, RMSPropSlots(rms, step)

    def around_mean(g, x, s, t, learning_rate):
        rms = decay * s.rms + (1 - decay) * g**2
        mg = decay * s.mg + (1 - decay) * g
        variance = jnp.maximum(rms - mg**2, 0)
        step = momentum * s.momentum + learning_rate * divide(g, jnp.sqrt(variance + eps), eps)
        return -step, CenteredRMSPropSlots(rms, mg, step)

    rule, slots = plain, RMSPropSlots(rms=full(1), momentum=zeros)
    if centered:
        rule, slots = around_mean, CenteredRMSPropSlots(rms=full(1), mg=zeros, momentum=zeros)
    return leafwise(rule, slots=slots, scheduled={"learning_rate": learning_rate})
