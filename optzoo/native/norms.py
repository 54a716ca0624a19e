"""Reductions of whole arrays to numbers, such as the sum of squares in a norm."""

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

from ..jaxprs.graph import Operation, Value, made_of
from .groups import LeafGroup, is_fusible, what_is_read

_FEWEST = 16  # elements that are worth a call
_FLOATS = {"float32", "float64"}
_REDUCTIONS = {"reduce_sum": _FLOATS, "reduce_max": _FLOATS, "reduce_min": _FLOATS}
_REDUCTIONS |= {"reduce_and": {"bool"}, "reduce_or": {"bool"}}


@dataclasses.dataclass(eq=False)
class SumGroup(LeafGroup):
    """Reductions of values computed elementwise from arrays of one shape.

    Its outputs are scalars. Its last operations are the reductions.
    """

    stage: int = 0  # how many reductions may come before: those of one stage are independent


def find_sums(nodes: Sequence[Any], wanted: Collection[Any]) -> list[SumGroup]:
    """The groups of reductions.

    Args:
        nodes: operations and native calls, in order.
        wanted: the reductions that native calls need.
    """
    operations = [node for node in nodes if isinstance(node, Operation)]
    reductions = {op for op in operations if op in wanted and _is_whole(op)}
    fusible = {op for op in operations if is_fusible(op)}
    place = {op: k for k, op in enumerate(operations)}
    stages = _stages(nodes, reductions)
    parts: list[tuple[Any, set[Operation], set[Value], list[Operation]]] = []
    for op in operations:
        if op not in reductions:
            continue
        own, arrays = _before(op, fusible)
        if not arrays:
            continue
        key, found = (op.ins[0].shape, stages[op]), [op]
        # Those that share an array are done together.
        for other in [p for p in parts if p[0] == key and p[2] & arrays]:
            parts.remove(other)
            own, arrays, found = own | other[1], arrays | other[2], [*other[3], *found]
        parts.append((key, own, arrays, found))
    return [
        _group(sorted(own, key=place.__getitem__), found, stage)
        for (_, stage), own, _, found in parts
    ]


def _is_whole(op: Operation) -> bool:
    """Whether an operation is a supported reduction of an array to a number."""
    dtypes, shape = _REDUCTIONS.get(op.name, ()), op.ins[0].shape if op.ins else ()
    is_known = math.prod(shape) >= _FEWEST and op.ins[0].dtype in dtypes
    return is_known and len(op.eqn.params["axes"]) == len(shape)


def _stages(nodes: Sequence[Any], reductions: Collection[Operation]) -> dict[Operation, int]:
    """The largest number of other reductions on a path to each reduction."""
    after, stages = dict[Value, int](), dict[Operation, int]()
    for node in nodes:
        stage = max((after.get(v, 0) for v in node.ins), default=0)
        if node in reductions:
            stages[node] = stage
        after.update(dict.fromkeys(node.outs, stage + (node in reductions)))
    return stages


def _before(op: Operation, fusible: Collection[Operation]) -> tuple[set[Operation], set[Value]]:
    """The elementwise operations that an operation needs, and the arrays that they read."""
    is_own = lambda v: v.maker is not None and v.maker in fusible
    follow = lambda v: v.maker.ins if is_own(v) and v.maker.name != "broadcast_in_dim" else ()
    values = [*made_of(op.ins[:1], follow)]
    own = {op for v in values if (op := v.maker) is not None and op in fusible}
    return own, {v for v in values if v.shape and not is_own(v)}


def _group(operations: list[Operation], reductions: list[Operation], stage: int) -> SumGroup:
    everything = [*operations, *reductions]
    scalars, arrays = what_is_read(everything)
    outs = [op.outs[0] for op in reductions]
    return SumGroup([*scalars, *arrays], outs, everything, {}, scalars, arrays, stage=stage)
