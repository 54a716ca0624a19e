"""Bags of ids: sums or means of their rows, in whole and in sharded tables."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from ..core.boxes import is_box
from ..core.checks import check_size
from ..core.lines import is_lines
from ..core.merge import kept, segment_sum
from ..core.meshes import automatically, spec_of
from ..core.numerics import is_real, upcast, wide_dtype
from ..core.paths import flatten_with_path, path_name
from ..core.row_ids import integer_ids
from ..jaxprs.lookup import bind_lookup
from ..sparse.lookup import check_range, lookup, table_of
from .exchange import exchange, first_positions, to_transport
from .lookup import check_shard
from .lookup import lookup as lookup_in_shards
from .row_sharding import RowSharding

Combiner = Literal["mean", "sum", "sqrtn"]
Pool = Literal["auto", "here", "owner"]


def lookup_sparse(
    table: Any,
    ids: Any,
    segment_ids: Any = None,
    num_segments: int | None = None,
    *,
    weights: Any = None,
    combiner: Combiner = "mean",
    sharding: Any = None,
    capacity_factor: float | None = None,
    transport: DTypeLike | None = None,
    pool: Pool = "auto",
) -> Any:
    r"""The pooled rows of bags of ids, as in ``tf.nn.embedding_lookup_sparse``.

    .. math::
        \text{sum: } \sum_i w_i e_i \qquad
        \text{mean: } \frac{\sum_i w_i e_i}{\sum_i w_i} \qquad
        \text{sqrtn: } \frac{\sum_i w_i e_i}{\sqrt{\sum_i w_i^2}}

    Bags are either the rows of ``ids``, of shape ``(num_bags, length)``, padded with the id
    ``num_rows``, or ragged: ``ids`` of shape ``(n,)``, with the bag of each id in ``segment_ids``.
    Padding is ignored. If your ids are padded with -1, replace it:
    ``ids = jnp.where(ids < 0, num_rows, ids)``. A bag without ids, or with a total weight of zero,
    gives zeros. Other ids out of range, including all negative ids, raise an error or give NaN, as
    in :func:`optzoo.lookup`.

    For ragged bags given by ``offsets``, as in torch, ``segment_ids`` are
    ``jnp.searchsorted(offsets, jnp.arange(n), side="right") - 1``.

    As in :func:`optzoo.lookup`, the gradient of the table is row-sparse. With ``sharding``, the
    table is sharded by rows, as in :func:`optzoo.sharded.lookup`; trees of tables, ids, segment ids
    and weights share the messages. On explicit mesh axes, pooled rows are divided like the first
    axis of ``ids``; those of ragged bags are not divided along their first axis.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> table = jnp.array([[1.0], [2.0], [4.0]])
        >>> optzoo.lookup_sparse(table, jnp.array([[0, 2], [1, 3]]), combiner="sum").tolist()
        [[5.0], [2.0]]

    Args:
        table: as for :func:`optzoo.lookup`, or the shard of this device; or a tree.
        ids: integers of shape ``(num_bags, length)`` or ``(n,)``.
        segment_ids: the bag of each of ``n`` ids, in ``[0, num_segments)``; others are ignored.
        num_segments: the number of ragged bags.
        weights: like ``ids``; None for ones.
        combiner: ``"mean"``, ``"sum"`` or ``"sqrtn"``.
        sharding: a :class:`optzoo.sharded.RowSharding`, a tree of them, or None for whole tables.
        capacity_factor: as in :func:`optzoo.sharded.lookup`.
        transport: as in :func:`optzoo.sharded.lookup`.
        pool: where rows of sharded tables are summed: ``"here"``, on the device of the bags, which
            receives each distinct row; at the ``"owner"`` of the rows, which sends a sum for each
            bag; or ``"auto"``, whichever sends less.

    Returns:
        Arrays of shape ``(num_bags, *row_shape)``; or a tree of them.

    Raises:
        TypeError: as :func:`optzoo.lookup`; if weights are not real numbers; or if the weights or
            ``combiner`` would round the pooled rows of an integer table.
        ValueError: as :func:`optzoo.lookup`; if an argument is out of range, or if only one of
            ``segment_ids`` and ``num_segments`` is given.

    References:
        ``tf.nn.embedding_lookup_sparse`` of TensorFlow 1, without ``max_norm``.

    Differences from the original:
        If the weights of a bag sum to zero, the original divides by zero.
    """
    _check_options(combiner, pool)
    if table is None:
        raise TypeError("table must be an array or a tree of arrays, got None")
    paths, treedef = flatten_with_path(table, is_leaf=lambda x: is_lines(x) or is_box(x))
    names, tables = [path_name(path) for path, _ in paths], [x for _, x in paths]

    def columns(**arguments):
        [(name, tree)] = arguments.items()
        if tree is None or (name == "sharding" and isinstance(tree, RowSharding)):
            return [tree] * len(tables)
        try:
            return treedef.flatten_up_to(tree)
        except ValueError as error:
            raise ValueError(
                f"{name} must be a tree like table, {treedef}, got a {type(tree).__name__}"
            ) from error

    shardings = columns(sharding=sharding)
    bags = [
        _make_bags(name, _num_rows(x) if s is None else s.num_rows, i, segments, w, num_segments)
        for name, x, s, i, segments, w in zip(
            names,
            tables,
            shardings,
            columns(ids=ids),
            columns(segment_ids=segment_ids),
            columns(weights=weights),
            strict=True,
        )
    ]
    for name, x, b in zip(names, tables, bags, strict=True):
        _check_integers(name, x, b.weights, combiner)
    at_owner = [
        s is not None and _pools_at_owner(pool, x, s, b, capacity_factor, transport)
        for x, s, b in zip(tables, shardings, bags, strict=True)
    ]
    pick = lambda items, where: [x for x, w in zip(items, where, strict=True) if w]
    here = [s is not None and not w for s, w in zip(shardings, at_owner, strict=True)]
    options = {"capacity_factor": capacity_factor, "transport": transport}
    found = iter(
        lookup_in_shards(
            pick(tables, here), [b.ids for b in pick(bags, here)], pick(shardings, here), **options
        )
    )
    sums = iter(
        _sums_of_owners(
            pick(tables, at_owner), pick(bags, at_owner), pick(shardings, at_owner), **options
        )
    )
    out = []
    for x, s, b, owner in zip(tables, shardings, bags, at_owner, strict=True):
        if owner:
            out.append(_divide(next(sums), b, combiner).astype(x.dtype))
        else:
            out.append(_pooled(lookup(x, b.ids) if s is None else next(found), b, combiner))
    return treedef.unflatten(out)


def _num_rows(table: Any) -> int:
    return (table if is_lines(table) else table_of(table)).shape[0]


def _check_options(combiner: Any, pool: Any) -> None:
    for name, value, kinds in (("combiner", combiner, Combiner), ("pool", pool, Pool)):
        if value not in get_args(kinds):
            raise ValueError(f"{name} must be one of {list(get_args(kinds))}, got {value!r}")


class _Bags(NamedTuple):
    """Ragged bags."""

    ids: Array  # (n,)
    segments: Array  # (n,)
    weights: Array | None  # (n,)
    is_real: Array  # (n,), False for padding
    number: int
    axes: Any  # the explicit mesh axes over which the bags are divided


def _make_bags(
    name: str, num_rows: int, ids: Any, segments: Any, weights: Any, number: int | None
) -> _Bags:
    given, axes, of = ids, None, f" of table '{name}'" if name else ""
    ids = integer_ids(ids, f"ids{of}")
    check_range(given, num_rows)
    if (segments is None) != (number is None):
        raise ValueError(f"segment_ids and num_segments{of} must be given together, or neither")
    if segments is None or number is None:
        if ids.ndim != 2:
            raise ValueError(
                f"ids{of} must have the shape (num_bags, length), got {ids.shape}: reshape them, "
                "or give segment_ids and num_segments"
            )
        number, axes = ids.shape[0], spec_of(ids)[0]
        segments = jnp.repeat(jnp.arange(number, dtype=jnp.int32), ids.shape[1])
    else:
        check_size(1, num_segments=number)
        segments = integer_ids(segments, f"segment_ids{of}")
        if ids.ndim != 1 or segments.shape != ids.shape:
            raise ValueError(
                f"ids and segment_ids{of} must be vectors of one length, got shapes {ids.shape} "
                f"and {segments.shape}"
            )
        segments = kept(segments, number)
    if weights is not None:
        weights = _as_weights(f"weights{of}", weights)
        if weights.shape != ids.shape:
            raise ValueError(
                f"weights{of} must have the shape of the ids, {ids.shape}, got {weights.shape}"
            )
        weights = _flat(weights)
    flat = _flat(ids)
    if not flat.size:  # one that is padding, of no bag
        one = lambda x, value: jnp.pad(x, (0, 1), constant_values=value)
        flat, segments = one(flat, num_rows), one(segments, number)
        weights = None if weights is None else one(weights, 0)
    return _Bags(flat, segments, weights, flat != num_rows, number, axes)


def _flat(x: Array) -> Array:
    """An array as a vector, divided over explicit mesh axes like its first axis."""
    return automatically(jnp.ravel, lambda _, x: PartitionSpec(spec_of(x)[0]))(x)


def _check_integers(name: str, table: Any, weights: Any, combiner: str) -> None:
    """Raises ``TypeError`` if the pooled rows of an integer table would be rounded."""
    dtype = jnp.result_type(table)
    if not jnp.issubdtype(dtype, jnp.integer):
        return
    of = f", '{name}'" if name else ""
    if combiner != "sum":
        raise TypeError(f"combiner must be 'sum' for a table of {dtype}{of}, got {combiner!r}")
    if weights is not None and jnp.issubdtype(weights.dtype, jnp.floating):
        raise TypeError(
            f"weights must be integers for a table of {dtype}{of}, got {weights.dtype}: convert "
            "the table to floating point"
        )


def _as_weights(name: str, weights: Any) -> Array:
    must = f"{name} must be real numbers, an array or a nested list of equal lengths"
    try:
        weights = jnp.asarray(weights)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{must}, got a {type(weights).__name__}") from error
    if not is_real(weights) and weights.dtype != jnp.bool_:
        raise TypeError(f"{must}, got dtype {weights.dtype}")
    return weights


def _pools_at_owner(
    pool: Pool,
    table: Any,
    s: RowSharding,
    bags: _Bags,
    capacity_factor: float | None,
    transport: DTypeLike | None,
) -> bool:
    if pool != "auto":
        return pool == "owner"
    # Bytes that are sent to and from each owner: rows, or sums of them, and their gradients; ids,
    # bags and weights.
    width, number = math.prod(table.shape[1:]), bags.ids.size
    distinct = s.capacity(number, capacity_factor)
    capacity = s.capacity(number, capacity_factor, repeated=True)
    of_row, of_sum = (jnp.dtype(transport or d).itemsize for d in (table.dtype, wide_dtype(table)))
    with_owner = 2 * bags.number * width * of_sum + (8 if bags.weights is None else 16) * capacity
    return s.num_shards > 1 and with_owner < (2 * width * of_row + 4) * distinct


def _times(rows: Array, weights: Array | None) -> Array:
    """Each row times its weight, in the dtype of the rows."""
    if weights is None:
        return rows
    return rows * weights.astype(rows.dtype).reshape(-1, *(1,) * (rows.ndim - 1))


def _pooled(rows: Array, bags: _Bags, combiner: Combiner) -> Array:
    """The pooled rows of the ids of some bags."""

    def pool(rows, segments, weights, is_real):
        b = bags._replace(segments=segments, weights=weights, is_real=is_real)
        total = _total(_times(upcast(rows), weights), b)
        return _divide(total, b, combiner).astype(rows.dtype)

    specs = lambda _, rows, *others: PartitionSpec(bags.axes, *spec_of(rows)[1:])
    return automatically(pool, specs)(rows, bags.segments, bags.weights, bags.is_real)


def _total(x: Array, bags: _Bags) -> Array:
    """The sum of each bag."""
    return segment_sum(x, bags.segments, bags.number)


def _divide(total: Array, bags: _Bags, combiner: Combiner) -> Array:
    if combiner == "sum":
        return total
    w = jnp.where(bags.is_real, 1.0 if bags.weights is None else bags.weights, 0)
    size = _total(w if combiner == "mean" else w * w, bags)
    is_empty = size == 0
    size = jnp.where(is_empty, 1, size)
    size = size if combiner == "mean" else jnp.sqrt(size)
    wide = (-1, *(1,) * (total.ndim - 1))
    return jnp.where(is_empty.reshape(wide), 0, total / size.astype(total.dtype).reshape(wide))


def _sums_of_owners(
    tables: list[Array],
    bags: list[_Bags],
    shardings: list[RowSharding],
    *,
    capacity_factor: float | None,
    transport: DTypeLike | None,
) -> list[Array]:
    """The sums of the bags, each of which adds the partial sums of the owners.

    Bags with an id that is out of range, or exceeds the capacity of a message, are NaN.
    """
    for table, s in zip(tables, shardings, strict=True):
        check_shard("", table, s)
    asked = [
        _ask(b, s, s.capacity(b.ids.size, capacity_factor, repeated=True))
        for b, s in zip(bags, shardings, strict=True)
    ]
    local = exchange([a.local for a in asked], shardings)
    segments = exchange([a.segments for a in asked], shardings)
    weighted = [
        (a.weights, s) for a, s in zip(asked, shardings, strict=True) if a.weights is not None
    ]
    weights = iter(exchange(*map(list, zip(*weighted, strict=True))) if weighted else [])
    parts = []
    for table, b, s, i, segment in zip(tables, bags, shardings, local, segments, strict=True):
        w = None if b.weights is None else next(weights).reshape(-1)
        rows = _times(upcast(bind_lookup(table, i.reshape(-1), shard=s.shard)), w)
        to = (jnp.arange(s.num_shards, dtype=segment.dtype)[:, None] * b.number + segment).reshape(
            -1
        )
        sums = segment_sum(rows, to, s.num_shards * b.number)
        sums = sums.reshape(s.num_shards, b.number, *rows.shape[1:])
        parts.append(to_transport(sums, transport))
    arrived = exchange(parts, shardings)
    out = []
    for table, b, a, sums in zip(tables, bags, asked, arrived, strict=True):
        total = jnp.sum(sums.astype(wide_dtype(table)), 0)
        is_bad = jax.ops.segment_max(a.is_lost.astype(jnp.int32), b.segments, b.number) > 0
        out.append(jnp.where(is_bad.reshape(-1, *(1,) * (total.ndim - 1)), jnp.nan, total))
    return out


class _Asked(NamedTuple):
    """The requests to each owner, of shapes ``(num_shards, capacity)``."""

    local: Array
    segments: Array
    weights: Array | None
    is_lost: Array  # for each id: out of range, or without room


def _ask(bags: _Bags, s: RowSharding, capacity: int) -> _Asked:
    places = s.places_of(bags.ids)
    is_inside = (bags.segments >= 0) & (bags.segments < bags.number)
    places = jnp.where(is_inside, places, s.stored_rows)
    order = jnp.argsort(places)
    in_order = places[order]
    bounds = jnp.arange(s.num_shards + 1, dtype=places.dtype) * s.rows_per_shard
    starts = first_positions(in_order, bounds)
    size = places.shape[0]
    at = starts[:-1, None] + jnp.arange(capacity, dtype=jnp.int32)[None]
    is_real = at < starts[1:, None]
    of = order[jnp.minimum(at, size - 1)]
    owner = jnp.arange(s.num_shards, dtype=places.dtype)[:, None]
    local = jnp.where(is_real, places[of] - owner * s.rows_per_shard, s.rows_per_shard)
    nth = jnp.arange(size, dtype=jnp.int32)
    nth = (
        nth - starts[jnp.minimum(in_order // s.rows_per_shard, s.num_shards - 1).astype(jnp.int32)]
    )
    has_room = jnp.zeros(size, bool).at[order].set(nth < capacity)
    return _Asked(
        local.astype(jnp.int32),
        bags.segments[of].astype(jnp.int32),
        None if bags.weights is None else bags.weights[of],
        (places > s.stored_rows) | ((places < s.stored_rows) & ~has_room),
    )
