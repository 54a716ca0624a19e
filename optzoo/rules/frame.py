"""The frame of an optimizer: state, step count, schedules, checks, the walk over the tree."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jax import Array

from ..core.boxes import Boxes, map_parameters
from ..core.checks import check_function, check_params, check_update_arguments
from ..core.compat import vary_as
from ..core.gradients import check_arrays, check_gradients
from ..core.lines import in_lines
from ..core.meshes import beside, placed_as
from ..core.numerics import next_count
from ..core.optimizer import About, Optimizer
from ..core.rows import as_arrays, is_rows
from ..core.schedules import at_step
from ..jaxprs.reads import note_reads
from ..state.fit import SlotShapes
from ..state.storage.stored import GATHERED, ROUNDING, stored_arrays, stored_slots
from ..state.types import LeafwiseState

NO_GLOBAL_STEP_MSG = (
    "this optimizer needs the global step: pass update(..., global_step=n), the number of "
    "updates before this one"
)


class Leaf(NamedTuple):
    """One parameter as an argument of a rule for all parameters."""

    g: Any  # the gradient: an array, SparseRows or None
    x: Any  # the parameter, None where the caller gave no params
    slots: Any  # a named tuple of arrays

    def like_update(self, u: Any) -> Any:
        """The array whose division an update has; None without one, or for rows."""
        like = self.g if self.x is None else self.x
        return None if u is None or is_rows(u) or is_rows(like) else like


# rule(leaves, shared, t, **scheduled) -> ([(update, new_slots), ...], shared)
TreeRule = Callable[..., tuple[list[tuple[Any, Any]], dict[str, Array]]]


def frame(
    rule: TreeRule,
    *,
    slots: Any,
    shared: Callable[[], dict[str, Array]] = dict,
    scheduled: Mapping[str, optax.ScalarOrSchedule] | None = None,
    needs_params: bool = False,
    needs_global_step: bool = False,
    shared_varies: bool = False,
    cycle: int = 1,
) -> Optimizer:
    """The transformation by a rule for all parameters, with their slots in stored form.

    :func:`optzoo.rules.treewise` describes the arguments.
    """
    _check_slots(slots)
    scheduled = dict(scheduled or {})
    Slots = type(slots)
    shapes = SlotShapes(slots, shared)
    reads = frozenset({"global_step", *scheduled})

    def init(params):
        params = as_arrays(params)
        check_arrays(params)
        slot = lambda f: map_parameters(lambda x: vary_as(in_lines(f)(x), x), params, lines=True)
        trees = list(map(slot, slots))
        of_all = vary_as(shared(), params) if shared_varies else shared()
        count = jnp.zeros([], jnp.int32)
        return beside(params, LeafwiseState(count, Slots._make(trees), of_all))

    def update(updates, state, params=None, **extra_args):
        updates, state, params = map(as_arrays, (updates, state, params))
        if needs_params:
            check_params(params)
        check_update_arguments(extra_args)
        note_reads(extra_args, reads)
        shapes.check_types(state, params)
        step = extra_args.get("global_step")
        if needs_global_step and step is None:
            raise ValueError(NO_GLOBAL_STEP_MSG)
        count = state.count
        step = count if step is None else step
        hyper = {k: at_step(k, step, v, extra_args.get(k)) for k, v in scheduled.items()}
        t = next_count(count, cycle)
        gs, xs, treedef = check_gradients(updates, params)
        boxes = Boxes(updates)
        rows = shapes.of_each(state, updates, gs, xs, boxes)
        rounding, gathered = extra_args.get(ROUNDING), extra_args.get(GATHERED)
        stored = stored_slots(rounding, rows, updates, gs, t, gathered)
        leaves = list(map(Leaf, gs, xs, stored))
        of_params, new_shared = rule(
            [leaf for leaf in leaves if not _is_empty(leaf)], state.shared, t, **hyper
        )
        of_params = iter(of_params)
        done = [(None, leaf.slots) if _is_empty(leaf) else next(of_params) for leaf in leaves]
        done = [_placed(*pair) for pair in zip(leaves, done, strict=True)]
        news = [new for _, new in done]
        trees = [
            boxes.refilled(tree, [new[i] for new in news]) for i, tree in enumerate(state.slots)
        ]
        updates = treedef.unflatten([u for u, _ in done])
        return updates, LeafwiseState(t, Slots._make(trees), new_shared)

    return Optimizer(init, update, About(reads=reads))


def _placed(leaf: Leaf, done: tuple[Any, Any]) -> tuple[Any, Any]:
    """Puts an update on the devices of its parameter, and stored slots on theirs."""
    u, slots = done
    like, news, olds = leaf.like_update(u), stored_arrays(slots), stored_arrays(leaf.slots)
    return (u, placed_as(news, olds)) if like is None else placed_as((u, news), (like, olds))


def _is_empty(leaf: Leaf) -> bool:
    """Whether a parameter is None, and so has no slots."""
    if leaf.g is not None:
        return False
    slots = stored_arrays(leaf.slots)
    return len(slots) > 0 and all(slot is None for slot in slots)


def _check_slots(slots: Any) -> None:
    """Raises ``TypeError`` unless slots are a named tuple of functions."""
    if not isinstance(slots, tuple) or not hasattr(slots, "_fields"):
        fix = "Slots(m=optzoo.rules.zeros) with class Slots(typing.NamedTuple)"
        raise TypeError(f"slots must be a named tuple of initializers, got {slots!r}: {fix}")
    by_name = {f"slots.{name}": f for name, f in zip(slots._fields, slots, strict=True)}
    check_function("a function of the parameter", **by_name)
