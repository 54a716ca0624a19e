"""Divides the branches of a program into native calls and operations of XLA."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..core.marks import WRITES
from ..jaxprs.graph import Graph, Operation, Value, inlined_branch, read
from ..jaxprs.primitives import PLAIN_CALLS, WITH_DERIVATIVES, Kind
from .groups import Unsupported, is_known
from .order import in_order
from .rows_groups import DISTINCT
from .simplify import simplify

_OF_ROWS = {*WRITES, *DISTINCT, "rows_gather", "rows_plain", "rows_protect"}


class Branches(Operation):
    """A ``cond`` with divided branches, and the operations that moved into them.

    Args:
        op: the ``cond``.
        moved: the operations that move into the branches, and the ``cond``, in order.
        outs: the results that are needed elsewhere.
        divide: returns the division of a branch, given its program, the inputs that its results
            replace, and the inputs that may be overwritten.
        kept: the replacements of values by the outer program.
        in_place: the replaced values that may be overwritten.
    """

    def __init__(
        self,
        op: Operation,
        moved: Sequence[Operation],
        outs: list[Value],
        divide: Callable[[Graph, Mapping[Value, Value], Collection[Value]], Any],
        kept: Mapping[Value, Value],
        in_place: Collection[Value],
    ):
        self.programs, self.divisions, outside = list[Graph](), [], list[Value]()
        for number in range(len(op.bodies)):
            # Of the same inputs in all of them.
            program, outside = inlined_branch(
                moved, op, number, outs, PLAIN_CALLS, WITH_DERIVATIVES
            )
            simplify(program)
            within = dict(zip(outside, program.inputs, strict=True))
            results = dict(zip(outs, program.results, strict=True))
            pairs = [(v, w) for v, w in kept.items() if v in within and w in results]
            places = {within[v]: results[w] for v, w in pairs}
            self.programs.append(program)
            mine = {within[v] for v in in_place if v in within}
            self.divisions.append(divide(program, places, mine))
        super().__init__(op.name, op.eqn, [op.ins[0], *outside], outs, op.jaxpr)

    @property
    def calls(self) -> list[Any]:
        """The native calls."""
        return [call for division in self.divisions for call in division.calls]

    @property
    def reasons(self) -> dict[Value, Unsupported]:
        """Reasons for results that are not made by native calls."""
        found = dict[Value, Unsupported]()
        for program, division in zip(self.programs, self.divisions, strict=True):
            for v, result in zip(self.outs, program.results, strict=True):
                if result.maker is not None and result in division.reasons:
                    found.setdefault(v, Unsupported("in a branch:", division.reasons[result]))
        return found

    def run(self, known: dict[Value, Any]) -> None:
        """Computes the results from known values, and adds them."""

        def branch(program, nodes):
            def run(*values):
                now = dict(zip(program.inputs, values, strict=True))
                for node in nodes:
                    node.run(now)
                return [jnp.asarray(read(now, v)) for v in program.results]

            return run

        nodes = [division.nodes for division in self.divisions]
        index, *values = (read(known, v) for v in self.ins)
        results = lax.switch(index, list(map(branch, self.programs, nodes)), *values)
        known.update(zip(self.outs, results, strict=True))


def divide_branches(
    program: Graph,
    kept: Mapping[Value, Value],
    in_place: Collection[Value],
    divide: Callable[[Graph, Mapping[Value, Value], Collection[Value]], Any],
    report: Callable[[Value, Unsupported], None],
) -> Graph:
    """The program with :class:`Branches` in place of each ``cond`` with native calls.

    Args:
        program: a step, or a branch in it.
        kept: as in :class:`Branches`.
        in_place: as in :class:`Branches`.
        divide: as in :class:`Branches`.
        report: called with results of branches that are not made by native calls, and the reason.
    """
    for op in program.operations:
        if op.kind is not Kind.BRANCH:
            continue
        moved = _moved(program, op)
        others = [each for each in program.operations if each not in moved]
        read = {*program.results, *(v for each in others for v in each.ins)}
        outs = [v for each in moved for v in each.outs if v in read]
        node = Branches(op, moved, outs, divide, kept, in_place)
        for v, why in node.reasons.items():
            report(v, why)
        if not node.calls:
            continue
        for v in outs:
            v.maker = node
        operations = in_order([*others, node], program.results)
        program = Graph(program.inputs, operations, program.results)
    return program


def _moved(program: Graph, op: Operation) -> list[Operation]:
    """A ``cond`` and the operations that can move into its branches, in order.

    A later operation can move if the branches have all its operands and its results are results of
    the program; an earlier one if only the branches use it.
    """
    after, results, readers = program.depending(op.outs), {*program.results}, program.readers()
    others = {each for each in program.operations if _is_movable(each)}
    while True:
        given, later = set(op.outs), set[Operation]()
        for each in program.operations:
            if each not in others or not given.intersection(each.ins):
                continue
            leaves = (v for v in each.outs if not others.issuperset(readers.get(v, ())))
            if results.issuperset(leaves) and not after.intersection(each.ins) - given:
                given.update(each.outs)
                later.add(each)
        if len(later) == len(others):
            break
        others = later
    moved = {op, *later}
    for each in reversed(program.operations):
        stays = any(v in results or v is op.ins[0] for v in each.outs)
        is_for_them = all(moved.issuperset(readers.get(v, ())) for v in each.outs)
        if _is_movable(each) and is_for_them and not stays:
            moved.add(each)
    return [each for each in program.operations if each in moved]


def _is_movable(op: Operation) -> bool:
    return op.name in _OF_ROWS or (op.kind is not Kind.BRANCH and bool(op.outs) and is_known(op))
