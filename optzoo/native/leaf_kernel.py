"""The native function of leaves: loops over blocks of their elements."""

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from ..jaxprs.graph import Value
from .call_frame import CallFrame, Rets
from .elements import Elements
from .groups import LeafGroup
from .handler import inner_function, module_of
from .loops import POINTER, ZERO, loop, repeat, variable
from .operations import I64, TYPES, element, load, smaller, store
from .pool import in_parallel

_BLOCK = 16_384  # elements of a task
_MANY = 8  # tasks for which threads are worth their start


def leaf_kernel(name: str, leaf: LeafGroup, version: tuple[int, int]) -> str:
    """The text of the native function of some leaves with the same operations."""
    no, ni, ns = len(leaf.outs), len(leaf.arrays), len(leaf.scalars)
    aliased = {i - ns: k for i, k in leaf.aliases.items()}
    apart = [i for i in range(ni) if i not in aliased]

    def execute(module, frame):
        b = frame.b
        types = [POINTER] * (no + len(apart)) + [TYPES[v.dtype] for v in leaf.scalars] + [I64]
        function, inner = inner_function(module, "leaf", types)
        pointers = {leaf.arrays[i]: function.args[k] for i, k in aliased.items()}
        pointers |= {leaf.arrays[i]: function.args[no + n] for n, i in enumerate(apart)}
        _leaf(inner, leaf, pointers, function.args)
        number = b.sdiv(frame.field(I64, frame.pointer, CallFrame.rets, Rets.size), I64(no))
        blocks = variable(b, I64)
        b.store(ZERO, blocks)
        with loop(b, number) as k:
            for i, o in aliased.items():
                frame.keep(leaf.arrays[i].dtype, argument(frame, k, i), result(frame, k, o))
            b.store(b.add(b.load(blocks, typ=I64), many_blocks(frame, k)), blocks)
        many = b.load(blocks, typ=I64)

        def block(frame, task):
            """A block of a leaf: those of the leaves before it come first."""
            b, first = frame.b, variable(frame.b, I64)
            b.store(task, first)

            def is_here(k):
                return b.icmp_signed("<", b.load(first, typ=I64), many_blocks(frame, k))

            def after(k):
                b.store(b.sub(b.load(first, typ=I64), many_blocks(frame, k)), first)
                return b.add(k, I64(1))

            k = repeat(b, ZERO, is_here, after)
            start = b.mul(b.load(first, typ=I64), I64(_BLOCK))
            at = lambda v, buffer: element(b, v.dtype, frame.data(buffer), start)
            outs = [at(v, result(frame, k, o)) for o, v in enumerate(leaf.outs)]
            ins = [at(leaf.arrays[i], argument(frame, k, i)) for i in apart]
            size = smaller(b, I64(_BLOCK), b.sub(frame.size(result(frame, k, 0)), start))
            b.call(function, [*outs, *ins, *frame.scalars(0, leaf.scalars), size])

        in_parallel(frame, "blocks", many, b.icmp_signed(">=", many, I64(_MANY)), block)

    def argument(frame, k, i):
        return frame.argument(frame.b.add(frame.b.mul(k, I64(ni)), I64(ns + i)))

    def result(frame, k, i):
        return frame.result(frame.b.add(frame.b.mul(k, I64(no)), I64(i)))

    def many_blocks(frame, k):
        size = frame.size(result(frame, k, 0))
        return frame.b.sdiv(frame.b.add(size, I64(_BLOCK - 1)), I64(_BLOCK))

    return module_of(name, version, execute)


def _leaf(
    b: ir.IRBuilder, leaf: LeafGroup, pointers: dict[Value, Any], args: Sequence[Any]
) -> None:
    """The loop over the elements."""
    first = len(args) - 1 - len(leaf.scalars)
    scalars = dict(zip(leaf.scalars, args[first:-1], strict=True))
    with loop(b, args[-1]) as e:

        def known(value, index):
            if value in scalars:
                return scalars[value]
            return load(b, value.dtype, pointers[value], e) if value in pointers else None

        elements = Elements(b, known)
        made = [elements.of(v, (e,)) for v in leaf.outs]
        for v, pointer, element in zip(leaf.outs, args, made, strict=False):
            store(b, v.dtype, pointer, e, element)
    b.ret_void()
