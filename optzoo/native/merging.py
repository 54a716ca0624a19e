"""The division of the ids of a step among threads, and the sums of gradients of equal ids.

Ids are put into parts by a hash of them, so equal ids are in one part and no two threads write the
same row. In a part the positions of the ids keep their order. So the results do not depend on the
number of threads.
"""

import math
from typing import Any

from llvmlite import ir

from ..jaxprs.graph import Value
from .groups import RowsGroup
from .handler import Frame, inner_function
from .loops import POINTER, VECTOR, ZERO, loop, repeat, variable, word_at
from .operations import (
    BOOL, I8, I32, I64, TYPES, add, bytes_of, convert, larger, load, smaller, store,
)  # fmt: skip
from .scratch import BLOCK, CHUNK

_HASH = 2654435761  # Knuth's multiplicative hashing
_MASK = 2**32 - 1


class Ids:
    """The ids of a call."""

    def __init__(self, frame: Frame, rows: RowsGroup):
        self.b, self.kind = frame.b, rows.ids.dtype
        ids, table = frame.argument(ZERO), frame.argument(I64(1 if rows.merged is None else 2))
        self.data, self.many = frame.data(ids), frame.length(ids)
        self.num_rows = frame.length(table)

    def at(self, position: Any) -> Any:
        """The id of a position."""
        found = word_at(self.b, TYPES[self.kind], self.data, position)
        return convert(self.b, found, self.kind, "int64")

    def is_real(self, row: Any) -> Any:
        """Whether a table has the row: one id stands for none."""
        return self.b.icmp_unsigned("<", row, self.num_rows)


class Parts:
    """The positions of the ids, by parts.

    The memory is that of :func:`scratch.of_parts`: by chunks of positions and by parts how many
    there are, then where the next one goes; by parts where it begins and ends; one counter. And by
    positions: those of each part; the number of the sum of its gradient, -1 if there is none; and
    the hash tables.
    """

    def __init__(self, frame: Frame, rows: RowsGroup):
        self.b, self.ids = frame.b, Ids(frame, rows)
        counts, words = (frame.result(I64(len(rows.outs) + k)) for k in range(2))
        self.number = frame.length(counts, 1)
        self.chunks = self.b.sub(frame.length(counts), I64(3))
        self._counts, order = frame.data(counts), frame.data(words)
        row = lambda k: self._of_chunk(self.b.add(self.chunks, I64(k)))
        self.starts, self.ends, self.counter = row(0), row(1), row(2)
        after = lambda pointer, k: self.b.gep(
            pointer, [self.b.mul(self.ids.many, I64(k))], source_etype=I32
        )
        self.order, self.places, self.table = order, after(order, 1), after(order, 2)

    def _of_chunk(self, chunk: Any) -> Any:
        """The counts of a chunk."""
        return self.b.gep(self._counts, [self.b.mul(chunk, self.number)], source_etype=I32)

    def get(self, words: Any, i: Any) -> Any:
        """A word, as a number of 64 bits."""
        return self.b.sext(word_at(self.b, I32, words, i), I64)

    def set(self, words: Any, i: Any, value: Any) -> None:
        """Writes a word."""
        self.b.store(self.b.trunc(value, I32), self.b.gep(words, [i], source_etype=I32))

    def hashed(self, row: Any) -> tuple[Any, Any]:
        """The part of a row, and 32 bits of its hash within the part."""
        b = self.b
        bits = b.and_(b.mul(row, I64(_HASH)), I64(_MASK))
        # The product of the hash and the number of parts, of which the upper bits are the part.
        product = b.mul(bits, self.number)
        return b.lshr(product, I64(32)), b.and_(product, I64(_MASK))

    def count(self, chunk: Any) -> None:
        """Counts the ids of a chunk."""
        counts = self._of_chunk(chunk)
        _fill(self.b, counts, 0, self.number)
        for position in self._real(chunk):
            part, _ = self.hashed(self.ids.at(position))
            self.set(counts, part, self.b.add(self.get(counts, part), I64(1)))

    def divide(self) -> Any:
        """Gives each part, and each chunk of it, its place; gives whether a part is long."""
        b, next_, longest = self.b, variable(self.b, I64), variable(self.b, I64)
        for word in (next_, longest):
            b.store(ZERO, word)
        with loop(b, self.number) as part:
            self.set(self.starts, part, b.load(next_, typ=I64))
            with loop(b, self.chunks) as chunk:
                counts, at = self._of_chunk(chunk), b.load(next_, typ=I64)
                b.store(b.add(at, self.get(counts, part)), next_)
                self.set(counts, part, at)
            self.set(self.ends, part, b.load(next_, typ=I64))
            b.store(larger(b, b.load(longest, typ=I64), self.length(part)), longest)
        self.set(self.counter, ZERO, ZERO)
        return b.icmp_signed(">", b.load(longest, typ=I64), I64(BLOCK))

    def sort(self, chunk: Any) -> None:
        """Puts the positions of a chunk into their parts."""
        counts = self._of_chunk(chunk)
        for position in self._real(chunk):
            part, _ = self.hashed(self.ids.at(position))
            at = self.get(counts, part)
            self.set(counts, part, self.b.add(at, I64(1)))
            self.set(self.order, at, position)
            self.set(self.places, position, I64(-1))

    def length(self, part: Any) -> Any:
        """How many positions a part has."""
        return self.b.sub(self.get(self.ends, part), self.get(self.starts, part))

    def _real(self, chunk: Any):
        """The loop over the positions of a chunk whose ids are rows."""
        b, start = self.b, self.b.mul(chunk, I64(CHUNK))
        with loop(b, smaller(b, I64(CHUNK), b.sub(self.ids.many, start))) as k:
            position = b.add(start, k)
            with b.if_then(self.ids.is_real(self.ids.at(position))):
                yield position


class Sums:
    """The sums of the gradients of equal ids, each in the order of their positions.

    Positions of one id beyond :data:`scratch.BLOCK` are added in blocks, by several threads.
    """

    def __init__(self, frame: Frame, rows: RowsGroup, merged: Value):
        self.b, self.parts = frame.b, Parts(frame, rows)
        self.kind, self.size = merged.dtype, math.prod(merged.shape[1:])
        self.bytes = self.size * bytes_of(self.kind)
        self._gradients = frame.data(frame.argument(I64(1)))
        self._sums = frame.data(frame.result(I64(len(rows.outs) + 2)))

    def of(self, position: Any) -> Any:
        """The sum of the gradients of a position so far, or its gradient."""
        place = self.parts.get(self.parts.places, position)
        is_single = self.b.icmp_signed("<", place, ZERO)
        start = self.b.select(is_single, self._gradients, self._sums)
        return self._row(start, self.b.select(is_single, position, place))

    def _row(self, start: Any, number: Any) -> Any:
        return self.b.gep(start, [self.b.mul(number, I64(self.bytes))], source_etype=I8)

    def merge(self, start: Any, many: Any) -> Any:
        """Merges some positions of a part, and puts the first ones of each id in front.

        Args:
            start: where they begin.
            many: how many there are.

        Returns:
            How many ids they have.
        """
        b, parts = self.b, self.parts
        length = b.mul(many, I64(2))
        table = b.gep(parts.table, [b.mul(start, I64(2))], source_etype=I32)
        order = b.gep(parts.order, [start], source_etype=I32)
        _fill(b, table, -1, length)
        number = variable(b, I64)
        b.store(ZERO, number)
        with loop(b, many) as k:
            position = parts.get(order, k)
            row = parts.ids.at(position)

            def is_found(at, row=row):
                first = parts.get(table, at)
                is_free = b.icmp_signed("<", first, ZERO)
                safe = b.select(is_free, ZERO, first)  # not the id of position -1
                return b.or_(is_free, b.icmp_signed("==", parts.ids.at(safe), row))

            def after(at):
                at = b.add(at, I64(1))
                return b.select(b.icmp_signed("==", at, length), ZERO, at)

            place = b.lshr(b.mul(parts.hashed(row)[1], length), I64(32))
            at = repeat(b, place, is_found, after)
            first = parts.get(table, at)
            with b.if_else(b.icmp_signed("<", first, ZERO)) as (new, again):
                with new:
                    parts.set(table, at, position)
                    parts.set(order, b.load(number, typ=I64), position)
                    b.store(b.add(b.load(number, typ=I64), I64(1)), number)
                with again:
                    self._join(first, position)
        return b.load(number, typ=I64)

    def _join(self, first: Any, position: Any) -> None:
        """Adds what a position has to what the first one of its id has."""
        b, parts = self.b, self.parts
        places = [parts.get(parts.places, p) for p in (first, position)]
        with b.if_else(b.icmp_signed("<", places[0], ZERO)) as (single, summed):
            with single:
                with b.if_else(b.icmp_signed("<", places[1], ZERO)) as (both, other):
                    with both:  # Each sum takes two positions at least: half of them suffice.
                        total = b.atomic_rmw("add", parts.counter, I32(1), "monotonic")
                        total = b.zext(total, I64)
                        copy = b.module.declare_intrinsic("llvm.memcpy", [POINTER, POINTER, I64])
                        target = self._row(self._sums, total)
                        b.call(copy, [target, self.of(first), I64(self.bytes), BOOL(0)])
                        parts.set(parts.places, first, total)
                        b.call(self._add(), [target, self.of(position)])
                    with other:
                        target = self._row(self._sums, places[1])
                        b.call(self._add(), [target, self.of(first)])
                        parts.set(parts.places, first, places[1])
            with summed:
                b.call(self._add(), [self._row(self._sums, places[0]), self.of(position)])

    def _add(self) -> ir.Function:
        """The function that adds a row to another one."""
        if "add_row" in self.b.module.globals:
            return self.b.module.globals["add_row"]
        function, b = inner_function(self.b.module, "add_row", [POINTER, POINTER])
        total, x = function.args
        with loop(b, I64(self.size), **VECTOR) as e:
            both = [load(b, self.kind, pointer, e) for pointer in (total, x)]
            store(b, self.kind, total, e, add(b, self.kind, *both))
        b.ret_void()
        return function

    # Long parts

    def merge_block(self, block: Any) -> None:
        """Merges the positions of a block, part by part, of long parts alone."""
        b, parts = self.b, self.parts
        with loop(b, parts.number) as part, b.if_then(self._is_long(part)):
            start, many = self._within(part, block)
            with b.if_then(b.icmp_signed(">", many, ZERO)):
                number = self.merge(start, many)
                parts.set(parts.table, b.mul(start, I64(2)), number)

    def join_blocks(self, part: Any) -> None:
        """Puts what is left of the blocks of a part side by side, if it is long."""
        b, parts = self.b, self.parts
        with b.if_then(self._is_long(part)):
            number, start = variable(b, I64), parts.get(parts.starts, part)
            b.store(start, number)
            first, end = (b.sdiv(x, I64(BLOCK)) for x in (start, parts.get(parts.ends, part)))
            with loop(b, b.add(b.sub(end, first), I64(1))) as k:
                begin, many = self._within(part, b.add(first, k))
                with b.if_then(b.icmp_signed(">", many, ZERO)):
                    left = parts.get(parts.table, b.mul(begin, I64(2)))
                    with loop(b, left) as j:
                        to = b.load(number, typ=I64)
                        parts.set(parts.order, to, parts.get(parts.order, b.add(begin, j)))
                        b.store(b.add(to, I64(1)), number)
            parts.set(parts.ends, part, b.load(number, typ=I64))

    def _is_long(self, part: Any) -> Any:
        return self.b.icmp_signed(">", self.parts.length(part), I64(BLOCK))

    def _within(self, part: Any, block: Any) -> tuple[Any, Any]:
        """Where the positions of a part in a block begin, and how many they are."""
        b, parts = self.b, self.parts
        start, begin = parts.get(parts.starts, part), b.mul(block, I64(BLOCK))
        start = larger(b, start, begin)
        end = smaller(b, parts.get(parts.ends, part), b.add(begin, I64(BLOCK)))
        return start, b.sub(end, start)


def _fill(b: ir.IRBuilder, words: Any, byte: int, many: Any) -> None:
    """Sets all bytes of some words."""
    fill = b.module.declare_intrinsic("llvm.memset", [POINTER, I64])
    b.call(fill, [words, I8(byte), b.shl(many, I64(2)), BOOL(0)])
