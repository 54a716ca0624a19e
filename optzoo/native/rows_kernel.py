"""The native function of rows: each is merged, read, computed and written, one after the other."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

from llvmlite import ir

from .chains import Chains, sum_of_chain
from .groups import REDUCTIONS, Rows
from .handler import Frame, inner_function, module_of
from .loops import POINTER, VECTOR, ZERO, loop, variable, word_at
from .numbers import Index, Numbers
from .operations import I8, I32, I64, TYPES, add, bytes_of, convert, load, reduced, store
from .program import Operation, Value

_AHEAD = 16  # rows are fetched so many rows before they are needed
_LINE = 64  # bytes of a cache line
_MOST_LINES = 32  # of a row that are fetched ahead


def rows_kernel(name: str, rows: Rows, version: tuple[int, int]) -> str:
    """The text of the native function of some rows of tables."""

    def execute(module, frame):
        function, inner = inner_function(module, "row", _RowArguments(rows).types())
        _Row(inner, rows, _RowArguments(rows).named(function.args)).write()
        _every_row(frame, rows, function)

    return module_of(name, version, execute)


class _RowArguments:
    """The arguments of the function for one row."""

    def __init__(self, rows: Rows):
        self.rows = rows
        self.pointers = [*rows.tables, *([rows.merged] if rows.merged else []), *rows.streams]

    def types(self) -> list[Any]:
        scalars = [TYPES[v.dtype] for v in self.rows.scalars]
        return [POINTER] * len(self.pointers) + scalars + [I64, I64]

    def named(self, args: Sequence[Any]) -> tuple[dict[Value, Any], Any, Any]:
        """By values their pointers or numbers; the number of the row and its position."""
        values = [*self.pointers, *self.rows.scalars]
        return dict(zip(values, args, strict=False)), args[-2], args[-1]


class _Row:
    """The function for one row: first reductions, then its elements, then what is one number."""

    def __init__(self, b: ir.IRBuilder, rows: Rows, given: tuple[dict[Value, Any], Any, Any]):
        self.b, self.rows = b, rows
        self.given, self.row, self.position = given
        self.flat: tuple[Index, Any] | None = None  # the coordinates of an element, its position
        self.numbers = Numbers(b, self._known)

    def write(self) -> None:
        for op in _reductions(self.rows.operations):
            self.numbers.keep(op.outs[0], self._reduce(op))
        single = lambda write: math.prod(write.ins[0].shape[1:]) == 1
        several = [write for write in self.rows.writes if not single(write)]
        if several:
            with self._elements(several[0].ins[0].shape) as (index, flat):
                self._store(several, index, flat)
        for write in filter(single, self.rows.writes):
            index = (self.position, *[ZERO] * (len(write.ins[0].shape) - 1))
            self._store([write], index, ZERO)
        self.b.ret_void()

    def _store(self, writes: list[Operation], index: Index, flat: Any) -> None:
        """Replaces an element of each table, or adds to it."""
        made = [self.numbers.of(write.ins[2], index) for write in writes]
        for k, write in enumerate(writes):
            if write.name == "rows_add":
                table = write.ins[0]
                old = self.numbers.of(table, (self.row, *index[1:]))
                made[k] = add(self.b, table.dtype, old, made[k])
        for write, number in zip(writes, made, strict=True):
            table = write.ins[0]
            store(self.b, table.dtype, self.given[table], flat, number)

    @contextlib.contextmanager
    def _elements(self, shape: Sequence[int]) -> Iterator[tuple[Index, Any]]:
        """A loop over the elements of a row: the index, and the position in the row."""
        with loop(self.b, I64(math.prod(shape[1:])), **VECTOR) as flat, self.numbers.scope():
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
            number = self.numbers.of(operand, index)
            self.b.store(reduced(self.b, op.name, self.b.load(total, typ=t), number), total)
        return self.b.load(total, typ=t)

    def _known(self, value: Value, index: Index) -> Any:
        rows = self.rows
        if value is rows.ids:
            return convert(self.b, self.row, "int64", value.dtype)
        if value in rows.scalars:
            return self.given[value]
        if value.maker is not None and value.maker.name == "rows_gather":
            return self.numbers.of(value.maker.ins[0], (self.row, *index[1:]))
        if value not in self.given:
            return None
        if value in rows.streams:
            at = self._offset(value.shape, index)
        else:  # the pointer is to the row
            at = self._offset(value.shape[1:], index[1:])
        return load(self.b, value.dtype, self.given[value], at)

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


def _every_row(frame: Frame, rows: Rows, function: Any) -> None:
    """Calls the function for each row that the ids name."""
    b, merges = frame.b, rows.merged is not None
    first = 1 + merges
    ids_buffer = frame.argument(ZERO)
    ids, kind = frame.data(ids_buffer), rows.ids.dtype
    tables = range(first, first + len(rows.tables))
    for i, o in rows.aliases.items():
        frame.keep(rows.ins[i].dtype, frame.argument(I64(i)), frame.result(I64(o)))
    pointer = lambda i: (
        frame.data(frame.result(I64(rows.aliases[i])))
        if i in rows.aliases
        else frame.data(frame.argument(I64(i)))
    )
    starts = {rows.ins[i]: pointer(i) for i in tables}
    end = first + len(rows.tables)
    streams = [pointer(i) for i in range(end, end + len(rows.streams))]
    scalars = frame.scalars(end + len(rows.streams), rows.scalars)
    num_rows = frame.length(frame.argument(I64(first)))
    many = frame.length(ids_buffer)
    id_of = lambda at: convert(b, word_at(b, TYPES[kind], ids, at), kind, "int64")

    def row_of(value, start, row):
        size = math.prod(value.shape[1:]) * bytes_of(value.dtype)
        return b.gep(start, [b.mul(row, I64(size))], source_etype=I8)

    def update(row, position, gradient):
        pointers = [row_of(v, start, row) for v, start in starts.items()]
        b.call(function, [*pointers, *gradient, *streams, *scalars, row, position])

    def fetch(row):
        for v, start in starts.items():
            fetch_row(b, row_of(v, start, row), math.prod(v.shape[1:]) * bytes_of(v.dtype))

    is_real = lambda row: b.icmp_unsigned("<", row, num_rows)
    if not merges:
        with loop(b, many) as position:
            later = b.add(position, I64(_AHEAD))
            with b.if_then(b.icmp_signed("<", later, many)):
                row = id_of(later)
                with b.if_then(is_real(row)):
                    fetch(row)
            row = id_of(position)
            with b.if_then(is_real(row)):
                update(row, position, [])
        return
    scratch = frame.result(I64(len(rows.outs)))
    values = frame.data(frame.argument(I64(1)))
    chains = Chains(b, frame.data(scratch), frame.length(scratch), many)
    with loop(b, many) as position:
        row = id_of(position)
        b.store(I32(-1), b.gep(chains.following, [position], source_etype=I32))
        with b.if_then(is_real(row)):
            chains.append(position, row, id_of)
    total = frame.data(frame.result(I64(len(rows.outs) + 1)))
    merged: Any = rows.merged
    with loop(b, chains.number()) as k:
        later = b.add(k, I64(_AHEAD))
        with b.if_then(b.icmp_signed("<", later, chains.number())):
            fetch(id_of(chains.at(chains.firsts, later)))
        position = chains.at(chains.firsts, k)
        gradient = variable(b, POINTER)
        b.store(row_of(merged, values, position), gradient)
        second = chains.at(chains.following, position)
        with b.if_then(b.icmp_signed(">=", second, ZERO), likely=False):
            sum_of_chain(b, merged, lambda at: row_of(merged, values, at), chains, position, total)
            b.store(total, gradient)
        update(id_of(position), position, [b.load(gradient, typ=POINTER)])


def fetch_row(b: ir.IRBuilder, pointer: Any, size: int) -> None:
    """Asks for a row that will be written."""
    function = b.module.globals.get("llvm.prefetch.p0") or ir.Function(
        b.module, ir.FunctionType(ir.VoidType(), [POINTER, I32, I32, I32]), "llvm.prefetch.p0"
    )
    for line in range(min(_MOST_LINES, -(-size // _LINE))):
        place = b.gep(pointer, [I64(line * _LINE)], source_etype=I8)
        b.call(function, [place, I32(1), I32(3), I32(1)])
