"""The learning rate, the last transformation of most optimizers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from ..core.checks import check_rate
from ..core.numerics import cast, has_16_bits, saturating_cast, upcast, upcast_dtype
from ..core.optimizer import About, Optimizer, about_of, known, reads_of, recorded
from ..core.rows import is_rows, update_tree
from ..core.schedules import at_step
from ..state.inner import fitting
from ..state.types import NoSlots, count_of
from .frame import frame
from .policies import ROW_WISE, linear, merged_if_short


@recorded
def scale_by_learning_rate(
    learning_rate: optax.ScalarOrSchedule,
) -> Optimizer:
    r"""Turns a direction into a descent step: :math:`u \leftarrow -\eta_t\, u`.

    Differs from ``optax.scale_by_learning_rate`` in three ways: it supports SparseRows, its state
    is the same for a number and a schedule, so that checkpoints can be used for both, and
    ``update(..., learning_rate=x)`` overrides the rate for one step.

    A wrapper of this library raises an error for a ``learning_rate=`` that no inner transformation
    uses, and so does the step of :func:`optzoo.minimize`. ``optax.chain`` does not check this: a
    chain that ends in ``optax.adam`` ignores it.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.transforms.scale_by_learning_rate(0.1)
        >>> state = tx.init(jnp.ones(2))
        >>> updates, state = tx.update(jnp.array([1.0, -2.0]), state, learning_rate=0.5)
        >>> print(updates)  # the rate of this step is overridden
        [-0.5  1. ]

    Args:
        learning_rate: :math:`\eta`, a number, or a schedule called with the number of updates
            before this one, or with ``update(..., global_step=)``.
    """
    check_rate(learning_rate)

    def rule(leaves, shared, t, learning_rate):
        steps = _steps([leaf.g for leaf in leaves], learning_rate)
        return [(u, leaf.slots) for u, leaf in zip(steps, leaves, strict=True)], shared

    tx = frame(rule, slots=NoSlots(), scheduled={"learning_rate": learning_rate})
    return known(tx, rows=linear)


def _steps(directions: Iterable[Any], rate: Any) -> list[Any]:
    """The descent step along each direction: an array, SparseRows or None."""
    rate = rate if isinstance(rate, jax.Array) else jnp.asarray(rate)
    factor = functools.cache(lambda dtype: -cast(rate, dtype))

    def step(u: Array) -> Array:
        return saturating_cast(factor(upcast_dtype(u.dtype)) * upcast(u), u.dtype)

    def of_each(u):
        if is_rows(u):
            u = merged_if_short(u)
            return u.with_values(step(u.values))
        return None if u is None else step(u)

    return list(map(of_each, directions))


def chain(*members: optax.GradientTransformation) -> Optimizer:
    """``optax.chain`` of transformations of this library, with an ``about`` of the whole."""
    init, update = optax.chain(*members)
    return fitting(Optimizer(init, rounded_once(update), _about_chain(*members)))


def rounded_once(update: Callable[..., Any]) -> Callable[..., Any]:
    """The ``update`` of several transformations, without rounding to 16 bits between them.

    A direction may overflow float16 although the step does not.
    """

    @functools.wraps(update)
    def in_32_bits(updates, state, params=None, **extra_args):
        gs, treedef = update_tree.flatten(updates)
        if not any(map(_is_narrow, gs)):
            return update(updates, state, params, **extra_args)
        wide = treedef.unflatten([upcast(g) if _is_narrow(g) else g for g in gs])
        updates, state = update(wide, state, params, **extra_args)
        pairs = zip(gs, treedef.flatten_up_to(updates), strict=True)
        return treedef.unflatten(
            [_narrow(u, g.dtype) if _is_narrow(g) else u for g, u in pairs]
        ), state

    return in_32_bits


def _is_narrow(g: Any) -> bool:
    return hasattr(g, "dtype") and has_16_bits(g.dtype)


def _narrow(u: Any, dtype: Any) -> Any:
    if is_rows(u):
        return u.with_values(saturating_cast(u.values, dtype))
    return saturating_cast(u, dtype)


def row_wise(tx: Optimizer) -> Optimizer:
    """An optimizer by one rule of this library, which updates each row by itself."""
    return known(tx, row_wise=tx.about.rows in ROW_WISE)


def _about_chain(*members: optax.GradientTransformation) -> About:
    """The combined ``about`` of the members of a chain."""
    policies = {about_of(tx).rows for tx in members} - {linear}
    rows = next(iter(policies), linear) if len(policies) < 2 else None
    return About(rows, rows in ROW_WISE, reads=reads_of(*members))


def descend(
    learning_rate: optax.ScalarOrSchedule, *directions: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """An optimizer: a descent step along a direction.

    It equals ``chain(*directions, scale_by_learning_rate(learning_rate))``, except that the
    schedule of the rate uses the update count of the first direction. In both, a 16-bit update is
    rounded once.

    Args:
        learning_rate: a number or a schedule.
        *directions: transformations, the first made by :func:`optzoo.rules.leafwise` or
            :func:`optzoo.rules.treewise`.
    """
    check_rate(learning_rate)
    direction = optax.chain(*directions)

    def init(params):
        states: Any = direction.init(params)
        return *states, optax.EmptyState()

    def update(updates, state, params=None, **extra_args):
        step = extra_args.get("global_step")
        step = count_of(state[0]) if step is None else step
        updates, new = direction.update(updates, state[:-1], params, **extra_args)
        rate = at_step("learning_rate", step, learning_rate, extra_args.get("learning_rate"))
        us, treedef = update_tree.flatten(updates)
        states: Any = new
        return treedef.unflatten(_steps(us, rate)), (*states, optax.EmptyState())

    about = _about_chain(*directions).reading("global_step", "learning_rate")
    return fitting(Optimizer(init, rounded_once(update), about))
