"""Positions of equal ids, found by a hash table, in LLVM's language."""

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir

from .loops import POINTER, VECTOR, ZERO, loop, repeat, variable, word_at
from .operations import BOOL, I8, I32, I64, add, load, store
from .program import Value

_HASH = 2654435761  # Knuth's multiplicative hashing


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

    def count(self) -> Any:
        """How many chains there are."""
        return self.b.load(self._number, typ=I64)

    def at(self, words: Any, i: Any) -> Any:
        """A position."""
        return self.b.sext(word_at(self.b, I32, words, i), I64)

    def _set(self, words: Any, i: Any, position: Any) -> None:
        self.b.store(self.b.trunc(position, I32), self.b.gep(words, [i], source_etype=I32))

    def end(self, position: Any) -> None:
        """Nothing follows a position, yet."""
        self._set(self.following, position, I64(-1))

    def is_long(self, first: Any) -> Any:
        """Whether a chain has more than its first position."""
        return self.b.icmp_signed(">=", self.at(self.following, first), ZERO)

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
        at = repeat(b, b.lshr(hashed, self.shift), is_found, step)
        first = self.at(self.table, at)
        with b.if_else(b.icmp_signed("<", first, ZERO)) as (new, again):
            with new:
                self._set(self.table, at, position)
                self._set(self.firsts, self.count(), position)
                self._set(self.lasts, position, position)
                b.store(b.add(self.count(), I64(1)), self._number)
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
    with loop(b, width, **VECTOR) as e:
        store(b, kind, total, e, load(b, kind, start, e))

    def more(at):
        row = row_of(at)
        with loop(b, width, **VECTOR) as e:
            store(b, kind, total, e, add(b, kind, load(b, kind, total, e), load(b, kind, row, e)))
        return chains.at(chains.following, at)

    second = chains.at(chains.following, position)
    repeat(b, second, lambda at: b.icmp_signed("<", at, ZERO), more)
