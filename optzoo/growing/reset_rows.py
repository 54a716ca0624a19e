"""Rows of tables that start anew, with their slots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from ..core.boxes import Boxes
from ..core.checks import check_transformation
from ..core.lines import Lines, is_lines
from ..core.merge import in_range
from ..core.paths import is_masked, value_by_name
from ..core.row_ids import integer_ids
from ..core.rows import SparseRows
from ..deferred.state import CaughtUpState
from ..sharded.row_sharding import RowSharding
from ..state.of_nnx import refuse_nnx
from ..state.types import map_nodes
from .arguments import (
    RowsOf,
    check_by_pattern,
    check_stored,
    check_tables,
    check_whole,
    init_by_name,
    names_of,
    rows_for,
    warn_of_zeros,
)
from .row_leaves import forget_rows, row_axes, without_ages


def reset_rows(
    params: Any,
    state: Any,
    tables: Mapping[str, Array],
    *,
    tx: optax.GradientTransformation,
    init: RowsOf | Mapping[str, RowsOf] | None = None,
    shardings: Mapping[str, RowSharding] | None = None,
) -> tuple[Any, Any]:
    """Parameters and state in which some rows of tables, and their slots, start anew.

    It is for a row that another id gets (:class:`optzoo.growing.Vocabulary`): nothing that was
    learned for the id before is left. The row is as :func:`optzoo.growing.resize_table` makes a new
    one; all other rows keep their values. A row that rested (:func:`optzoo.caught_up`) is as of
    now. What :func:`optzoo.accumulate` has collected for it is forgotten.

    In a compiled function whose parameters and state are donated, it costs what the rows cost. One
    number of ids is one program: fill up with the number of rows, which is no row.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.momentum(0.1, 0.9)
        >>> params = {"emb": jnp.ones((4, 2))}
        >>> params, state = optzoo.growing.reset_rows(
        ...     params, tx.init(params), {"emb": jnp.array([1, 4])}, tx=tx
        ... )
        >>> print(params["emb"][:, 0])
        [1. 0. 1. 1.]

    Args:
        params: the parameters.
        state: that of ``tx`` for them, without an axis of replicas.
        tables: by a pattern of names (:func:`optzoo.param_groups`) the ids of its
            rows, integers of shape ``(n,)``. They may repeat. Those out of range are ignored.
        tx: the transformation, which gives the slots of new rows.
        init: as for :func:`optzoo.growing.resize_table`. It gets the number of rows, or more, for
            ids that are ignored.
        shardings: for each table that is sharded by rows, by pattern, its sharding. In a compiled
            function it cannot be checked that none is missing.

    Warns:
        InitialValueWarning: as :func:`optzoo.growing.resize_table`.

    Raises:
        TypeError: if ``tables`` or ``shardings`` is no dict, if ids are not integers, or if ``tx``
            is no transformation; if the state is an ``nnx.State`` or ``nnx.Optimizer``.
        StateError: if the state is not that of ``tx`` and of these parameters.
        ValueError: if ids are not of shape ``(n,)``; otherwise as
            :func:`optzoo.growing.resize_table`.

    Returns:
        The new parameters and the new state. They take the place of those given, whose other arrays
        they have: a step that donates one deletes them in the other, too.
    """
    check_transformation(tx=tx)
    refuse_nnx(state)
    check_by_pattern("tables", tables, "{'emb': ids}")
    shardings = {} if shardings is None else shardings
    check_by_pattern("shardings", shardings, "{'emb': sharding}")
    for sharding in shardings.values():
        if not isinstance(sharding, RowSharding):
            raise TypeError(
                f"shardings must have an optzoo.sharded.RowSharding each, got {sharding!r}"
            )
    ids_of = value_by_name("tables", tables, params)
    check_tables("tables", params, ids_of)
    rows_of = init_by_name(init, params)
    sharding_of = value_by_name("shardings", shardings, params)
    warn_of_zeros(state, ids_of, rows_of)
    for name, ids in ids_of.items():
        params, state = _reset(params, state, tx, name, _checked(ids), rows_of, sharding_of)
    return params, state


def _checked(ids: Any) -> Array:
    ids = integer_ids(ids, "tables: ids")
    if ids.ndim != 1:
        raise ValueError(f"tables: ids must have shape (n,), got {ids.shape}: use ids.reshape(-1)")
    return ids.astype(jnp.int64 if ids.dtype.itemsize == 8 else jnp.int32)


def _reset(
    params: Any,
    state: Any,
    tx: optax.GradientTransformation,
    name: str,
    ids: Array,
    rows_of: Mapping[str, RowsOf],
    sharding_of: Mapping[str, RowSharding],
) -> tuple[Any, Any]:
    """Parameters and state with some rows of one table anew."""
    xs, treedef = jax.tree.flatten(params, is_leaf=is_lines)
    number = names_of(params).index(name)
    x, sharding = xs[number], sharding_of.get(name)
    if sharding is None:
        check_whole(name, x, "sharding")
    else:
        check_stored(name, x, sharding)
    axes = row_axes(tx, params, state, {name: x.shape[0]})
    outside = x.shape[0] if sharding is None else sharding.num_rows
    ids = jnp.unique(in_range(ids, outside), size=len(ids), fill_value=outside)
    places = ids if sharding is None else sharding.places_of(ids)
    values = rows_for(name, x, ids, rows_of)
    g = SparseRows(places, values, x.shape[0], coalesced=True, lines=is_lines(x))
    put = lambda array: g.scatter(jnp.asarray(array), g.values)
    xs[number] = Lines(put(x.value), x.shape) if is_lines(x) else put(x)
    params = treedef.unflatten(xs)
    boxes = Boxes(params, none=False)

    # Nothing reads the other rows of the fresh slots, so a compiler does not make them.
    fresh = jax.tree.leaves(without_ages(tx.init(params)))
    arrays, structure = jax.tree.flatten(without_ages(state))
    columns = zip(arrays, fresh, axes, strict=True)
    new = [a if axis is None else g.scatter(jnp.asarray(a), g.gather(b)) for a, b, axis in columns]

    def as_of_now(node, before):
        [clock] = node.clock.values()
        lasts = boxes.slots(before.last)
        if not is_masked(lasts[number]):
            lasts[number] = g.scatter(lasts[number], jnp.full(ids.shape, clock.count))
        return node._replace(last=boxes.refilled(before.last, lasts))

    state = map_nodes(CaughtUpState, as_of_now, structure.unflatten(new), state)
    return params, forget_rows(state, {name: lambda of_cycle: jnp.isin(of_cycle, ids)})
