"""An optimizer with deferred rows: its state, its update, and which rows can be deferred."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from ..core.boxes import Boxes, map_parameters
from ..core.checks import check_params
from ..core.compat import in_same_trace
from ..core.gradients import check_gradients
from ..core.lines import is_lines
from ..core.marked_rows import distinct
from ..core.meshes import zeros_of_rows
from ..core.numerics import wide_dtype
from ..core.optimizer import Notes, about_of, note
from ..core.paths import is_masked, leaves_with_path, path_name, resolve_mask
from ..core.rows import Shard, SparseRows, axes_of_rows, is_rows, map_not_none
from ..core.schedules import at_step
from ..state.decay_rule import Deferral
from ..state.fit import StateError
from ..state.storage.at_random import DTYPES
from ..state.storage.packing import unpack
from ..state.storage.stored import GATHERED
from ..state.types import nodes_of
from .catch_up import NOTHING_FOLLOWS
from .motion import Clock, Motion, make_motion, restarted, tick
from .state import CaughtUpState
from .tables import (
    Table,
    scattered,
    slots_by_leaf,
    slots_nodes,
    tables_of,
    turn,
    with_slots_by_leaf,
)

# Smaller tables are updated as a whole, which takes no longer than to look up some thousand rows.
_LEAST_ROWS = 4096


class DeferredOptimizer(NamedTuple):
    """An optimizer with deferred rows."""

    inner: optax.GradientTransformationExtraArgs
    deferral: Deferral
    mask: Any
    dense: bool
    horizon: int

    def motion(self, dtype: Any) -> Motion:
        """The motion of rows in a dtype."""
        return make_motion(self.deferral.rule, np.dtype(dtype).name, self.horizon)

    def init(self, params: Any) -> CaughtUpState:
        """The initial state."""
        for path, x in leaves_with_path(params, is_leaf=is_lines):
            if is_lines(x) and not is_masked(x.value):
                raise ValueError(
                    f"table '{path_name(path)}' is in lines, which optzoo.caught_up does not "
                    "support: give it as an array (optzoo.rows.from_lines), or use another "
                    "optimizer for it by optzoo.param_groups"
                )
        state = self.inner.init(params)
        marks = _marks(self.mask, params)
        dtype = _dtype(params, marks, state, self.deferral)
        start = lambda x, mark: zeros_of_rows(x, jnp.int32) if mark else optax.MaskedNode()
        clock = restarted(self.motion(dtype).start, 0)
        last = map_parameters(start, params, marks)
        return CaughtUpState(state, {self.deferral.rule.form.key: clock}, last)

    def check(self, state: Any) -> None:
        """Raises ``StateError`` unless the rows of a state are deferred by this decay rule."""
        if not isinstance(state, CaughtUpState):
            raise StateError(
                "the state of optzoo.caught_up must be a CaughtUpState, got "
                f"{type(state).__name__}: make it from a state of the inner optimizer by "
                "optzoo.rows.take_over"
            )
        [(key, clock)], mine = state.clock.items(), self.deferral.rule.form.key
        fix = (
            "catch up all rows by params, state = optzoo.rows.catch_up(params, state), then "
            "resume from optzoo.rows.take_over(tx, params, state.inner)"
        )
        if key != mine:
            raise StateError(
                f"rows of this state are deferred by the decay rule {key!r}, not {mine!r}: {fix}"
            )
        motion = self.motion(clock.ring.dtype)
        shapes = [jax.tree.map(jnp.shape, c) for c in (clock, motion.start)]
        if shapes[0] != shapes[1]:
            raise StateError(
                "the clock of this state has window and horizon "
                f"{len(clock.young), len(clock.ring)}, but this transformation has "
                f"{len(motion.start.young), len(motion.start.ring)}: {fix}"
            )
        if state.is_behind() and not motion.has_numbers(clock):
            raise StateError(
                "rows of this state are deferred by a decay rule with other numbers (decays, eps, "
                f"weight decay) than {self.deferral.rule}: {fix}"
            )

    def advance(
        self,
        state: CaughtUpState,
        params: Any,
        gs: list[Any],
        tables: Mapping[int, Table],
        parts: Mapping[int, "CurrentRows"],
        extra_args: Mapping[str, Any],
    ) -> tuple[list[Any], CaughtUpState]:
        """The updates (of the rows of tables given as parts) and the state after a step.

        Args:
            state: the state before.
            params: the parameters before.
            gs: the gradients; those of ``parts`` are not read.
            tables: the tables before the step, by their indices.
            parts: the rows to update, by the indices of their tables; all rows of other tables
                move.
            extra_args: extra args of ``update``.
        """
        gs, (xs, treedef), boxes = list(gs), jax.tree.flatten(params), Boxes(params, none=False)
        slots = slots_by_leaf(state.inner, boxes)
        for i, table in tables.items():
            xs[i], slots[i], _ = table.arrays
        before = list(slots)
        for i, part in parts.items():
            gs[i], (xs[i], slots[i], _) = part.g, part.rows
        names = {i: _name(params, i) for i in parts}
        now = {**extra_args, GATHERED: {names[i]: part.gradient for i, part in parts.items()}}
        if self.dense:
            gs = [g.to_dense() if is_rows(g) else g for g in gs]
        few = with_slots_by_leaf(state.inner, boxes, slots)
        us, inner = self.inner.update(treedef.unflatten(gs), few, treedef.unflatten(xs), **now)
        [(key, clock)] = state.clock.items()
        clock = self._tick(state, clock, extra_args)
        slots, lasts = slots_by_leaf(inner, boxes), boxes.slots(state.last)
        for i, table in tables.items():
            if i not in parts:
                lasts[i] = jnp.full_like(table.arrays[2], clock.count)
                continue
            part = parts[i]
            rows = slots[i], table.as_of(part.rows[2], clock.count)
            old = before[i], table.arrays[2]
            slots[i], lasts[i] = scattered(old, part.places, rows)
        inner, last = with_slots_by_leaf(inner, boxes, slots), boxes.refilled(state.last, lasts)
        return treedef.flatten_up_to(us), CaughtUpState(inner, {key: clock}, last)

    def _tick(self, state: CaughtUpState, clock: Clock, extra_args: Mapping[str, Any]) -> Clock:
        """The clock after a step."""
        node = slots_nodes(state.inner)[0]
        count, step = node.count, extra_args.get("global_step")
        step = count if step is None else step
        rate = at_step("learning_rate", step, self.deferral.rate, extra_args.get("learning_rate"))
        dtype = clock.ring.dtype  # in which the rule computes
        cast = lambda a: jnp.asarray(a).astype(dtype)
        size = self.deferral.size(cast(rate), count + 1, jax.tree.map(cast, node.shared))
        decay = extra_args.get("average_decay")
        if self.deferral.average is not None:
            decay = at_step("average_decay", step, self.deferral.average, decay)
        elif decay is not None:
            raise ValueError(
                "update got average_decay=, but optzoo.caught_up defers rows by the decay given "
                "to moving_average: omit it"
            )
        return tick(self.motion(dtype), clock, size, decay)

    def update(
        self, updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, CaughtUpState]:
        """The update of optax, for rows that are caught up."""
        check_params(params)
        self.check(state)
        gs, xs, _ = check_gradients(updates, params)
        gs = [g for g, x in zip(gs, xs, strict=True) if x is not None]
        xs = jax.tree.leaves(params)  # without what is None among the parameters
        tables, treedef = tables_of(state, params)
        sweeps, parts = {}, {}
        for i, table in tables.items():
            g = gs[i]
            if g is None:
                raise ValueError(NO_GRADIENT_MSG.format(_name(params, i)))
            if not is_rows(g):
                continue
            gs[i] = g = g.coalesce()
            table = table.divided(axes_of_rows(g))
            places = turn(table.clock, g.num_rows)
            # Not those that this step has updated, in an earlier round on sharded tables.
            is_later = table.gather(places)[2] == table.clock.count + 1
            places = distinct(jnp.where(is_later, g.num_rows, places))
            before, current = table.gather(places), table.read(places)
            sweeps[i] = g.with_rows(places, current[0] - before[0])
            _, *rest = table.scatter(places, current).arrays
            tables[i] = table = table.with_arrays((xs[i], *rest))
            parts[i] = CurrentRows(table, g.indices, table.gather(g.indices), g.values)
        us, new = self.advance(state, params, gs, tables, parts, extra_args)
        for i, table in tables.items():
            last = parts[i].rows[2] if i in parts else table.arrays[2]
            us[i] = _poisoned(us[i], last == table.clock.count)
            if i in parts:
                us[i] = gs[i].with_values(us[i]).drop_padding() + sweeps[i]
        made = {_name(params, i): us[i].values for i in parts}
        note(extra_args, _MADE, made)
        return treedef.unflatten(us), new

    def apply(
        self,
        state: CaughtUpState,
        params: Any,
        gs: list[Any],
        tables: Mapping[int, Table],
        parts: Mapping[int, "CurrentRows"],
        extra_args: Mapping[str, Any],
    ) -> tuple[Any, CaughtUpState]:
        """The parameters and the state after a step; :meth:`advance` describes the arguments."""
        us, new = self.advance(state, params, gs, tables, parts, extra_args)
        xs, treedef = jax.tree.flatten(params)
        for i, table in tables.items():
            xs[i] = table.arrays[0]
        of_rows = [parts[i].rows[0] if i in parts else x for i, x in enumerate(xs)]
        after: Any = optax.apply_updates(of_rows, us)
        for i, part in parts.items():
            after[i] = scattered(xs[i], part.places, after[i])
        return treedef.unflatten(after), new


class CurrentRows(NamedTuple):
    """The rows of a table that a step updates."""

    table: Table
    places: Array  # of the rows, each once; out of range for the others
    rows: Any  # of all arrays of the table, current
    g: Array  # the gradient of each

    @property
    def gradient(self) -> SparseRows:
        """The gradient of the table."""
        n, axes = self.table.num_rows, self.table.axes
        return SparseRows(self.places, self.g, n, shard=Shard(axes, n, False) if axes else None)

    @classmethod
    def of(cls, table: Table, g: SparseRows, *, is_current: bool = False) -> "CurrentRows":
        """The rows of a gradient, which may be repeated, caught up if needed."""
        g = g.coalesce()
        table = table.divided(axes_of_rows(g))
        read = table.gather if is_current else table.read
        return cls(table, g.indices, read(g.indices), g.values)


# The keyword by which `update` is given the notes of `final_update`: for each update that was made
# its values by the names of tables.
_MADE = "optzoo_made"


def final_update(
    tx: optax.GradientTransformationExtraArgs,
    updates: Any,
    state: Any,
    params: Any,
    extra_args: Mapping[str, Any],
) -> tuple[Any, Any]:
    """An update that checks that nothing changes the updates of :func:`optzoo.caught_up`.

    These updates also move deferred rows, to the positions recorded by the clock. Unchanged arrays
    are the same objects in a trace.

    Raises:
        ValueError: if a transformation changes the updates of :func:`optzoo.caught_up`, or may do
            so.
    """
    nodes = nodes_of(CaughtUpState, state)
    if not nodes:
        return tx.update(updates, state, params, **extra_args)
    notes = Notes()
    updates, state = tx.update(updates, state, params, **extra_args, **{_MADE: notes})
    if len(notes.of) < len(nodes):
        raise ValueError(
            "a transformation around optzoo.caught_up does not pass on the keyword arguments of "
            f"update, so changes to the update of a table cannot be detected: {NOTHING_FOLLOWS}"
        )
    final = _by_name(updates)
    for name in {name for made in notes.of for name in made}:
        values = [made[name] for made in notes.of if name in made]
        u = getattr(final.get(name), "values", None)
        # Some may be of an update that was traced for its errors alone.
        others = [each for each in values if each is not u]
        if len(others) == len(values) or any(in_same_trace(each, u) for each in others):
            raise ValueError(
                f"a transformation changes the update of table '{name}' of optzoo.caught_up: "
                f"{NOTHING_FOLLOWS}"
            )
    return updates, state


def _by_name(updates: Any) -> dict[str, Any]:
    leaves = leaves_with_path(updates, is_leaf=is_rows)
    return {path_name(path): u for path, u in leaves}


NO_GRADIENT_MSG = (
    "table '{}' has no gradient in this step. All tables of optzoo.caught_up share one clock: "
    "give an empty gradient, optzoo.SparseRows(ids[:0], values[:0], num_rows)"
)


def _poisoned(u: Array, is_current: Array) -> Array:
    """NaN for the rows that were not caught up before they were read."""
    return jnp.where(is_current.reshape(is_current.shape + (1,) * (u.ndim - 1)), u, jnp.nan)


def _name(params: Any, i: int) -> str:
    return path_name(leaves_with_path(params)[i][0])


def deferral_of(inner: Any, dense: bool) -> Deferral:
    """The deferral of an optimizer."""
    make = about_of(inner).deferral
    if make is None:
        raise TypeError(
            f"inner has no decay rule for rows without a gradient, got {inner!r}. Supported: "
            f"{WITH_DECAY_RULE}; also in optzoo.moving_average and in slots_dtype except int8. "
            "Transform gradients before optzoo.caught_up, in an optax.chain that ends with it"
        )
    try:
        deferral = make(dense)
    except jax.errors.ConcretizationTypeError as error:
        raise TypeError(
            "the decays, eps and weight decay of an optimizer with deferred rows must be Python "
            "numbers, not traced as by optax.inject_hyperparams; learning_rate= may be traced"
        ) from error
    if deferral is not None:
        return deferral
    if dense:
        raise ValueError("inner has no decay rule for dense=True, with which all its rows decay")
    raise ValueError(
        "inner does not change rows without a gradient, so nothing can be caught up. With "
        "dense=True all rows move, as with a zero gradient"
    )


WITH_DECAY_RULE = (
    "adam, adamw, nadam, add_sign and power_sign; with dense=True also momentum, momentumw, "
    "rmsprop, amsgrad and adamax"
)


def _marks(mask: Any, params: Any) -> Any:
    """Which parameters are tables, as a tree of bools."""
    if mask is not None:
        return map_not_none(lambda _, mark: mark, params, resolve_mask(mask, params))
    is_real = lambda x: jnp.issubdtype(jnp.result_type(x), jnp.floating)
    large = lambda x: len(np.shape(x)) > 0 and x.shape[0] >= _LEAST_ROWS and is_real(x)
    return jax.tree.map(large, params)


def _dtype(params: Any, marks: Any, state: Any, deferral: Deferral) -> Any:
    """The dtype in which all tables are caught up; raises ``TypeError`` if it is unsupported."""
    if len(slots_nodes(state)) != (1 if deferral.rule.average is None else 2):
        raise TypeError("inner must be one optimizer of optzoo with slots")
    paths, slots = leaves_with_path(params), slots_by_leaf(state, Boxes(params, none=False))
    found = set[Any]()
    for (path, x), mark, row in zip(paths, jax.tree.leaves(marks), slots, strict=True):
        if not mark:
            continue
        name = path_name(path)
        if not np.shape(x) or not np.shape(x)[0]:
            raise TypeError(
                f"tables: parameter '{name}' has shape {np.shape(x)}, without an axis of rows"
            )
        of_slots = {np.dtype(jnp.result_type(a)) for a in jax.tree.leaves([*map(unpack, row)])}
        wide = {np.dtype(wide_dtype(x)), *map(np.dtype, map(wide_dtype, of_slots))}
        if len(wide) > 1 or not wide <= {np.dtype(np.float32), np.dtype(np.float64)}:
            raise TypeError(
                f"table '{name}' and its slots must all be float32 or all float64, or 16-bit in "
                f"place of float32, got {jnp.result_type(x)} and slots in "
                f"{sorted(map(str, of_slots))}"
            )
        if short := _SHORT & of_slots:
            _check_short(name, short.pop(), deferral.at_random)
        found |= wide
    if len(found) > 1:
        raise TypeError(
            "the tables of optzoo.caught_up must all be float64 or none, since they share a clock"
        )
    return found.pop() if found else np.dtype(np.float32)


_SHORT = set(map(np.dtype, DTYPES))


def _check_short(name: str, dtype: Any, at_random: bool) -> None:
    """Raises ``TypeError`` unless 16-bit slots follow the decay rule of their rows on average."""
    if at_random and dtype == jnp.bfloat16:
        return
    fix = (
        "Store them in float32 by optzoo.slots_dtype(inner, 'float32', packed=True), or round "
        "them stochastically by optzoo.slots_dtype(inner, 'bfloat16', stochastic=True)"
    )
    reason = (
        "the exponent range of float16 is too small for a mean square, and a row whose mean "
        "square is rounded to zero makes a large step"
        if at_random
        else "with rounding to nearest, slowly decaying slots do not change in a step, so their "
        "rows follow no decay rule"
    )
    raise TypeError(f"table '{name}' has slots in {dtype}: {reason}. {fix}")
