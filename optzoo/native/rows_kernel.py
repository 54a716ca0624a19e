"""The native function of rows: each is merged, read, computed and written, one after the other."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llvmlite import ir

from ..jaxprs.graph import Operation, Value
from .elements import Elements, Index
from .group_loop import IndexOf, write_group
from .groups import REDUCTIONS, reductions
from .handler import Frame, inner_function, module_of
from .loops import OUTER, POINTER, VECTOR, ZERO, loop
from .merging import AHEAD, Ids, Parts, Sums, fetch, fill
from .operations import (
    I8,
    I32,
    I64,
    TYPES,
    add,
    bytes_of,
    constant,
    convert,
    larger,
    load,
    smaller,
    store,
)
from .pool import in_parallel
from .rows_groups import Part, RowsGroup
from .totals import Totals

_BLOCK = 256  # rows of a task
_NBYTES = 3 * 2**19  # of written rows for which threads are worth their start
_CHUNKS = 8  # chunks for which they are


def rows_kernel(name: str, rows: RowsGroup, version: tuple[int, int]) -> str:
    """The text of the native function of some rows of tables."""

    def execute(module, frame):
        function, inner = inner_function(module, "row", _RowArguments(rows).types())
        _Row(inner, rows, _RowArguments(rows).named(function.args)).write()
        for i, o in rows.aliases.items():
            frame.keep(rows.ins[i].dtype, frame.argument(I64(i)), frame.result(I64(o)))
        if rows.repeats:
            _by_parts(frame, rows, function)
        else:
            _by_blocks(frame, rows, function)

    return module_of(name, version, execute)


def _by_blocks(frame: Frame, rows: RowsGroup, function: Any) -> None:
    """Rows with distinct ids, in order."""
    b, many = frame.b, Ids(frame, rows).many

    def some(frame, task):
        b, each = frame.b, _EachRow(frame, rows, function)
        start = b.mul(task, I64(_BLOCK))
        size = smaller(b, I64(_BLOCK), b.sub(each.ids.many, start))
        each.write(size, lambda k: b.add(start, k), lambda position: ())

    tasks = b.sdiv(b.add(many, I64(_BLOCK - 1)), I64(_BLOCK))
    in_parallel(frame, "rows", tasks, _is_worth(b, rows, many), some)


def _by_parts(frame: Frame, rows: RowsGroup, function: Any) -> None:
    """Rows with equal ids by the same thread, merged if required."""
    b, parts, merged = frame.b, Parts(frame, rows), rows.merged
    is_worth = _is_worth(b, rows, parts.ids.many)
    of_chunks = b.and_(is_worth, b.icmp_signed(">=", parts.chunks, I64(_CHUNKS)))
    if merged is not None:
        Sums(frame, rows, merged).sample()

    def of(frame):
        """The parts, and the sums if any, in the function of a task."""
        if merged is None:
            return Parts(frame, rows), None
        return (sums := Sums(frame, rows, merged)).parts, sums

    def count(frame, chunk):
        parts, sums = of(frame)
        if sums is None:
            parts.keep(chunk, lambda position: None)
        else:
            sums.prepare_next(chunk)
        parts.count(chunk)

    def some(frame, part):
        each, (parts, sums) = _EachRow(frame, rows, function), of(frame)
        start, many = parts.of(part)
        order = frame.b.gep(parts.order, [start], source_etype=I32)
        gradient = lambda position: ()
        if sums is not None:
            many, gradient = sums.merge(order, start, many), lambda p: (sums.of(p),)
        each.write(many, lambda k: parts.get(order, k), gradient)

    in_parallel(frame, "count", parts.chunks, of_chunks, count)
    parts.divide()
    sort = lambda frame, chunk: Parts(frame, rows).sort(chunk)
    in_parallel(frame, "sort", parts.chunks, of_chunks, sort)
    in_parallel(frame, "rows", parts.number, is_worth, some)


def _is_worth(b: ir.IRBuilder, rows: RowsGroup, many: Any) -> Any:
    """Whether a step with this number of ids is worth starting threads."""
    nbytes = sum(map(_size, rows.outs))
    return b.icmp_signed(">=", many, I64(_NBYTES // nbytes))


class _RowArguments:
    """The arguments of the function for one row."""

    def __init__(self, rows: RowsGroup):
        self.rows = rows
        of_rows = [*rows.tables, *([rows.merged] if rows.merged else [])]
        self.pointers = [*of_rows, *rows.streams, *rows.lists, *rows.reads]

    def types(self) -> list[Any]:
        scalars = [TYPES[v.dtype] for v in self.rows.scalars]
        return [POINTER] * len(self.pointers) + scalars + [I64, I64, I64]

    def named(self, args: Sequence[Any]) -> tuple[dict[Value, Any], Any, Any, Any]:
        """The pointers or scalars of values; the row, its position, the number of rows."""
        values = [*self.pointers, *self.rows.scalars]
        return dict(zip(values, args, strict=False)), *args[-3:]


class _Row:
    """The function for one row: its reductions, its elements, its values with one element."""

    def __init__(
        self, b: ir.IRBuilder, rows: RowsGroup, given: tuple[dict[Value, Any], Any, Any, Any]
    ):
        self.b, self.rows = b, rows
        self.given, self.row, self.position, self.num_rows = given
        # The coordinates of an element, its position, and the shape of the row.
        self.flat: tuple[Index, Any, Sequence[int]] | None = None
        self.elements = Elements(b, self._known, self._constant)

    def write(self) -> None:
        for v in self.rows.kept:
            assert v.maker is not None
            index = (self.position, *[ZERO] * (len(v.shape) - 1))
            is_reduced = v.maker.name in REDUCTIONS
            self.elements.keep(
                v, self._reduce(v.maker) if is_reduced else self.elements.of(v, index)
            )
        several = [part for part in self.rows.parts if math.prod(part.row) > 1]
        if self.rows.lanes is not None:
            found = reductions(self.rows.operations)
            self._write_groups(several, [op for op in found if _many(op.outs[0]) > 1])
        elif several:
            with self._elements(several[0].row) as index:
                self._store([(part, index) for part in several])
        rest = [part for part in self.rows.parts if part not in several]
        self._store([(part, (self.position, *[ZERO] * len(part.row))) for part in rest])
        self.b.ret_void()

    def _write_groups(self, parts: Sequence[Part], of_group: Sequence[Operation]) -> None:
        """For each group: its reductions, its elements, its values with one element."""
        number, length = self._groups()
        of_groups = [part for part in parts if math.prod(part.row) == number]
        parts = [part for part in parts if part not in of_groups]
        width = math.prod(parts[0].row)

        def store(index_of):
            self._store([(part, index_of(part.value.shape)) for part in parts])

        with loop(self.b, I64(number), **OUTER) as group, self.elements.scope():
            write_group(
                self.b,
                self.elements,
                of_group,
                [part.value for part in parts],
                {self.rows.ids, *self.given},
                functools.partial(self._lanes, group),
                length,
                lambda v: width == number * length and _many(v) == width,
                store,
            )
            self._store([(part, (self.position, group)) for part in of_groups])

    def _store(self, parts: Sequence[tuple[Part, Index]]) -> None:
        """Replaces or adds to an element of each table, after all of them are computed."""
        made = []
        for part, index in parts:
            array, new = (
                part.array,
                self.elements.of(part.value, self._from(part, part.first, index)),
            )
            index = self._from(part, part.start, index)
            if part.adds:
                old = self.elements.of(array, (self.row, *index[1:]))
                new = add(self.b, array.dtype, old, new)
            made.append((array, self._place(array, index), new))
        for array, at, new in made:
            store(self.b, array.dtype, self.given[array], at, new)

    def _from(self, part: Part, start: int, index: Index) -> Index:
        """Converts an index in a part of the last axis to an index of the whole axis."""
        size = part.row[-1] if part.row else 1
        return (*index[:-1], self.elements.in_part(index[-1], start, size)) if start else index

    @contextlib.contextmanager
    def _elements(self, row: Sequence[int]) -> Iterator[Index]:
        """A loop over the elements of a row, or of its groups; yields the index."""
        lanes, width = self.rows.lanes, math.prod(row)
        if lanes is not None and width > lanes[0]:
            groups, shape = loop(self.b, I64(lanes[0]), **OUTER), (1, *row)
            with groups as group, self._lanes(group, shape) as (_, index_of):
                yield index_of(shape)
            return
        with loop(self.b, I64(width), **VECTOR) as flat, self.elements.scope():
            inner = self._coordinates(flat, row)
            self.flat = inner, flat, row
            yield (self.position, *inner)
            self.flat = None

    @contextlib.contextmanager
    def _lanes(self, group: Any, shape: Sequence[int]) -> Iterator[tuple[Any, IndexOf]]:
        """A loop over the elements of a group in rows of a shape."""
        number, length = self._groups()
        many, width = I64(length), math.prod(shape[1:])
        if width < number * length:
            left = self.b.sub(I64(width), self.b.mul(group, many))
            many = smaller(self.b, many, left)
        with loop(self.b, many, unroll_disable=1) as lane, self.elements.scope():
            at = self.elements.in_group(group, lane, length)

            def index_of(shape):
                return (self.position, *((at,) if len(shape) == 2 else (group, lane)))

            yield lane, index_of

    def _groups(self) -> tuple[int, int]:
        """The number and the length of the groups of a row."""
        assert self.rows.lanes is not None
        return self.rows.lanes

    def _coordinates(self, flat: Any, shape: Sequence[int]) -> Index:
        found, rest = [], flat
        for k, d in enumerate(shape):
            after = math.prod(shape[k + 1 :])
            if d == 1:
                found.append(ZERO)
            elif after == 1:
                found.append(rest)
            else:
                found.append(self.b.udiv(rest, I64(after)))
                rest = self.b.urem(rest, I64(after))
        return tuple(found)

    def _reduce(self, op: Operation) -> Any:
        """A reduction over the elements of a row."""
        total = Totals(self.b, [op])
        with self._elements(op.ins[0].shape[1:]) as index:
            total.add(lambda op: self.elements.of(op.ins[0], index))
        return total.get(op)

    def _known(self, value: Value, index: Index) -> Any:
        rows = self.rows
        if value is rows.ids:
            return convert(self.b, self.row, "int64", value.dtype)
        if value in rows.scalars:
            return self.given[value]
        if value.maker is not None and value.maker.name == "rows_gather":
            array, ids = value.maker.ins
            if ids is rows.ids:
                row = self.row if rows.writes else _nearest(self.b, self.row, self.num_rows)
                return self.elements.of(array, (row, *index[1:]))
            if array in rows.lists:
                return self._entry(array, ids, index)
        if value not in self.given or value in rows.reads:
            return None
        return load(self.b, value.dtype, self.given[value], self._place(value, index))

    def _entry(self, array: Value, ids: Value, index: Index) -> Any:
        """An element of an entry of a list, at an index computed for this row."""
        number = convert(self.b, self.elements.of(ids, index[:1]), ids.dtype, "int64")
        number = _nearest(self.b, number, I64(array.shape[0]))
        at = self._offset(array.shape, (number, *index[1:]))
        return load(self.b, array.dtype, self.given[array], at)

    def _place(self, value: Value, index: Index) -> Any:
        """The offset of an element from the pointer of its array."""
        if value in self.rows.streams or value in self.rows.reads:
            return self._offset(value.shape, index)
        return self._offset(value.shape[1:], index[1:])  # it points to the row

    def _constant(self, value: Value) -> Any:
        """Constants; the number of rows is an argument, to share code by tables of any height."""
        if value.dtype in ("int32", "int64") and value.literal == self.rows.tables[0].shape[0]:
            return convert(self.b, self.num_rows, "int64", value.dtype)
        return constant(value.dtype, value.literal)

    def _offset(self, shape: Sequence[int], index: Index) -> Any:
        if self.flat is not None and len(index) and _same(index, self.flat[0]):
            is_row = len(shape) == 1 or tuple(shape) == tuple(self.flat[2])  # not a part of one
            if is_row:
                return self.flat[1]
        total = ZERO
        for k, i in enumerate(index):
            if i is not ZERO:
                total = self.b.add(total, self.b.mul(i, I64(math.prod(shape[k + 1 :]))))
        return total


def _nearest(b: ir.IRBuilder, number: Any, end: Any) -> Any:
    """The nearest integer in ``[0, end)``."""
    return smaller(b, larger(b, number, ZERO), b.sub(end, I64(1)))


def _same(index: Index, other: Index) -> bool:
    return len(index) == len(other) and all(i is j for i, j in zip(index, other, strict=True))


def _many(value: Value) -> int:
    """The number of elements of a row."""
    return math.prod(value.shape[1:])


class _EachRow:
    """A loop over the rows at some ids."""

    def __init__(self, frame: Frame, rows: RowsGroup, function: Any):
        self.b, self.frame, self.rows, self.function = frame.b, frame, rows, function
        first = 1 if rows.merged is None else 2
        end = first + len(rows.tables)
        self.ids = Ids(frame, rows)
        self.tables = {rows.ins[i]: self._memory(i) for i in range(first, end)}
        others = end + len(rows.streams) + len(rows.lists)
        self.others = [self._memory(i) for i in range(end, others)]
        results = range(len(rows.writes), len(rows.outs))
        self.reads = [frame.data(frame.result(I64(k))) for k in results]
        self.scalars = frame.scalars(others, rows.scalars)

    def write(
        self,
        many: Any,
        position_of: Callable[[Any], Any],
        gradient_of: Callable[[Any], tuple[Any, ...]],
    ) -> None:
        """Updates the rows.

        Args:
            many: the number of rows.
            position_of: the position of a row in the ids.
            gradient_of: the memory of its gradient, if it is not a stream.
        """
        b = self.b
        with loop(b, many) as k:
            later = b.add(k, I64(AHEAD))
            is_in = b.icmp_signed("<", later, many)
            with b.if_then(is_in), self._at(position_of(later)) as row:
                for v, start in self.tables.items():
                    fetch(b, self._row(v, start, row), _size(v))
                self._fetch_streams(position_of(later))
            position = position_of(k)
            with self._at(position) as row:
                pointers = [self._row(v, start, row) for v, start in self.tables.items()]
                arrays = [*pointers, *gradient_of(position), *self.others, *self.reads]
                place = self.ids.at(position), position, self.ids.num_rows
                b.call(self.function, [*arrays, *self.scalars, *place])

    @contextlib.contextmanager
    def _at(self, position: Any) -> Iterator[Any]:
        """Processes the row of a position, if it exists; reads use the nearest row."""
        b, row = self.b, self.ids.at(position)
        if not self.rows.writes:
            yield _nearest(b, row, self.ids.num_rows)
            return
        with b.if_else(self.ids.is_real(row)) as (real, other):
            with real:
                yield row
            with other:
                for v, start in zip(self.rows.reads, self.reads, strict=True):
                    fill(b, self._row(v, start, position), 0, I64(_size(v)))

    def _fetch_streams(self, position: Any) -> None:
        """Prefetches elements of arrays at a position."""
        for v, start in zip(self.rows.streams, self.others, strict=False):
            if v.shape[:1] == self.rows.ids.shape:
                fetch(self.b, self._row(v, start, position), _size(v))

    def _memory(self, i: int) -> Any:
        """The memory of an argument, or of the result that replaces it."""
        o = self.rows.aliases.get(i)
        frame = self.frame
        return frame.data(frame.argument(I64(i)) if o is None else frame.result(I64(o)))

    def _row(self, value: Value, start: Any, row: Any) -> Any:
        return self.b.gep(start, [self.b.mul(row, I64(_size(value)))], source_etype=I8)


def _size(value: Value) -> int:
    """The bytes of a row."""
    return math.prod(value.shape[1:]) * bytes_of(value.dtype)
