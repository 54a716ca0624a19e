"""Lifts a rule for all parameters at once to an optax transformation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import optax
from jax import Array

from ..core.checks import check_size
from ..state.types import NoSlots
from .frame import TreeRule, frame
from .on_stored import on_loaded_slots


def treewise(
    rule: TreeRule,
    *,
    slots: Any = NoSlots(),  # noqa: B008 (an empty named tuple cannot change)
    shared: Callable[[], dict[str, Array]] = dict,
    scheduled: Mapping[str, optax.ScalarOrSchedule] | None = None,
    needs_params: bool = False,
    needs_global_step: bool = False,
    shared_varies: bool = False,
    cycle: int = 1,
) -> optax.GradientTransformationExtraArgs:
    """A transformation by a rule for all parameters; most optimizers use :func:`leafwise`.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> def rule(leaves, shared, t):
        ...     norm = jnp.sqrt(sum(jnp.sum(leaf.g**2) for leaf in leaves))
        ...     return [(-leaf.g / norm, leaf.slots) for leaf in leaves], shared
        >>> tx = optzoo.rules.treewise(rule)
        >>> gradients = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
        >>> updates, state = tx.update(gradients, tx.init(gradients))
        >>> print(updates["a"], updates["b"])
        [-0.6] [-0.8]

    Args:
        rule: ``rule(leaves, shared, t, **scheduled) -> ([(update, new_slots), ...], shared)`` for a
            list of :class:`Leaf`, where ``t`` is the number of this update, from 1. The update for
            a missing gradient is None.
        slots: a named tuple of initializers, each a function of the parameter.
        shared: a function that returns the arrays shared by all parameters, by name.
        scheduled: hyper-parameters passed to the rule by keyword, each a number or a schedule.
        needs_params: whether the rule reads the parameters.
        needs_global_step: whether ``update`` must be given ``global_step=``.
        shared_varies: whether ``shared`` depends on the gradients: inside a ``shard_map`` that
            checks types, it then varies over devices like the parameters.
        cycle: an int, the period of the rule in ``t``. ``t`` is at most ``2**31 - 1``, where it
            goes back by ``cycle``; with 1 it stays.

    Raises:
        ValueError: at trace time, if params or the global step are missing, if a gradient does not
            have the shape of its parameter and slots, if the state is that of another optimizer or
            of other parameters, or if a value of ``scheduled`` is an array with axes.
        TypeError: at trace time, if a gradient is neither real floating-point nor SparseRows.
    """
    return frame(
        on_loaded_slots(rule),
        slots=slots,
        shared=shared,
        scheduled=scheduled,
        needs_params=needs_params,
        needs_global_step=needs_global_step,
        shared_varies=shared_varies,
        cycle=check_size(1, cycle=cycle),
    )
