"""The native function of leaves: loops over blocks of their elements."""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from ..jaxprs.graph import Value
from .call_frame import CallFrame, Rets
from .elements import Elements, FlatElements, in_memory
from .group_loop import write_group
from .groups import LeafGroup, reductions
from .handler import Members, inner_function, module_of
from .loops import OUTER, POINTER, ZERO, loop, summed, which
from .operations import I64, TYPES, element, smaller, store
from .pool import in_parallel
from .scratch import SUMMED

_BLOCK = 65_536  # elements of a task
_MANY = 65_536  # elements for which threads are worth their start
_SHORT = 8  # fewer elements of a group have no loop
_KEPT = 4096  # elements of a group that are kept between its passes, at most


def leaf_kernel(name: str, leaf: LeafGroup, version: tuple[int, int]) -> str:
    """The text of the native function of some leaves with the same operations."""
    no, ni, ns = len(leaf.outs), len(leaf.arrays), len(leaf.scalars)
    of = Members(ns, ni, no)
    whole = next(o for o, v in enumerate(leaf.outs) if _is_whole(leaf, v))
    length = max(1, leaf.length)
    block_size = max(1, _BLOCK // length) * length
    size_of = lambda frame, k: frame.size(of.result(frame, k, whole))
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
        with loop(b, number) as k:
            for i, o in aliased.items():
                pair = of.argument(frame, k, i), of.result(frame, k, o)
                frame.keep(leaf.arrays[i].dtype, *pair)
        many = summed(b, number, lambda k: many_blocks(frame, k))

        def block(frame, task):
            """A block of a leaf, numbered after those of the leaves before it."""
            b = frame.b
            k, rest = which(b, task, lambda k: many_blocks(frame, k))
            start = b.mul(rest, I64(block_size))
            of_groups = b.sdiv(start, I64(length))
            first = lambda v: start if _is_whole(leaf, v) else of_groups
            at = lambda v, buffer: element(b, v.dtype, frame.data(buffer), first(v))
            outs = [at(v, of.result(frame, k, o)) for o, v in enumerate(leaf.outs)]
            ins = [at(leaf.arrays[i], of.argument(frame, k, i)) for i in apart]
            size = smaller(b, I64(block_size), b.sub(size_of(frame, k), start))
            b.call(function, [*outs, *ins, *frame.scalars(0, leaf.scalars), size])

        elements = summed(b, number, lambda k: size_of(frame, k))
        in_parallel(frame, "blocks", many, b.icmp_signed(">=", elements, I64(_MANY)), block)

    def many_blocks(frame, k):
        size = frame.b.add(size_of(frame, k), I64(block_size - 1))
        return frame.b.sdiv(size, I64(block_size))

    return module_of(name, version, execute)


def _is_whole(leaf: LeafGroup, value: Value) -> bool:
    """Whether an array has one number for each element, not for each group."""
    return math.prod(value.shape) == math.prod(leaf.shape)


def _leaf(
    b: ir.IRBuilder, leaf: LeafGroup, pointers: dict[Value, Any], args: Sequence[Any]
) -> None:
    """The loop over elements, or over groups of elements."""
    first = len(args) - 1 - len(leaf.scalars)
    scalars = dict(zip(leaf.scalars, args[first:-1], strict=True))
    outs = dict(zip(leaf.outs, args, strict=False))
    known = in_memory(b, scalars, pointers)
    elements = FlatElements(b, known) if leaf.length else Elements(b, known)

    def write(index_of, values):
        made = [elements.of(v, index_of(v.shape)) for v in values]
        for v, new in zip(values, made, strict=True):
            (at,) = index_of(v.shape)
            store(b, v.dtype, outs[v], at, new)

    if not leaf.length:
        with loop(b, args[-1]) as e, elements.scope():
            write(lambda shape: (e,), leaf.outs)
    else:
        with loop(b, b.sdiv(args[-1], I64(leaf.length))) as group, elements.scope():
            _group(b, leaf, elements, group, write)
    b.ret_void()


def _group(
    b: ir.IRBuilder, leaf: LeafGroup, elements: Elements, group: Any, write: Callable[..., None]
) -> None:
    """A group of elements, and the values with one number for the group."""
    size = math.prod(leaf.shape)
    whole = [v for v in leaf.outs if _is_whole(leaf, v)]
    hints = {} if leaf.length < _SHORT else {"unroll_disable": 1}

    @contextlib.contextmanager
    def lanes(shape, start=ZERO, end=None):
        many = I64(leaf.length) if end is None else b.sub(end, start)
        with loop(b, many, **hints) as i, elements.scope():
            lane = b.add(start, i)
            at = elements.in_group(group, lane, leaf.length)
            yield lane, lambda shape: (at if math.prod(shape) == size else group,)

    @contextlib.contextmanager
    def pieces():
        with loop(b, I64(-(-leaf.length // SUMMED)), **OUTER) as piece:
            start = b.mul(piece, I64(SUMMED))
            end = smaller(b, b.add(start, I64(SUMMED)), I64(leaf.length))
            yield functools.partial(lanes, start=start, end=end)

    keeps = lambda v: math.prod(v.shape) == size and leaf.length <= _KEPT
    store = lambda index_of: write(index_of, whole)
    write_group(
        b,
        elements,
        reductions(leaf.operations),
        whole,
        leaf.ins,
        lanes,
        leaf.length,
        keeps,
        store,
        pieces if leaf.length > SUMMED else None,
    )
    write(lambda shape: (group,), [v for v in leaf.outs if v not in whole])
