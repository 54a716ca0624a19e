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
from jax.typing import DTypeLike
from optax._src.base import NO_PARAMS_MSG  # no public name, and the message users know

from .rows import is_rows

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


def lazy(rule: Rule) -> RowsRule:
    """Only the touched rows live; the slots and parameters of the others stand still."""

    def on_rows(g, x, s, t, **scheduled):
        if g.num_rows == 0:
            return g, s
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
        if g.num_rows == 0:
            return g, s
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
            :func:`dense`, :func:`touched`, :func:`linear` or a function of your own.
        scheduled: hyper-parameters given to the rule by keyword, each a number or a schedule. A
            schedule is called with the number of updates before this one, or with
            ``update(..., global_step=)``. ``update(..., name=value)`` overrides one of them for
            this step.
        powers: bases whose ``t``-th powers the rule gets by keyword. They are running products
            in float32 kept in the state, as TensorFlow keeps ``beta1_power``: bias corrections
            such as ``1 - b2**t`` magnify the rounding of a power a thousand times, so equal
            numbers need equal products.
        needs_params: whether the rule reads the parameter.

    Raises:
        ValueError: at trace time, if params are needed and missing, or if a gradient does not
            have the shape of its parameter and slots.
        TypeError: at trace time, if a gradient is neither real floating-point nor SparseRows.
    """
    array_rule = _in_float32(rule)
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

        gs, treedef = jax.tree.flatten(updates, is_leaf=lambda g: g is None or is_rows(g))
        xs = [None] * len(gs) if params is None else treedef.flatten_up_to(params)
        _check_gradients(gs, xs, treedef)
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


def _in_float32(rule: Rule) -> Rule:
    def wide(g, x, s, t, **scheduled):
        given = g, s
        widen = lambda a: a.astype(jnp.promote_types(a.dtype, jnp.float32))
        g, x, s = jax.tree.map(widen, (g, x, s))
        hyper = {k: jnp.asarray(h).astype(g.dtype) for k, h in scheduled.items()}
        u, new = rule(g, x, s, t, **hyper)
        return jax.tree.map(_like, given, (u, new))

    return wide


def _like(old: Array, new: Array) -> Array:
    """``new`` in the dtype of ``old``; in its shape it must come."""
    if new.shape != old.shape:
        raise ValueError(
            f"the rule made an array of shape {new.shape} of one of shape {old.shape}: "
            "the gradient does not fit its slots, or the rule is wrong"
        )
    return _narrow(new, old.dtype)


def _narrow(a: Array, dtype: DTypeLike) -> Array:
    """Casts; what is finite stays finite (a squared gradient overflows float16 easily)."""
    if jnp.promote_types(a.dtype, dtype) != dtype:
        top = jnp.finfo(dtype).max.astype(a.dtype)
        a = jnp.where(jnp.isfinite(a), jnp.clip(a, -top, top), a)
    return a.astype(dtype)


def _check_gradients(gs: list[Any], xs: list[Any], treedef: Any) -> None:
    for i, (g, x) in enumerate(zip(gs, xs, strict=True)):
        if g is None:
            continue
        dtype = g.dtype if is_rows(g) else jnp.result_type(g)
        if not jnp.issubdtype(dtype, jnp.floating):
            mend = (
                "wrap the optimizer in optax.contrib.split_real_and_imaginary"
                if jnp.issubdtype(dtype, jnp.complexfloating)
                else "freeze the parameter with a gradient of None or optax.masked"
            )
            raise TypeError(f"{_name(treedef, i)} has a gradient of dtype {dtype}: {mend}")
        if x is not None and jnp.shape(x) != jnp.shape(g):
            raise ValueError(
                f"{_name(treedef, i)} has shape {jnp.shape(x)} but its gradient {jnp.shape(g)}"
            )


def _name(treedef: Any, i: int) -> str:
    paths, _ = jax.tree_util.tree_flatten_with_path(treedef.unflatten(range(treedef.num_leaves)))
    return f"parameter '{jax.tree_util.keystr(paths[i][0])}'"
