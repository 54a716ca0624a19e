"""The native function of reductions: loops over blocks of elements, then over the blocks.

Elements are reduced in blocks, and the blocks in order, so that results do not depend on the number
of threads, and sums of large arrays are accurate in float32.
"""

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from ..jaxprs.graph import Operation
from .call_frame import CallFrame, Rets
from .elements import Elements, in_memory
from .handler import Members, inner_function, module_of
from .loops import POINTER, ZERO, loop, summed, variable, which
from .norms import SumGroup
from .operations import I8, I64, TYPES, element, load, smaller, store
from .pool import in_parallel
from .scratch import SUMMED
from .totals import Totals

_TASK = 16  # blocks of a task
_BYTES = 8  # of the memory for a number of a block


def sum_kernel(name: str, sums: SumGroup, version: tuple[int, int]) -> str:
    """The text of the native function of some groups of reductions with the same operations."""
    no, ni, ns = len(sums.outs), len(sums.arrays), len(sums.scalars)
    reductions, of = sums.operations[-no:], Members(ns, ni, no)

    def execute(module, frame):
        b = frame.b
        types = [POINTER] * (no + ni) + [TYPES[v.dtype] for v in sums.scalars] + [I64]
        function, inner = inner_function(module, "sums", types)
        _block(inner, sums, function.args)

        def some(frame, task):
            """Some blocks of one of the groups."""
            b = frame.b
            k, rest = which(b, task, lambda k: tasks(frame, k))
            first, size = b.mul(rest, I64(_TASK)), frame.size(of.argument(frame, k, 0))
            before = summed(b, k, lambda j: blocks(frame, j))
            with loop(b, smaller(b, I64(_TASK), b.sub(blocks(frame, k), first))) as i:
                block = b.add(first, i)
                start = b.mul(block, I64(SUMMED))
                arrays = [
                    element(b, v.dtype, frame.data(of.argument(frame, k, n)), start)
                    for n, v in enumerate(sums.arrays)
                ]
                outs = [place(frame, b.add(before, block), o) for o in range(no)]
                many = smaller(b, I64(SUMMED), b.sub(size, start))
                b.call(function, [*outs, *arrays, *frame.scalars(0, sums.scalars), many])

        results = frame.field(I64, frame.pointer, CallFrame.rets, Rets.size)
        groups = b.sdiv(b.sub(results, I64(1)), I64(no))
        many = summed(b, groups, lambda k: tasks(frame, k))
        in_parallel(frame, "blocks", many, b.icmp_signed(">", many, I64(1)), some)
        block = variable(b, I64)
        b.store(ZERO, block)
        with loop(b, groups) as k:
            totals = Totals(b, reductions)
            with loop(b, blocks(frame, k)):
                at = b.load(block, typ=I64)
                at_block = {op: place(frame, at, o) for o, op in enumerate(reductions)}
                totals.add(lambda op: load(b, op.outs[0].dtype, at_block[op], ZERO))
                b.store(b.add(at, I64(1)), block)
            outs = [frame.data(of.result(frame, k, o)) for o in range(no)]
            _write(b, reductions, totals, outs)

    def blocks(frame, k):
        size = frame.b.add(frame.size(of.argument(frame, k, 0)), I64(SUMMED - 1))
        return frame.b.sdiv(size, I64(SUMMED))

    def tasks(frame, k):
        return frame.b.sdiv(frame.b.add(blocks(frame, k), I64(_TASK - 1)), I64(_TASK))

    def place(frame, block, o):
        """The position of a number of a block among those of all groups."""
        b, results = frame.b, frame.field(I64, frame.pointer, CallFrame.rets, Rets.size)
        memory = frame.data(frame.result(b.sub(results, I64(1))))
        at = b.add(b.mul(block, I64(no)), I64(o))
        return b.gep(memory, [b.mul(at, I64(_BYTES))], source_etype=I8)

    return module_of(name, version, execute)


def _block(b: ir.IRBuilder, sums: SumGroup, args: Sequence[Any]) -> None:
    """The loop over the elements of a block."""
    reductions, no, ni = sums.operations[-len(sums.outs) :], len(sums.outs), len(sums.arrays)
    arrays = dict(zip(sums.arrays, args[no : no + ni], strict=True))
    scalars = dict(zip(sums.scalars, args[no + ni : -1], strict=True))
    totals = Totals(b, reductions)
    with loop(b, args[-1]) as i:
        elements = Elements(b, in_memory(b, scalars, arrays))
        totals.add(lambda op: elements.of(op.ins[0], (i,)))
    _write(b, reductions, totals, args[:no])
    b.ret_void()


def _write(
    b: ir.IRBuilder, reductions: Sequence[Operation], totals: Totals, places: Sequence[Any]
) -> None:
    for op, pointer in zip(reductions, places, strict=True):
        store(b, op.outs[0].dtype, pointer, ZERO, totals.get(op))
