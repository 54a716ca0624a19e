"""The learning rate, the last transformation of most optimizers."""

from typing import Any

import optax

from ..core.checks import check_rate
from ..state.inner import fitting
from ..state.storage import count_of
from ..state.types import LeafwiseState, NoSlots
from .leafwise import leafwise
from .policies import linear


def scale_by_learning_rate(
    learning_rate: optax.ScalarOrSchedule,
) -> optax.GradientTransformationExtraArgs:
    r"""Turns a direction into a descent step: :math:`u \leftarrow -\eta_t\, u`.

    Differs from ``optax.scale_by_learning_rate`` in three ways: it takes SparseRows, its state
    is the same for a number and a schedule (a checkpoint survives the change), and
    ``update(..., learning_rate=x)`` overrides the rate for one step.

    A wrapper of this library refuses a ``learning_rate=`` that nothing inside it reads, and so does
    the step of :func:`optzoo.minimize`. ``optax.chain`` cannot know what its parts read: a chain
    that ends in ``optax.adam`` ignores it.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.scale_by_learning_rate(0.1)
        >>> state = tx.init(jnp.ones(2))
        >>> updates, state = tx.update(jnp.array([1.0, -2.0]), state, learning_rate=0.5)
        >>> print(updates)  # the rate of this step is overridden
        [-0.5  1. ]

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


def descend(
    learning_rate: optax.ScalarOrSchedule, *directions: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """An optimizer: a descent step along a direction.

    It equals ``optax.chain(*directions, scale_by_learning_rate(learning_rate))`` but for one thing:
    there is one count of updates, that of the first direction, which the schedule of the rate
    follows.

    Args:
        learning_rate: a number or a schedule.
        *directions: transformations, the first made by :func:`optzoo.leafwise` or
            :func:`optzoo.treewise`.
    """
    direction = optax.chain(*directions)
    rate = scale_by_learning_rate(learning_rate)

    def init(params):
        states: Any = direction.init(params)
        return *states, optax.EmptyState()

    def update(updates, state, params=None, **extra_args):
        counted = LeafwiseState(count_of(state[0]), NoSlots(), {})
        updates, new = direction.update(updates, state[:-1], params, **extra_args)
        updates, _ = rate.update(updates, counted, params, **extra_args)
        states: Any = new
        return updates, (*states, optax.EmptyState())

    return fitting(optax.GradientTransformationExtraArgs(init, update))
