"""Resets rows of tables, together with their slots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from ..core.boxes import Boxes
from ..core.checks import check_transformation
from ..core.lines import Lines, is_lines, param_tree
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
    """Resets some rows of tables, and their slots.

    Use it for a row that is assigned to another id (:class:`optzoo.growing.Vocabulary`): nothing
    learned for the previous id remains. The row is initialized like a new one of
    :func:`optzoo.growing.resize_table`; all other rows keep their values. With
    :func:`optzoo.caught_up` the row is current. Gradients that :func:`optzoo.accumulate` has
    collected for it are dropped.

    In a compiled function whose parameters and state are donated, the cost scales with the number
    of ids. Each number of ids compiles another program: pad ids with the number of rows, which is
    ignored.

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
        state: the state of ``tx`` for them, without a replica axis.
        tables: a dict from patterns of names (:func:`optzoo.param_groups`) to ids of rows, integers
            of shape ``(n,)``. Ids may repeat; those out of range are ignored.
        tx: the transformation, which initializes the slots of new rows.
        init: as in :func:`optzoo.growing.resize_table`. For ids that are ignored, it gets the
            number of rows, or more.
        shardings: a dict from patterns to the shardings of tables that are sharded by rows. In a
            compiled function missing shardings are not detected.

    Warns:
        InitialValueWarning: as in :func:`optzoo.growing.resize_table`.

    Raises:
        TypeError: if ``tables`` or ``shardings`` is not a dict, if ids are not integers, or if
            ``tx`` is not a transformation; if the state is an ``nnx.State`` or ``nnx.Optimizer``.
        StateError: if the state is not a state of ``tx`` for these parameters.
        ValueError: if ids are not of shape ``(n,)``; and as in :func:`optzoo.growing.resize_table`.

    Returns:
        The new parameters and the new state. They share unchanged arrays with the arguments: a step
        that donates the new ones deletes these arrays of the old ones, too.
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
    """The parameters and the state with some rows of one table reset."""
    xs, treedef = param_tree.flatten(params)
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
