"""Tables with deferred rows: caught up by ids, or as a whole."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..core.boxes import Boxes
from ..core.compat import TracedOnce
from ..core.lines import doubled
from ..core.marked_rows import distinct, gather_rows, scatter_equal_rows, scatter_rows
from ..core.meshes import zeros_of
from ..core.numerics import is_trainable, upcast
from ..core.paths import flatten_with_path, is_masked, path_name
from ..state.decay_rule import Form
from ..state.fit import misfit
from ..state.storage.at_random import DTYPES, first_place, first_place_in_shard, places_of_rows
from ..state.storage.packing import is_packed, pack_like, unpack
from ..state.storage.stored import rounded
from ..state.types import LeafwiseState, map_nodes, nodes_of
from .motion import Clock, caught_up_rows, restarted
from .state import CaughtUpState

_BLOCK = 4096  # rows caught up at once
_SEED = 0x51EE9  # keeps the bits that round deferred rows apart from those of the updates


def all_current(state: CaughtUpState) -> CaughtUpState:
    """The state with all rows current at the count of the inner state, as after ``catch_up``."""
    (form, clock), count = form_of(state), count_of_updates(state.inner)
    last = jax.tree.map(lambda a: jnp.full_like(a, count), state.last)
    return CaughtUpState(state.inner, {form.key: restarted(clock, count)}, last)


# The slots of a state, by parameter


def slots_nodes(inner: Any) -> list[LeafwiseState]:
    """The parts of the inner state that have slots: the optimizer, then its moving average."""
    return [node for node in nodes_of(LeafwiseState, inner) if len(node.slots)]


def count_of_updates(inner: Any) -> Array:
    """The number of updates of the inner state."""
    return slots_nodes(inner)[0].count


def slots_by_leaf(inner: Any, boxes: Boxes) -> list[Any]:
    """For each parameter, the named tuples of its stored slots: one per part of the state."""

    def of_each(slots):
        columns = map(boxes.slots, slots)
        return map(type(slots)._make, zip(*columns, strict=True))

    return list(zip(*(of_each(node.slots) for node in slots_nodes(inner)), strict=True))


def with_slots_by_leaf(inner: Any, boxes: Boxes, rows: list[Any]) -> Any:
    """The inner state with other slots."""
    parts = zip(*rows, strict=True)

    def change(node):
        if not len(node.slots):
            return node
        columns = zip(*next(parts), strict=True)
        return node._replace(slots=type(node.slots)._make(map(boxes.refilled, node.slots, columns)))

    return map_nodes(LeafwiseState, change, inner)


# One table


class Table:
    """A table, its stored slots, and for each row the step to which it is current."""

    def __init__(
        self,
        form: Form,
        clock: Clock,
        name: str,
        arrays: Any,
        axes: tuple[str, ...] = (),
    ):
        self.form, self.clock = form, clock
        self.name = name  # of the parameter
        self.arrays = arrays  # x, slots, last
        self.axes = axes  # of the mesh, over which the table is divided, if this is known

    @property
    def num_rows(self) -> int:
        """The number of rows of the arrays."""
        return len(self.arrays[2])

    def with_arrays(self, arrays: Any) -> "Table":
        """The table with other arrays."""
        return Table(self.form, self.clock, self.name, arrays, self.axes)

    def divided(self, axes: tuple[str, ...]) -> "Table":
        """The same table, marked as divided over these mesh axes."""
        return Table(self.form, self.clock, self.name, self.arrays, axes)

    def gather(self, ids: Array) -> Any:
        """Rows of all arrays; arbitrary rows for ids out of range."""
        return jax.tree.map(lambda a: gather_rows(a, ids), self.arrays)

    def scatter(self, ids: Array, rows: Any) -> "Table":
        """The table with other rows at distinct ids; ids out of range are ignored."""
        return self.with_arrays(scattered(self.arrays, ids, rows))

    def read(self, ids: Array) -> Any:
        """Current rows of all arrays; arbitrary rows for ids out of range."""
        return self.current(lambda a: gather_rows(a, ids))

    def current(self, take: Callable[[Array], Array]) -> Any:
        """Current rows of all arrays; NaN if the clock is stopped.

        Args:
            take: a function that returns rows of an array.
        """
        current = TracedOnce(lambda: self._advanced(jax.tree.map(take, self.arrays), take))

        def stopped():
            x, slots, last = jax.tree.map(zeros_of, current.types)
            if self.form.average:  # it is read in the place of x
                slots = jax.tree.map(_unknown, slots)
            return _unknown(x), slots, last

        # By a conditional, so that XLA keeps what it computes. Otherwise it computes it again where
        # it is used, and gathers x alone, which takes longer than all of this; and in a loop it
        # copies the table, to read it again after it was written.
        return jax.lax.cond(self.clock.count >= 0, current, stopped)

    def _advanced(self, rows: Any, take: Callable[[Array], Array]) -> Any:
        x, slots, last = rows
        each = [unpack(part) for part in slots]
        stored = {name: a for part in each for name, a in part._asdict().items()}
        wide = {name: upcast(a) for name, a in stored.items()}
        new, current = caught_up_rows(self.form, self.clock, upcast(x), wide, last)
        if any(a.dtype in DTYPES for a in stored.values()):  # at random: right on average
            start = first_place(_SEED, self.clock.count, self.name)
            start = first_place_in_shard(start, self.axes, self.arrays[0].shape)
            ids = take(jnp.arange(self.num_rows, dtype=jnp.uint32))
            start = places_of_rows(start, ids, self.arrays[0].shape)
            current = {
                name: rounded(a, current[name], start, k)
                for k, (name, a) in enumerate(stored.items())
            }
        of_part = lambda part: type(part)(**{name: current[name] for name in part._fields})
        packed = tuple(pack_like(s, of_part(p)) for s, p in zip(slots, each, strict=True))
        cast = lambda old, new: new.astype(old.dtype)
        # A table in 16 bits is rounded to the nearest, as by a step of the optimizer.
        new, slots = jax.tree.map(cast, (x, slots), (new, packed))
        return new, slots, self.as_of(last, self.clock.count)

    @staticmethod
    def as_of(last: Array, count: Array) -> Array:
        """The step counts of rows that are current."""
        # Not a constant: it depends on what was read, so that XLA reads before it writes in place.
        # Otherwise it copies the steps of all rows.
        return jnp.maximum(last, count)


def _unknown(a: Array) -> Array:
    """NaN; packed words of two slots are unchanged."""
    is_real = jnp.issubdtype(a.dtype, jnp.inexact)
    return a + jnp.asarray(jnp.nan, a.dtype) if is_real else a


def scattered(arrays: Any, ids: Array, rows: Any) -> Any:
    """Arrays with other rows at distinct ids; ids out of range are ignored."""
    return jax.tree.map(lambda a, r: scatter_rows(jnp.asarray(a), ids, r), arrays, rows)


def by_ids(table: Table, ids: Array) -> Table:
    """The table, with the rows of these ids current; ids may repeat."""
    put = lambda a, rows: scatter_equal_rows(a, ids, rows)  # a current row stays as it is
    return table.with_arrays(jax.tree.map(put, table.arrays, table.read(ids)))


def whole(table: Table) -> Table:
    """The table with all rows current."""
    n = table.num_rows
    size = min(_BLOCK, n)

    def body(k, arrays):
        start = jnp.minimum(k * size, n - size)
        cut = lambda a: jax.lax.dynamic_slice_in_dim(a, start, size)
        rows = table.with_arrays(arrays).current(cut)
        put = lambda a, r: jax.lax.dynamic_update_slice_in_dim(a, r, start, 0)
        return jax.tree.map(put, arrays, rows)

    any_behind = jnp.any(table.arrays[2] != table.clock.count)
    number = jnp.where(any_behind, -(-n // size), 0)
    return table.with_arrays(jax.lax.fori_loop(0, number, body, table.arrays))


def swept(table: Table) -> Table:
    """The table, with the rows to sweep in this step current."""
    places = turn(table.clock, table.num_rows)
    return table.scatter(places, table.read(places))


def turn(clock: Clock, num_rows: int) -> Array:
    """The rows to sweep in this step, so that none exceeds the horizon; or padding."""
    steps = len(clock.ring) - 2
    number = -(-num_rows // steps)
    turns = -(-num_rows // number)
    stride = steps // turns
    start = clock.count // stride % turns * number
    start = jnp.where(clock.count % stride == 0, start, num_rows)
    return distinct(jnp.minimum(start + jnp.arange(number, dtype=jnp.int32), num_rows))


def form_of(state: CaughtUpState) -> tuple[Form, Clock]:
    """The form of the decay rule of the rows of a state, and its clock.

    The clock is stopped if the inner state is of another step: all rows that are read become NaN.
    """
    [(key, clock)] = state.clock.items()
    form = Form.of_key(key)
    if form is None:
        raise ValueError(
            f"the clock of this state has the key {key!r} of an older version: convert it by "
            "optzoo.state.state_like(state, jax.eval_shape(tx.init, params))"
        )
    in_step = clock.count == count_of_updates(state.inner)
    return form, clock._replace(count=jnp.where(in_step, clock.count, -1))


def tables_of(state: CaughtUpState, params: Any) -> tuple[dict[int, Table], Any]:
    """The tables, by the indices of their parameters, and the structure of the parameters.

    Raises:
        StateError: if the state does not match the parameters.
    """
    leaves, treedef = flatten_with_path(params)
    (form, clock), boxes = form_of(state), Boxes(params, none=False)
    try:
        slots, lasts = slots_by_leaf(state.inner, boxes), boxes.slots(state.last)
    except ValueError as error:
        raise misfit("slots of these parameters", "those of a tree of another structure") from error
    tables = dict[int, Table]()
    for i, ((path, x), s, last) in enumerate(zip(leaves, slots, lasts, strict=True)):
        if not is_masked(last):
            name = path_name(path)
            if not is_trainable(x):
                raise misfit(f"real numbers as parameter '{name}'", jnp.result_type(x))
            _check_rows(name, jnp.shape(x), last, s)
            tables[i] = Table(form, clock, name, (x, s, last))
    return tables, treedef


def _check_rows(name: str, shape: tuple[int, ...], last: Any, parts: Iterable[Any]) -> None:
    """Raises ``StateError`` unless the arrays of a table have an entry for each row."""
    of, is_array = f"rows of parameter '{name}', which has shape {shape}", hasattr(last, "shape")
    if not is_array or last.shape != shape[:1]:
        raise misfit(of, f"{last.shape[0]} rows" if is_array else f"a {type(last).__name__}")
    for part in parts:
        two = doubled(shape) if is_packed(part) else shape
        for a in jax.tree.leaves(part):
            if jnp.shape(a) not in (shape[:1], shape, two):
                raise misfit(of, f"a slot of shape {jnp.shape(a)}")


def with_tables(
    state: CaughtUpState, params: Any, tables: Mapping[int, Table]
) -> tuple[Any, CaughtUpState]:
    """The parameters and the state with other tables."""
    (leaves, treedef), boxes = jax.tree.flatten(params), Boxes(params, none=False)
    slots, lasts = slots_by_leaf(state.inner, boxes), boxes.slots(state.last)
    for i, table in tables.items():
        leaves[i], slots[i], lasts[i] = table.arrays
    inner = with_slots_by_leaf(state.inner, boxes, slots)
    last = boxes.refilled(state.last, lasts)
    return treedef.unflatten(leaves), state._replace(inner=inner, last=last)


def map_tables(params: Any, state: Any, change: Callable[[int, Table], Table]) -> tuple[Any, Any]:
    """Parameters and state with every table changed.

    Args:
        params: the parameters.
        state: a state with parts made by :func:`optzoo.caught_up`.
        change: a function of the index of a parameter and its table that returns the new table.
    """

    def of_node(node):
        nonlocal params
        tables, _ = tables_of(node, params)
        changed = {i: change(i, table) for i, table in tables.items()}
        params, node = with_tables(node, params, changed)
        return node

    state = map_nodes(CaughtUpState, of_node, state)
    return params, state
