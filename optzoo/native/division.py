"""Divides a program into native calls and operations of XLA."""

import functools
import graphlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ..core.marks import WRITES
from ..core.warn import warn
from ..jaxprs.graph import Graph, Operation, Value, needed
from . import engine, groups
from .branches import Branches, divide_branches
from .calls import Call
from .elementwise import uses_half
from .find_rows import find_rows
from .grouped_leaves import find_grouped_leaves
from .groups import LeafGroup, Unsupported
from .norms import SumGroup, find_sums
from .order import in_order
from .slices import find_slices
from .verify import Unsound, verify

# XLA takes long to compile calls of many arrays: one call of a thousand leaves took it 69 s.
MOST_LEAVES = 16


class Division:
    """The operations and native calls of a program, in order.

    Args:
        program: a step, or a branch in it.
        kept: the results that replace arrays of the parameters and the state; None if their
            structure changes.
        in_place: the arrays among them that may be overwritten.
        has_effects: whether the program has side effects.

    Attributes:
        nodes: operations, branches and native calls.
        reasons: the reasons for results that are not made by native calls.
    """

    def __init__(
        self,
        program: Graph,
        kept: Mapping[Value, Value] | None,
        in_place: Collection[Value],
        has_effects: bool = False,
    ):
        self._program, self._kept, self._in_place = program, kept or {}, in_place
        self.nodes: list[Any] = program.operations
        self.reasons: dict[Value, Unsupported] = {}
        reason = _refusal(program, kept, has_effects)
        try:
            if reason is None:
                self.nodes = self._divided()
        except graphlib.CycleError:
            reason = "its parts depend on each other's results"
        except Unsound as error:
            reason = f"native code for it would be wrong, which is a bug in optzoo: {error}"
            warn(f"XLA computes this update: {reason}", RuntimeWarning)
        if reason is not None:
            self.reasons = dict.fromkeys(program.results, Unsupported(reason))

    @property
    def calls(self) -> list[Call]:
        """The native calls, including those in branches."""
        found = [[node] if isinstance(node, Call) else node.calls for node in self._native]
        return [call for calls in found for call in calls]

    @property
    def _native(self) -> list[Call | Branches]:
        return [node for node in self.nodes if isinstance(node, Call | Branches)]

    def _report(self, result: Value, why: Unsupported) -> None:
        """Records the first reason for a result."""
        self.reasons.setdefault(result, why)

    def _divided(self) -> list[Any]:
        """The nodes after all passes."""
        program, nodes = self._program, self._program.operations
        verify(nodes, program.inputs, program.results, "read_program")
        for after, divide in {
            "divide_branches": self._with_branches,
            "find_rows": self._with_rows,
            "find_grouped_leaves": self._with_grouped_leaves,
            "find_leaves": self._with_leaves,
            "find_sums": self._with_sums,
        }.items():
            nodes = divide(nodes)
            verify(nodes, program.inputs, program.results, after)
        return nodes

    # The passes: each returns the nodes with more native calls, in order.

    def _with_branches(self, nodes: list[Any]) -> list[Any]:
        states = self._states
        free = {*self._in_place, *(states.keys() - self._kept.keys())}
        found = divide_branches(self._graph(nodes), states, free, Division, self._report)
        return found.operations

    def _with_rows(self, nodes: list[Any]) -> list[Any]:
        rows = find_rows(self._graph(nodes), set(self._states), self._report)
        return self._with(nodes, [Call([group]) for group in rows])

    def _with_grouped_leaves(self, nodes: list[Any]) -> list[Any]:
        places, in_place = self._places(nodes), set(self._in_place)
        rest = self._graph([node for node in nodes if isinstance(node, Operation)])
        found = find_grouped_leaves(rest, places, in_place, self._report)
        if not found:
            return nodes
        # Such as the norm of an update, by which the same loop scales it.
        scalars = {v for leaf in found for v in leaf.scalars}
        within = {op for leaf in found for op in leaf.operations}
        rest = groups.done_twice(rest, within, scalars)
        groups.set_makers(rest.operations)
        return self._with(_replaced(nodes, rest.operations), self._calls(found))

    def _with_leaves(self, nodes: list[Any]) -> list[Any]:
        places, made = self._places(nodes), _made_by_calls(nodes)
        left = [v for v in self._program.results if v not in made]
        operations = [node for node in nodes if isinstance(node, Operation)]
        rest = Graph(self._program.inputs, needed(operations, left), left)
        slices = find_slices(rest, places)
        into = {places[before]: array for before, array in slices.items()}
        unchanged = {before for before, array in slices.items() if array is before}
        places = {b: after for b, after in {**places, **slices}.items() if b not in unchanged}
        rest.results = [*left, *(v for v in into.values() if v not in unchanged)]
        rest, leaves = groups.find_leaves(rest, places, set(self._in_place), self._report)
        nodes = self._with(_replaced(nodes, rest.operations), self._calls(leaves))
        native = _made_by_calls(nodes)
        for node in nodes:
            if isinstance(node, Branches):
                native.update(v for v in node.outs if v not in node.reasons)
        native |= {after for after, v in into.items() if v in unchanged | native}
        self.reasons = {v: why for v, why in self.reasons.items() if _same(v) not in native}
        return nodes

    def _with_sums(self, nodes: list[Any]) -> list[Any]:
        """With native norms where native calls need them."""
        native = [node for node in nodes if isinstance(node, Call | Branches)]
        wanted = set(needed(nodes, [v for node in native for v in node.ins]))
        return self._with(nodes, self._calls(find_sums(nodes, wanted)))

    # What the passes share

    @functools.cached_property
    def _states(self) -> dict[Value, Value]:
        """The next value of each array, and of each table whose rows are written in turn."""
        return {**self._kept, **_written(self._program, self._kept)}

    def _graph(self, nodes: list[Any]) -> Graph:
        return Graph(self._program.inputs, nodes, self._program.results)

    def _places(self, nodes: list[Any]) -> dict[Value, Value]:
        """The next value of each array that changes, unless a native call makes it."""
        made = _made_by_calls(nodes)
        return {
            before: after
            for before, after in self._kept.items()
            if before.shape and after is not before and after not in made
        }

    def _with(self, nodes: list[Any], calls: list[Call]) -> list[Any]:
        """The nodes with calls in place of what makes their outputs."""
        made = _made_by_calls(calls)
        others = [node for node in nodes if not made.intersection(node.outs)]
        return in_order([*others, *calls], self._program.results)

    def _calls(self, leaves: Iterable[LeafGroup]) -> list[Call]:
        """Merges leaves or sums with the same operations into shared calls."""
        alike: dict[Any, list[LeafGroup]] = {}
        for leaf in leaves:
            stage = leaf.stage if isinstance(leaf, SumGroup) else None
            alike.setdefault((leaf.signature(), stage, *leaf.scalars), []).append(leaf)
        return [
            Call(parts[i : i + MOST_LEAVES])
            for parts in alike.values()
            for i in range(0, len(parts), MOST_LEAVES)
        ]


def _made_by_calls(nodes: Iterable[Any]) -> set[Value]:
    return {v for node in nodes if isinstance(node, Call) for v in node.outs}


def _replaced(nodes: Iterable[Any], operations: Sequence[Operation]) -> list[Any]:
    """The nodes with operations in place of those with the same results."""
    made = {v for op in operations for v in op.outs}
    return [*operations, *(node for node in nodes if not made.intersection(node.outs))]


def _written(program: Graph, kept: Mapping[Value, Value]) -> dict[Value, Value]:
    """For tables whose rows are written, and for intermediate values, the next value."""
    found = dict[Value, Value]()
    for op in program.operations:
        if op.name in WRITES and (op.ins[0] in kept or op.ins[0] in found.values()):
            found[op.ins[0]] = op.outs[0]
    return found


def _same(result: Value) -> Value:
    """A result before a conversion to its own dtype, as of a weakly typed parameter."""
    maker = result.maker
    if maker is not None and maker.name == "convert_element_type":
        return maker.ins[0] if maker.ins[0].dtype == result.dtype else result
    return result


def _refusal(program: Graph, kept: Mapping[Value, Value] | None, has_effects: bool) -> str | None:
    """The reason why a program has no native code."""
    if kept is None:
        return "the update changes the structure of the state"
    if has_effects:
        return "the update has side effects"
    if any(map(uses_half, program.operations)) and not engine.has_half():
        return "this processor does not convert float16"
    return None
