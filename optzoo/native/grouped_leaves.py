"""Arrays in groups of consecutive elements that share a number: rows, or codes of one scale."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping

from ..jaxprs.graph import Graph, Operation, Value, made_of
from ..jaxprs.primitives import Kind
from .elementwise import is_elementwise
from .groups import (
    REDUCTIONS,
    LeafGroup,
    Unsupported,
    can_reduce,
    each,
    leaf_group,
    reductions,
)
from .order import in_order


def find_grouped_leaves(
    program: Graph,
    places: Mapping[Value, Value],
    in_place: Collection[Value],
    report: Callable[[Value, Unsupported], None],
) -> list[LeafGroup]:
    """The groups of operations on arrays whose elements are reduced in groups.

    Values have the size of the array, or one element for each group of consecutive elements.

    Args:
        program: without the groups of rows.
        places: the next value of each array of the parameters and the state.
        in_place: the arrays whose next values reuse their memory.
        report: called with results that are in no group, and the reason.
    """
    if not reductions(program.operations):
        return []
    found, made = [], program.depending(places)
    for results in _together(places.values()):
        ops = _operations(results)
        if not (over := reductions(ops)):
            continue
        shapes = [(op.ins[0].shape, op.outs[0].shape) for op in over]
        sizes = {(*map(math.prod, pair),) for pair in shapes}
        size, length = max(sizes)[0], math.prod(shapes[0][0][len(shapes[0][1]) :])
        own = {v for op in ops for v in op.outs}
        arrays = {v for op in ops for v in op.ins if v.shape and v not in own}
        values = [v for op in each(ops) for v in (*op.ins, *op.outs) if v.shape]
        if len(sizes) > 1 or not {math.prod(v.shape) for v in values} <= {*max(sizes)}:
            reason = "its groups are padded, or have several lengths"
        elif not length or all(math.prod(v.shape) < size for v in results):
            reason = "it has values with one number for each group only"
        elif any(v in made and v not in places for v in arrays):
            reason = "a result between its operations is needed elsewhere"
        else:
            in_turn = in_order(ops, results)  # the same for leaves of the same operations
            found.append(leaf_group(in_turn, results, places, in_place, length))
            continue
        for v in results:
            report(v, Unsupported(reason))
    return found


def _together(results: Iterable[Value]) -> Iterable[list[Value]]:
    """Groups results that share operations."""
    groups: dict[int, list[Value]] = {}
    owner: dict[Operation, int] = {}  # of operations the group, which may have been joined
    joined: dict[int, int] = {}

    def find(number):
        while number in joined:
            number = joined[number]
        return number

    for number, result in enumerate(results):
        groups[number] = [result]
        for op in _operations([result]):
            other = find(owner.setdefault(op, number))
            if other != (mine := find(number)):
                joined[mine] = other
                groups[other] += groups.pop(mine)
    return groups.values()


def _operations(results: Iterable[Value]) -> list[Operation]:
    """The operations on elements or on groups from which results are computed."""
    is_in = lambda op: op is not None and bool(op.outs[0].shape) and _is_known(op)
    follow = lambda v: v.maker.ins if is_in(v.maker) else ()
    makers = dict.fromkeys(v.maker for v in made_of(results, follow) if is_in(v.maker))
    return [op for op in makers if op is not None]


def _is_known(op: Operation) -> bool:
    """Whether an operation computes each element, or group, from the same one."""
    if op.inside:
        return all(_is_known(inner) or not inner.outs[0].shape for inner in op.inside)
    ins, out = [v.shape for v in op.ins], op.outs[0].shape
    if op.name == "broadcast_in_dim":
        same = tuple(op.params["broadcast_dimensions"]) == tuple(range(len(ins[0])))
        return not ins[0] or (same and _is_part(ins[0], out))
    if op.kind is Kind.MOVE:
        return op.name != "reshape" or op.params["dimensions"] is None
    if op.name in REDUCTIONS:
        are_last = tuple(op.params["axes"]) == (*range(len(out), len(ins[0])),)
        return are_last and can_reduce(op)
    return is_elementwise(op) and all(not shape or _is_part(shape, out) for shape in ins)


def _is_part(shape: tuple[int, ...], out: tuple[int, ...]) -> bool:
    """Whether the shape of an array is a prefix of another, followed only by axes of length 1."""
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape == out[: len(shape)]
