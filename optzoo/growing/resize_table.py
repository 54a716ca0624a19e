"""Resizes tables, together with the state of their optimizer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..core.boxes import with_sizes
from ..core.checks import check_size, check_transformation
from ..core.lines import (
    Lines,
    from_lines,
    is_lines,
    param_tree,
    rows_per_line,
    shape_of_lines,
    to_lines_of,
)
from ..core.meshes import EVERYWHERE, automatically
from ..core.paths import value_by_name
from ..deferred.catch_up import catch_up
from ..sharded.order_of_ids import from_order_of_ids, in_order_of_ids
from ..sharded.row_sharding import RowSharding
from ..state.deferred import has_deferred
from ..state.of_nnx import refuse_nnx
from .arguments import (
    RowsOf,
    check_by_pattern,
    check_stored,
    check_tables,
    check_whole,
    init_by_name,
    names_of,
    placed,
    rows_for,
    warn_of_zeros,
)
from .row_leaves import forget_rows, row_axes, with_ages, without_ages


def resize_table(
    params: Any,
    state: Any,
    tables: Mapping[str, int],
    *,
    tx: optax.GradientTransformation,
    init: RowsOf | Mapping[str, RowsOf] | None = None,
    shardings: Mapping[str, tuple[RowSharding, RowSharding]] | None = None,
) -> tuple[Any, Any]:
    """Changes the number of rows of some tables, in parameters and state.

    Remaining rows and their slots keep their values, bit by bit, in any storage: 16-bit and packed
    slots, averages, one number for each row, tables in lines. New rows are initialized by ``init``,
    their slots by ``tx.init``. A smaller number drops the rows of the largest ids. All other
    arrays, such as counts, are unchanged.

    Deferred rows (:func:`optzoo.caught_up`) are caught up first, as by
    :func:`optzoo.rows.catch_up`; new rows are current. Gradients that :func:`optzoo.accumulate` has
    collected for dropped rows are dropped.

    Programs are compiled again for the new shapes, so resize rarely and in large steps. Old and new
    arrays are in memory at the same time.

    Example:
        >>> import jax, jax.numpy as jnp, optzoo
        >>> tx = optzoo.lazy_adam(0.1)
        >>> params = {"emb": jnp.ones((4, 2))}
        >>> rows = optzoo.sharded.uniform_rows(jax.random.key(0), 2)
        >>> params, state = optzoo.growing.resize_table(
        ...     params, tx.init(params), {"emb": 6}, tx=tx, init=rows
        ... )
        >>> params["emb"].shape, optzoo.get_slot(state, "m")["emb"].shape
        ((6, 2), (6, 2))

    Args:
        params: the parameters.
        state: the state of ``tx`` for them, without a replica axis.
        tables: a dict from patterns of names (:func:`optzoo.param_groups`) to new numbers of rows,
            the lengths of the first axis.
        tx: the transformation, which initializes the slots of new rows.
        init: a function of an array of ids that returns their rows, of shape ``(n, *row_shape)``,
            as in :func:`optzoo.sharded.create_table`; or a dict from patterns to such functions.
            Rows are stored in the dtype of the table, in which finite numbers remain finite. New
            rows are zero if ``init`` is None or no pattern matches.
        shardings: a dict from patterns to pairs of the old and the new sharding, with equal numbers
            of shards, for tables that are sharded by rows. ``tables`` has the new number of ids,
            ``num_rows``. Rows move to their new owners.

    Warns:
        InitialValueWarning: if new rows of a table are zero because ``init`` is missing, and its
        optimizer is row-wise LAMB or LARS (:func:`optzoo.row_wise_lamb`), which never updates rows
        of zeros.

    Raises:
        TypeError: if ``tables`` or ``shardings`` is not a dict, or has values of another type; if
            ``tx`` is not a transformation; if ``init`` does not return real numbers; if the state
            is an ``nnx.State`` or ``nnx.Optimizer`` (:func:`optzoo.nnx_split`).
        StateError: if the state is not a state of ``tx`` for these parameters.
        ValueError: if a pattern matches no parameter, or two patterns match the same one; if a
            parameter has no rows; if ``init`` returns rows of another shape; if the state has
            arrays that depend on all rows of a table (GGT; Shampoo and SOAP up to the size of their
            largest matrix); if the shardings of a table that is sharded by rows are missing or do
            not match.

    Returns:
        The new parameters and the new state. They share unchanged arrays with the arguments: a step
        that donates the new ones deletes these arrays of the old ones, too.
    """
    check_transformation(tx=tx)
    refuse_nnx(state)
    check_by_pattern("tables", tables, "{'emb': 2000}")
    sizes = {pattern: check_size(1, **{f"tables[{pattern!r}]": n}) for pattern, n in tables.items()}
    size_of = value_by_name("tables", sizes, params)
    check_tables("tables", params, size_of)
    rows_of = init_by_name(init, params)
    pairs = _pairs_by_name(shardings, params, size_of)
    old, new = ({name: pair[i] for name, pair in pairs.items()} for i in (0, 1))
    stored = {**size_of, **{name: s.stored_rows for name, s in new.items()}}
    row_axes(tx, params, state, stored)
    leaves = zip(names_of(params), param_tree.leaves(params), strict=True)
    rows_before = {name: x.shape[0] for name, x in leaves if name in size_of}
    rows_before |= {name: sharding.num_rows for name, sharding in old.items()}
    warn_of_zeros(state, [name for name, n in size_of.items() if n > rows_before[name]], rows_of)
    if has_deferred(state):
        params, state = catch_up(params, state)
    like = _with_lines(params, stored)
    params, state = from_lines((params, state))
    params, state = _reordered(in_order_of_ids, params, state, old)
    alone = {name: n for name, n in stored.items() if name not in pairs}
    params, state = _resized(params, state, tx, alone, rows_of)
    for name, (before, after) in pairs.items():
        one, kept = {name: stored[name]}, min(before.num_rows, after.num_rows)
        params, state = _resized(params, state, tx, one, rows_of, kept)
    params, state = _reordered(from_order_of_ids, params, state, new)
    gone = {name: lambda ids, size=size: ids >= size for name, size in size_of.items()}
    return to_lines_of(like, tx, (params, forget_rows(state, gone)))


def _pairs_by_name(
    shardings: Any, params: Any, size_of: Mapping[str, int]
) -> dict[str, tuple[RowSharding, RowSharding]]:
    """For the name of each sharded table, its old and new sharding."""
    shardings = {} if shardings is None else shardings
    check_by_pattern("shardings", shardings, "{'emb': (old, new)}")
    for pair in shardings.values():
        if not isinstance(pair, tuple) or [type(s) for s in pair] != [RowSharding] * 2:
            raise TypeError(
                "shardings must have a pair of the old and the new optzoo.sharded.RowSharding for "
                f"each table, got {pair!r}"
            )
    pairs = value_by_name("shardings", shardings, params)
    leaves = param_tree.leaves(params)
    for name, x in zip(names_of(params), leaves, strict=True):
        if name in pairs:
            _check_pair(name, x, pairs[name], size_of.get(name))
        elif name in size_of:
            check_whole(name, x, "(old, new)")
    return pairs


def _check_pair(name: str, x: Any, pair: tuple[RowSharding, RowSharding], size: int | None) -> None:
    old, new = pair
    if size != new.num_rows:
        raise ValueError(
            f"shardings: the new sharding of parameter '{name}' has num_rows={new.num_rows}, but "
            f"tables has {size}: give the same number in both"
        )
    check_stored(name, x, old)
    per_line = rows_per_line(x.shape[1:]) if is_lines(x) else 1
    if new.rows_per_shard % per_line:
        raise ValueError(
            f"shardings: the {new.rows_per_shard} rows of a shard of parameter '{name}' are not a "
            f"multiple of the {per_line} rows of a line: give "
            f"multiple={per_line * new.num_shards}, or a multiple of it, to the new RowSharding"
        )
    if old.num_shards != new.num_shards:
        raise ValueError(
            f"shardings: parameter '{name}' has {old.num_shards} shards before and "
            f"{new.num_shards} after: keep num_shards here, and change it by "
            "optzoo.sharded.in_order_of_ids and optzoo.sharded.from_order_of_ids"
        )


def _with_lines(params: Any, stored: Mapping[str, int]) -> Any:
    """The shapes of the new parameters; tables in lines remain in lines."""

    def new(name, x):
        if not is_lines(x):
            return x
        shape = stored.get(name, x.shape[0]), *x.shape[1:]
        return Lines(jax.ShapeDtypeStruct(shape_of_lines(shape), x.dtype), shape)

    leaves, treedef = param_tree.flatten(params)
    return treedef.unflatten(map(new, names_of(params), leaves))


def _reordered(
    move: Callable[..., Any], params: Any, state: Any, tables: Mapping[str, RowSharding]
) -> tuple[Any, Any]:
    """Parameters and state with the rows of sharded tables in another order."""
    if not tables:
        return params, state
    patterns = {re.escape(name): sharding for name, sharding in tables.items()}
    moved = move({"params": params, "state": state}, patterns, params)
    return moved["params"], moved["state"]


def _resized(
    params: Any,
    state: Any,
    tx: optax.GradientTransformation,
    sizes: Mapping[str, int],
    rows_of: Mapping[str, RowsOf],
    kept: int | None = None,
) -> tuple[Any, Any]:
    """Parameters and state with other numbers of rows, in the order of the ids.

    Args:
        params: the parameters, none in lines.
        state: the state of ``tx``, with all rows current.
        tx: the transformation.
        sizes: the new numbers of rows, by the names of the tables.
        rows_of: functions of ids for new rows, by the names of the tables.
        kept: the number of rows that keep their values; None for the smaller of the old and the new
            number.
    """
    if not sizes:
        return params, state
    names, (xs, treedef) = names_of(params), jax.tree.flatten(params)
    axes = row_axes(tx, params, state, sizes)
    arrays, structure = jax.tree.flatten(without_ages(state))

    def resized(name, x):
        first = min(len(x), sizes[name]) if kept is None else kept
        if first == sizes[name]:
            return x[:first]
        dtype = jnp.int64 if sizes[name] >= 2**31 else jnp.int32
        ids = first + jnp.arange(sizes[name] - first, dtype=dtype)
        return jnp.concatenate([x[:first], rows_for(name, x, ids, rows_of)])

    def resized_slot(old, fresh, axis):
        first = min(old.shape[axis], fresh.shape[axis]) if kept is None else kept
        rows = jax.lax.slice_in_dim(fresh, first, None, axis=axis).astype(old.dtype)
        return jnp.concatenate([jax.lax.slice_in_dim(old, 0, first, axis=axis), rows], axis)

    def make(xs, arrays):
        new = [resized(n, x) if n in sizes else x for n, x in zip(names, xs, strict=True)]
        fresh = jax.tree.leaves(without_ages(tx.init(treedef.unflatten(new))))
        slots = [
            resized_slot(old, start, axis)
            for old, start, axis in zip(arrays, fresh, axes, strict=True)
            if axis is not None
        ]
        return [x for n, x in zip(names, new, strict=True) if n in sizes], slots

    tables = [i for i, name in enumerate(names) if name in sizes]
    slots = [i for i, axis in enumerate(axes) if axis is not None]
    # An array that is not on several devices may go where the compiler puts it.
    places = [placed(xs[i]) for i in tables], [placed(arrays[i]) for i in slots]
    spec = lambda place: getattr(place, "spec", EVERYWHERE)
    specs = tuple(list(map(spec, each)) for each in places)
    make = automatically(make, lambda *_: specs)
    found = jax.jit(make, out_shardings=places)(xs, arrays)
    for all_arrays, positions, new in zip((xs, arrays), (tables, slots), found, strict=True):
        for i, array in zip(positions, new, strict=True):
            all_arrays[i] = array
    params, state = with_sizes((treedef.unflatten(xs), structure.unflatten(arrays)))
    return params, with_ages(state, params, jax.eval_shape(tx.init, params))
