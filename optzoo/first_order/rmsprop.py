"""RMSProp, plain or centered, with or without momentum."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from ..core.checks import check_decays, check_flags, check_not_negative, check_rate
from ..core.numerics import safe_divide, sqrt
from ..core.optimizer import known, recorded
from ..rules.leafwise import full, leafwise, zeros
from ..rules.learning_rate import row_wise
from ..state.decay_rule import DecayRule, Deferral
from ..state.types import NotNegative, Signed, Slot


class RMSPropSlots(NamedTuple):
    """The slots of RMSProp with momentum."""

    rms: NotNegative  # mean of the squared gradient
    momentum: Signed  # decaying sum of the steps


class CenteredRMSPropSlots(NamedTuple):
    """The slots of centered RMSProp with momentum."""

    rms: Slot  # more than 8 bits: rms - mg**2 must not become negative by rounding
    mg: Slot  # mean of the gradient
    momentum: Signed


class PlainRMSPropSlots(NamedTuple):
    """The slots of RMSProp without momentum."""

    rms: NotNegative


class PlainCenteredRMSPropSlots(NamedTuple):
    """The slots of centered RMSProp without momentum."""

    rms: Slot  # as above
    mg: Slot


_SLOTS: dict[frozenset[str], Any] = {
    frozenset(kind._fields): kind
    for kind in (
        RMSPropSlots, CenteredRMSPropSlots, PlainRMSPropSlots, PlainCenteredRMSPropSlots
    )
}  # fmt: skip


@recorded
def rmsprop(
    learning_rate: optax.ScalarOrSchedule,
    b2: float = 0.9,
    momentum: float | None = 0.0,
    eps: float = 1e-10,
    centered: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""RMSProp, as in ``tf.train.RMSPropOptimizer``.

    .. math::
        r_t &= \rho\, r_{t-1} + (1 - \rho)\, g_t^2, \qquad r_0 = 1 \\
        c_t &= \rho\, c_{t-1} + (1 - \rho)\, g_t \\
        M_t &= \mu\, M_{t-1} + \eta_t\, \frac{g_t}{\sqrt{r_t - c_t^2 + \epsilon}} \\
        x_t &= x_{t-1} - M_t

    where :math:`c_t` is zero unless ``centered`` is true. The mean square starts at one, so early
    steps are small. The learning rate is inside the momentum sum, so RMSProp applies it itself, and
    a change of the rate applies to new gradients only. Rows without a gradient keep their
    parameters and slots (:func:`optzoo.rules.lazy`).

    In ``optax.rmsprop`` the mean square begins at 0, unless ``initial_scale=1``.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.rmsprop(0.1, centered=True)
        >>> params = jnp.array([1.0, -2.0])
        >>> updates, state = tx.update(jnp.array([0.5, -4.0]), tx.init(params), params)
        >>> print(optzoo.slot_names(state))
        ('rms', 'mg', 'momentum')
        >>> print(updates)
        [-0.0521  0.2615]

    Args:
        learning_rate: :math:`\eta`, a number or a schedule.
        b2: :math:`\rho`, in [0, 1).
        momentum: :math:`\mu`, at least 0. None computes the same steps as 0, without the slot and
            with half the state. The original always has the slot: to load its checkpoints, give a
            number.
        eps: :math:`\epsilon`, inside the square root, at least 0.
        centered: divide by the standard deviation instead of the root mean square. A static
            argument: it cannot be injected.

    References:
        Tieleman and Hinton, `Lecture 6.5: rmsprop
        <https://www.cs.toronto.edu/~tijmen/csc321/slides/lecture_slides_lec6.pdf>`_, 2012;
        Graves, `Generating Sequences With Recurrent Neural Networks
        <https://arxiv.org/abs/1308.0850>`_, 2013 (centered, with momentum).

    Differences from the original:
        If the root is zero (possible with ``eps=0``), the step is zero, and a variance that is
        negative due to rounding is set to zero; the original gives NaN in both cases.
    """
    check_rate(learning_rate)
    [b2] = check_decays(b2=b2)
    check_not_negative(none=True, momentum=momentum)
    check_not_negative(eps=eps)
    check_flags(centered=centered)
    slots = {"rms": full(1)}
    slots |= {"mg": zeros} if centered else {}
    slots |= {} if momentum is None else {"momentum": zeros}
    Slots = _SLOTS[frozenset(slots)]

    def step(g, s, learning_rate):
        mean_square = jnp.maximum(s["rms"] - s["mg"] ** 2, 0) if centered else s["rms"]
        return learning_rate * safe_divide(g, sqrt(mean_square + eps), eps)

    def rule(g, x, s, t, learning_rate):
        new = {"rms": b2 * s.rms + (1 - b2) * g**2}
        if centered:
            new["mg"] = b2 * s.mg + (1 - b2) * g
        if momentum is not None:
            new["momentum"] = momentum * s.momentum + step(g, new, learning_rate)
        update = lambda s: -step(g, s._asdict(), learning_rate)
        if momentum is not None:
            update = lambda s: -s.momentum
        return update, Slots(**new)

    def deferral(dense):
        bases: dict[str, Any] = {"rms": b2, "mg": b2, "momentum": momentum}
        decays = tuple((name, float(bases[name])) for name in slots)
        # The momentum holds the learning rate, so all steps have the same size.
        moves = "momentum" if "momentum" in slots else None
        return Deferral(DecayRule(decays, moves)) if dense else None

    tx = leafwise(rule, slots=Slots(**slots), scheduled={"learning_rate": learning_rate})
    return known(row_wise(tx), deferral=deferral)
