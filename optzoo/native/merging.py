"""The division of the ids of a step among threads, and the sums of gradients of equal ids.

Ids are divided into parts by their hash, so that equal ids are in one part and no two threads write
the same row. A part keeps the order of positions. The results do not depend on the number of
threads.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir

from ..jaxprs.graph import Value
from .handler import Frame, inner_function
from .loops import POINTER, VECTOR, ZERO, loop, repeat, variable, word_at
from .operations import (
    BOOL,
    I8,
    I32,
    I64,
    TYPES,
    add,
    bytes_of,
    convert,
    load,
    smaller,
    store,
)
from .rows_groups import RowsGroup
from .scratch import CHUNK

_HASH = 2654435761  # Knuth's multiplicative hashing
_MASK = 2**32 - 1
_SAMPLED = 4  # chunks from which on the first one is a sample
AHEAD = 16  # rows are fetched so many rows before they are needed
_LINE = 64  # bytes of a cache line
_MOST_LINES = 32  # of a row that are fetched ahead


class Ids:
    """The ids of a call."""

    def __init__(self, frame: Frame, rows: RowsGroup):
        self.b, self.kind = frame.b, rows.ids.dtype
        ids, table = frame.argument(ZERO), frame.argument(I64(1 if rows.merged is None else 2))
        self.data, self.many = frame.data(ids), frame.length(ids)
        self.num_rows = frame.length(table)

    def at(self, position: Any) -> Any:
        """The id at a position."""
        found = word_at(self.b, TYPES[self.kind], self.data, position)
        return convert(self.b, found, self.kind, "int64")

    def is_real(self, row: Any) -> Any:
        """Whether the table has the row: the padding id has none."""
        return self.b.icmp_unsigned("<", row, self.num_rows)


class Parts:
    """The positions of the ids, by parts.

    The memory is that of :func:`scratch.of_rows`. The first array has a row for each chunk of
    positions: for each part the number of positions, later the index of the next one; and the total
    number. Then, for each part, its begin and end, and one shared word. The second array has rows
    over positions: those of each chunk, those of each part, and, for sums, the index of the sum of
    a position, -1 without one, and hash tables of two words per position.
    """

    def __init__(self, frame: Frame, rows: RowsGroup):
        self.b, self.ids = frame.b, Ids(frame, rows)
        counts, words = (frame.result(I64(len(rows.outs) + k)) for k in range(2))
        self.number = self.b.sub(frame.length(counts, 1), I64(1))
        self.chunks = self.b.sub(frame.length(counts), I64(3))
        self._counts, self._kept = frame.data(counts), frame.data(words)
        row = lambda k: self._of_chunk(self.b.add(self.chunks, I64(k)))
        self.starts, self.ends, self.common = row(0), row(1), row(2)
        after = lambda k: self.b.gep(
            self._kept, [self.b.mul(self.ids.many, I64(k))], source_etype=I32
        )
        self.order, self.places, self.table = after(1), after(2), after(3)

    def _of_chunk(self, chunk: Any) -> Any:
        """The counts of a chunk."""
        at = self.b.mul(chunk, self.b.add(self.number, I64(1)))
        return self.b.gep(self._counts, [at], source_etype=I32)

    def get(self, words: Any, i: Any) -> Any:
        """Reads a word as a 64-bit number."""
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

    def keep(self, chunk: Any, start_of: Callable[[Any], None]) -> None:
        """Lists the positions of a chunk whose ids are rows.

        Args:
            chunk: the index of the chunk.
            start_of: called for each of them.
        """
        b, start, number = self.b, self.b.mul(chunk, I64(CHUNK)), variable(self.b, I64)
        b.store(ZERO, number)
        kept = self.kept(chunk)
        with loop(b, smaller(b, I64(CHUNK), b.sub(self.ids.many, start))) as k:
            position = b.add(start, k)
            with b.if_then(self.ids.is_real(self.ids.at(position))):
                start_of(position)
                self.set(kept, b.load(number, typ=I64), position)
                b.store(b.add(b.load(number, typ=I64), I64(1)), number)
        self.set_length(chunk, b.load(number, typ=I64))

    def kept(self, chunk: Any) -> Any:
        """The positions of a chunk."""
        return self.b.gep(self._kept, [self.b.mul(chunk, I64(CHUNK))], source_etype=I32)

    def length_of_chunk(self, chunk: Any) -> Any:
        """The number of positions of a chunk after merging."""
        return self.get(self._of_chunk(chunk), self.number)

    def set_length(self, chunk: Any, length: Any) -> None:
        """Sets the number of positions of a chunk after merging."""
        self.set(self._of_chunk(chunk), self.number, length)

    def count(self, chunk: Any) -> None:
        """Counts the positions of a chunk in each part."""
        counts = self._of_chunk(chunk)
        fill(self.b, counts, 0, self.b.shl(self.number, I64(2)))
        for _, part in self._of_parts(chunk):
            self.set(counts, part, self.b.add(self.get(counts, part), I64(1)))

    def divide(self) -> None:
        """Assigns memory to each part and to its share of each chunk."""
        b, following = self.b, variable(self.b, I64)
        b.store(ZERO, following)
        with loop(b, self.number) as part:
            self.set(self.starts, part, b.load(following, typ=I64))
            with loop(b, self.chunks) as chunk:
                counts, at = self._of_chunk(chunk), b.load(following, typ=I64)
                b.store(b.add(at, self.get(counts, part)), following)
                self.set(counts, part, at)
            self.set(self.ends, part, b.load(following, typ=I64))

    def sort(self, chunk: Any) -> None:
        """Copies the positions of a chunk to their parts."""
        counts = self._of_chunk(chunk)
        for position, part in self._of_parts(chunk):
            at = self.get(counts, part)
            self.set(counts, part, self.b.add(at, I64(1)))
            self.set(self.order, at, position)

    def _of_parts(self, chunk: Any) -> Iterator[tuple[Any, Any]]:
        """The loop over the positions of a chunk, with the part of each."""
        kept = self.kept(chunk)
        with loop(self.b, self.length_of_chunk(chunk)) as k:
            position = self.get(kept, k)
            yield position, self.hashed(self.ids.at(position))[0]

    def of(self, part: Any) -> tuple[Any, Any]:
        """The positions of a part, their begin and their number."""
        start = self.get(self.starts, part)
        return start, self.b.sub(self.get(self.ends, part), start)


class Sums:
    """The sums of the gradients of equal ids, each in the order of their positions.

    If many ids are equal, the ids of a chunk are merged first, then the sums of the chunks, so that
    several threads add the gradients of a frequent id.
    """

    def __init__(self, frame: Frame, rows: RowsGroup, merged: Value):
        self.b, self.parts = frame.b, Parts(frame, rows)
        self.kind, self.size = merged.dtype, math.prod(merged.shape[1:])
        self.bytes = self.size * bytes_of(self.kind)
        self._gradients = frame.data(frame.argument(I64(1)))
        self._sums = frame.data(frame.result(I64(len(rows.outs) + 2)))

    def of(self, position: Any) -> Any:
        """The current sum of the gradients of a position, or its gradient."""
        place = self.parts.get(self.parts.places, position)
        is_single = self.b.icmp_signed("<", place, ZERO)
        start = self.b.select(is_single, self._gradients, self._sums)
        return self._row(start, self.b.select(is_single, position, place))

    def _row(self, start: Any, number: Any) -> Any:
        return self.b.gep(start, [self.b.mul(number, I64(self.bytes))], source_etype=I8)

    def merge(self, order: Any, start: Any, many: Any) -> Any:
        """Merges positions, and moves the first one of each id to the front.

        Args:
            order: the positions.
            start: the begin of the memory of their hash table.
            many: the number of positions.

        Returns:
            The number of distinct ids.
        """
        b, parts = self.b, self.parts
        length = b.mul(many, I64(2))
        table = b.gep(parts.table, [b.mul(start, I64(2))], source_etype=I32)
        fill(b, table, -1, b.shl(length, I64(2)))
        number = variable(b, I64)
        b.store(ZERO, number)
        with loop(b, many) as k:
            position = parts.get(order, k)
            row = parts.ids.at(position)
            later = b.add(k, I64(AHEAD))
            with b.if_then(b.icmp_signed("<", later, many)):
                fetch(b, self.of(parts.get(order, later)), self.bytes)

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
        """Adds the sum of a position to that of the first position of its id."""
        b, parts = self.b, self.parts
        place = parts.get(parts.places, first)
        with b.if_else(b.icmp_signed("<", place, ZERO)) as (single, summed):
            with single:
                self._begin_sum(first, position)
            with summed:
                b.call(self._add(), [self._row(self._sums, place), self.of(position)])

    def _begin_sum(self, first: Any, position: Any) -> None:
        """Starts the sum of two positions, of which the first one has none yet."""
        b, parts = self.b, self.parts
        place = parts.get(parts.places, position)
        with b.if_else(b.icmp_signed("<", place, ZERO)) as (single, summed):
            with single:  # The number of a sum is the second one of its positions.
                copy = b.module.declare_intrinsic("llvm.memcpy", [POINTER, POINTER, I64])
                total = self._row(self._sums, position)
                b.call(copy, [total, self.of(first), I64(self.bytes), BOOL(0)])
                b.call(self._add(), [total, self.of(position)])
                parts.set(parts.places, first, position)
            with summed:
                b.call(self._add(), [self._row(self._sums, place), self.of(first)])
                parts.set(parts.places, first, place)

    def _add(self) -> ir.Function:
        """The function that adds one row to another."""
        if "add_row" in self.b.module.globals:
            return self.b.module.globals["add_row"]
        function, b = inner_function(self.b.module, "add_row", [POINTER, POINTER])
        total, x = function.args
        with loop(b, I64(self.size), **VECTOR) as e:
            both = [load(b, self.kind, pointer, e) for pointer in (total, x)]
            store(b, self.kind, total, e, add(b, self.kind, *both))
        b.ret_void()
        return function

    # Chunks

    def prepare(self, chunk: Any, merges: Any) -> None:
        """Lists the positions of a chunk; merges them if ``merges``."""
        b, parts = self.b, self.parts
        parts.keep(chunk, lambda position: parts.set(parts.places, position, I64(-1)))
        with b.if_then(merges):
            start, many = b.mul(chunk, I64(CHUNK)), parts.length_of_chunk(chunk)
            parts.set_length(chunk, self.merge(parts.kept(chunk), start, many))

    def sample(self) -> None:
        """Merges the first chunk of many, and records whether many of its ids are equal."""
        b, parts = self.b, self.parts
        parts.set(parts.common, ZERO, ZERO)
        with b.if_then(self._has_sample()):
            self.prepare(ZERO, BOOL(1))
            is_less = b.icmp_signed("<", parts.length_of_chunk(ZERO), I64(CHUNK * 7 // 8))
            parts.set(parts.common, ZERO, b.zext(is_less, I64))

    def prepare_next(self, chunk: Any) -> None:
        """Lists the positions of another chunk, and merges them depending on the sample."""
        b = self.b
        is_sample = b.and_(self._has_sample(), b.icmp_signed("==", chunk, ZERO))
        with b.if_then(b.not_(is_sample)):
            merges = b.icmp_signed(">", self.parts.get(self.parts.common, ZERO), ZERO)
            self.prepare(chunk, merges)

    def _has_sample(self) -> Any:
        return self.b.icmp_signed(">=", self.parts.chunks, I64(_SAMPLED))


def fetch(b: ir.IRBuilder, pointer: Any, size: int) -> None:
    """Prefetches a row that will be written."""
    function = b.module.globals.get("llvm.prefetch.p0") or ir.Function(
        b.module, ir.FunctionType(ir.VoidType(), [POINTER, I32, I32, I32]), "llvm.prefetch.p0"
    )
    for line in range(min(_MOST_LINES, -(-size // _LINE))):
        place = b.gep(pointer, [I64(line * _LINE)], source_etype=I8)
        b.call(function, [place, I32(0), I32(3), I32(1)])


def fill(b: ir.IRBuilder, place: Any, byte: int, nbytes: Any) -> None:
    """Sets some bytes of memory."""
    function = b.module.declare_intrinsic("llvm.memset", [POINTER, I64])
    b.call(function, [place, I8(byte), nbytes, BOOL(0)])
