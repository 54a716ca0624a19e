"""Loops in LLVM IR."""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir

from .operations import BOOL, I32, I64

POINTER = ir.PointerType()
ZERO = I64(0)


@contextlib.contextmanager
def loop(b: ir.IRBuilder, end: Any, **hints: int) -> Iterator[Any]:
    """A context manager for the body of a loop from 0 to ``end``, with hints for LLVM."""
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
    if isinstance(end, ir.Constant) and end.constant % 4 == 1 and end.constant < _MASKED:
        hints.setdefault("vectorize_enable", 1)
    if hints:
        back.set_metadata("llvm.loop", _hints(b.module, hints))
    b.position_at_end(after)


# XLA's own loops are not unrolled before they are vectorized, either.
VECTOR = {"unroll_disable": 1, "interleave_count": 4}
SCALAR = {"unroll_disable": 1, "vectorize_enable": 0}
OUTER = {"vectorize_enable": 0}  # a loop around others
_ITSELF = "the loop itself"
# Shorter loops LLVM ends by a vector with a mask, unless it is told to vectorize. And of one with
# one element, LLVM 22 stores 4 bytes, also where the element has 1 or 2 (AVX-512).
_MASKED = 16


def _hints(module: ir.Module, hints: dict[str, int]) -> Any:
    """The LLVM metadata of a loop, completed by :func:`complete_hints`."""
    number = sum(node.operands[0].string == _ITSELF for node in module.metadata if node.operands)
    node = [ir.MetaDataString(module, _ITSELF), I32(number)]
    for name, value in hints.items():
        word = ir.MetaDataString(module, "llvm.loop." + name.replace("_", "."))
        kind = {"vectorize_enable": BOOL(value), "unroll_disable": None}.get(name, I32(value))
        node.append(module.add_metadata([word] if kind is None else [word, kind]))
    return module.add_metadata(node)


def complete_hints(text: str) -> str:
    """The text of a module with self-referential loop metadata, as LLVM requires."""
    found = rf'(!\d+) = !{{ !"{_ITSELF}", i32 \d+'
    return re.sub(found, r"\1 = distinct !{ \1", text)


def repeat(b: ir.IRBuilder, start: Any, is_done: Callable, next_of: Callable) -> Any:
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


def which(b: ir.IRBuilder, number: Any, count: Callable[[Any], Any]) -> tuple[Any, Any]:
    """The group of a number and its index in it, for groups of ``count(0)``, ``count(1)``, ..."""
    place = variable(b, I64)
    b.store(number, place)

    def is_here(k):
        return b.icmp_signed("<", b.load(place, typ=I64), count(k))

    def after(k):
        b.store(b.sub(b.load(place, typ=I64), count(k)), place)
        return b.add(k, I64(1))

    return repeat(b, ZERO, is_here, after), b.load(place, typ=I64)


def summed(b: ir.IRBuilder, end: Any, count: Callable[[Any], Any]) -> Any:
    """The sum of ``count(k)`` for all ``k`` below ``end``."""
    total = variable(b, I64)
    b.store(ZERO, total)
    with loop(b, end, **SCALAR) as k:
        b.store(b.add(b.load(total, typ=I64), count(k)), total)
    return b.load(total, typ=I64)


def variable(b: ir.IRBuilder, t: Any) -> Any:
    """Memory for a number, which LLVM replaces by a register."""
    with b.goto_entry_block():
        return b.alloca(t)


def memory(b: ir.IRBuilder, nbytes: int) -> Any:
    """Memory of a function."""
    with b.goto_entry_block():
        found = b.alloca(ir.IntType(8), nbytes)
    found.align = 64
    found.type = POINTER  # llvmlite gives it a type of its own, as LLVM did once
    return found


def word_at(b: ir.IRBuilder, t: Any, pointer: Any, index: Any) -> Any:
    """The word at an index."""
    return b.load(b.gep(pointer, [index], source_etype=t), typ=t)
