"""The native function of reductions: one loop over the elements of some arrays for all of them."""

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir

from ..jaxprs.graph import Operation
from .call_frame import CallFrame, Rets
from .elements import Elements
from .handler import inner_function, module_of
from .loops import POINTER, ZERO, loop, variable
from .norms import SumGroup
from .operations import BOOL, I64, TYPES, load, reduced, store

# Elements are reduced in blocks of so many, and the blocks in order: so a result does not depend on
# the number of threads, and sums of large arrays are exact enough in float32.
BLOCK = 4096


def sum_kernel(name: str, sums: SumGroup, version: tuple[int, int]) -> str:
    """The text of the native function of some groups of reductions with the same operations."""
    no, ni, ns = len(sums.outs), len(sums.arrays), len(sums.scalars)

    def execute(module, frame):
        b = frame.b
        types = [POINTER] * (no + ni) + [TYPES[v.dtype] for v in sums.scalars] + [I64]
        function, inner = inner_function(module, "sums", types)
        _Sums(inner, sums, function.args).write()
        results = frame.field(I64, frame.pointer, CallFrame.rets, Rets.size)
        scalars = frame.scalars(0, sums.scalars)
        with loop(b, b.sdiv(results, I64(no))) as k:
            argument = lambda i: frame.argument(b.add(b.mul(k, I64(ni)), I64(ns + i)))
            result = lambda i: frame.result(b.add(b.mul(k, I64(no)), I64(i)))
            outs = [frame.data(result(i)) for i in range(no)]
            ins = [frame.data(argument(i)) for i in range(ni)]
            b.call(function, [*outs, *ins, *scalars, frame.size(argument(0))])

    return module_of(name, version, execute)


class _Sums:
    """The loops over blocks and over the elements of a block."""

    def __init__(self, b: ir.IRBuilder, sums: SumGroup, args: Any):
        self.b, no = b, len(sums.outs)
        self.outs, ins, self.size = args[:no], args[no:-1], args[-1]
        self.arrays = dict(zip(sums.arrays, ins, strict=False))
        self.scalars = dict(zip(sums.scalars, ins[len(sums.arrays) :], strict=True))
        self.reductions = sums.operations[-no:]

    def write(self) -> None:
        b = self.b
        totals, parts = self._variables(), self._variables()
        self._start(totals)
        blocks = b.sdiv(b.add(self.size, I64(BLOCK - 1)), I64(BLOCK))
        with loop(b, blocks) as block:
            self._start(parts)
            start = b.mul(block, I64(BLOCK))
            rest = b.sub(self.size, start)
            end = b.select(b.icmp_signed("<", rest, I64(BLOCK)), rest, I64(BLOCK))
            with loop(b, end) as i:
                at = b.add(start, i)
                elements = Elements(b, lambda value, index: self._known(value, at))
                self._add(parts, lambda op: elements.of(op.ins[0], (at,)))
            done = dict(zip(self.reductions, parts, strict=True))
            self._add(totals, lambda op: b.load(done[op], typ=TYPES[op.outs[0].dtype]))
        for op, out, total in zip(self.reductions, self.outs, totals, strict=True):
            dtype = op.outs[0].dtype
            store(b, dtype, out, ZERO, b.load(total, typ=TYPES[dtype]))
        b.ret_void()

    def _known(self, value: Any, at: Any) -> Any:
        if value in self.scalars:
            return self.scalars[value]
        pointer = self.arrays.get(value)
        return None if pointer is None else load(self.b, value.dtype, pointer, at)

    def _variables(self) -> list[Any]:
        return [variable(self.b, TYPES[op.outs[0].dtype]) for op in self.reductions]

    def _start(self, totals: list[Any]) -> None:
        for op, total in zip(self.reductions, totals, strict=True):
            self.b.store(_neutral(op), total)

    def _add(self, totals: list[Any], element: Callable[[Operation], Any]) -> None:
        for op, total in zip(self.reductions, totals, strict=True):
            before = self.b.load(total, typ=TYPES[op.outs[0].dtype])
            self.b.store(_step(self.b, op.name, before, element(op)), total)


def _neutral(op: Operation) -> Any:
    if op.outs[0].dtype == "bool":
        return BOOL(op.name == "reduce_and")
    start = {"reduce_sum": 0.0, "reduce_max": -math.inf, "reduce_min": math.inf}[op.name]
    return TYPES[op.outs[0].dtype](start)


def _step(b: ir.IRBuilder, name: str, total: Any, x: Any) -> Any:
    of_bools = {"reduce_and": b.and_, "reduce_or": b.or_}
    return of_bools[name](total, x) if name in of_bools else reduced(b, name, total, x)
