"""Native functions of groups, in LLVM's language: the loops around the operations.

Each value is a function of its index: :class:`Numbers` follows it back to memory. So nothing is
stored between the operations of a group.
"""

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llvmlite import ir

from .call_frame import EXECUTE, Args, Buffer, CallFrame, Metadata, MetadataExtension, Rets, Version
from .groups import REDUCTIONS, Leaf, Rows
from .operations import (
    BOOL,
    I8,
    I32,
    I64,
    TYPES,
    add,
    compute,
    constant,
    convert,
    load,
    reduced,
    store,
    stored_type,
)  # fmt: skip
from .program import Operation, Value

POINTER = ir.PointerType()
_AHEAD = 16  # rows are fetched so many rows before they are needed
ZERO = I64(0)
_LINE = 64  # bytes of a cache line
_MOST_LINES = 32  # of a row that are fetched ahead
_HASH = 2654435761  # Knuth's multiplicative hashing


# Loops


@contextlib.contextmanager
def loop(b: ir.IRBuilder, end: Any, **hints: int) -> Iterator[Any]:
    """The body of the context, for all integers from 0 to ``end``; with hints for LLVM."""
    before = b.block
    head, body, after = (b.append_basic_block() for _ in range(3))
    b.branch(head)
    b.position_at_end(head)
    i = b.phi(I64)
    i.add_incoming(I64(0), before)
    b.cbranch(b.icmp_signed("<", i, end), body, after)
    b.position_at_end(body)
    yield i
    i.add_incoming(b.add(i, I64(1), flags=("nsw",)), b.block)
    back = b.branch(head)
    if hints:
        back.set_metadata("llvm.loop", _hints(b.module, hints))
    b.position_at_end(after)


# XLA's own loops are not unrolled before they are vectorized, either.
_VECTOR = {"unroll_disable": 1, "interleave_count": 4}
_SCALAR = {"unroll_disable": 1, "vectorize_enable": 0}
_ITSELF = "the loop itself"


def _hints(module: ir.Module, hints: dict[str, int]) -> Any:
    """LLVM's metadata of a loop, which :func:`_distinct` completes."""
    number = sum(node.operands[0].string == _ITSELF for node in module.metadata if node.operands)
    node = [ir.MetaDataString(module, _ITSELF), I32(number)]
    for name, value in hints.items():
        word = ir.MetaDataString(module, "llvm.loop." + name.replace("_", "."))
        kind = {"vectorize_enable": BOOL(value), "unroll_disable": None}.get(name, I32(value))
        node.append(module.add_metadata([word] if kind is None else [word, kind]))
    return module.add_metadata(node)


def _distinct(text: str) -> str:
    """The text of a module whose loops refer to themselves, as LLVM wants it."""
    found = rf'(!\d+) = !{{ !"{_ITSELF}", i32 \d+'
    return re.sub(found, r"\1 = distinct !{ \1", text)


def _repeat(b: ir.IRBuilder, start: Any, is_done: Callable, next_of: Callable) -> Any:
    """The first of ``start``, ``next_of(start)``, ... for which ``is_done``."""
    before = b.block
    head, body, after = (b.append_basic_block() for _ in range(3))
    b.branch(head)
    b.position_at_end(head)
    i = b.phi(start.type)
    i.add_incoming(start, before)
    b.cbranch(is_done(i), after, body)
    b.position_at_end(body)
    following = next_of(i)
    i.add_incoming(following, b.block)
    b.branch(head)
    b.position_at_end(after)
    return i


def variable(b: ir.IRBuilder, t: Any) -> Any:
    """Memory for a number, which LLVM replaces by a register."""
    with b.goto_entry_block():
        return b.alloca(t)


def _at(b: ir.IRBuilder, t: Any, pointer: Any, index: Any) -> Any:
    return b.load(b.gep(pointer, [index], source_etype=t), typ=t)


# The call frame


class Frame:
    """What XLA hands over."""

    def __init__(self, b: ir.IRBuilder, pointer: Any):
        self.b, self.pointer = b, pointer

    def field(self, t: Any, pointer: Any, *fields: Any) -> Any:
        """A field of a structure; ``fields`` lead to it, each a descriptor of a structure."""
        offset = sum(field.offset for field in fields)
        return self.b.load(self.b.gep(pointer, [I64(offset)], source_etype=I8), typ=t)

    def argument(self, i: Any) -> Any:
        """The buffer of an argument."""
        table = self.field(POINTER, self.pointer, CallFrame.args, Args.args)
        return _at(self.b, POINTER, table, i)

    def result(self, i: Any) -> Any:
        """The buffer of a result."""
        table = self.field(POINTER, self.pointer, CallFrame.rets, Rets.rets)
        return _at(self.b, POINTER, table, i)

    def data(self, buffer: Any) -> Any:
        """The memory of a buffer."""
        return self.field(POINTER, buffer, Buffer.data)

    def size(self, buffer: Any) -> Any:
        """The number of its elements."""
        dims = self.field(POINTER, buffer, Buffer.dims)
        total = variable(self.b, I64)
        self.b.store(I64(1), total)
        with loop(self.b, self.field(I64, buffer, Buffer.rank), **_SCALAR) as i:
            self.b.store(self.b.mul(self.b.load(total, typ=I64), _at(self.b, I64, dims, i)), total)
        return self.b.load(total, typ=I64)

    def length(self, buffer: Any) -> Any:
        """The first dimension of a buffer that has one."""
        return _at(self.b, I64, self.field(POINTER, buffer, Buffer.dims), ZERO)

    def scalars(self, start: int, values: Sequence[Value]) -> list[Any]:
        """The numbers of scalars, which are arguments from ``start`` on."""
        data = lambda i: self.data(self.argument(I64(i)))
        return [load(self.b, v.dtype, data(start + k), ZERO) for k, v in enumerate(values)]

    def keep(self, dtype: str, argument: Any, result: Any) -> None:
        """Copies what should have the same memory, unless it has."""
        source, target = self.data(argument), self.data(result)
        with self.b.if_then(self.b.icmp_unsigned("!=", source, target), likely=False):
            size = self.b.mul(self.size(result), I64(bytes_of(dtype)))
            copy = self.b.module.declare_intrinsic("llvm.memcpy", [POINTER, POINTER, I64])
            self.b.call(copy, [target, source, size, BOOL(0)])


def bytes_of(dtype: str) -> int:
    """The bytes of a number in memory."""
    width = {ir.HalfType: 16, ir.FloatType: 32, ir.DoubleType: 64}
    t = stored_type(dtype)
    bits = t.width if isinstance(t, ir.IntType) else width[type(t)]
    return bits // 8 * (2 if dtype.startswith("complex") else 1)


def _module(
    name: str, version: tuple[int, int], execute: Callable[[ir.Module, Frame], None]
) -> str:
    """The text of a module with one function that XLA can call."""
    module = ir.Module(name)
    function = ir.Function(module, ir.FunctionType(POINTER, [POINTER]), name)
    b = ir.IRBuilder(function.append_basic_block("entry"))
    frame = Frame(b, function.args[0])
    extension = frame.field(POINTER, frame.pointer, CallFrame.extension_start)
    null = POINTER(None)
    with b.if_then(b.icmp_unsigned("!=", extension, null), likely=False):
        # XLA asks for the version and the traits before it calls the function.
        metadata = frame.field(POINTER, extension, MetadataExtension.metadata)
        api = Metadata.api_version.offset
        answers = dict(
            zip((Version.major_version.offset, Version.minor_version.offset), version, strict=True)
        )
        answers = {api + offset: value for offset, value in answers.items()}
        for offset, value in (answers | {Metadata.traits.offset: 0}).items():
            b.store(I32(value), b.gep(metadata, [I64(offset)], source_etype=I8))
        b.ret(null)
    stage = frame.field(I32, frame.pointer, CallFrame.stage)
    with b.if_then(b.icmp_signed("==", stage, I32(EXECUTE))):
        execute(module, frame)
    b.ret(null)
    return _distinct(str(module))


def _function(module: ir.Module, name: str, types: Sequence[Any]) -> tuple[Any, Any]:
    """A function inside of the module whose pointers are to memory that does not overlap."""
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), types), name)
    function.linkage = "internal"
    for argument in function.args:
        if argument.type == POINTER:
            argument.add_attribute("noalias")
    return function, ir.IRBuilder(function.append_basic_block("entry"))


# Values

Index = tuple[Any, ...]  # an integer for each axis


class Numbers:
    """Computes single numbers of values, each once.

    Args:
        b: the builder.
        known: gives a number of a value that is in memory, for the value and its index; None for
            any other value.
    """

    def __init__(self, b: ir.IRBuilder, known: Callable[[Value, Any], Any]):
        self.b, self.known = b, known
        self._made: list[dict[Any, Any]] = [{}]

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """What is made in the body is known in it alone: it may be that of a loop."""
        self._made.append({})
        yield
        self._made.pop()

    def keep(self, value: Value, number: Any) -> None:
        """Sets a number of each row."""
        self._made[-1][value, None] = number

    def of(self, value: Value, index: Index) -> Any:
        """The number of a value at an index."""
        if value.literal is not None and not value.shape:
            return constant(value.dtype, value.literal)
        key = value, tuple(map(id, index))
        for made in self._made:
            if (value, None) in made or key in made:
                return made[(value, None) if (value, None) in made else key]
        number = self.known(value, index)
        if number is None:
            number = self._compute(value, index)
        self._made[-1][key] = number
        return number

    def _compute(self, value: Value, index: Index) -> Any:
        if value.meaning is not None:
            return self.of(value.meaning, index)
        op = value.maker
        if op is None:
            raise AssertionError(f"a value of shape {value.shape} is neither made nor read")
        inner, params = op.ins[0] if op.ins else value, op.eqn.params
        if op.name == "iota":
            return convert(self.b, index[params["dimension"]], "int64", value.dtype)
        if op.name == "broadcast_in_dim":
            axes = zip(params["broadcast_dimensions"], inner.shape, strict=True)
            return self.of(inner, tuple(ZERO if d == 1 else index[axis] for axis, d in axes))
        if op.name in ("reshape", "squeeze", "expand_dims"):
            long = iter([i for i, d in zip(index, value.shape, strict=True) if d != 1])
            return self.of(inner, tuple(ZERO if d == 1 else next(long) for d in inner.shape))
        return compute(self.b, op, [self.of(v, _narrowed(index, value, v)) for v in op.ins])


def _narrowed(index: Index, value: Value, operand: Value) -> Index:
    """The index in an operand, whose axes may be of length 1 or missing."""
    if operand.shape == value.shape:
        return index
    return tuple(ZERO if d == 1 else i for d, i in zip(operand.shape, index, strict=False))


# Leaves


def leaf_kernel(name: str, leaf: Leaf, version: tuple[int, int]) -> str:
    """The text of the native function of some leaves with the same operations."""
    no, ni, ns = len(leaf.outs), len(leaf.arrays), len(leaf.scalars)
    aliased = {i - ns: k for i, k in leaf.aliases.items()}
    apart = [i for i in range(ni) if i not in aliased]

    def execute(module, frame):
        b, scalars = frame.b, frame.scalars(0, leaf.scalars)
        types = [POINTER] * (no + len(apart)) + [TYPES[v.dtype] for v in leaf.scalars] + [I64]
        function, inner = _function(module, "leaf", types)
        pointers = {leaf.arrays[i]: function.args[k] for i, k in aliased.items()}
        pointers |= {leaf.arrays[i]: function.args[no + n] for n, i in enumerate(apart)}
        _leaf(inner, leaf, pointers, function.args)
        results = frame.field(I64, frame.pointer, CallFrame.rets, Rets.size)
        with loop(b, b.sdiv(results, I64(no))) as k:
            argument = lambda i: frame.argument(b.add(b.mul(k, I64(ni)), I64(ns + i)))
            result = lambda i: frame.result(b.add(b.mul(k, I64(no)), I64(i)))
            for i, o in aliased.items():
                frame.keep(leaf.arrays[i].dtype, argument(i), result(o))
            outs = [frame.data(result(i)) for i in range(no)]
            ins = [frame.data(argument(i)) for i in apart]
            b.call(function, [*outs, *ins, *scalars, frame.size(result(0))])

    return _module(name, version, execute)


def _leaf(b: ir.IRBuilder, leaf: Leaf, pointers: dict[Value, Any], args: Sequence[Any]) -> None:
    """The loop over the elements."""
    first = len(args) - 1 - len(leaf.scalars)
    scalars = dict(zip(leaf.scalars, args[first:-1], strict=True))
    with loop(b, args[-1]) as e:

        def known(value, index):
            if value in scalars:
                return scalars[value]
            return load(b, value.dtype, pointers[value], e) if value in pointers else None

        numbers = Numbers(b, known)
        made = [numbers.of(v, (e,)) for v in leaf.outs]
        for v, pointer, number in zip(leaf.outs, args, made, strict=False):
            store(b, v.dtype, pointer, e, number)
    b.ret_void()


# Rows


def rows_kernel(name: str, rows: Rows, version: tuple[int, int]) -> str:
    """The text of the native function of some rows of tables."""

    def execute(module, frame):
        function, inner = _function(module, "row", _RowArguments(rows).types())
        _Row(inner, rows, _RowArguments(rows).named(function.args)).write()
        _every_row(frame, rows, function)

    return _module(name, version, execute)


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
        with loop(self.b, I64(math.prod(shape[1:])), **_VECTOR) as flat, self.numbers.scope():
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
    id_of = lambda at: convert(b, _at(b, TYPES[kind], ids, at), kind, "int64")

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


class Chains:
    """The positions of each distinct id, in order, found by a hash table.

    Memory, in 32-bit words: the table, whose length is a power of two, and for ``many`` positions
    the firsts of the chains, the following position of each, and the last of each chain.
    """

    def __init__(self, b: ir.IRBuilder, memory: Any, length: Any, many: Any):
        self.b, self.table = b, memory
        self.length = b.sub(length, b.mul(many, I64(3)))
        part = lambda start: b.gep(memory, [start], source_etype=I32)
        self.firsts = part(self.length)
        self.following = b.gep(self.firsts, [many], source_etype=I32)
        self.lasts = b.gep(self.following, [many], source_etype=I32)
        self._number = variable(b, I64)
        b.store(ZERO, self._number)
        count = b.module.declare_intrinsic("llvm.cttz", [I64], ir.FunctionType(I64, [I64, BOOL]))
        self.shift = b.sub(I64(32), b.call(count, [self.length, BOOL(1)]))
        fill = b.module.declare_intrinsic("llvm.memset", [POINTER, I64])
        b.call(fill, [memory, I8(-1), b.shl(self.length, I64(2)), BOOL(0)])

    def number(self) -> Any:
        """How many chains there are."""
        return self.b.load(self._number, typ=I64)

    def at(self, words: Any, i: Any) -> Any:
        """A position."""
        return self.b.sext(_at(self.b, I32, words, i), I64)

    def _set(self, words: Any, i: Any, position: Any) -> None:
        self.b.store(self.b.trunc(position, I32), self.b.gep(words, [i], source_etype=I32))

    def append(self, position: Any, row: Any, id_of: Callable[[Any], Any]) -> None:
        """Adds a position to the chain of its row."""
        b = self.b
        hashed = b.and_(b.mul(row, I64(_HASH)), I64(2**32 - 1))
        is_free = lambda at: b.icmp_signed("<", self.at(self.table, at), ZERO)

        def is_found(at):
            first = self.at(self.table, at)
            # Not the id of position -1.
            safe = b.select(b.icmp_signed("<", first, ZERO), ZERO, first)
            return b.or_(is_free(at), b.icmp_signed("==", id_of(safe), row))

        step = lambda at: b.and_(b.add(at, I64(1)), b.sub(self.length, I64(1)))
        at = _repeat(b, b.lshr(hashed, self.shift), is_found, step)
        first = self.at(self.table, at)
        with b.if_else(b.icmp_signed("<", first, ZERO)) as (new, again):
            with new:
                self._set(self.table, at, position)
                self._set(self.firsts, self.number(), position)
                self._set(self.lasts, position, position)
                b.store(b.add(self.number(), I64(1)), self._number)
            with again:
                self._set(self.following, self.at(self.lasts, first), position)
                self._set(self.lasts, first, position)


def sum_of_chain(
    b: ir.IRBuilder,
    merged: Value,
    row_of: Callable[[Any], Any],
    chains: Chains,
    position: Any,
    total: Any,
) -> None:
    """The sum of the gradients of a chain, in order."""
    width, kind = I64(math.prod(merged.shape[1:])), merged.dtype
    start = row_of(position)
    with loop(b, width, **_VECTOR) as e:
        store(b, kind, total, e, load(b, kind, start, e))

    def more(at):
        row = row_of(at)
        with loop(b, width, **_VECTOR) as e:
            store(b, kind, total, e, add(b, kind, load(b, kind, total, e), load(b, kind, row, e)))
        return chains.at(chains.following, at)

    second = chains.at(chains.following, position)
    _repeat(b, second, lambda at: b.icmp_signed("<", at, ZERO), more)
