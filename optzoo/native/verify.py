"""Checks the invariants of the program after each pass of the native engine.

Native code checks neither types nor bounds. If a pass lost an operation or confused two arrays, it
would read or overwrite wrong memory.
"""

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

from ..jaxprs.graph import Operation, Value
from .branches import Branches
from .calls import Call
from .groups import Group, LeafGroup
from .norms import SumGroup


class Unsound(Exception):
    """A pass has returned an inconsistent program: a bug in optzoo."""


def verify(
    nodes: Iterable[Any], inputs: Iterable[Value], results: Iterable[Value], after: str
) -> None:
    """Checks a program between two passes.

    Each value is computed once, before it is read, with the shape and the dtype of its equation.
    The operations of a native call depend only on its inputs. Arrays that share a loop have one
    size, and an output reuses the memory of at most one input, of its shape and dtype.

    Args:
        nodes: operations, branches and native calls, in order.
        inputs: the known values.
        results: values that the nodes must compute, or that are known.
        after: the name of the last pass.

    Raises:
        Unsound: with the name of the pass and the first difference.
    """
    try:
        _check_nodes(nodes, inputs, results)
    except Unsound as error:
        raise Unsound(f"after {after}, {error}") from None


def _check_nodes(nodes: Iterable[Any], inputs: Iterable[Value], results: Iterable[Value]) -> None:
    known = set(inputs)
    for node in nodes:
        _check_known(node.ins, known, node)
        if isinstance(node, Call):
            _check_call(node)
        elif isinstance(node, Branches):
            for program, division in zip(node.programs, node.divisions, strict=True):
                _check_types(program.inputs, [v.aval for v in node.ins[1:]], node)
                _check_types(program.results, [v.aval for v in node.outs], node)
                _check_nodes(division.nodes, program.inputs, program.results)
        else:
            _check_operation(node)
        _add(node.outs, known, node)
    _check_known(results, known, "the end")


def _check_known(values: Iterable[Value], known: set[Value], where: Any) -> None:
    if any(v.literal is None and v not in known for v in values):
        raise Unsound(f"a value is read by {_name(where)} before it is computed")


def _add(made: Sequence[Value], known: set[Value], node: Any) -> None:
    if len(set(made) - known) < len(made):
        raise Unsound(f"a value is computed again by {_name(node)}")
    known.update(made)


def _check_types(values: Sequence[Value], avals: Sequence[Any], where: Any) -> None:
    if len(values) == len(avals) and all(map(operator.is_, (v.aval for v in values), avals)):
        return  # most are
    types = [(v.shape, v.aval.dtype) for v in values if hasattr(v.aval, "dtype")]
    expected = [(a.shape, a.dtype) for a in avals if hasattr(a, "dtype")]
    if types != expected:
        raise Unsound(f"{_name(where)} has values of {types} in place of {expected}")


def _check_operation(op: Operation) -> None:
    _check_types(op.ins, [v.aval for v in op.eqn.invars], op)
    _check_types(op.outs, [v.aval for v in op.eqn.outvars], op)
    if op.inside:
        _check_nodes(op.inside, op.ins, [v if v.meaning is None else v.meaning for v in op.outs])


def _check_call(call: Call) -> None:
    """Parts of a call share one function, which is that of the first part."""
    for part in call.parts:
        _check_nodes(part.operations, part.ins, part.outs)
        _check_memory(part)
    leaves = [part for part in call.parts if isinstance(part, LeafGroup)]
    for leaf in leaves:
        _check_sizes(leaf)
    kinds = list(map(_kind_of, leaves))
    if any(kind != kinds[0] for kind in kinds):
        raise Unsound("a native call has leaves of several operations")


def _kind_of(leaf: LeafGroup) -> Any:
    """The part of the signature of a leaf that kernels read; unlike the whole, it is cheap."""
    dtypes = [v.dtype for v in (*leaf.ins, *leaf.outs)]
    return leaf.scalars, leaf.length, leaf.aliases, dtypes, [op.name for op in leaf.operations]


def _check_memory(part: Group) -> None:
    """An output reuses the memory of at most one input, of the same number of bytes."""
    inside = {v for op in part.operations for v in op.outs}
    if not inside.issuperset(part.outs):
        raise Unsound("a native call returns a value that it does not compute")
    if len({*part.aliases.values()}) < len(part.aliases):
        raise Unsound("an output reuses the memory of two inputs")
    for i, o in part.aliases.items():
        _check_types([part.outs[o]], [part.ins[i].aval], "a native call in place")


def _check_sizes(leaf: LeafGroup) -> None:
    """The arrays of one loop have an element for each of its iterations, or for each group."""
    outs = [] if isinstance(leaf, SumGroup) else leaf.outs
    sizes = {math.prod(v.shape) for v in (*leaf.arrays, *outs)}
    size = max(sizes)
    allowed = {size, size // leaf.length} if leaf.length else {size}
    if not sizes <= allowed or (leaf.length and size % leaf.length):
        raise Unsound(f"arrays of {sorted(sizes)} elements are in one loop")
    if any(math.prod(v.shape) != 1 for v in leaf.scalars):
        raise Unsound("an array is used as a scalar")


def _name(node: Any) -> str:
    if isinstance(node, Call):
        return "a native call"
    return f"`{node.name}` {node.line}".strip() if isinstance(node, Operation) else str(node)
