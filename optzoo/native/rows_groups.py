"""Groups of rows of tables that one native loop reads, computes and writes."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..jaxprs.graph import Operation, Value
from .groups import REDUCTIONS, Group, each, splits

MERGES = {"rows_merge", "rows_merge_in_place"}  # the marks of what gives ids and sums
DISTINCT = {*MERGES, "rows_distinct"}  # of what gives ids of which no two are equal


class Part(NamedTuple):
    """New elements of rows, and their positions in the rows of an array."""

    array: Value  # a table, or a result that has a row for each id
    value: Value
    adds: bool
    row: tuple[int, ...]  # the shape of what a row gets
    start: int = 0  # in the last axis of the array
    first: int = 0  # and in that of the value


@dataclasses.dataclass(eq=False)
class RowsGroup(Group):
    """Rows of some tables that share their ids: read, computed and written one after the other.

    It changes rows of tables (``writes``), returns a row for each id (``reads``), or both, in which
    case rows of ids out of range are zeros. The inputs are, in this order: the ids, the gradients
    if rows with equal ids must be merged, the tables, other arrays, arrays from which rows read
    entries, and scalars.
    """

    changes_rows = True
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
        """The written parts."""
        return _parts(self.writes, self.reads, self.lanes)

    @property
    def repeats(self) -> bool:
        """Whether rows with equal ids may be written, as XLA has not merged them."""
        return bool(self.writes) and (self.merged is not None or not are_distinct(self.ids))

    @property
    def kept(self) -> list[Value]:
        """Values with one element per row, computed before any write, in order."""
        parts = {"slice", "split"} if self.lanes is None else {}
        made = [
            v for op in each(self.operations) if op.name in {*REDUCTIONS, *parts} for v in op.outs
        ]
        return [v for v in made if v.shape[:1] == self.ids.shape and math.prod(v.shape[1:]) == 1]


def are_distinct(ids: Value) -> bool:
    """Whether all ids are distinct, except those out of range."""
    return ids.maker is not None and ids.maker.name in DISTINCT


def lanes_of(operations: Iterable[Operation]) -> tuple[int, int] | None:
    """The number and the length of the groups into which rows are split."""
    for op in each(operations):
        split = splits(op)
        if split is not None:
            return split
    return None


def _parts(
    writes: Sequence[Operation], reads: Sequence[Value], lanes: tuple[int, int] | None
) -> list[Part]:
    """The values written to rows; for long rows, their parts."""
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
