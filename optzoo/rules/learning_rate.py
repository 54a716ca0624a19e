"""The last link of most chains: the learning rate."""

import optax

from ..core.checks import check_rate
from .leafwise import leafwise
from .policies import linear


def scale_by_learning_rate(
    learning_rate: optax.ScalarOrSchedule,
) -> optax.GradientTransformationExtraArgs:
    r"""Turns a direction into a descent step: :math:`u \leftarrow -\eta_t\, u`.

    Differs from ``optax.scale_by_learning_rate`` in three ways: it takes SparseRows, its state
    is the same for a number and a schedule (a checkpoint survives the change), and
    ``update(..., learning_rate=x)`` overrides the rate for one step.

    Args:
        learning_rate: :math:`\eta`, a number, or a schedule called with the number of updates
            before this one (or with ``update(..., global_step=)``).

    Raises:
        TypeError: if the rate is neither a number nor a schedule.
    """
    check_rate(learning_rate)
    return leafwise(
        lambda g, x, s, t, learning_rate: (-learning_rate * g, s),
        rows=linear,
        scheduled={"learning_rate": learning_rate},
    )
