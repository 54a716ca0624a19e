"""The native function of leaves: one loop over the elements of each."""

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from ..jaxprs.graph import Value
from .call_frame import CallFrame, Rets
from .elements import Elements
from .groups import LeafGroup
from .handler import inner_function, module_of
from .loops import POINTER, loop
from .operations import I64, TYPES, load, store


def leaf_kernel(name: str, leaf: LeafGroup, version: tuple[int, int]) -> str:
    """The text of the native function of some leaves with the same operations."""
    no, ni, ns = len(leaf.outs), len(leaf.arrays), len(leaf.scalars)
    aliased = {i - ns: k for i, k in leaf.aliases.items()}
    apart = [i for i in range(ni) if i not in aliased]

    def execute(module, frame):
        b, scalars = frame.b, frame.scalars(0, leaf.scalars)
        types = [POINTER] * (no + len(apart)) + [TYPES[v.dtype] for v in leaf.scalars] + [I64]
        function, inner = inner_function(module, "leaf", types)
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
