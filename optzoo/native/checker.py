"""Verifies that the loop over the rows of a group computes the operations of the group.

The loop processes one id after the other. For each id it computes, in this order,

1. values with one element per row that are reductions of the row or a part of it (``kept``);
2. values with several elements per row, by element or by group of elements; all new elements of a
   turn are computed before any of them is written;
3. all other values with one element per row.

An element of a value is computed from elements of the operands, and so on back to memory. The loop
is correct if all these elements are available:

- of an array that is not written, any element;
- of a table, and of kept values, an element of this row;
- of a table that turns write, the elements that the same turn writes;
- of kept values of a group of elements, an element of this group.

The checker follows each element back to memory with a symbolic index, and refuses all other
accesses.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

from ..jaxprs.graph import Operation, Value
from ..jaxprs.primitives import Kind
from .elementwise import DTYPES, is_elementwise
from .groups import REDUCTIONS, Unsupported, can_reduce, each, unknown
from .rows_groups import Part, RowsGroup


@dataclasses.dataclass(frozen=True)
class At:
    """The position of an element on an axis: ``start``, and an index over ``size`` positions."""

    what: object = None
    size: int = 1
    start: int = 0

    def moved(self, by: int) -> "At":
        """The position ``by`` elements later."""
        return dataclasses.replace(self, start=self.start + by)


Index = tuple[At, ...]
Element = tuple[Value, Index, Operation | None]  # of a value, and who reads it
FIRST = At()


def _same(index: Iterable[At], other: Iterable[At]) -> bool:
    """Whether two indices address the same elements, possibly in loops of different lengths."""
    places = lambda index: [(at.what, at.start) for at in index]
    return places(index) == places(other)


def check(rows: RowsGroup) -> None:
    """Raises ``Unsupported``, with the reason, unless the loop over the rows is correct."""
    _check_arrays(rows)
    _Loop(rows).check()


def _check_arrays(rows: RowsGroup) -> None:
    """Each array has one role and one pointer; the shapes of tables and rows match."""
    ids, written = rows.ids, [write.ins[0] for write in rows.writes]
    if ids.dtype not in ("int32", "int64") or len(ids.shape) != 1:
        raise Unsupported(f"its ids have dtype {ids.dtype} and shape {ids.shape}")
    if len({*written, *(write.outs[0] for write in rows.writes)}) < 2 * len(rows.writes):
        raise Unsupported("its rows are written twice")
    read = [*rows.tables, *rows.streams, *rows.lists]
    if len({ids, *read, *rows.reads}) <= len(read) + len(rows.reads):
        raise Unsupported("an array is read both by the rows of its ids and in another way")
    gathers = [op for op in each(rows.operations) if op.name == "rows_gather" and op.ins[1] is ids]
    heights = {v.shape[:1] for v in (*rows.tables, *(op.ins[0] for op in gathers))}
    if len(heights) != 1 or any(0 in v.shape for v in rows.tables):
        raise Unsupported("its slots have other numbers of rows, or it has no slots")
    if min(heights)[0] >= 2**31:
        raise Unsupported("it has 2**31 rows or more")
    put = [(w.ins[0], w.ins[2]) for w in rows.writes] + [(op.ins[0], op.outs[0]) for op in gathers]
    if any(v.shape != (*ids.shape, *table.shape[1:]) for table, v in put):
        raise Unsupported("its rows have other shapes than its ids and its tables")
    if any(v.shape[:1] != ids.shape for v in rows.reads):
        raise Unsupported("a result on its rows is also used elsewhere")
    for v in (*read, *rows.scalars, *rows.reads, *(write.ins[2] for write in rows.writes)):
        if v.dtype not in DTYPES:
            raise Unsupported(f"the dtype {v.dtype} is not supported by the native engine")


class _Loop:
    """The turns of the loop, in order, with the values that they read, keep and write."""

    def __init__(self, rows: RowsGroup):
        self.rows, self.written = rows, {write.ins[0] for write in rows.writes}
        [many] = rows.ids.shape
        self.here = At("position", many)
        self.kept = dict[Value, Index]()  # with the first places of all its indices
        # Of tables that were written, or are being written, the elements that are still right.
        self.left: dict[Value, list[Index]] = {}
        self.in_groups = False
        # The native merging puts a sum at another position of its id than `rows_merge` does.
        merge = rows.ids.maker
        self.moves = rows.merged is not None and merge is not None and merge.name == "rows_merge"

    def check(self) -> None:
        rows = self.rows
        for v in rows.kept:
            assert v.maker is not None
            if v.maker.name in REDUCTIONS:
                self._check_reduction(v.maker)
            else:
                self._read([(v, (self.here, *[FIRST] * (len(v.shape) - 1)), None)])
            self.kept[v] = (self.here,)
        parts = rows.parts
        _check_covered(parts)
        several = [part for part in parts if math.prod(part.row) > 1]
        if rows.lanes is None:
            self._check_elements(several)
        else:
            self._check_groups(several, *rows.lanes)
        single = [part for part in parts if part not in several]
        self._read(
            (p.value, self._of_part(p, (FIRST,) * len(p.row), p.first), None) for p in single
        )

    # What the turns do

    def _check_reduction(self, op: Operation) -> None:
        [v], shape = op.ins, op.ins[0].shape
        whole = all(d == 1 or axis in op.params["axes"] for axis, d in enumerate(shape) if axis)
        if 0 in op.params["axes"] or not whole or shape[:1] != self.rows.ids.shape:
            raise Unsupported(op, "is not over an available row or a part of it")
        _check_dtype(op)
        self._read([(v, (self.here, *self._elements(shape[1:])), op)])

    def _elements(self, row: Sequence[int]) -> Index:
        """The index in a row of an element of a loop over it."""
        lanes, width = self.rows.lanes, math.prod(row)
        if lanes is None or width <= lanes[0]:
            return tuple(FIRST if d == 1 else At(axis, d) for axis, d in enumerate(row))
        return self._in_group(row, *lanes)

    def _in_group(self, row: Sequence[int], number: int, length: int) -> Index:
        """The index in a row of an element of a group."""
        if tuple(row) == (number, length):
            return At("group", number), At("lane", length)
        if len(row) == 1 and row[0] <= number * length:
            return (At("element", row[0]),)
        raise Unsupported("its rows are split into several kinds of groups")

    def _check_elements(self, several: Sequence[Part]) -> None:
        """The loop over the elements of rows."""
        if len({part.row for part in several}) > 1:
            raise Unsupported("its slots have rows of several shapes")
        if not several:
            return
        index = self._elements(several[0].row)
        self._write(several, index)
        self._read((part.value, self._of_part(part, index, part.first), None) for part in several)
        self._end()

    def _check_groups(self, several: Sequence[Part], number: int, length: int) -> None:
        """The loop over groups of elements, and the inner loop over their elements."""
        of_groups = [part for part in several if part.row == (number,)]
        whole = [part for part in several if part not in of_groups]
        if not whole:
            raise Unsupported("it has values with one number for each group only")
        if len({part.row for part in whole}) > 1:
            raise Unsupported("its slots have rows of several shapes")
        if any(len(part.value.shape) != 1 + len(part.row) for part in whole):
            raise Unsupported("its rows are split into several kinds of groups")
        self.in_groups = True
        index, at_group = self._in_group(whole[0].row, number, length), At("group", number)
        self._write(whole, index)
        self._write(of_groups, (at_group,))
        reductions = [op for op in each(self.rows.operations) if op.name in REDUCTIONS]
        reductions = [op for op in reductions if math.prod(op.outs[0].shape[1:]) > 1]
        for op in reductions:
            is_lanes = op.ins[0].shape[1:] == (number, length)
            if not is_lanes or tuple(op.params["axes"]) != (2,):
                raise Unsupported(op, "is not over a group of its elements")
            _check_dtype(op)
            self._read([(op.ins[0], (self.here, at_group, At("lane", length)), op)])
            self.kept[op.outs[0]] = (self.here, at_group)
        self._read((part.value, self._of_part(part, index, part.first), None) for part in whole)
        self.left |= {part.array: [] for part in whole if part.array in self.written}
        self._read((part.value, self._of_part(part, (at_group,), 0), None) for part in of_groups)
        for op in reductions:
            del self.kept[op.outs[0]]
        self.in_groups = False
        self._end()

    def _write(self, parts: Iterable[Part], index: Index) -> None:
        """Records the elements that a turn writes."""
        for part in parts:
            if part.array in self.written:
                place = self._of_part(part, index, part.start)[1:]
                self.left.setdefault(part.array, []).append(place)

    def _end(self) -> None:
        """Marks written values as changed after all turns."""
        self.left = {table: [] for table in self.left}

    def _of_part(self, part: Part, index: Index, start: int) -> Index:
        """The index in an array whose part begins at ``start`` of the last axis."""
        return (self.here, *index[:-1], index[-1].moved(start)) if start else (self.here, *index)

    # What an element needs

    def _read(self, elements: Iterable[Element]) -> None:
        """Follows elements back to memory; raises for unavailable ones."""
        todo, seen = list(elements), set[tuple[Value, Index]]()
        while todo:
            v, index, reader = todo.pop()
            if (v, index) not in seen:
                seen.add((v, index))
                todo += self._needs(v, index, reader or v.maker)

    def _needs(self, v: Value, index: Index, reader: Operation | None) -> list[Element]:
        """The elements from which an element is computed."""
        rows, op = self.rows, v.maker
        if v.literal is not None or v in rows.scalars:
            return []
        if v in rows.streams or (op is not None and op.name == "iota"):
            if self.moves and any(at.what == "position" for at in index):
                raise Unsupported(reader or "it", "reads the positions of merged ids")
            return []
        if v in self.kept or v is rows.ids or v is rows.merged:
            first = self.kept.get(v, ())
            if not self._is_here(index[0]) or not _same(index[1 : len(first)], first[1:]):
                raise Unsupported(reader or "it", "reads other rows or groups than the current one")
            return []
        if op is None:
            raise Unsupported(reader or "it", "reads an array as a whole")
        if op.name == "rows_gather":
            return self._gathered(op, index, reader)
        if self.in_groups and not self._is_in_place(v, index):
            raise Unsupported(
                reader or "it", "reads other elements of its group than the current one"
            )
        return [(v.meaning, index, op)] if v.meaning is not None else self._operands(op, v, index)

    def _is_here(self, at: At) -> bool:
        return _same([at], [self.here]) or (self.here.size == 1 and at == FIRST)

    def _gathered(self, op: Operation, index: Index, reader: Operation | None) -> list[Element]:
        """An element of a row of a table, or of an entry of a list."""
        table, ids = op.ins
        if table in self.rows.lists:
            return [(ids, index[:1], op)]
        if not self._is_here(index[0]):
            raise Unsupported(reader or "it", "reads other rows than the current one")
        if table not in self.rows.tables:
            return [(table, (At("row", table.shape[0]), *index[1:]), op)]
        if not any(_same(index[1:], right) for right in self.left.get(table, [index[1:]])):
            raise Unsupported(reader or "it", "reads already written elements of its row")
        return []

    def _is_in_place(self, v: Value, index: Index) -> bool:
        """Whether a value with all elements of a row, possibly kept, is read at the current one."""
        lanes = self.rows.lanes
        is_whole = lanes is not None and math.prod(v.shape[1:]) == math.prod(lanes)
        return not is_whole or _same(index[1:], self._in_group(v.shape[1:], *lanes))

    def _operands(self, op: Operation, v: Value, index: Index) -> list[Element]:
        """The elements of operands from which an element of a result is computed."""
        if not {x.dtype for x in (*op.ins, *op.outs)} <= DTYPES:
            raise unknown(op)
        if is_elementwise(op):
            return [(x, _within(op, x, v, index), op) for x in op.ins]
        if op.name == "concatenate":
            return _concatenated(op, index)
        if op.name in REDUCTIONS:
            raise Unsupported(op, "is not over an available row or a part of it")
        if op.name == "broadcast_in_dim" and len(op.ins) == 1:
            inner = _broadcast(op, index)
        elif op.name == "slice":
            inner = _sliced(op, index)
        elif op.name == "split":
            inner = _split(op, v, index)
        elif op.kind is Kind.MOVE and (op.name != "reshape" or op.params["dimensions"] is None):
            inner = _reshaped(op, v, index, self.rows.lanes)
        else:
            raise unknown(op)
        return [(op.ins[0], inner, op)]


def _check_dtype(op: Operation) -> None:
    if not can_reduce(op):
        raise Unsupported(op, f"is over {op.ins[0].dtype}")


def _check_covered(parts: Sequence[Part]) -> None:
    """Checks that the parts cover a row, without overlaps."""
    for array in {part.array for part in parts}:
        mine, end = sorted((p for p in parts if p.array is array), key=lambda p: p.start), 0
        for part in mine:
            is_next = part.start == end and part.row[:-1] == array.shape[1:-1]
            end += part.row[-1] if part.row else 1
            if not is_next or len(part.row) != len(array.shape) - 1:
                raise Unsupported("its rows are not written whole")
        if end != (array.shape[-1] if array.shape[1:] else 1):
            raise Unsupported("its rows are not written whole")


def _within(op: Operation, operand: Value, v: Value, index: Index) -> Index:
    """The index in an operand of an elementwise operation."""
    if not operand.shape:
        return ()
    fits = len(operand.shape) == len(v.shape)
    if not fits or any(d not in (1, e) for d, e in zip(operand.shape, v.shape, strict=True)):
        raise Unsupported("the operands of", op, "have shapes that do not match")
    return tuple(FIRST if d == 1 else at for d, at in zip(operand.shape, index, strict=True))


def _broadcast(op: Operation, index: Index) -> Index:
    axes = zip(op.params["broadcast_dimensions"], op.ins[0].shape, strict=True)
    return tuple(FIRST if d == 1 else index[axis] for axis, d in axes)


def _sliced(op: Operation, index: Index) -> Index:
    strides = op.params["strides"]
    if strides is not None and {*strides} != {1}:
        raise Unsupported(op, "has strides")
    starts = op.params["start_indices"]
    return tuple(at.moved(start) for at, start in zip(index, starts, strict=True))


def _split(op: Operation, v: Value, index: Index) -> Index:
    axis, before = op.params["axis"], op.params["sizes"][: op.outs.index(v)]
    return (*index[:axis], index[axis].moved(sum(before)), *index[axis + 1 :])


def _concatenated(op: Operation, index: Index) -> list[Element]:
    axis, start, found = op.params["dimension"], 0, []
    at = index[axis]
    for v in op.ins:
        end = start + v.shape[axis]
        if at.start < end and start < at.start + at.size:
            inside = FIRST if v.shape[axis] == 1 else at.moved(-start)
            found.append((v, (*index[:axis], inside, *index[axis + 1 :]), op))
        start = end
    return found


def _reshaped(op: Operation, v: Value, index: Index, lanes: tuple[int, int] | None) -> Index:
    """The operand index of a reshape that changes axes of length 1 or splits the last axis."""
    [x] = op.ins
    long = [at for at, d in zip(index, v.shape, strict=True) if d != 1]
    old, new = ([d for d in y.shape if d != 1] for y in (x, v))
    if old != new:
        long = _regrouped(op, long, old, new, lanes)
    left = iter(long)
    return tuple(FIRST if d == 1 else next(left) for d in x.shape)


def _regrouped(
    op: Operation,
    long: list[At],
    old: list[int],
    new: list[int],
    lanes: tuple[int, int] | None,
) -> list[At]:
    """The positions where the last axis of an operand is split, or its last two axes are joined."""
    number, length = lanes or (0, 0)
    pair = [At("group", number), At("lane", length)]
    if old == [*new[:-2], math.prod(new[-2:])]:
        is_group = new[-2:] == [number, length] and long[-2:] == pair
        return [*long[:-2], At("element" if is_group else object(), old[-1])]
    if new == [*old[:-2], math.prod(old[-2:])]:
        if old[-2:] == [number, length] and _same(long[-1:], [At("element")]):
            return [*long[:-1], *pair]
        return [*long[:-1], At(object(), old[-2]), At(object(), old[-1])]  # somewhere
    raise Unsupported(op, "may mix elements of its rows")
