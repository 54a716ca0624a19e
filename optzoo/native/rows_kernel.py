"""The native function of rows: each is merged, read, computed and written, one after the other."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

from llvmlite import ir

from ..jaxprs.graph import Operation, Value
from .elements import Elements, Index
from .groups import REDUCTIONS, RowsGroup
from .handler import Frame, inner_function, module_of
from .loops import POINTER, VECTOR, ZERO, loop, variable, word_at
from .operations import I8, I32, I64, TYPES, add, bytes_of, constant, convert, load, reduced, store
from .sums import Sums

_AHEAD = 16  # rows are fetched so many rows before they are needed
_LINE = 64  # bytes of a cache line
_MOST_LINES = 32  # of a row that are fetched ahead


def rows_kernel(name: str, rows: RowsGroup, version: tuple[int, int]) -> str:
    """The text of the native function of some rows of tables."""

    def execute(module, frame):
        function, inner = inner_function(module, "row", _RowArguments(rows).types())
        _Row(inner, rows, _RowArguments(rows).named(function.args)).write()
        _EveryRow(frame, rows, function).write()

    return module_of(name, version, execute)


class _RowArguments:
    """The arguments of the function for one row."""

    def __init__(self, rows: RowsGroup):
        self.rows = rows
        self.pointers = [*rows.tables, *([rows.merged] if rows.merged else []), *rows.streams]

    def types(self) -> list[Any]:
        scalars = [TYPES[v.dtype] for v in self.rows.scalars]
        return [POINTER] * len(self.pointers) + scalars + [I64, I64, I64]

    def named(self, args: Sequence[Any]) -> tuple[dict[Value, Any], Any, Any, Any]:
        """By values their pointers, or scalars; the row, its position, the number of rows."""
        values = [*self.pointers, *self.rows.scalars]
        return dict(zip(values, args, strict=False)), *args[-3:]


class _Row:
    """The function for one row: its reductions, its elements, what has one element for each row."""

    def __init__(
        self, b: ir.IRBuilder, rows: RowsGroup, given: tuple[dict[Value, Any], Any, Any, Any]
    ):
        self.b, self.rows = b, rows
        self.given, self.row, self.position, self.num_rows = given
        self.flat: tuple[Index, Any] | None = None  # the coordinates of an element, its position
        self.elements = Elements(b, self._known, self._constant)

    def write(self) -> None:
        for op in _reductions(self.rows.operations):
            self.elements.keep(op.outs[0], self._reduce(op))
        single = lambda write: math.prod(write.ins[0].shape[1:]) == 1
        several = [write for write in self.rows.writes if not single(write)]
        if several:
            shape = min((write.ins[0].shape for write in several), key=math.prod)
            with self._elements(shape) as (index, _):
                self._store([each for w in several for each in self._parts(w, index, shape)])
        axes = lambda write: len(write.ins[0].shape) - 1
        rest = filter(single, self.rows.writes)
        self._store([(write, (self.position, *[ZERO] * axes(write))) for write in rest])
        self.b.ret_void()

    def _parts(
        self, write: Operation, index: Index, shape: Sequence[int]
    ) -> list[tuple[Operation, Index]]:
        """The elements of a row that are written for one of a shape: two, of slots side by side."""
        if write.ins[0].shape == shape:
            return [(write, index)]
        starts = 0, shape[-1]
        return [(write, (*index[:-1], self.elements.in_part(index[-1], s))) for s in starts]

    def _store(self, writes: Sequence[tuple[Operation, Index]]) -> None:
        """Replaces an element of each table, or adds to it, once all of them are computed."""
        made = []
        for write, index in writes:
            table, new = write.ins[0], self.elements.of(write.ins[2], index)
            if write.name == "rows_add":
                old = self.elements.of(table, (self.row, *index[1:]))
                new = add(self.b, table.dtype, old, new)
            made.append(new)
        for (write, index), new in zip(writes, made, strict=True):
            table = write.ins[0]
            at = self._offset(table.shape[1:], index[1:])
            store(self.b, table.dtype, self.given[table], at, new)

    @contextlib.contextmanager
    def _elements(self, shape: Sequence[int]) -> Iterator[tuple[Index, Any]]:
        """A loop over the elements of a row: the index, and the position in the row."""
        with loop(self.b, I64(math.prod(shape[1:])), **VECTOR) as flat, self.elements.scope():
            inner = self._coordinates(flat, shape[1:])
            self.flat = inner, flat
            yield (self.position, *inner), flat
            self.flat = None

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
        operand, t = op.ins[0], TYPES[op.outs[0].dtype]
        start = {"reduce_sum": 0.0, "reduce_max": -math.inf, "reduce_min": math.inf}[op.name]
        total = variable(self.b, t)
        self.b.store(t(start), total)
        with self._elements(operand.shape) as (index, _):
            element = self.elements.of(operand, index)
            self.b.store(reduced(self.b, op.name, self.b.load(total, typ=t), element), total)
        return self.b.load(total, typ=t)

    def _known(self, value: Value, index: Index) -> Any:
        rows = self.rows
        if value is rows.ids:
            return convert(self.b, self.row, "int64", value.dtype)
        if value in rows.scalars:
            return self.given[value]
        if value.maker is not None and value.maker.name == "rows_gather":
            return self.elements.of(value.maker.ins[0], (self.row, *index[1:]))
        if value not in self.given:
            return None
        if value in rows.streams:
            at = self._offset(value.shape, index)
        else:  # the pointer is to the row
            at = self._offset(value.shape[1:], index[1:])
        return load(self.b, value.dtype, self.given[value], at)

    def _constant(self, value: Value) -> Any:
        """The number of rows is an argument, so that tables of all heights share the function."""
        if value.dtype in ("int32", "int64") and value.literal == self.rows.tables[0].shape[0]:
            return convert(self.b, self.num_rows, "int64", value.dtype)
        return constant(value.dtype, value.literal)

    def _offset(self, shape: Sequence[int], index: Index) -> Any:
        if self.flat is not None and len(index) and _same(index, self.flat[0]):
            return self.flat[1]
        total = ZERO
        for k, i in enumerate(index):
            if i is not ZERO:
                total = self.b.add(total, self.b.mul(i, I64(math.prod(shape[k + 1 :]))))
        return total


def _same(index: Index, other: Index) -> bool:
    return len(index) == len(other) and all(i is j for i, j in zip(index, other, strict=True))


def _reductions(operations: Sequence[Operation]) -> Iterator[Operation]:
    for op in operations:
        yield from _reductions(op.inside)
        if op.name in REDUCTIONS:
            yield op


class _EveryRow:
    """The loop over the rows that the ids name, in the function that XLA calls."""

    def __init__(self, frame: Frame, rows: RowsGroup, function: Any):
        self.b, self.frame, self.rows, self.function = frame.b, frame, rows, function
        first = 1 if rows.merged is None else 2
        end = first + len(rows.tables)
        for i, o in rows.aliases.items():
            frame.keep(rows.ins[i].dtype, frame.argument(I64(i)), frame.result(I64(o)))
        ids = frame.argument(ZERO)
        self.ids, self.many = frame.data(ids), frame.length(ids)
        self.num_rows = frame.length(frame.argument(I64(first)))
        self.tables = {rows.ins[i]: self._memory(i) for i in range(first, end)}
        self.streams = [self._memory(end + k) for k in range(len(rows.streams))]
        self.scalars = frame.scalars(end + len(rows.streams), rows.scalars)

    def _memory(self, i: int) -> Any:
        """That of an argument, or of the result that takes its place."""
        o = self.rows.aliases.get(i)
        frame = self.frame
        return frame.data(frame.argument(I64(i)) if o is None else frame.result(I64(o)))

    def _id(self, position: Any) -> Any:
        kind = self.rows.ids.dtype
        return convert(self.b, word_at(self.b, TYPES[kind], self.ids, position), kind, "int64")

    def _is_real(self, row: Any) -> Any:
        return self.b.icmp_unsigned("<", row, self.num_rows)

    def _row(self, value: Value, start: Any, row: Any) -> Any:
        return self.b.gep(start, [self.b.mul(row, I64(_size(value)))], source_etype=I8)

    def _fetch(self, row: Any) -> None:
        for v, start in self.tables.items():
            fetch_row(self.b, self._row(v, start, row), _size(v))

    def _update(self, row: Any, position: Any, *gradient: Any) -> None:
        pointers = [self._row(v, start, row) for v, start in self.tables.items()]
        place = row, position, self.num_rows
        arguments = [*pointers, *gradient, *self.streams, *self.scalars, *place]
        self.b.call(self.function, arguments)

    def write(self) -> None:
        """Merges rows of equal ids, or takes them as they come."""
        if self.rows.merged is None:
            self._as_they_come()
        else:
            self._merged(self.rows.merged)

    def _as_they_come(self) -> None:
        b = self.b
        with loop(b, self.many) as position:
            later = b.add(position, I64(_AHEAD))
            with b.if_then(b.icmp_signed("<", later, self.many)):
                row = self._id(later)
                with b.if_then(self._is_real(row)):
                    self._fetch(row)
            row = self._id(position)
            with b.if_then(self._is_real(row)):
                self._update(row, position)

    def _merged(self, merged: Value) -> None:
        b, frame, outs = self.b, self.frame, len(self.rows.outs)
        values, words = frame.data(frame.argument(I64(1))), frame.result(I64(outs))
        totals = frame.data(frame.result(I64(outs + 1)))
        sums = Sums(
            b, frame.data(words), frame.length(words), self.many,
            lambda place: self._row(merged, totals, place),
            lambda position: self._row(merged, values, position),
            math.prod(merged.shape[1:]), merged.dtype,
        )  # fmt: skip
        with loop(b, self.many) as position:
            row = self._id(position)
            with b.if_then(self._is_real(row)):
                sums.append(position, row, self._id)
        with loop(b, sums.count()) as k:
            later = b.add(k, I64(_AHEAD))
            with b.if_then(b.icmp_signed("<", later, sums.count())):
                self._fetch(self._id(sums.at(sums.firsts, later)))
            position = sums.at(sums.firsts, k)
            self._update(self._id(position), position, sums.of(position))


def _size(value: Value) -> int:
    """The bytes of a row."""
    return math.prod(value.shape[1:]) * bytes_of(value.dtype)


def fetch_row(b: ir.IRBuilder, pointer: Any, size: int) -> None:
    """Asks for a row that will be written."""
    function = b.module.globals.get("llvm.prefetch.p0") or ir.Function(
        b.module, ir.FunctionType(ir.VoidType(), [POINTER, I32, I32, I32]), "llvm.prefetch.p0"
    )
    for line in range(min(_MOST_LINES, -(-size // _LINE))):
        place = b.gep(pointer, [I64(line * _LINE)], source_etype=I8)
        b.call(function, [place, I32(1), I32(3), I32(1)])
