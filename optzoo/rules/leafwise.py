"""Lifts a rule for one array to an optax transformation over a whole tree.

Almost every optimizer treats each parameter independently. Such an optimizer defines the *slots* of
a parameter, and the *rule* that computes an update and new slots from a gradient and the slots.
:func:`leafwise` adds the rest: missing gradients, sparse rows, dtypes, storage of slots, step
count, schedules and the walk over the tree.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import optax
from jax import Array

from ..core.checks import check_function, check_size
from ..core.numerics import slot_dtype, upcast_dtype
from ..core.optimizer import Optimizer, known
from ..core.rows import is_rows
from ..state.types import NoSlots
from .frame import frame
from .on_stored import in_dtype, in_float32
from .policies import POLICIES, RowsPolicy, Rule, lazy


def zeros(x: Any) -> Array:
    """A slot of zeros for the parameter ``x``, with the dtype of :func:`optzoo.rules.full`.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> print(optzoo.rules.zeros(jnp.ones((2, 2))))
        [[0. 0.]
         [0. 0.]]
    """
    return full(0)(x)


def full(value: Any) -> Callable[[Any], Array]:
    """A slot filled with ``value``.

    It has the dtype of the parameter, or float32 for a 16-bit parameter, since 16 bits round away a
    change by a thousandth. :func:`optzoo.slots_dtype` makes 16-bit slots.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> print(optzoo.rules.full(0.1)(jnp.ones((2, 2))))
        [[0.1 0.1]
         [0.1 0.1]]
    """
    # The dtype is given so that a weakly typed parameter still gets a strongly typed slot.
    return lambda x: jnp.full_like(x, value, dtype=slot_dtype(x))


def as_given(t: Any, **numbers: Any) -> dict[str, Any]:
    """The keyword arguments of a rule, unless ``precompute`` replaces them."""
    del t
    return numbers


def leafwise(
    rule: Rule,
    *,
    slots: Any = NoSlots(),  # noqa: B008 (an empty named tuple cannot change)
    rows: RowsPolicy = lazy,
    scheduled: Mapping[str, optax.ScalarOrSchedule] | None = None,
    powers: Mapping[str, Any] | None = None,
    precompute: Callable[..., dict[str, Any]] = as_given,
    needs_params: bool = False,
    needs_global_step: bool = False,
    cycle: int = 1,
) -> Optimizer:
    """Applies ``rule`` to each leaf of a tree: the way to write your own optimizer.

    The rule computes in at least float32, for any dtypes of gradients, slots and parameters. Its
    update is cast to the dtype of the gradient, and each slot keeps its dtype and its storage.

    If a gradient is ``None``, its parameter and slots are unchanged.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> def rule(g, x, slots, t, learning_rate):
        ...     return -learning_rate * jnp.sign(g), slots
        >>> tx = optzoo.rules.leafwise(rule, scheduled={"learning_rate": 0.1})
        >>> updates, state = tx.update(jnp.array([3.0, -4.0]), tx.init(jnp.ones(2)))
        >>> print(updates)
        [-0.1  0.1]

    Args:
        rule: ``rule(g, x, slots, t, **scheduled) -> (update, new_slots)`` for one array, where
            ``t`` is the number of this update, from 1. The update is added to the parameter. It may
            be a function of the new slots, ``lambda slots: ...``, which is called with the slots in
            stored form. This avoids copies if :func:`optzoo.slots_dtype` packs them or rounds them
            stochastically.
        slots: a named tuple of initializers, functions of the parameter such as :func:`zeros` or
            ``full(0.1)``. Its field names are the names of the slots.
        rows: how the rule is applied to a :class:`SparseRows` gradient: :func:`lazy`,
            :func:`dense`, :func:`touched`, :func:`linear` or your own :class:`RowsPolicy`, which
            gets the rule with its casts.
        scheduled: hyper-parameters passed to the rule by keyword, each a number or a schedule. A
            schedule is called with the number of updates before this one, or with
            ``update(..., global_step=)``. ``update(..., name=value)`` overrides one of them for
            this step.
        powers: bases whose ``t``-th powers are passed to the rule by keyword. They are running
            float32 products in the state, like TensorFlow's ``beta1_power``: bias corrections such
            as ``1 - b2**t`` magnify the rounding of a power a thousand times, so equal results need
            equal products.
        precompute: ``precompute(t, **scheduled, **powers)`` returns a dict of the keyword arguments
            of the rule, in place of the scheduled values and the powers: numbers shared by all
            parameters, such as a bias correction. It is called once for each dtype in which the
            rule computes. By default they are unchanged.
        needs_params: whether the rule reads the parameter.
        needs_global_step: whether ``update`` must be given ``global_step=``.
        cycle: an int, the period of the rule in ``t``. ``t`` is at most ``2**31 - 1``, where it
            goes back by ``cycle``; with 1 it stays.

    Raises:
        ValueError: at trace time, if params or the global step are missing, if a gradient does not
            have the shape of its parameter and slots, if the state is that of another optimizer or
            of other parameters, or if a value of ``scheduled`` is an array with axes.
        TypeError: if ``rule``, ``rows``, ``slots`` or ``precompute`` are not functions; at trace
            time, if a gradient is neither real floating-point nor SparseRows.
    """
    check_function(rule=rule, precompute=precompute)
    check_function("a policy such as optzoo.rules.lazy", rows=rows)
    array_rule = in_float32(rule)
    rows_rule = rows(array_rule)
    bases = dict(powers or {})

    def on_all(leaves, powers, t, **scheduled):
        given = {**scheduled, **powers}

        @functools.cache
        def of_dtype(dtype):
            return in_dtype(precompute(t, **in_dtype(given, dtype)), dtype)

        def on_leaf(g, x, s):
            if g is None:
                return None, s
            numbers = of_dtype(upcast_dtype(g.dtype))
            return (rows_rule if is_rows(g) else array_rule)(g, x, s, t, **numbers)

        done = [on_leaf(*leaf) for leaf in leaves]
        return done, {k: p * jnp.asarray(bases[k], p.dtype) for k, p in powers.items()}

    tx = frame(
        on_all,
        slots=slots,
        shared=lambda: {k: jnp.array(base, jnp.float32) for k, base in bases.items()},
        scheduled=scheduled,
        needs_params=needs_params,
        needs_global_step=needs_global_step,
        cycle=check_size(1, cycle=cycle),
    )
    return known(tx, rows=rows if rows in POLICIES else None)


def without_state(transformation: Optimizer) -> Optimizer:
    """A transformation made by :func:`leafwise` without slots and step count."""

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        updates, _ = transformation.update(updates, transformation.init({}), params, **extra_args)
        return updates, state

    return Optimizer(lambda params: optax.EmptyState(), update, transformation.about)
