"""Divides a program into native calls and operations of XLA."""

import functools
import graphlib
from collections.abc import Collection, Iterable, Mapping
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
        required: whether it is an error if XLA computes it.
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
        required: bool = False,
        has_effects: bool = False,
    ):
        self._required = required
        self.nodes: list[Any] = program.operations
        self.reasons: dict[Value, Unsupported] = {}
        reason = _refusal(program, kept, has_effects)
        try:
            if reason is None:
                verify(program.operations, program.inputs, program.results, "read_program")
                nodes = self._divide(program, kept or {}, in_place)
                verify(nodes, program.inputs, program.results, "find_sums")
                self.nodes = nodes
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

    def _divide(
        self, program: Graph, kept: Mapping[Value, Value], in_place: Collection[Value]
    ) -> list[Any]:
        of_branch = functools.partial(Division, required=self._required)
        states = {**kept, **_written(program, kept)}
        free = {*in_place, *(states.keys() - kept.keys())}
        program = divide_branches(program, states, free, of_branch, self._report)
        verify(program.operations, program.inputs, program.results, "divide_branches")
        rows = find_rows(program, set(states), self._report)
        made = {v for group in rows for v in group.outs}
        others = [op for op in program.operations if not made.intersection(op.outs)]
        nodes = in_order([*others, *(Call([g], self._required) for g in rows)], program.results)
        places = {
            before: after
            for before, after in kept.items()
            if before.shape and after is not before and after not in made
        }
        verify(nodes, program.inputs, program.results, "find_rows")
        rest = [node for node in nodes if isinstance(node, Operation)]
        rest = Graph(program.inputs, rest, program.results)
        grouped = find_grouped_leaves(rest, places, set(in_place), self._report)
        made = made.union(*(leaf.outs for leaf in grouped))
        places = {before: after for before, after in places.items() if after not in made}
        left = [v for v in program.results if v not in made]
        rest = Graph(program.inputs, needed(rest.operations, left), left)
        slices = find_slices(rest, places)
        into = {places[before]: array for before, array in slices.items()}
        unchanged = {before for before, array in slices.items() if array is before}
        places = {b: after for b, after in {**places, **slices}.items() if b not in unchanged}
        rest.results = [*left, *(v for v in into.values() if v not in unchanged)]
        rest, leaves = groups.find_leaves(rest, places, set(in_place), self._report)
        verify(rest.operations, [*program.inputs, *made], rest.results, "find_leaves")
        calls = self._calls([*grouped, *leaves])
        done = {v for call in calls for v in call.outs}
        new = {v for op in rest.operations for v in op.outs}
        nodes = [*rest.operations, *(node for node in nodes if not new.intersection(node.outs))]
        branches = [node for node in nodes if isinstance(node, Branches)]
        within = {v for node in branches for v in node.outs if v not in node.reasons}
        native = done | made | within
        native |= {after for after, v in into.items() if v in unchanged | native}
        self.reasons = {v: why for v, why in self.reasons.items() if _same(v) not in native}
        nodes = [node for node in nodes if not done.intersection(node.outs)]
        return self._with_sums(in_order([*nodes, *calls], program.results), program)

    def _with_sums(self, nodes: list[Any], program: Graph) -> list[Any]:
        """The nodes, with native norms where native calls need them."""
        native = [node for node in nodes if isinstance(node, Call | Branches)]
        wanted = set(needed(nodes, [v for node in native for v in node.ins]))
        sums = self._calls(find_sums(nodes, wanted))
        done = {v for call in sums for v in call.outs}
        nodes = [node for node in nodes if not done.intersection(node.outs)]
        return in_order([*nodes, *sums], program.results)

    def _calls(self, leaves: Iterable[LeafGroup]) -> list[Call]:
        """Merges leaves or sums with the same operations into shared calls."""
        alike: dict[Any, list[LeafGroup]] = {}
        for leaf in leaves:
            stage = leaf.stage if isinstance(leaf, SumGroup) else None
            alike.setdefault((leaf.signature(), stage, *leaf.scalars), []).append(leaf)
        return [
            Call(parts[i : i + MOST_LEAVES], self._required)
            for parts in alike.values()
            for i in range(0, len(parts), MOST_LEAVES)
        ]


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
