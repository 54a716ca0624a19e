"""The frame of an optimizer: state, step count, schedules, checks, the walk over the tree."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from ..core.checks import check_params
from ..core.gradients import check_gradients
from ..core.rows import is_sparse_or_none
from ..state.storage import load, save, store, stored_arrays
from ..state.types import LeafwiseState, NoSlots

NO_GLOBAL_STEP_MSG = (
    "this optimizer follows a global step of yours: pass update(..., global_step=n), the number "
    "of updates before this one; an optimizer without it counts by itself"
)


class Leaf(NamedTuple):
    """What a rule for all parameters sees of one."""

    g: Any  # the gradient: an array, SparseRows or None
    x: Any  # the parameter, None where the caller gave no params
    slots: Any  # a named tuple of arrays


def treewise(
    rule: Callable[..., tuple[list[tuple[Any, Any]], dict[str, Array]]],
    *,
    slots: Any = NoSlots(),  # noqa: B008 (an empty named tuple cannot change)
    shared: Callable[[], dict[str, Array]] = dict,
    scheduled: Mapping[str, optax.ScalarOrSchedule] | None = None,
    needs_params: bool = False,
    needs_global_step: bool = False,
    opens_slots: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """An optimizer whose rule sees all parameters at once; :func:`leafwise` is for the usual ones.

    Args:
        rule: ``rule(leaves, shared, t, **scheduled) -> ([(update, new_slots), ...], shared)`` for
            a list of :class:`Leaf`, where ``t`` counts the updates from 1. An update for a
            missing gradient is None.
        slots: a named tuple of initializers, each a function of the parameter.
        shared: makes the arrays that belong to no parameter, by name.
        scheduled: hyper-parameters given to the rule by keyword, each a number or a schedule.
        needs_params: whether the rule reads the parameters.
        needs_global_step: whether ``update`` must be given ``global_step=``.
        opens_slots: whether the rule itself opens slots of 16 bits that :func:`optzoo.slots_dtype`
            packs or rounds at random, of the touched rows alone.

    Raises:
        ValueError: at trace time, if params or the global step are needed and missing, or if a
            gradient does not have the shape of its parameter and slots.
        TypeError: at trace time, if a gradient is neither real floating-point nor SparseRows.
    """
    scheduled = dict(scheduled or {})
    Slots = type(slots)

    def init(params):
        trees = [jax.tree.map(initializer, params) for initializer in slots]
        return LeafwiseState(jnp.zeros([], jnp.int32), Slots._make(trees), shared())

    def update(updates, state, params=None, **extra_args):
        if needs_params:
            check_params(params)
        step = extra_args.get("global_step")
        if needs_global_step and step is None:
            raise ValueError(NO_GLOBAL_STEP_MSG)
        step = state.count if step is None else step
        hyper = {k: _at(step, v, extra_args.get(k)) for k, v in scheduled.items()}
        t = jnp.asarray(optax.safe_increment(state.count))
        check_gradients(updates, params)
        gs, treedef = jax.tree.flatten(updates, is_leaf=is_sparse_or_none)
        gs = [g if is_sparse_or_none(g) else jnp.asarray(g) for g in gs]
        xs = [None] * len(gs) if params is None else treedef.flatten_up_to(params)
        columns = zip(*map(treedef.flatten_up_to, state.slots), strict=True)
        rows = [Slots._make(row) for row in columns] if len(slots) else [slots] * len(gs)
        stored = store(rows, updates, gs, extra_args.get("rounding_seed"), t)
        given = stored if opens_slots else list(map(load, stored))
        done, new_shared = rule(list(map(Leaf, gs, xs, given)), state.shared, t, **hyper)
        if not opens_slots:
            done = [(u, save(s, new)) for s, (u, new) in zip(stored, done, strict=True)]
        trees = [
            treedef.unflatten([stored_arrays(new)[i] for _, new in done]) for i in range(len(slots))
        ]
        updates = treedef.unflatten([u for u, _ in done])
        return updates, LeafwiseState(t, Slots._make(trees), new_shared)

    return optax.GradientTransformationExtraArgs(init, update)


def _at(step: Any, value: Any, override: Any) -> Any:
    """A scheduled hyper-parameter at ``step``, unless overridden for this update."""
    if override is not None:
        return override
    return value(step) if callable(value) else value
