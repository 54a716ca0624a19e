"""The train step of an optimizer whose rows sleep: each row is read once and written once."""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from ..core.merge import elect, segment_sum
from ..core.numerics import upcast
from ..core.paths import path_name
from ..core.rows import Shard, SparseRows, axes_of_rows, is_rows
from ..jaxprs.loss import Loss, trace_loss
from ..state.sleeping.tables import (
    Table,
    by_ids,
    map_tables,
    sleeping_leaves,
    slots_by_leaf,
    swept,
    tables_of,
    turn,
    whole,
    with_slots_by_leaf,
    with_tables,
)
from ..state.types import CaughtUpState
from .lookup import DenseGradientWarning, Sparse, report_dense
from .sleepers import Sleepers


class Part(NamedTuple):
    """The rows of a table that a step updates."""

    table: Table
    places: Array  # of the rows, each once; out of range for the others
    rows: Any  # of all arrays of the table, awake
    g: Array  # the gradient of each


def train_step(
    sleepers: Sleepers,
    call: Callable[[Any], tuple[Any, Any]],
    params: Any,
    state: CaughtUpState,
    extra_args: Mapping[str, Any],
    sparse: Sparse,
) -> tuple[Any, CaughtUpState, Any, Any]:
    """The parameters, the state, the loss and the auxiliary data after a step.

    Args:
        sleepers: the optimizer.
        call: gives the loss and the auxiliary data for parameters.
        params: before.
        state: before.
        extra_args: of ``update``.
        sparse: what to do where all rows of a table must be caught up.
    """
    sleepers.check(state)
    tables, treedef = tables_of(state, params)
    of_leaves = lambda leaves: call(treedef.unflatten(leaves))
    loss = trace_loss(of_leaves, treedef.flatten_up_to(params), tables)
    if sparse != "allow":
        for i, reason in loss.dense_tables():
            report_dense(f"'{_names(params)[i]}'", reason, sparse)
    report_reads(loss, params, tables, sparse)
    reads = loss.reads()
    if any(reads[i] for i in tables):
        tables = {i: whole(t) if reads[i] else t for i, t in tables.items()}
        params, state = with_tables(state, params, tables)
        asleep = [i for i in tables if not reads[i]]
        loss = trace_loss(of_leaves, treedef.flatten_up_to(params), asleep)
    flat = treedef.flatten_up_to(params)
    tables = {i: swept(t, turn(t.motion, t.clock, len(flat[i]))) for i, t in tables.items()}
    value, aux, grads, parts = _differentiate(loss, flat, tables)
    params, state = _update(sleepers, treedef, params, state, grads, tables, parts, extra_args)
    return params, state, value, aux


def catch_up_for(
    call: Callable[[Any], tuple[Any, Any]], params: Any, state: Any, sparse: Sparse
) -> tuple[Any, Any]:
    """The parameters and the state with all rows awake that a loss reads.

    For optimizers whose rows sleep inside of other transformations; :func:`train_step` describes
    the arguments.
    """
    asleep, treedef = sleeping_leaves(params, state), jax.tree.structure(params)
    flat = treedef.flatten_up_to(params)
    loss = trace_loss(lambda leaves: call(treedef.unflatten(leaves)), flat, asleep)
    reads, ids = loss.reads(), ids_by_leaf(loss, flat)
    report_reads(loss, params, asleep, sparse)
    change = lambda i, table: whole(table) if reads[i] else by_ids(table, ids[i])
    return map_tables(params, state, change)


def look_up(table: Table, ids: Array) -> Array:
    """Rows as of now, as :func:`optzoo.lookup` reads them; the table is unchanged."""
    return _as_looked_up(table.read(ids)[0], ids, len(table.arrays[2]))


def update_asleep(
    sleepers: Sleepers,
    params: Any,
    state: CaughtUpState,
    grads: Any,
    extra_args: Mapping[str, Any],
) -> tuple[Any, CaughtUpState]:
    """The parameters and the state after an update, which catches up the rows that it changes.

    Args:
        sleepers: the optimizer.
        params: before; tables with dense gradients are awake.
        state: before.
        grads: row-sparse ones may have repeated ids.
        extra_args: of ``update``.
    """
    tables, treedef = tables_of(state, params)
    gs, parts = treedef.flatten_up_to(grads), {}
    for i, table in tables.items():
        if is_rows(gs[i]):
            g = gs[i].coalesce()
            table = table.divided(axes_of_rows(g))
            parts[i] = Part(table, g.indices, table.read(g.indices), g.values)
    return _update(sleepers, treedef, params, state, gs, tables, parts, extra_args)


def report_reads(loss: Loss, params: Any, tables: Iterable[int], sparse: Sparse) -> None:
    """Warns of tables with sparse gradients whose rows must all be caught up, or raises."""
    if sparse == "allow":
        return
    names, reads = _names(params), loss.reads()
    for i in sorted({found.leaf for found in loss.lookups}.intersection(tables)):
        if reads[i] and not loss.uses[i]:
            text = (
                f"the loss reads table '{names[i]}' not by lookups alone, so all its rows are "
                "caught up in each step, which takes a pass over the table"
            )
            if sparse == "require":
                raise ValueError(f"{text}. With sparse='allow' this is permitted")
            warnings.warn(f"{text}. sparse='allow' silences this", DenseGradientWarning, 4)


def _names(params: Any) -> list[str]:
    return [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]


def _differentiate(
    loss: Loss, flat: list[Array], tables: Mapping[int, Table]
) -> tuple[Any, Any, list[Any], dict[int, Part]]:
    """The loss, the auxiliary data, all gradients, and the rows to update."""
    lookups = [found for found in loss.lookups if found.leaf in loss.elsewhere]
    ids, rows, given = ids_by_leaf(loss, flat), {}, [jnp.zeros(0)] * len(lookups)
    for i in ids:
        rows[i] = tables[i].read(ids[i])
        x, start = _as_looked_up(rows[i][0], ids[i], len(flat[i])), 0
        for k in [k for k, found in enumerate(lookups) if found.leaf == i]:
            end = start + math.prod(lookups[k].shape)
            given[k] = x[start:end].reshape(lookups[k].rows)
            start = end
    value, aux, grads, of_lookups = loss.differentiate(flat, given)
    parts = {}
    for i, table in tables.items():
        if i in loss.elsewhere:
            gs = [
                g.reshape(-1, *g.shape[len(found.shape) :])
                for g, found in zip(of_lookups, lookups, strict=True)
                if found.leaf == i
            ]
            parts[i] = _merged(table, ids[i], rows[i], gs)
        elif is_rows(grads[i]):  # of a table that is awake as a whole
            g = grads[i].coalesce()
            parts[i] = Part(table, g.indices, table.gather(g.indices), g.values)
    return value, aux, grads, parts


def ids_by_leaf(loss: Loss, flat: list[Array]) -> dict[int, Array]:
    """The ids of all lookups of each leaf whose rows are elsewhere."""
    if loss.ids_depend_on_rows(flat):
        raise ValueError(
            "ids depend on looked-up rows, but rows are caught up before the loss runs: call "
            "optzoo.catch_up and tx.update in a loop of your own, or leave the table out of the "
            "tables of optzoo.caught_up"
        )
    ids = {i: [jnp.zeros(0, jnp.int32)] for i in sorted(loss.elsewhere)}
    lookups = [found for found in loss.lookups if found.leaf in loss.elsewhere]
    for found, each in zip(lookups, loss.ids(flat), strict=True):
        ids[found.leaf].append(each.reshape(-1))
    return {i: jnp.concatenate(parts) for i, parts in ids.items()}


def _as_looked_up(x: Array, ids: Array, num_rows: int) -> Array:
    """Rows as :func:`optzoo.lookup` reads them: zeros for padding, NaN for ids out of range."""
    wide = ids.reshape(ids.shape + (1,) * (x.ndim - 1))
    x = jnp.where((wide < 0) | (wide > num_rows), jnp.nan, x)
    return jnp.where(wide == num_rows, 0, x)


def _merged(table: Table, ids: Array, rows: Any, gs: Sequence[Array]) -> Part:
    """Rows of ids that may repeat, each once."""
    n = len(table.arrays[2])
    if not gs:
        return Part(table, ids, rows, jnp.zeros_like(rows[0]))
    elected = elect(ids)
    places = jnp.where(elected == jnp.arange(len(ids), dtype=ids.dtype), ids, n)
    g = segment_sum(upcast(jnp.concatenate(gs)), elected, len(ids))
    return Part(table, places, rows, g.astype(rows[0].dtype))


def _rows_of(part: Part) -> SparseRows:
    """The gradient of a part."""
    n, axes = len(part.table.arrays[2]), part.table.axes
    return SparseRows(part.places, part.g, n, shard=Shard(axes, n, False) if axes else None)


def _update(
    sleepers: Sleepers,
    treedef: Any,
    params: Any,
    state: CaughtUpState,
    grads: list[Any],
    tables: Mapping[int, Table],
    parts: Mapping[int, Part],
    extra_args: Mapping[str, Any],
) -> tuple[Any, CaughtUpState]:
    """The parameters and the state after the update."""
    leaves = list(
        zip(
            grads,
            treedef.flatten_up_to(params),
            slots_by_leaf(state.inner, treedef),
            strict=True,
        )
    )
    for i, table in tables.items():  # swept
        leaves[i] = grads[i], *table.arrays[:2]
    for i, part in parts.items():
        leaves[i] = part.g, *part.rows[:2]
    rows = {i: _rows_of(part) for i, part in parts.items()}
    us, inner, clock = sleepers.advance(state, treedef, leaves, extra_args, rows)
    slots, lasts = slots_by_leaf(inner, treedef), treedef.flatten_up_to(state.last)
    xs = [leaf[1] for leaf in leaves]
    new: Any = optax.apply_updates(xs, us)
    for i, table in tables.items():
        if i not in parts:
            lasts[i] = jnp.full_like(table.arrays[2], clock.count)
            continue
        places, last = parts[i].places, parts[i].rows[2]
        rows = new[i], slots[i], table.as_of(last, clock.count)
        new[i], slots[i], lasts[i] = table.scatter(places, rows, unique=True).arrays
    inner, [law] = with_slots_by_leaf(inner, treedef, slots), state.clock
    new_state = CaughtUpState(inner, {law: clock}, treedef.unflatten(lasts))
    return treedef.unflatten(new), new_state
