"""Rows of tables that one native loop reads, computes and writes."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from ..core.marks import WRITES
from ..jaxprs.graph import Graph, Operation, Value, made_of
from .elementwise import DTYPES
from .groups import Group, Unsupported, each, is_known, splits

_MERGES = {"rows_merge", "rows_merge_in_place"}  # the marks of what gives ids and sums
DISTINCT = {*_MERGES, "rows_distinct"}  # of what gives ids of which no two are equal


class Part(NamedTuple):
    """New elements of rows, and where they are in the rows of an array."""

    array: Value  # a table, or a result that has a row for each id
    value: Value
    adds: bool
    row: tuple[int, ...]  # the shape of what a row gets
    start: int = 0  # in the last axis of the array
    first: int = 0  # and in that of the value


@dataclasses.dataclass(eq=False)
class RowsGroup(Group):
    """Rows of some tables that share their ids: read, computed and written one after the other.

    It changes rows of tables (``writes``), gives a row for each id (``reads``), or both: then those
    of ids out of range are zeros. The inputs are the ids, the gradients if rows of equal ids are to
    be merged, the tables, other arrays, those of which rows take entries, and scalars, in this
    order.
    """

    ids: Value
    merged: Value | None  # the gradients once they are merged, if the group merges them
    tables: list[Value]
    streams: list[Value]
    lists: list[Value]  # of which each row takes the entry whose number it has computed
    scalars: list[Value]
    writes: list[Operation]
    reads: list[Value]
    lanes: tuple[int, int] | None  # the number of groups of elements in a row, and their length

    @property
    def parts(self) -> list[Part]:
        """What is written."""
        return _parts(self.writes, self.reads, self.lanes)

    @property
    def repeats(self) -> bool:
        """Whether rows of equal ids may be written: XLA has not merged them."""
        return bool(self.writes) and (self.merged is not None or not _are_distinct(self.ids))


def _are_distinct(ids: Value) -> bool:
    return ids.maker is not None and ids.maker.name in DISTINCT


def find_rows(
    program: Graph, tables: Collection[Value], report: Callable[[Value, str], None]
) -> list[RowsGroup]:
    """The groups of rows.

    Args:
        program: the step.
        tables: the arrays of the parameters and the state.
        report: gets the next values of tables whose rows are in no group, with the reason.
    """
    by_ids: dict[Value, list[Operation]] = {}
    for op in program.operations:
        if op.name in WRITES and op.ins[0] in tables:
            by_ids.setdefault(op.ins[1], []).append(op)
    found, readers, reads = [], program.readers(), _results_of_rows(program)
    for ids in dict.fromkeys((*by_ids, *reads)):
        writes = by_ids.get(ids, [])
        try:
            found.append(_rows(program, readers, ids, writes, reads.get(ids, [])))
        except Unsupported as error:
            for write in writes:
                report(write.outs[0], str(error))
    return found


def _results_of_rows(program: Graph) -> dict[Value, list[Value]]:
    """By ids the results that have a row for each of them, made of rows of these ids."""
    ids_of, found = dict[Value, set[Value]](), dict[Value, list[Value]]()
    for op in program.operations:
        ids = set[Value]().union(*(ids_of.get(v, ()) for v in op.ins))
        if op.name == "rows_gather" and not ids:
            ids = {op.ins[1]}
        ids_of.update(dict.fromkeys(op.outs, ids))
    is_row = lambda op: op is not None and (op.name == "rows_gather" or is_known(op))
    for v in dict.fromkeys(v for v in program.results if is_row(v.maker)):
        for ids in ids_of.get(v, ()):
            if len(ids_of[v]) == 1 and v.shape[:1] == ids.shape:
                found.setdefault(ids, []).append(v)
    return found


def _rows(
    program: Graph,
    readers: dict[Value, list[Operation]],
    ids: Value,
    writes: list[Operation],
    reads: list[Value],
) -> RowsGroup:
    merge = ids.maker if ids.maker is not None and ids.maker.name in _MERGES else None
    merged = None if merge is None else merge.outs[1]
    gathers = [op for op in program.operations if op.name == "rows_gather" and op.ins[1] is ids]
    of_rows = program.depending(op.outs[0] for op in gathers)
    part = _Slice(ids, merged, of_rows)
    for value in (*(write.ins[2] for write in writes), *reads):
        part.visit(value)
    taken = {*part.operations}
    part.operations = [op for op in program.operations if op in taken]
    for write in writes:
        part.add(part.tables, write.ins[0])
    inside = {*part.operations, *writes}
    outside = lambda v: v in program.results or any(op not in inside for op in readers.get(v, ()))
    made = [v for op in part.operations for v in op.outs if v in of_rows and v not in reads]
    reads = [*reads, *filter(outside, made)]
    _check_tables(part, writes, reads)
    if of_rows.intersection((*part.streams, *part.scalars)):
        raise Unsupported("an operation on its rows is not known to the native engine")
    is_sum = len(writes) == 1 and writes[0].name == "rows_add" and not part.gathers
    may_repeat = is_sum or all(write.name == "rows_scatter_equal" for write in writes)
    if writes and not (_are_distinct(ids) or (may_repeat and not reads)):
        raise Unsupported("its rows may repeat, and are not merged")
    _check_roles(part, reads)
    first, is_used = [ids], merge is not None and any(map(outside, merge.outs))
    if merge is not None and not (is_used or reads) and _merges_here(part, merge):
        part.streams = [v for v in part.streams if v is not merged]
        inside.add(merge)
        first = merge.ins
    ins = [*first, *part.tables, *part.streams, *part.lists, *part.scalars]
    outs = [*(write.outs[0] for write in writes), *reads]
    group = [op for op in program.operations if op in inside]
    start = len(first)
    aliases = {start + part.tables.index(write.ins[0]): k for k, write in enumerate(writes)}
    return RowsGroup(
        ins, outs, group, aliases, ids, merged if merge in inside else None, part.tables,
        part.streams, part.lists, part.scalars, writes, reads, _lanes(part.operations),
    )  # fmt: skip


def _check_roles(part: "_Slice", reads: Sequence[Value]) -> None:
    """Each array has one role, and so one pointer: a row of a table is written while others run."""
    arrays = [part.ids, *part.tables, *part.streams, *part.lists, *reads]
    if len({*arrays}) < len(arrays):
        raise Unsupported("an array is read by the rows of its ids, and in another way, too")


def _merges_here(part: "_Slice", merge: Operation) -> bool:
    """Whether a group can merge the gradients itself."""
    others = [v for v in part.streams if v is not part.merged]
    # A sum of the native merging is at the first position of its id.
    is_same = merge.name == "rows_merge_in_place" or all(
        v.shape[:1] != part.ids.shape for v in others
    )
    return len(others) < len(part.streams) and is_same


class _Slice:
    """What rows are made of.

    Args:
        ids: of the rows.
        merged: the gradients, if they are merged.
        of_rows: all that depends on rows of tables that the ids name.
    """

    def __init__(self, ids: Value, merged: Value | None, of_rows: Collection[Value]):
        self.ids, self.merged, self.of_rows = ids, merged, of_rows
        self.tables: list[Value] = []
        self.streams: list[Value] = []
        self.lists: list[Value] = []
        self.scalars: list[Value] = []
        self.operations: list[Operation] = []
        self.gathers: list[Operation] = []
        self._seen: set[Value] = set()

    @staticmethod
    def add(values: list[Value], value: Value) -> None:
        if value not in values:
            values.append(value)

    def visit(self, value: Value) -> None:
        """Adds all that a value is made of."""
        for _ in made_of([value], self._enter):
            pass

    def _enter(self, v: Value) -> list[Value]:
        """Adds a value; gives what it is made of, and is not added yet."""
        if v in self._seen or v is self.ids:
            return []
        self._seen.add(v)
        if not v.shape:
            self.scalars += [] if v.literal is not None else [v]
        elif v.literal is not None or v.maker is None or v is self.merged:
            self.streams.append(v)
        elif v.maker.name == "rows_gather":
            return self._gather(v.maker)
        elif is_known(v.maker):
            self._take(v.maker)
            return v.maker.ins
        else:
            self.streams.append(v)
        return []

    def _gather(self, op: Operation) -> list[Value]:
        """Adds a gather; gives what it is made of, and is not added yet."""
        table, ids = op.ins
        if ids is self.ids:
            self._take(op)
            self.gathers.append(op)
            if _is_computed(table):
                return [table]
            self.add(self.tables, table)
        elif ids in self.of_rows and ids.shape == self.ids.shape and len(table.shape) < 3:
            self._take(op)
            self.add(self.lists, table)
            return [ids]
        else:
            self.streams.append(op.outs[0])
        return []

    def _take(self, op: Operation) -> None:
        if op not in self.operations:
            self.operations.append(op)


def _is_computed(table: Value) -> bool:
    """Whether each row of an array is computed from its number and scalars alone."""
    is_made = lambda v: v.maker is not None and v.literal is None and is_known(v.maker)
    follow = lambda v: v.maker.ins if v.shape and is_made(v) else ()
    return all(not v.shape or is_made(v) for v in made_of([table], follow))


def _check_tables(part: _Slice, writes: Sequence[Operation], reads: Sequence[Value]) -> None:
    targets = [write.ins[0] for write in writes]
    if len({*targets, *(write.outs[0] for write in writes)}) < 2 * len(writes):
        raise Unsupported("its rows are written twice")
    heights = {v.shape[:1] for v in (*part.tables, *(op.ins[0] for op in part.gathers))}
    if len(heights) != 1 or any(0 in t.shape for t in part.tables):
        raise Unsupported("its slots have other numbers of rows, or it has none")
    on_rows = [(w.ins[0], w.ins[2]) for w in writes] + [(g.ins[0], g.outs[0]) for g in part.gathers]
    if any(rows.shape != (*part.ids.shape, *table.shape[1:]) for table, rows in on_rows):
        raise Unsupported("its rows have other shapes than its ids and its tables")
    _check_first_axis(part)
    if any(v.shape[:1] != part.ids.shape for v in reads):
        raise Unsupported("a result on its rows is used elsewhere, too")
    if (lanes := _lanes(part.operations)) is not None:
        _check_lanes(part.operations, lanes)
    parts = _parts(writes, reads, lanes)
    if lanes is None:
        _check_slices(part, writes, parts)
    shapes = {p.row for p in parts}
    shapes = {shape for shape in shapes if math.prod(shape) > 1 and shape != _one_each(lanes)}
    if len(shapes) > 1:
        raise Unsupported("its slots have rows of several shapes")
    arrays = (*part.tables, *part.streams, *part.lists, *part.scalars, *reads)
    for v in (*arrays, *(w.ins[2] for w in writes)):
        if v.dtype not in DTYPES:
            raise Unsupported(f"the dtype {v.dtype} is not known to the native engine")
    if part.ids.dtype not in ("int32", "int64") or len(part.ids.shape) != 1:
        raise Unsupported(f"its ids have dtype {part.ids.dtype} and shape {part.ids.shape}")
    if min(heights)[0] >= 2**31:
        raise Unsupported("it has 2**31 rows or more")


def _check_first_axis(part: _Slice) -> None:
    """An axis of the number of ids is that of the rows, wherever it is the first one."""
    [many] = part.ids.shape
    of_rows = {op.outs[0] for op in part.gathers} | {v for v in part.streams if many in v.shape[:1]}
    for op in each(part.operations):
        if not of_rows.intersection(op.ins):
            continue
        of_rows.update(op.outs)
        if op.name == "broadcast_in_dim":
            [v] = op.ins
            moves = v.shape[:1] == (many,) and op.params["broadcast_dimensions"][0] != 0
        elif op.name in ("reshape", "squeeze", "expand_dims"):
            firsts = op.ins[0].shape[:1], op.outs[0].shape[:1]
            moves = (many,) in firsts and firsts[0] != firsts[1]
        else:
            continue
        if moves:
            raise Unsupported(f"`{op.name}` may mix its rows, of which there are {many}")


def _check_slices(part: _Slice, writes: Sequence[Operation], parts: Sequence[Part]) -> None:
    """Elements that change are read where they are written: none after another one is written."""
    targets = {write.ins[0] for write in writes if math.prod(write.ins[0].shape[1:]) > 1}
    changing = {op.outs[0] for op in part.gathers if op.ins[0] in targets}
    written = {(math.prod(p.row), p.start) for p in parts}
    for op in each(part.operations):
        if changing.intersection(op.ins):
            changing.update(op.outs)
        for v, start in _slices(op):
            width = math.prod(v.shape[1:])
            if v in changing and width > 1 and (width, start) not in written:
                raise Unsupported("elements of its rows change places")


def _slices(op: Operation) -> Iterable[tuple[Value, int]]:
    """Parts of the last axis, and where they begin."""
    if op.name == "slice":
        return [(op.outs[0], op.params["start_indices"][-1])]
    if op.name == "split":
        starts = itertools.accumulate(op.params["sizes"], initial=0)
        return zip(op.outs, starts, strict=False)
    return ()


def _parts(
    writes: Sequence[Operation], reads: Sequence[Value], lanes: tuple[int, int] | None
) -> list[Part]:
    """What is put into rows; of long rows their parts."""
    wholes = [(op.ins[0], op.ins[2], op.name == "rows_add") for op in writes]
    wholes += [(v, v, False) for v in reads]
    shapes = {array.shape[1:] for array, _, _ in wholes}
    shapes = {shape for shape in shapes if math.prod(shape) > 1 and shape != _one_each(lanes)}
    shortest, found = min(shapes, key=math.prod, default=()), []
    for array, value, adds in wholes:
        row, inner = array.shape[1:], value
        while inner.meaning is not None:
            inner = inner.meaning
        op = inner.maker
        if math.prod(row) <= math.prod(shortest):
            found.append(Part(array, value, adds, row))
        elif op is not None and op.name == "concatenate" and op.params["dimension"] == len(row):
            ends = itertools.accumulate(v.shape[-1] for v in op.ins)
            for v, end in zip(op.ins, ends, strict=True):
                found.append(Part(array, v, adds, v.shape[1:], end - v.shape[-1]))
        elif lanes is None and len(row) == len(shortest) == 1 and not row[0] % shortest[0]:
            starts = range(0, row[0], shortest[0])
            found += [Part(array, value, adds, shortest, start, start) for start in starts]
        else:
            found.append(Part(array, value, adds, row))
    return found


def _one_each(lanes: tuple[int, int] | None) -> tuple[int, ...]:
    """The shape of rows with one element for each group."""
    return () if lanes is None else lanes[:1]


def _lanes(operations: Iterable[Operation]) -> tuple[int, int] | None:
    """The groups of consecutive elements into which rows are split: how many, and how long."""
    for op in each(operations):
        split = splits(op)
        if split is not None:
            return split
    return None


def _check_lanes(operations: Iterable[Operation], lanes: tuple[int, int]) -> None:
    """All rows are split into the same groups."""
    number, length = lanes
    for op in each(operations):
        ins = [] if op.name in ("rows_gather", "slice", "split") else op.ins
        outs = [] if op.name in ("rows_gather", "concatenate") else op.outs
        for v in (*ins, *outs):
            row = v.shape[1:]
            is_plain = math.prod(row) == 1 or (len(row) == 1 and row[0] <= number * length)
            if not is_plain and row not in (lanes, (number, 1)):
                raise Unsupported("its rows are split into several kinds of groups")
