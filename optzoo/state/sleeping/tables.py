"""Tables whose rows sleep: caught up by ids, or as a whole."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from ...core.compat import vary, varying
from ...core.numerics import upcast
from ...core.paths import is_masked, path_name
from ..packing import pack_like, unpack
from ..stochastic_rounding import DTYPES, first_place, first_place_in_shard, places_of_rows
from ..storage import rounded
from ..types import CaughtUpState, Clock, LeafwiseState, map_nodes, nodes_of
from .motion import Motion, make_motion, start_clock, wake

_BLOCK = 4096  # rows caught up at once
_SEED = 0x51EE9  # keeps the bits that round rows in their sleep apart from those of the updates

NOTHING_FOLLOWS = (
    "the update includes how rows have moved in their sleep, so nothing may scale it, add to it or "
    "replace it. Make optzoo.caught_up the last of its optax.chain, with no wrapper around it that "
    "changes updates, and transform gradients before it"
)


def catch_up(params: Any, state: Any, ids: Any) -> tuple[Any, Any]:
    """The rows of some ids as of now: for a loop of your own, before the loss reads them.

    :func:`optzoo.minimize` does it itself. Repeated ids do no harm. Ids out of range are ignored.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.caught_up(optzoo.adam(0.1))
        >>> table = jnp.ones((3, 2))
        >>> table, state = optzoo.catch_up(table, tx.init(table), jnp.array([0, 2]))
        >>> print(table.shape)
        (3, 2)

    Args:
        params: the parameters.
        state: the state of :func:`optzoo.caught_up`, or of a chain or masks with it.
        ids: by the path of a table, such as ``{"users/embedding": user_ids}``, integers of any
            shape; or the integers alone if the parameters are one array.

    Returns:
        The parameters and the state. Donate both, so that the rows are written in place.

    Raises:
        TypeError: if ids are not integers.
        ValueError: if there is no parameter of such a path, if no part of the state is of
            :func:`optzoo.caught_up`, or if it is not the last of its ``optax.chain``.
    """
    check_no_guard(state)
    _check_nothing_follows(state)
    paths = jax.tree_util.tree_leaves_with_path(params)
    names = [path_name(path) for path, _ in paths]
    given = ids if isinstance(ids, Mapping) else {"": ids}
    if unknown := sorted(set(given) - set(names)):
        raise ValueError(f"ids: no parameter is called {unknown}; there are {names}")
    by_leaf = {i: jnp.asarray(given[name]) for i, name in enumerate(names) if name in given}
    for i, of_leaf in by_leaf.items():
        if not jnp.issubdtype(of_leaf.dtype, jnp.integer):
            raise TypeError(f"the ids of '{names[i]}' must be integers, got {of_leaf.dtype}")
    change = lambda i, table: by_ids(table, by_leaf[i].reshape(-1)) if i in by_leaf else table
    return map_tables(params, state, change)


def check_no_guard(state: Any) -> None:
    """Raises ``ValueError`` if ``optax.apply_if_finite`` is around :func:`optzoo.caught_up`."""
    for node in nodes_of(optax.ApplyIfFiniteState, state):
        if has_sleepers(node.inner_state):
            raise ValueError(
                "optax.apply_if_finite takes no updates of optzoo.caught_up, which have more rows "
                "than the gradients: put optzoo.zero_if_norm_exceeds(math.inf) before it in a chain"
            )


def _check_nothing_follows(state: Any) -> None:
    """Raises ``ValueError`` if the state of an ``optax.chain`` has a part after the sleepers'."""
    is_plain = lambda node: type(node) is tuple  # not a named tuple, which a wrapper has
    for node in jax.tree.leaves(state, is_leaf=is_plain):
        if not is_plain(node):
            continue
        for k, part in enumerate(node):
            # What is masked may be for other parameters.
            follow = [p for p in node[k + 1 :] if not isinstance(p, optax.MaskedState)]
            if has_sleepers(part) and follow:
                raise ValueError(
                    f"optzoo.caught_up is number {k + 1} of {len(node)} transformations in a "
                    f"chain: {NOTHING_FOLLOWS}"
                )
            _check_nothing_follows(part)


def flush(params: Any, state: Any) -> tuple[Any, Any]:
    """All rows as of now: for evaluation, export and checkpoints, and before settings change.

    It reads and writes every row once. The result is what the optimizer has without
    :func:`optzoo.caught_up`, and ``state.inner`` is its state; training may resume from either.
    Outside of ``jit`` the tables are copied. To write them in place, use
    ``jax.jit(optzoo.flush, donate_argnums=(0, 1))``.

    Of arrays that are sharded by rows each device flushes its own. Inside ``jit`` the shardings are
    not known, so there call it in a ``jax.shard_map`` (docs/caught_up.md).

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.caught_up(optzoo.adam(0.1))
        >>> table = jnp.ones((3, 2))
        >>> table, state = optzoo.flush(table, tx.init(table))
        >>> print(optzoo.slot_names(state.inner))  # a state of adam
        ('m', 'v')

    Args:
        params: the parameters.
        state: the state of :func:`optzoo.caught_up`, or of a chain or masks with it.

    Returns:
        The parameters and the state.

    Raises:
        ValueError: if no part of the state is of :func:`optzoo.caught_up`.
    """
    leaves, treedef = jax.tree.flatten((params, state))
    meshes = {x.sharding.mesh for x in leaves if _has_shards(x)}
    if len(meshes) != 1:
        return _flush(params, state)
    [mesh] = meshes
    on_mesh = lambda x: getattr(getattr(x, "sharding", None), "mesh", None) == mesh
    specs = [x.sharding.spec if on_mesh(x) else PartitionSpec() for x in leaves]
    return _flush_of_shards(mesh, treedef, tuple(specs))(params, state)


def _has_shards(x: Any) -> bool:
    """Whether an array is known to have its rows on several devices."""
    if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array) or x.ndim == 0:
        return False
    return isinstance(x.sharding, NamedSharding) and x.sharding.shard_shape(x.shape)[0] < len(x)


@jax.jit
def _flush(params: Any, state: Any) -> tuple[Any, Any]:
    return map_tables(params, state, lambda i, table: whole(table))


@functools.cache
def _flush_of_shards(mesh: Any, treedef: Any, specs: tuple[PartitionSpec, ...]) -> Any:
    tree = treedef.unflatten(specs)

    def flush(params, state):
        # The parameters are the first of the leaves.
        awake = lambda i, table: whole(table.divided(_axes_of(specs[i])))
        return map_tables(params, state, awake)

    return jax.jit(jax.shard_map(flush, mesh=mesh, in_specs=tree, out_specs=tree))


def _axes_of(spec: PartitionSpec) -> tuple[str, ...]:
    """The mesh axes over which an array is divided."""
    return tuple(a for each in spec for a in ((each,) if isinstance(each, str) else each or ()))


def has_sleepers(state: Any) -> bool:
    """Whether a part of a state is of :func:`optzoo.caught_up`."""
    return bool(nodes_of(CaughtUpState, state))


def sleeping_leaves(params: Any, state: Any) -> set[int]:
    """The positions of all parameters whose rows may sleep."""
    treedef = jax.tree.structure(params)
    lasts = [treedef.flatten_up_to(node.last) for node in nodes_of(CaughtUpState, state)]
    return {i for last in lasts for i, a in enumerate(last) if not is_masked(a)}


def refuse_sleepers(state: Any, what: str) -> None:
    """Raises ``ValueError`` if a part of a state is of :func:`optzoo.caught_up`."""
    if has_sleepers(state):
        raise ValueError(
            f"{what} does not support optzoo.caught_up, whose rows sleep: take the optimizer inside"
        )


def check_awake(state: Any, what: str) -> None:
    """Raises ``ValueError`` if a row of a state is known to sleep; traced arrays pass.

    Args:
        state: any.
        what: for the error, what would read the rows.
    """
    for node in nodes_of(CaughtUpState, state):
        [clock] = node.clock.values()
        arrays = [clock.count, *jax.tree.leaves(node.last)]
        if any(isinstance(a, jax.core.Tracer | jax.ShapeDtypeStruct) for a in arrays):
            continue
        if any((np.asarray(last) != clock.count).any() for last in arrays[1:]):
            raise ValueError(
                f"{what} would read rows that sleep: call optzoo.flush(params, state) before"
            )


def all_awake(state: CaughtUpState) -> CaughtUpState:
    """The state with all rows as of the count of the inner state, as after :func:`flush`."""
    [law], (motion, _) = state.clock, motion_of(state)
    count = count_of_updates(state.inner)
    clock = start_clock(motion, count)
    last = jax.tree.map(lambda a: jnp.full_like(a, count), state.last)
    return CaughtUpState(state.inner, {law: clock}, last)


# The slots of a state, by parameter


def slots_nodes(inner: Any) -> list[LeafwiseState]:
    """The parts of the inner state that have slots: the optimizer, then its moving average."""
    return [node for node in nodes_of(LeafwiseState, inner) if len(node.slots)]


def count_of_updates(inner: Any) -> Array:
    """The number of updates of the inner state."""
    return slots_nodes(inner)[0].count


def slots_by_leaf(inner: Any, treedef: Any) -> list[Any]:
    """For each parameter the named tuples of its slots, as they are stored: one of each part."""

    def of_each(slots):
        columns = [treedef.flatten_up_to(tree) for tree in slots]
        return map(type(slots)._make, zip(*columns, strict=True))

    return list(zip(*(of_each(node.slots) for node in slots_nodes(inner)), strict=True))


def with_slots_by_leaf(inner: Any, treedef: Any, rows: list[Any]) -> Any:
    """The inner state with other slots."""
    parts = zip(*rows, strict=True)

    def change(node):
        if not len(node.slots):
            return node
        columns = zip(*next(parts), strict=True)
        return node._replace(slots=type(node.slots)._make(map(treedef.unflatten, columns)))

    return map_nodes(LeafwiseState, change, inner)


# One table


class Table:
    """A table, its slots as they are stored, and for each row the step that it is as of."""

    def __init__(
        self,
        motion: Motion,
        clock: Clock,
        number: int,
        arrays: Any,
        axes: tuple[str, ...] = (),
    ):
        self.motion, self.clock = motion, clock
        self.number = number  # of the parameter
        self.arrays = arrays  # x, slots, last
        self.axes = axes  # of the mesh, over which the table is divided, if this is known

    def with_arrays(self, arrays: Any) -> "Table":
        """The same table later."""
        return Table(self.motion, self.clock, self.number, arrays, self.axes)

    def divided(self, axes: tuple[str, ...]) -> "Table":
        """The same table, of which each device along these mesh axes has another part."""
        return Table(self.motion, self.clock, self.number, self.arrays, axes)

    def gather(self, ids: Array) -> Any:
        """Rows of all arrays; of ids out of range, some rows."""
        return jax.tree.map(lambda a: _take(a, ids), self.arrays)

    def scatter(self, ids: Array, rows: Any, *, unique: bool) -> "Table":
        """The table with other rows; ids out of range are ignored."""
        n = len(self.arrays[2])
        ids = jnp.where((ids >= 0) & (ids < n), ids, n)
        put = lambda a, r: (
            jnp.asarray(a)
            .at[ids]
            .set(r, mode="drop", wrap_negative_indices=False, unique_indices=unique)
        )
        return self.with_arrays(jax.tree.map(put, self.arrays, rows))

    def read(self, ids: Array) -> Any:
        """Rows of all arrays as of now; of ids out of range, some rows."""
        return self.awake(lambda a: _take(a, ids))

    def awake(self, take: Callable[[Array], Array]) -> Any:
        """Rows of all arrays as of now; if the clock is stopped, rows of NaN.

        Args:
            take: gives rows of an array.
        """

        def awake():
            return self._wake(jax.tree.map(take, self.arrays), take)

        def stopped():
            jaxpr, shapes = jax.make_jaxpr(awake, return_shape=True)()
            # Inside shard_map both branches need the same type.
            kinds = jax.tree.unflatten(
                jax.tree.structure(shapes), map(varying, jaxpr.jaxpr.outvars)
            )
            zeros = lambda a, axes: vary(jnp.zeros_like(a), axes)
            x, slots, last = jax.tree.map(zeros, shapes, kinds)
            if self.motion.law.average is not None:  # it is read in the place of x
                slots = jax.tree.map(_unknown, slots)
            return _unknown(x), slots, last

        # By a conditional, so that XLA keeps what it computes. Otherwise it computes it again where
        # it is used, and gathers x alone, which takes longer than all of this; and in a loop it
        # copies the table, to read it again after it was written.
        return jax.lax.cond(self.clock.count >= 0, awake, stopped)

    def _wake(self, rows: Any, take: Callable[[Array], Array]) -> Any:
        x, slots, last = rows
        each = [unpack(part) for part in slots]
        stored = {name: a for part in each for name, a in part._asdict().items()}
        wide = {name: upcast(a) for name, a in stored.items()}
        new, awake = wake(self.motion, self.clock, upcast(x), wide, last)
        if any(a.dtype in DTYPES for a in stored.values()):  # at random: right on average
            start = first_place(_SEED, self.clock.count, self.number)
            start = first_place_in_shard(start, self.axes, self.arrays[0].shape)
            ids = take(jnp.arange(len(self.arrays[2]), dtype=jnp.uint32))
            start = places_of_rows(start, ids, self.arrays[0].shape)
            awake = {
                name: rounded(a, awake[name], start, k)
                for k, (name, a) in enumerate(stored.items())
            }
        of_part = lambda part: type(part)(**{name: awake[name] for name in part._fields})
        packed = tuple(pack_like(s, of_part(p)) for s, p in zip(slots, each, strict=True))
        cast = lambda old, new: new.astype(old.dtype)
        # A table in 16 bits is rounded to the nearest, as by a step of the optimizer.
        new, slots = jax.tree.map(cast, (x, slots), (new, packed))
        return new, slots, self.as_of(last, self.clock.count)

    @staticmethod
    def as_of(last: Array, count: Array) -> Array:
        """The steps of some rows that are as of now."""
        # Not a constant: it depends on what was read, so that XLA reads before it writes in place.
        # Otherwise it copies the steps of all rows.
        return jnp.maximum(last, count)


def _unknown(a: Array) -> Array:
    """NaN; words of two slots as they are."""
    is_real = jnp.issubdtype(a.dtype, jnp.inexact)
    return vary(jnp.full_like(a, jnp.nan), varying(a)) if is_real else a


def _take(a: Array, ids: Array) -> Array:
    return jnp.take(a, ids, axis=0, mode="clip")


def by_ids(table: Table, ids: Array) -> Table:
    """The table with the rows of these ids awake."""
    return table.scatter(ids, table.read(ids), unique=False)


def whole(table: Table) -> Table:
    """The table with all rows awake."""
    n = len(table.arrays[2])
    size = min(_BLOCK, n)

    def body(k, arrays):
        start = jnp.minimum(k * size, n - size)
        cut = lambda a: jax.lax.dynamic_slice_in_dim(a, start, size)
        rows = table.with_arrays(arrays).awake(cut)
        put = lambda a, r: jax.lax.dynamic_update_slice_in_dim(a, r, start, 0)
        return jax.tree.map(put, arrays, rows)

    any_asleep = jnp.any(table.arrays[2] != table.clock.count)
    number = jnp.where(any_asleep, -(-n // size), 0)
    return table.with_arrays(jax.lax.fori_loop(0, number, body, table.arrays))


def swept(table: Table, places: Array) -> Table:
    """The table with the rows whose turn it is awake."""
    return table.scatter(places, table.read(places), unique=True)


def turn(motion: Motion, clock: Clock, num_rows: int) -> Array:
    """The rows to sweep in this step, so that none sleeps longer than the horizon; or padding."""
    steps = motion.horizon - 2
    number = -(-num_rows // steps)
    turns = -(-num_rows // number)
    stride = steps // turns
    start = clock.count // stride % turns * number
    start = jnp.where(clock.count % stride == 0, start, num_rows)
    return jnp.minimum(start + jnp.arange(number, dtype=jnp.int32), num_rows)


def motion_of(state: CaughtUpState) -> tuple[Motion, Clock]:
    """The motion of the rows of a state, and its clock.

    The clock is stopped if the inner state is not of the same step: then all rows that are read
    become NaN.
    """
    [(law, clock)] = state.clock.items()
    motion = make_motion(law, clock.ring.dtype.name, clock.ring.shape[0])
    in_step = clock.count == count_of_updates(state.inner)
    return motion, clock._replace(count=jnp.where(in_step, clock.count, -1))


def tables_of(state: CaughtUpState, params: Any) -> tuple[dict[int, Table], Any]:
    """By the position of their parameters the tables; and the structure of the parameters."""
    leaves, treedef = jax.tree.flatten(params)
    motion, clock = motion_of(state)
    slots, lasts = slots_by_leaf(state.inner, treedef), treedef.flatten_up_to(state.last)
    return {
        i: Table(motion, clock, i, (x, s, last))
        for i, (x, s, last) in enumerate(zip(leaves, slots, lasts, strict=True))
        if not is_masked(last)
    }, treedef


def with_tables(
    state: CaughtUpState, params: Any, tables: Mapping[int, Table]
) -> tuple[Any, CaughtUpState]:
    """The parameters and the state with other tables."""
    leaves, treedef = jax.tree.flatten(params)
    slots, lasts = slots_by_leaf(state.inner, treedef), treedef.flatten_up_to(state.last)
    for i, table in tables.items():
        leaves[i], slots[i], lasts[i] = table.arrays
    inner = with_slots_by_leaf(state.inner, treedef, slots)
    return treedef.unflatten(leaves), state._replace(inner=inner, last=treedef.unflatten(lasts))


def map_tables(params: Any, state: Any, change: Callable[[int, Table], Table]) -> tuple[Any, Any]:
    """Parameters and state with every table changed.

    Args:
        params: the parameters.
        state: any that has parts of :func:`optzoo.caught_up`.
        change: of the position of a parameter and its table the new table.

    Raises:
        ValueError: if no part of the state is of :func:`optzoo.caught_up`.
    """
    if not has_sleepers(state):
        raise ValueError(
            "no rows sleep in this state, which is not of optzoo.caught_up: all are as of now"
        )

    def of_node(node):
        nonlocal params
        tables, _ = tables_of(node, params)
        changed = {i: change(i, table) for i, table in tables.items()}
        params, node = with_tables(node, params, changed)
        return node

    state = map_nodes(CaughtUpState, of_node, state)
    return params, state
