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
    """An optimizer whose rule sees all parameters at once; :func:`leafwise` is for the usual ones.

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
        rule: ``rule(leaves, shared, t, **scheduled) -> ([(update, new_slots), ...], shared)`` for
            a list of :class:`Leaf`, where ``t`` counts the updates from 1. An update for a
            missing gradient is None.
        slots: a named tuple of initializers, each a function of the parameter.
        shared: makes the arrays that belong to no parameter, by name.
        scheduled: hyper-parameters given to the rule by keyword, each a number or a schedule.
        needs_params: whether the rule reads the parameters.
        needs_global_step: whether ``update`` must be given ``global_step=``.
        shared_varies: whether ``shared`` follows from the gradients: inside a ``shard_map`` that
            checks types it then differs between devices, as the parameters do.
        cycle: what the rule takes ``t`` modulo, an int. ``t`` ends at ``2**31 - 1``, and goes back
            by so much there; with 1 it stays.

    Raises:
        ValueError: at trace time, if params or the global step are needed and missing, if a
            gradient does not have the shape of its parameter and slots, or if the state is that of
            another optimizer or of other parameters, or if a value of ``scheduled`` is an array
            with axes.
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
