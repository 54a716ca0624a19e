"""Finds the rows of tables that one native loop can read, compute and write."""

from collections.abc import Callable, Collection

from ..core.marks import WRITES
from ..jaxprs.graph import Graph, Operation, Value, made_of
from .checker import check
from .groups import Unsupported, each, is_known, unknown
from .rows_groups import MERGES, RowsGroup, are_distinct, lanes_of


def find_rows(
    program: Graph, tables: Collection[Value], report: Callable[[Value, Unsupported], None]
) -> list[RowsGroup]:
    """The groups of rows.

    Args:
        program: the step.
        tables: the arrays of the parameters and the state.
        report: called with the next values of tables whose rows are in no group, and the reason.
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
                report(write.outs[0], error.with_traceback(None))
    return found


def _results_of_rows(program: Graph) -> dict[Value, list[Value]]:
    """For ids, the results with a row for each id that are computed from rows of these ids."""
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
    merge = ids.maker if ids.maker is not None and ids.maker.name in MERGES else None
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
    for v in (*part.streams, *part.scalars):
        if v in of_rows and v.maker is not None:
            raise unknown(v.maker)
    is_sum = len(writes) == 1 and writes[0].name == "rows_add" and not part.gathers
    may_repeat = is_sum or all(write.name == "rows_scatter_equal" for write in writes)
    if writes and not (are_distinct(ids) or (may_repeat and not reads)):
        raise Unsupported("its rows may repeat, and are not merged")
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
    found = RowsGroup(
        ins, outs, group, aliases, ids, merged if merge in inside else None, part.tables,
        part.streams, part.lists, part.scalars, writes, reads, lanes_of(part.operations),
    )  # fmt: skip
    check(found)
    return found


def _merges_here(part: "_Slice", merge: Operation) -> bool:
    """Whether a group can merge the gradients itself."""
    others = [v for v in part.streams if v is not part.merged]
    made = [v for op in each(part.operations) if op.name == "iota" for v in op.outs]
    # A sum of the native merging is at the first position of its id.
    is_same = merge.name == "rows_merge_in_place" or all(
        v.shape[:1] != part.ids.shape for v in (*others, *made)
    )
    return len(others) < len(part.streams) and is_same


class _Slice:
    """The values from which rows are computed.

    Args:
        ids: the ids of the rows.
        merged: the gradients, if they are merged.
        of_rows: all values that depend on rows of tables at these ids.
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
        """Adds all values from which a value is computed."""
        for _ in made_of([value], self._enter):
            pass

    def _enter(self, v: Value) -> list[Value]:
        """Adds a value; returns those of its operands that are not added yet."""
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
        """Adds a gather; returns those of its operands that are not added yet."""
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
    """Whether each row of an array is computed only from its index and scalars."""
    is_made = lambda v: v.maker is not None and v.literal is None and is_known(v.maker)
    follow = lambda v: v.maker.ins if v.shape and is_made(v) else ()
    return all(not v.shape or is_made(v) for v in made_of([table], follow))
