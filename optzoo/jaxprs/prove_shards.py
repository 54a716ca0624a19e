"""Verifies that an optimizer gives the same results for sharded and unsharded tables.

The update is traced, abstractly, with tables and row-sparse gradients whose numbers of rows are
primes that occur nowhere else, so that shapes show which arrays have rows.

In one round a device has all gradients of its rows. They may be used row by row, and in sums over
all shards. Values that a device computes from its own rows only, such as the norm of its shard,
must not be used otherwise.

A device merges rows with equal ids, of which other devices may have more. Operations of an
optimizer on rows before merging must therefore be linear, so that they have the same effect on the
sums.

In several rounds, tables and slots may only be gathered and scattered by ids, so that untouched
rows do not change; and gathered rows may only be used row by row, so that no result depends on
which rows arrive in a round.
"""

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from ..core.lines import param_tree
from ..core.marks import WRITES, marking
from ..core.optimizer import about_of
from ..core.rows import Shard, SparseRows, is_rows
from .equations import used_inputs
from .graph import Graph, Operation, Value, inlined, needed
from .primitives import CALLS, PLAIN_CALLS, Kind
from .prove_rows import NotRowWise, check_operation, primes, row_axes

_IN_ONE_ROUND = (
    "Give sharded_minimize capacity_factor=None, for one round with capacity for any ids, or use "
    "an optimizer that updates each touched row by itself, such as optzoo.lazy_adam, "
    "optzoo.caught_up(optzoo.adam(...)) or optzoo.on_rows(...)"
)
_BY_ROWS = (
    "Use an optimizer that treats each row by itself, such as optzoo.lazy_adam, row_wise_lamb or "
    "row_wise_lars. To clip, put optzoo.clip_by_global_norm or clip_by_norm before it, which "
    "include all shards; do not use optzoo.rows.densify or optzoo.rows.on_values"
)
_MERGED = "Put optzoo.rows.coalesce() before it, which merges rows on any number of devices"


class NotAlone(Exception):
    """An optimizer does not treat each row by itself, for a reason."""


class Trace(NamedTuple):
    """An update of abstract tables."""

    graph: Graph
    whole: dict[int, str]  # the names of tables by their numbers of rows
    touched: dict[int, str]  # the names of tables by the numbers of rows of their gradients
    moved: list[str]  # the tables of which all rows move
    of_tables: set[int]  # the outputs that are updates of tables
    sums: set[int]  # the tables, by their positions, whose ``squares`` are used
    ids: set[int]  # the inputs that are the ids of rows of sharded tables
    values: set[int]  # those that are the rows


def check_update(
    tx: optax.GradientTransformationExtraArgs,
    params: Any,
    tables: Mapping[int, str],
    extra_args: Mapping[str, Any],
    shards: Mapping[int, Shard],
    more_rows: Set[int],
    merged: Set[int],
) -> set[int]:
    """The tables of which ``tx`` needs the sum of squares before the first of several rounds.

    The arguments are those of :func:`trace_update`, and two sets of tables: ``more_rows``, whose
    updates may have more rows than the gradient, which move in the first round only; and
    ``merged``, whose rows with equal ids are merged before the update.

    Raises:
        ValueError: if ``tx`` mixes the rows of a table in a way that is wrong for shards, or, with
            several rounds, does not update each touched row by itself.
    """
    if about_of(tx).row_wise:
        return set()

    def trace(shards, listed=False):
        some = {i: tables[i] for i in shards}
        return trace_update(tx, params, some, extra_args, shards, listed=listed)

    in_one_round = {i: of._replace(is_round=False) for i, of in shards.items()}
    of_merged = {i: of for i, of in in_one_round.items() if i in merged}
    for check, some, fix in (
        (_check_shards, in_one_round, _BY_ROWS),
        (_check_listed, of_merged, _MERGED),
    ):
        try:
            if some:
                check(trace(some, listed=some is of_merged))
        except NotAlone as error:
            raise ValueError(
                f"the optimizer cannot update a table that is sharded by rows: {error}. {fix}"
            ) from None
    if not any(of.is_round for of in shards.values()):
        return set()
    try:
        in_rounds = trace(shards)
        _check_alone(in_rounds, {tables[i] for i in more_rows})
    except NotAlone as error:
        raise ValueError(
            f"the optimizer cannot update rows in several rounds: {error}. {_IN_ONE_ROUND}"
        ) from None
    return in_rounds.sums


def prove_alone(
    tx: optax.GradientTransformationExtraArgs,
    params: Any,
    tables: Mapping[int, str],
    extra_args: Mapping[str, Any],
) -> None:
    """Raises :class:`NotAlone` unless ``tx`` updates each touched row by itself, and no other.

    The arguments are those of :func:`trace_update`.
    """
    _check_alone(trace_update(tx, params, tables, extra_args, {}))


def prove_in_cache(
    tx: optax.GradientTransformationExtraArgs,
    params: Any,
    tables: Mapping[int, str],
    extra_args: Mapping[str, Any],
    more_rows: Set[str],
) -> None:
    """Raises :class:`NotAlone` unless the updates of touched rows depend only on these rows.

    In this case a table with a subset of rows that includes all touched ones has the same updates.
    Unlike in :func:`prove_alone`, a row may depend on all touched rows, such as on their norm. The
    arguments are those of :func:`trace_update`, and the names of the tables whose updates may have
    more rows than the gradient.
    """
    if about_of(tx).row_wise:
        return
    programs = []
    for more in (0, 1):
        trace = trace_update(tx, params, tables, extra_args, {}, more=more)
        _check_alone(trace, more_rows, sums=True)
        programs.append(list(_written(trace)))
    # How many rows rest and are swept depends on all of them.
    if not more_rows and programs[0] != programs[1]:
        raise NotAlone("its update depends on the number of rows of a table")


def _written(trace: Trace) -> Iterator[Any]:
    """The operations of an update, with their constants; operations on rows by their names."""
    is_int = lambda a: np.issubdtype(np.result_type(a), np.integer)
    known = lambda a: trace.whole.get(int(a), a) if is_int(a) else a
    for op, *_ in trace.graph.walk():
        numbers = [v.literal for v in op.ins if v.literal is not None and not v.shape]
        yield op.name, [str(known(a)) for a in numbers]


def trace_update(
    tx: optax.GradientTransformationExtraArgs,
    params: Any,
    tables: Mapping[int, str],
    extra_args: Mapping[str, Any],
    shards: Mapping[int, Shard],
    *,
    listed: bool = False,
    more: int = 0,
) -> Trace:
    """Traces an update with tables of other numbers of rows.

    Args:
        tx: the optimizer.
        params: arrays or tracers, for their shapes.
        tables: the names of the tables, by their indices among the leaves of ``params``.
        extra_args: extra args of the update.
        shards: the shards of tables that are sharded, inside of ``shard_map`` over their axes.
        listed: whether ids may repeat; each operation on rows is then one operation of the graph.
        more: how many numbers of rows to skip.
    """
    leaves, treedef = param_tree.leaves(params), jax.tree.structure(params)
    taken = {d for x in leaves for d in x.shape}
    # As many rows as there are: an optimizer may choose by size.
    start = max([11, *(leaves[i].shape[0] for i in tables)])
    sizes = (p for p in primes(start) if p not in taken)
    of_gradient = {i: next(sizes) for i in tables}
    of_table = {i: next(sizes) for i in more * [*tables] + [*tables]}
    struct = lambda x, n=None: jax.ShapeDtypeStruct(
        x.shape if n is None else (n, *x.shape[1:]), x.dtype
    )
    params = treedef.unflatten([struct(x, of_table.get(i)) for i, x in enumerate(leaves)])
    ids = {i: jax.ShapeDtypeStruct((n,), "int32") for i, n in of_gradient.items()}
    values = [struct(x, of_gradient.get(i)) for i, x in enumerate(leaves)]
    squares = {i: jax.ShapeDtypeStruct((), "float32") for i, of in shards.items() if of.is_round}

    def update(squares, ids, values, state, params):
        def rows(i, v):
            more = {"shard": shards.get(i), "squares": squares.get(i)}
            return SparseRows(ids[i], v, of_table[i], coalesced=not listed, **more)

        gs = [rows(i, v) if i in ids else v for i, v in enumerate(values)]
        return tx.update(treedef.unflatten(gs), state, params, **extra_args)

    state = jax.eval_shape(tx.init, params)
    trace = jax.make_jaxpr(update, return_shape=True)
    with marking() if listed else contextlib.nullcontext():
        jaxpr, (updates, _) = trace(squares, ids, values, state, params)
    us = treedef.flatten_up_to(updates)
    ends = list(itertools.accumulate(len(jax.tree.leaves(u)) for u in us))
    graph = inlined(jaxpr.jaxpr, jaxpr.consts, PLAIN_CALLS if listed else ())
    first = len(squares) + len(ids)
    return Trace(
        Graph(graph.inputs, needed(graph.operations, graph.results), graph.results),
        {n: tables[i] for i, n in of_table.items()},
        {n: tables[i] for i, n in of_gradient.items()},
        [tables[i] for i in tables if not is_rows(us[i])],
        {k for i in tables for k in range(ends[i] - len(jax.tree.leaves(us[i])), ends[i])},
        {i for i, used in zip(squares, used_inputs(jaxpr.jaxpr), strict=False) if used},
        {len(squares) + k for k, i in enumerate(ids) if i in shards},
        {first + i for i in shards},
    )


def _check_alone(trace: Trace, more_rows: Set[str] = frozenset(), *, sums: bool = False) -> None:
    """Raises :class:`NotAlone` unless each touched row is updated by itself, and no other.

    With ``sums``, rows may depend on a sum over the touched rows.
    """
    if trace.moved:
        raise NotAlone(f"it moves all rows of table '{trace.moved[0]}'")
    for op, top, *_ in trace.graph.walk():
        if op.kind in CALLS:
            continue
        touched = {trace.touched[n] for v in op.ins for n in row_axes(v, trace.touched)}
        if op.name == "concatenate" and touched and touched <= more_rows:
            continue  # what it is used for is known from one round
        sizes = [size for v in (*op.ins, *op.outs) for size in row_axes(v, trace.whole)]
        if sums and not sizes and op.name in _SUMS:
            continue
        if not sizes:
            _check_rows(op, top, trace.touched)
        elif not _is_row_access(op):
            raise NotAlone(
                f"`{op.name}` may use all rows of table '{trace.whole[sizes[0]]}' ({top.line})"
            )


def _check_shards(trace: Trace) -> None:
    """Raises :class:`NotAlone` if a value other than rows depends on the rows of one shard."""
    names = trace.whole | trace.touched
    has_rows = lambda v: bool(row_axes(v, names))

    def is_mine(op: Operation, given: list[bool], top: Operation) -> Sequence[bool]:
        """Which results are computed from the rows of one shard, without being rows."""
        if op.kind in CALLS:
            if op.turns in names:
                raise NotAlone(
                    f"`{op.name}` reduces or iterates over the rows of a table ({top.line})"
                )
            if any(given):
                raise NotAlone(_words(op, top))
            return given
        if not any(map(has_rows, op.outs)):
            mine = any(given) or any(map(has_rows, op.ins))
            return [mine and op.kind is not Kind.COLLECTIVE] * len(op.outs)
        if op.kind is Kind.COLLECTIVE:
            raise NotAlone(f"`{op.name}` mixes the rows of several shards ({top.line})")
        if not _is_row_access(op):
            if any(given):
                raise NotAlone(_words(op, top))
            if op.kind is not Kind.MAKE:
                _check_rows(op, top, names)
        return [False] * len(op.outs)

    results = trace.graph.spread([False] * len(trace.graph.inputs), is_mine)
    if any(found for k, found in enumerate(results) if k not in trace.of_tables):
        raise NotAlone("an update or a part of the state depends on the rows of one shard only")


# The order of rows does not matter to them; they lose the axis, or another one.
_SUMS = {"reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_sum"}
_MERGES = {"rows_merge", "rows_merge_in_place"}
_ADDS = {"rows_add", "scatter-add", "scatter_add"}  # to the first operand; rows are the third
_KEEPS = {Kind.SAME, Kind.MOVE}
_LINEAR = {"neg", "convert_element_type", "reduce_precision", "concatenate"}
_OF_IDS = {*_LINEAR, "rows_protect", "rows_plain"}


def _check_listed(trace: Trace) -> None:
    """Raises :class:`NotAlone` if merging rows with equal ids before the update changes results.

    Until they are merged or added to an array, rows may only be used linearly, and values with an
    element for each row must not be reduced.
    """

    def of_rows(op: Operation, given: list[bool], top: Operation) -> Sequence[bool]:
        """Which results are linear in unmerged rows."""
        if op.name in _MERGES or (op.name in _ADDS and not any(given[:2])) or not any(given):
            return [False] * len(op.outs)
        is_linear = (
            op.kind in _KEEPS
            or op.name in _LINEAR
            or (op.name in ("add", "add_any", "sub") and all(given))
            or (op.name == "mul" and not all(given))
            or (op.name == "div" and not given[1])
            or (
                op.name == "select_n"
                and not given[0]
                and all(map(_is_zero_or, op.ins[1:], given[1:]))
            )
        )
        if not is_linear:
            raise NotAlone(_as_listed(op, top))
        return [True] * len(op.outs)

    def of_ids(op: Operation, given: list[bool], top: Operation) -> Sequence[bool]:
        """Which results have an element for each unmerged row."""
        if op.name in _MERGES or op.name in WRITES - _ADDS or not any(given):
            return [False] * len(op.outs)
        if op.kind is Kind.SCATTER or op.name in _ADDS:
            if given[0] or not given[2]:
                raise NotAlone(_as_listed(op, top))
            return [False] * len(op.outs)
        keeps = op.kind in {*_KEEPS, Kind.ELEMENTWISE} or op.name in _OF_IDS
        gathers = (op.kind is Kind.GATHER or op.name == "rows_gather") and not given[0]
        if not keeps and not gathers:
            raise NotAlone(_as_listed(op, top))
        return [True] * len(op.outs)

    for check, listed in ((of_rows, trace.values), (of_ids, trace.values | trace.ids)):
        inputs = [k in listed for k in range(len(trace.graph.inputs))]
        results = trace.graph.spread(inputs, check)
        if any(found for k, found in enumerate(results) if k not in trace.of_tables):
            raise NotAlone("an update or a part of the state depends on unmerged rows")


def _is_zero_or(value: Value, is_listed: bool) -> bool:
    """Whether a value is known to be linear in rows, or zero."""
    while (maker := value.maker) and (maker.kind in _KEEPS or maker.name in _LINEAR):
        value = maker.ins[0]
    return is_listed or (value.literal is not None and not np.any(value.literal))


def _as_listed(op: Operation, top: Operation) -> str:
    at = f" ({top.line})" if top.line else ""  # none of what is inside of a function of JAX
    return (
        f"`{op.name}` uses the unmerged rows of a gradient{at}, but each device merges rows with "
        "equal ids first"
    )


def _words(op: Operation, top: Operation) -> str:
    return (
        f"`{op.name}` uses a value computed from the rows of one shard only, such as a norm "
        f"({top.line})"
    )


def _check_rows(op: Operation, top: Operation, names: dict[int, str]) -> None:
    try:
        check_operation(op, names, top.line)
    except NotRowWise as error:
        raise NotAlone(error.reason) from None


def _is_row_access(op: Operation) -> bool:
    """Whether an operation gathers or scatters whole rows by a vector of ids."""
    if op.kind is Kind.GATHER:
        numbers = op.params["dimension_numbers"]
        return (numbers.collapsed_slice_dims, numbers.start_index_map) == ((0,), (0,))
    if op.kind is Kind.SCATTER:
        numbers = op.params["dimension_numbers"]
        inserted, to = numbers.inserted_window_dims, numbers.scatter_dims_to_operand_dims
        return (inserted, to) == ((0,), (0,))
    return False
