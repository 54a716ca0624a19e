"""An optimizer whose rows sleep: its state, its update, and what may sleep at all."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from ..core.checks import check_params
from ..core.compat import in_same_trace
from ..core.gradients import flatten_gradients
from ..core.lines import is_lines
from ..core.numerics import wide_dtype
from ..core.optimizer import Notes, about_of, note
from ..core.paths import path_name, resolve_mask
from ..core.rows import SparseRows, axes_of_rows, is_rows
from ..rules.frame import at_step
from ..state.fit import StateError
from ..state.packing import unpack
from ..state.sleeping.law import Sleeper
from ..state.sleeping.motion import Motion, make_motion, start_clock, tick
from ..state.sleeping.tables import (
    NOTHING_FOLLOWS,
    slots_by_leaf,
    slots_nodes,
    tables_of,
    turn,
    with_slots_by_leaf,
)
from ..state.stochastic_rounding import DTYPES
from ..state.storage import GATHERED
from ..state.types import CaughtUpState, Clock, nodes_of

# Smaller tables are updated as a whole, which takes no longer than to look up some thousand rows.
_LEAST_ROWS = 4096


class Sleepers(NamedTuple):
    """An optimizer whose rows sleep."""

    inner: optax.GradientTransformationExtraArgs
    sleeper: Sleeper
    tables: Any
    dense: bool
    horizon: int

    def motion(self, dtype: Any) -> Motion:
        """The motion of rows in a dtype."""
        return make_motion(self.sleeper.law, np.dtype(dtype).name, self.horizon)

    def init(self, params: Any) -> CaughtUpState:
        """The state at the start."""
        for path, x in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_lines):
            if is_lines(x):
                raise ValueError(
                    f"table '{path_name(path)}' is in lines, in which rows of optzoo.caught_up "
                    "cannot sleep: give it as an array (optzoo.from_lines), or take an optimizer "
                    "of touched rows for it by optzoo.groups"
                )
        state = self.inner.init(params)
        marks = _marks(self.tables, params)
        dtype = _dtype(params, marks, state, self.sleeper)
        start = lambda x, mark: jnp.zeros(x.shape[0], jnp.int32) if mark else optax.MaskedNode()
        clock = start_clock(self.motion(dtype), 0)
        last = jax.tree.map(start, params, marks)
        return CaughtUpState(state, {self.sleeper.law: clock}, last)

    def check(self, state: Any) -> None:
        """Raises ``StateError`` unless the rows of a state sleep by this law."""
        if not isinstance(state, CaughtUpState):
            raise StateError(
                f"the state of optzoo.caught_up is a CaughtUpState, got {type(state).__name__}: "
                "optzoo.take_over makes it from a state of the optimizer inside"
            )
        [(law, clock)], mine = state.clock.items(), self.sleeper.law
        fix = (
            "catch up all rows by params, state = optzoo.flush(params, state), then resume from "
            "optzoo.take_over(tx, params, state.inner)"
        )
        if law != mine:
            raise StateError(f"rows of this state sleep by the law [{law}], not [{mine}]: {fix}")
        motion = self.motion(clock.ring.dtype)
        shapes = (motion.window, motion.horizon), (len(clock.young), len(clock.ring))
        if shapes[0] != shapes[1]:
            raise StateError(
                "the clock of this state has another window and horizon than this transformation, "
                f"{shapes[1]} and not {shapes[0]}: {fix}"
            )

    def advance(
        self,
        state: CaughtUpState,
        treedef: Any,
        leaves: Sequence[Any],
        extra_args: Any,
        rows: Mapping[int, SparseRows],
    ) -> tuple[list[Any], Any, Clock]:
        """The updates, the inner state and the clock after a step.

        Args:
            state: before.
            treedef: of the parameters.
            leaves: for each parameter the gradient, the values and the slots; those of a table may
                be of a few rows, all awake.
            extra_args: of ``update``.
            rows: by their positions the gradients that are of a few rows.
        """
        gs, xs, slots = ([leaf[k] for leaf in leaves] for k in range(3))
        if self.dense:
            gs = [g.to_dense() if is_rows(g) else g for g in gs]
        few = with_slots_by_leaf(state.inner, treedef, slots)
        params = treedef.unflatten(xs)
        now = {**extra_args, GATHERED: {_name(params, i): g for i, g in rows.items()}}
        us, inner = self.inner.update(treedef.unflatten(gs), few, params, **now)
        node, [clock] = slots_nodes(state.inner)[0], state.clock.values()
        count = node.count
        step = extra_args.get("global_step")
        step = count if step is None else step
        rate = at_step(step, self.sleeper.rate, extra_args.get("learning_rate"))
        dtype = clock.ring.dtype  # in which the rule computes
        cast = lambda a: jnp.asarray(a).astype(dtype)
        size = self.sleeper.size(cast(rate), count + 1, jax.tree.map(cast, node.shared))
        decay = extra_args.get("average_decay")
        if self.sleeper.average is not None:
            decay = at_step(step, self.sleeper.average, decay)
        elif decay is not None:
            raise ValueError(
                "update got average_decay=, but the rows of optzoo.caught_up sleep by the decay "
                "that moving_average was given: leave it out"
            )
        return treedef.flatten_up_to(us), inner, tick(self.motion(dtype), clock, size, decay)

    def update(
        self, updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, CaughtUpState]:
        """The update of optax, of rows that were caught up before."""
        check_params(params)
        self.check(state)
        gs, xs, _ = flatten_gradients(updates, params)
        tables, treedef = tables_of(state, params)
        slots = slots_by_leaf(state.inner, treedef)
        leaves, sweeps = list(zip(gs, xs, slots, strict=True)), {}
        for i, table in tables.items():
            g, x = gs[i], xs[i]
            if g is None:
                raise ValueError(NO_GRADIENT_MSG.format(_name(params, i)))
            if not is_rows(g):
                continue
            gs[i] = g = g.coalesce()
            table = table.divided(axes_of_rows(g))
            places = turn(table.motion, table.clock, g.num_rows)
            # Not those that this step has updated, in an earlier round on sharded tables.
            is_later = table.gather(places)[2] == table.clock.count + 1
            places = jnp.where(is_later, g.num_rows, places)
            before, awake = table.gather(places), table.read(places)
            sweeps[i] = g.with_rows(places, awake[0] - before[0])
            _, *rest = table.scatter(places, awake, unique=True).arrays
            tables[i] = table.with_arrays((x, *rest))
            few_x, few_slots, _ = tables[i].gather(g.indices)
            leaves[i] = g.values, few_x, few_slots
        rows = {i: gs[i] for i in sweeps}
        us, inner, clock = self.advance(state, treedef, leaves, extra_args, rows)
        new_slots, lasts = slots_by_leaf(inner, treedef), treedef.flatten_up_to(state.last)
        for i, table in tables.items():
            g, (_, old_slots, last) = gs[i], table.arrays
            if not is_rows(g):
                us[i] = _poisoned(us[i], last == table.clock.count)
                lasts[i] = jnp.full_like(last, clock.count)
                continue
            few_u = _poisoned(us[i], g.gather(last) == table.clock.count)
            us[i] = g.with_values(few_u).drop_padding() + sweeps[i]
            later = table.as_of(g.gather(last), clock.count)
            new_slots[i] = jax.tree.map(g.scatter, old_slots, new_slots[i])
            lasts[i] = g.scatter(last, later)
        inner = with_slots_by_leaf(inner, treedef, new_slots)
        [law] = state.clock
        new = CaughtUpState(inner, {law: clock}, treedef.unflatten(lasts))
        made = {_name(params, i): us[i].values for i in tables if is_rows(us[i])}
        note(extra_args, _MADE, made)
        return treedef.unflatten(us), new


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
    """An update of which nothing changes what :func:`optzoo.caught_up` has made.

    Its update moves rows that have slept too, to where the clock says that they are. The arrays of
    a trace show what has changed it: what nothing has changed are the same objects.

    Raises:
        ValueError: if something changes rows that :func:`optzoo.caught_up` has made, or if this
            cannot be known.
    """
    sleeping = nodes_of(CaughtUpState, state)
    if not sleeping:
        return tx.update(updates, state, params, **extra_args)
    notes = Notes()
    updates, state = tx.update(updates, state, params, **extra_args, **{_MADE: notes})
    if len(notes.of) < len(sleeping):
        raise ValueError(
            "a transformation around optzoo.caught_up does not pass the keywords of its update on, "
            "so it is not known whether the update of a table is changed after it was made: "
            f"{NOTHING_FOLLOWS}"
        )
    final = _by_name(updates)
    for name in {name for made in notes.of for name in made}:
        values = [made[name] for made in notes.of if name in made]
        u = getattr(final.get(name), "values", None)
        # Some may be of an update that was traced for its errors alone.
        others = [each for each in values if each is not u]
        if len(others) == len(values) or any(in_same_trace(each, u) for each in others):
            raise ValueError(
                f"the update of table '{name}' of optzoo.caught_up is changed after it was made: "
                f"{NOTHING_FOLLOWS}"
            )
    return updates, state


def _by_name(updates: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(updates, is_leaf=is_rows)
    return {path_name(path): u for path, u in leaves}


NO_GRADIENT_MSG = (
    "table '{}' has no gradient in this step. All tables of optzoo.caught_up share one clock: give "
    "rows that are empty, optzoo.SparseRows(ids[:0], values[:0], num_rows)"
)


def _poisoned(u: Array, is_awake: Array) -> Array:
    """NaN for the rows that were not caught up before they were read."""
    return jnp.where(is_awake.reshape(is_awake.shape + (1,) * (u.ndim - 1)), u, jnp.nan)


def _name(params: Any, i: int) -> str:
    return path_name(jax.tree_util.tree_leaves_with_path(params)[i][0])


def sleeper_for(inner: Any, dense: bool) -> Sleeper:
    """The law of an optimizer."""
    make = about_of(inner).law
    if make is None:
        raise TypeError(
            f"inner has no law for rows without a gradient, got {inner!r}. Those that have one: "
            f"{WITH_LAW}; and optzoo.slots_dtype and moving_average around them. Gradients "
            "are transformed before optzoo.caught_up, in an optax.chain of which it is the last"
        )
    try:
        sleeper = make(dense)
    except jax.errors.ConcretizationTypeError as error:
        raise TypeError(
            "the decays, eps and weight decay of an optimizer whose rows sleep must be Python "
            "numbers, not traced ones as by optax.inject_hyperparams; learning_rate= may be traced"
        ) from error
    if sleeper is not None:
        return sleeper
    if dense:
        raise ValueError("inner has no law for dense gradients, with which all its rows decay")
    raise ValueError(
        "inner leaves rows without gradient as they are, so that there is nothing to catch up. "
        "With dense=True all rows move, as if their gradient were zero"
    )


WITH_LAW = (
    "adam, adamw, nadam, add_sign and power_sign; with dense=True also momentum, momentumw, "
    "rmsprop, amsgrad and adamax"
)


def _marks(tables: Any, params: Any) -> Any:
    """Which parameters are tables, as a tree of bools."""
    if tables is not None:
        return resolve_mask(tables, params)
    is_real = lambda x: jnp.issubdtype(jnp.result_type(x), jnp.floating)
    large = lambda x: len(np.shape(x)) > 0 and x.shape[0] >= _LEAST_ROWS and is_real(x)
    return jax.tree.map(large, params)


def _dtype(params: Any, marks: Any, state: Any, sleeper: Sleeper) -> Any:
    """In which all tables are caught up; raises ``TypeError`` if rows cannot sleep."""
    if len(slots_nodes(state)) != (1 if sleeper.law.average is None else 2):
        raise TypeError("inner must be one optimizer of optzoo with slots")
    paths, treedef = jax.tree_util.tree_flatten_with_path(params)
    slots = slots_by_leaf(state, treedef)
    found = set[Any]()
    for (path, x), mark, row in zip(paths, jax.tree.leaves(marks), slots, strict=True):
        if not mark:
            continue
        name = path_name(path)
        if not np.shape(x) or not np.shape(x)[0]:
            raise TypeError(f"tables: parameter '{name}' has no rows, its shape is {np.shape(x)}")
        of_slots = {np.dtype(jnp.result_type(a)) for a in jax.tree.leaves([*map(unpack, row)])}
        wide = {np.dtype(wide_dtype(x)), *map(np.dtype, map(wide_dtype, of_slots))}
        if len(wide) > 1 or not wide <= {np.dtype(np.float32), np.dtype(np.float64)}:
            raise TypeError(
                f"table '{name}' and its slots must all be in float32, or all in float64, or in 16 "
                f"bits in the place of float32, got {jnp.result_type(x)} and slots in "
                f"{sorted(map(str, of_slots))}"
            )
        if short := _SHORT & of_slots:
            _check_short(name, short.pop(), sleeper.at_random)
        found |= wide
    if len(found) > 1:
        raise TypeError(
            "the tables of optzoo.caught_up must all be in float64 or none: they share a clock"
        )
    return found.pop() if found else np.dtype(np.float32)


_SHORT = set(map(np.dtype, DTYPES))


def _check_short(name: str, dtype: Any, at_random: bool) -> None:
    """Raises ``TypeError`` unless slots in 16 bits follow the law of their rows on average."""
    if at_random and dtype == jnp.bfloat16:
        return
    fix = (
        "Store them in float32 by optzoo.slots_dtype(inner, 'float32', packed=True), or round them "
        "at random by optzoo.slots_dtype(inner, 'bfloat16', stochastic=True)"
    )
    reason = (
        "float16 has too few exponents for a mean square, and a row whose mean square is rounded "
        "to zero moves far"
        if at_random
        else "rounded to the nearest, a slot that decays slowly does not decay at all in the steps "
        "of the optimizer, so its rows follow no law that they could be caught up by"
    )
    raise TypeError(f"table '{name}' has slots in {dtype}: {reason}. {fix}")
