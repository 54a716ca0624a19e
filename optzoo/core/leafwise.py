"""Lifts a rule for one array to an optax transformation over a whole tree.

Almost every optimizer treats each parameter on its own. Such an optimizer says two things only:
the *slots* it keeps beside a parameter, and the *rule* that turns a gradient and the slots into
an update and new slots. :func:`leafwise` supplies all the rest: the step count, schedules, the
walk over the tree, missing gradients, sparse rows, dtypes.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from optax._src.base import NO_PARAMS_MSG  # no public name, and the message users know

from .gradients import check_gradients
from .numerics import narrow, widen
from .rows import is_gradient, is_rows

# rule(g, x, slots, t, **scheduled) -> update, new slots
#   g, x       the gradient and the parameter (None where the caller gave no params)
#   slots      a named tuple of arrays
#   t          the number of this update: 1, 2, ...
#   scheduled  by name, the hyper-parameters that may change with the step, and the powers
Rule = Callable[..., tuple[Any, Any]]
# The same for a SparseRows gradient; the update may be rows or an array.
RowsRule = Callable[..., tuple[Any, Any]]

# A field of a slots tuple: an initializer in the call of leafwise, an array in the rule, a
# params-shaped tree in the state.
Slot = Any


NO_GLOBAL_STEP_MSG = (
    "this optimizer follows a global step of yours: pass update(..., global_step=n), the number "
    "of updates before this one; an optimizer without it counts by itself"
)


class NoSlots(NamedTuple):
    """What a stateless optimizer keeps: nothing."""


class LeafwiseState(NamedTuple):
    """How many updates were made, a params-shaped tree for each slot, and running powers."""

    count: Array
    slots: Any
    powers: dict[str, Array]


def zeros(x: Any) -> Array:
    """A slot of zeros beside the parameter ``x``."""
    return full(0)(x)


def full(value: Any) -> Callable[[Any], Array]:
    """A slot filled with ``value``."""
    # The dtype is given so that a weakly typed parameter still gets a strongly typed slot.
    return lambda x: jnp.full_like(x, value, dtype=jnp.result_type(x))


def in_float32(rule: Rule) -> Rule:
    """The rule in float32 at least; the update in the gradient's dtype, each slot in its own."""

    def wide(g, x, s, t, **scheduled):
        given = g, s
        g, x, s = jax.tree.map(widen, (g, x, s))
        hyper = {k: jnp.asarray(h).astype(g.dtype) for k, h in scheduled.items()}
        u, new = rule(g, x, s, t, **hyper)
        return jax.tree.map(_like, given, (u, new))

    return wide


def lazy(rule: Rule) -> RowsRule:
    """Only the touched rows live; the slots and parameters of the others stand still."""

    def on_rows(g, x, s, t, **scheduled):
        g = g.coalesce()
        x, few = jax.tree.map(g.gather, (x, s))
        u, new = rule(g.values, x, few, t, **scheduled)
        return g.with_values(u).drop_padding(), jax.tree.map(g.scatter, s, new)

    return on_rows


def dense(rule: Rule) -> RowsRule:
    """As if the gradient were dense: a row of zeros decays its slots, and moves."""
    return lambda g, x, s, t, **scheduled: rule(g.to_dense(), x, s, t, **scheduled)


def touched(rule: Rule) -> RowsRule:
    """The slots decay everywhere, but only the touched rows of the parameter move."""

    def on_rows(g, x, s, t, **scheduled):
        g = g.coalesce()
        u, new = rule(g.to_dense(), x, s, t, **scheduled)
        return g.with_values(g.gather(u)).drop_padding(), new

    return on_rows


def linear(rule: Rule) -> RowsRule:
    """For rules linear in the gradient and without slots: repeated rows need no merging."""

    def on_rows(g, x, s, t, **scheduled):
        u, new = rule(g.values, x, s, t, **scheduled)
        return g.with_values(u), new

    return on_rows


def leafwise(
    rule: Rule,
    *,
    slots: Any = NoSlots(),  # noqa: B008 (an empty named tuple cannot change)
    rows: Callable[[Rule], RowsRule] = lazy,
    scheduled: Mapping[str, optax.ScalarOrSchedule] | None = None,
    powers: Mapping[str, Any] | None = None,
    needs_params: bool = False,
    needs_global_step: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Applies ``rule`` to each leaf of a tree: the way to write an optimizer of your own.

    The rule computes in at least float32 whatever the dtypes of gradients, slots and parameters;
    its update then takes the gradient's dtype, and each slot keeps its own.

    A gradient of ``None`` leaves its parameter and slots alone.

    Args:
        rule: ``rule(g, x, slots, t, **scheduled) -> (update, new_slots)`` for one array, where
            ``t`` counts the updates from 1. The update is added to the parameter.
        slots: a named tuple of initializers, each a function of the parameter: :func:`zeros`,
            ``full(0.1)``. Its field names are the names of the slots.
        rows: what the rule becomes for a :class:`SparseRows` gradient: :func:`lazy`,
            :func:`dense`, :func:`touched`, :func:`linear` or a function of your own, which gets the
            rule with its casts around it.
        scheduled: hyper-parameters given to the rule by keyword, each a number or a schedule. A
            schedule is called with the number of updates before this one, or with
            ``update(..., global_step=)``. ``update(..., name=value)`` overrides one of them for
            this step.
        powers: bases whose ``t``-th powers the rule gets by keyword. They are running products
            in float32 kept in the state, as TensorFlow keeps ``beta1_power``: bias corrections
            such as ``1 - b2**t`` magnify the rounding of a power a thousand times, so equal
            numbers need equal products.
        needs_params: whether the rule reads the parameter.
        needs_global_step: whether ``update`` must be given ``global_step=``.

    Raises:
        ValueError: at trace time, if params or the global step are needed and missing, or if a
            gradient does not have the shape of its parameter and slots.
        TypeError: at trace time, if a gradient is neither real floating-point nor SparseRows.
    """
    array_rule = in_float32(rule)
    rows_rule = rows(array_rule)
    scheduled, bases = dict(scheduled or {}), dict(powers or {})
    Slots = type(slots)

    def init(params):
        trees = [jax.tree.map(initializer, params) for initializer in slots]
        first = {k: jnp.array(base, jnp.float32) for k, base in bases.items()}
        return LeafwiseState(jnp.zeros([], jnp.int32), Slots._make(trees), first)

    def update(updates, state, params=None, **extra_args):
        if needs_params and params is None:
            raise ValueError(NO_PARAMS_MSG)
        step = extra_args.get("global_step")
        if needs_global_step and step is None:
            raise ValueError(NO_GLOBAL_STEP_MSG)
        step = state.count if step is None else step
        hyper = {k: _at(step, v, extra_args.get(k)) for k, v in scheduled.items()}
        hyper |= state.powers
        t = jnp.asarray(optax.safe_increment(state.count))

        def on_leaf(g, x, s):
            if g is None:
                return None, s
            on_gradient = rows_rule if is_rows(g) else array_rule
            u, new = on_gradient(g if is_rows(g) else jnp.asarray(g), x, s, t, **hyper)
            return u, new

        check_gradients(updates, params)
        gs, treedef = jax.tree.flatten(updates, is_leaf=is_gradient)
        xs = [None] * len(gs) if params is None else treedef.flatten_up_to(params)
        columns = [treedef.flatten_up_to(tree) for tree in state.slots]
        leaves = zip(gs, xs, *columns, strict=True)
        done = [on_leaf(g, x, Slots._make(s)) for g, x, *s in leaves]
        updates = treedef.unflatten([u for u, _ in done])
        trees = [treedef.unflatten([new[i] for _, new in done]) for i in range(len(slots))]
        powers = {k: p * jnp.asarray(bases[k], p.dtype) for k, p in state.powers.items()}
        return updates, LeafwiseState(t, Slots._make(trees), powers)

    return optax.GradientTransformationExtraArgs(init, update)


def _at(step: Any, value: Any, override: Any) -> Any:
    """A scheduled hyper-parameter at ``step``, unless overridden for this update."""
    if override is not None:
        return override
    return value(step) if callable(value) else value


def _like(old: Array, new: Array) -> Array:
    """``new`` in the dtype of ``old``; in its shape it must come."""
    if new.shape != old.shape:
        raise ValueError(
            f"the rule made an array of shape {new.shape} of one of shape {old.shape}: "
            "the gradient does not fit its slots, or the rule is wrong"
        )
    return narrow(new, old.dtype)
