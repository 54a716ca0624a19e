"""The merging of gradients of equal ids, in LLVM's language."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from .handler import inner_function
from .loops import POINTER, VECTOR, ZERO, loop, repeat, variable, word_at
from .operations import BOOL, I8, I32, I64, add, bytes_of, load, store

_HASH = 2654435761  # Knuth's multiplicative hashing


class Sums:
    """The sums of the gradients of equal ids, in order, by a hash table of the distinct ids.

    The gradients are read one after the other, which is twice as fast as id after id.

    Args:
        b: the builder.
        memory: 32-bit words: the table, whose length is a power of two, and for ``many`` positions
            the first one of each distinct id, and where the sum of a first position is; -1 if its
            id is not repeated.
        length: the number of words.
        many: the number of positions.
        row_at: the memory of the sum of a number.
        gradient_at: the memory of the gradient of a position.
        size: the number of elements of a row.
        kind: their dtype.
    """

    def __init__(
        self,
        b: ir.IRBuilder,
        memory: Any,
        length: Any,
        many: Any,
        row_at: Callable[[Any], Any],
        gradient_at: Callable[[Any], Any],
        size: int,
        kind: str,
    ):
        self.b, self.table = b, memory
        self.row_at, self.gradient_at = row_at, gradient_at
        self.bytes = size * bytes_of(kind)
        self.length = b.sub(length, b.mul(many, I64(2)))
        self.firsts = b.gep(memory, [self.length], source_etype=I32)
        self.places = b.gep(self.firsts, [many], source_etype=I32)
        self._number, self._repeated = variable(b, I64), variable(b, I64)
        b.store(ZERO, self._number)
        b.store(ZERO, self._repeated)
        count = b.module.declare_intrinsic("llvm.cttz", [I64], ir.FunctionType(I64, [I64, BOOL]))
        self.shift = b.sub(I64(32), b.call(count, [self.length, BOOL(1)]))
        fill = b.module.declare_intrinsic("llvm.memset", [POINTER, I64])
        b.call(fill, [memory, I8(-1), b.shl(self.length, I64(2)), BOOL(0)])
        self._add, inner = inner_function(b.module, "add_row", [POINTER, POINTER])
        total, x = self._add.args
        with loop(inner, I64(size), **VECTOR) as e:
            both = [load(inner, kind, pointer, e) for pointer in (total, x)]
            store(inner, kind, total, e, add(inner, kind, *both))
        inner.ret_void()

    def count(self) -> Any:
        """How many distinct ids there are."""
        return self.b.load(self._number, typ=I64)

    def at(self, words: Any, i: Any) -> Any:
        """A position or a number."""
        return self.b.sext(word_at(self.b, I32, words, i), I64)

    def of(self, first: Any) -> Any:
        """The sum, or the only gradient, of the id of a first position."""
        place = self.at(self.places, first)
        is_single = self.b.icmp_signed("<", place, ZERO)
        return self.b.select(is_single, self.gradient_at(first), self.row_at(place))

    def _set(self, words: Any, i: Any, position: Any) -> None:
        self.b.store(self.b.trunc(position, I32), self.b.gep(words, [i], source_etype=I32))

    def append(self, position: Any, row: Any, id_of: Callable[[Any], Any]) -> None:
        """Adds the gradient of a position to the sum of its row."""
        b = self.b
        hashed = b.and_(b.mul(row, I64(_HASH)), I64(2**32 - 1))
        is_free = lambda at: b.icmp_signed("<", self.at(self.table, at), ZERO)

        def is_found(at):
            first = self.at(self.table, at)
            # Not the id of position -1.
            safe = b.select(b.icmp_signed("<", first, ZERO), ZERO, first)
            return b.or_(is_free(at), b.icmp_signed("==", id_of(safe), row))

        step = lambda at: b.and_(b.add(at, I64(1)), b.sub(self.length, I64(1)))
        at = repeat(b, b.lshr(hashed, self.shift), is_found, step)
        first = self.at(self.table, at)
        with b.if_else(b.icmp_signed("<", first, ZERO)) as (new, again):
            with new:
                self._set(self.table, at, position)
                self._set(self.firsts, self.count(), position)
                self._set(self.places, position, I64(-1))
                b.store(b.add(self.count(), I64(1)), self._number)
            with again:
                with b.if_then(b.icmp_signed("<", self.at(self.places, first), ZERO)):
                    place = b.load(self._repeated, typ=I64)
                    self._set(self.places, first, place)
                    b.store(b.add(place, I64(1)), self._repeated)
                    copy = b.module.declare_intrinsic("llvm.memcpy", [POINTER, POINTER, I64])
                    args = self.row_at(place), self.gradient_at(first), I64(self.bytes), BOOL(0)
                    b.call(copy, args)
                total = self.row_at(self.at(self.places, first))
                b.call(self._add, [total, self.gradient_at(position)])
