"""A JAX program as a graph: its operations, the values between them, the bodies of calls."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .equations import (
    bind_equation,
    closed_jaxprs,
    evaluate_equation,
    has_shardings,
    is_literal,
    line_of,
    scan_sizes,
)
from .primitives import CALLS, KINDS, Kind, name_of

_text = functools.cache(str)


@dataclasses.dataclass(eq=False)
class Value:
    """A result of an operation, an input or a constant."""

    aval: Any
    maker: "Operation | None" = dataclasses.field(default=None, repr=False)
    literal: Any = None
    # The same value inside of the call that made it.
    meaning: "Value | None" = dataclasses.field(default=None, repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value; () for values without one."""
        return getattr(self.aval, "shape", ())

    @property
    def dtype(self) -> str:
        """The name of the dtype."""
        return _text(self.aval.dtype)

    @property
    def key(self) -> Any:
        """A key that is equal for scalar constants with equal bits; otherwise unique to the value.

        A traced constant, such as an argument of an update, has no known bits.
        """
        if self.literal is None or self.shape or isinstance(self.literal, jax.core.Tracer):
            return id(self)
        return self.dtype, np.asarray(self.literal).tobytes()


@dataclasses.dataclass(eq=False)
class Operation:
    """An equation on values. A marked operation on rows has the name of its mark."""

    name: str
    eqn: Any = dataclasses.field(repr=False)
    ins: list[Value]
    outs: list[Value]
    jaxpr: Any = dataclasses.field(repr=False)  # of the equation
    inside: "list[Operation]" = dataclasses.field(default_factory=list)  # on the same values
    # The equation of the outermost call that it was inlined from, if there is one.
    call: Any = dataclasses.field(default=None, repr=False)

    @property
    def kind(self) -> Kind | None:
        """The effect on the axes of the operands; None if unknown."""
        return KINDS.get(self.name)

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of the primitive."""
        return self.eqn.params

    @property
    def line(self) -> str:
        """The line of the user's program."""
        return line_of(self.eqn) or (line_of(self.call) if self.call else "")

    @functools.cached_property
    def bodies(self) -> "list[Body]":
        """The bodies that the operation runs; for custom derivatives only the function itself."""
        graphs = [Graph.of(*closed) for closed in closed_jaxprs(self.eqn)]
        return _bodies(self, graphs) if graphs else []

    @property
    def turns(self) -> int | None:
        """The number of iterations of a ``scan``; None for any other operation."""
        return self.params["length"] if self.name == "scan" else None

    def run(self, known: dict[Value, Any]) -> None:
        """Computes the results from known values, and adds them."""
        results = bind_equation(self.eqn, [read(known, v) for v in self.ins])
        known.update(zip(self.outs, results, strict=True))

    def evaluate(self, values: Sequence[Any]) -> list[Any]:
        """The results for operands, with the name scopes and other settings of the equation."""
        return evaluate_equation(self.jaxpr, self.eqn, values)


def read(known: Mapping[Value, Any], value: Value) -> Any:
    """The value of a known value or a literal."""
    return known[value] if value.literal is None else value.literal


class Body(NamedTuple):
    """A body of an operation."""

    graph: "Graph"
    inputs: list[int]  # by the inputs of the graph the operands that they are, at first
    outputs: list[int | None]  # by its results those of the operation; None: whether to go on
    again: dict[int, int]  # by inputs of a loop the results that they are in later turns


@dataclasses.dataclass(eq=False)
class Graph:
    """The operations that compute results from inputs."""

    inputs: list[Value]
    operations: list[Operation]
    results: list[Value]

    @classmethod
    def of(cls, jaxpr: Any, consts: Sequence[Any] | None = None) -> "Graph":
        """The graph of a jaxpr. Constants without values become the first inputs."""
        graph = cls([], [], [])
        values = graph._start(jaxpr, consts)
        for eqn in jaxpr.eqns:
            ins = [_value(v, values) for v in eqn.invars]
            op = Operation(name_of(eqn), eqn, ins, [Value(v.aval) for v in eqn.outvars], jaxpr)
            graph._append(op)
            values.update(zip(eqn.outvars, op.outs, strict=True))
        graph.results = [_value(v, values) for v in jaxpr.outvars]
        return graph

    def _start(self, jaxpr: Any, consts: Sequence[Any] | None) -> dict[Any, Value]:
        """Creates the inputs; returns the known values."""
        values = {v: Value(v.aval) for v in (*jaxpr.constvars, *jaxpr.invars)}
        self.inputs = [values[v] for v in jaxpr.invars]
        if consts is None:
            self.inputs = [*(values[v] for v in jaxpr.constvars), *self.inputs]
        else:
            for v, const in zip(jaxpr.constvars, consts, strict=True):
                values[v].literal = const
        return values

    def _append(self, op: Operation) -> None:
        for v in op.outs:
            v.maker = op
        self.operations.append(op)

    def readers(self) -> dict[Value, list[Operation]]:
        """For each value, the operations that read it."""
        found: dict[Value, list[Operation]] = {}
        for op in self.operations:
            for v in op.ins:
                found.setdefault(v, []).append(op)
        return found

    def walk(self, into: Collection[Kind] = CALLS) -> Iterator["Visit"]:
        """All operations; those in calls of these kinds precede the call."""
        for op in self.operations:
            if op.kind in into:
                turns = 1 if op.turns is None else op.turns
                may_not = op.kind is Kind.BRANCH or op.name == "while"
                for step in (step for body in op.bodies for step in body.graph.walk(into)):
                    times, sometimes = turns * step.times, may_not or step.sometimes
                    yield Visit(step.operation, op, times, sometimes)
            yield Visit(op, op, 1, False)

    def depending(self, values: Iterable[Value]) -> set[Value]:
        """These values, and all values that depend on them."""
        found = set(values)
        for op in self.operations:
            if found.intersection(op.ins):
                found.update(op.outs)
        return found

    def spread(
        self,
        inputs: Sequence[bool],
        of: Callable[[Operation, list[bool], Operation], Sequence[bool]],
        outermost: Operation | None = None,
    ) -> list[bool]:
        """Which results have a property that propagates from operands to results.

        Args:
            inputs: which of the inputs have the property.
            of: ``of(operation, operands, outermost)`` returns the property of each result of an
                operation. For a call, whose results follow from its bodies, ``operands`` are the
                operands that select the body or the number of iterations.
            outermost: the operation of the program that this graph is in.
        """
        found = {v for v, has_it in zip(self.inputs, inputs, strict=True) if has_it}
        for op in self.operations:
            top, ins = outermost or op, [v in found for v in op.ins]
            outs = _through(op, ins, of, top) if op.kind in CALLS else of(op, ins, top)
            found.update(v for v, has_it in zip(op.outs, outs, strict=True) if has_it)
        return [v in found for v in self.results]


class Visit(NamedTuple):
    """An operation of a program, or of a call in it."""

    operation: Operation
    # The one of the program that it is in. JAX reuses jaxprs, and with them the lines of their
    # first call.
    outermost: Operation
    times: int  # how often the loops of a known length around it run it
    sometimes: bool  # whether a branch, or a loop of another length, is around it


def needed(
    operations: Sequence[Operation],
    results: Iterable[Value],
    given: Callable[[Value], bool] = lambda v: False,
) -> list[Operation]:
    """The operations on which the results depend, in order, except for given values."""
    wanted, found = {v for v in results if not given(v)}, []
    for op in reversed(operations):
        if wanted.intersection(op.outs):
            wanted.update(v for v in op.ins if not given(v))
            found.append(op)
    return found[::-1]


def made_of(values: Iterable[Value], follow: Callable[[Value], Iterable[Value]]) -> Iterator[Value]:
    """All values from which values are computed, each once; ``follow`` gives the next ones."""
    waiting, seen = [*values], set[Value]()
    while waiting:
        v = waiting.pop()
        if v not in seen:
            seen.add(v)
            yield v
            waiting += follow(v)


def _value(v: Any, values: Mapping[Any, Value]) -> Value:
    return Value(v.aval, literal=np.asarray(v.val)) if is_literal(v) else values[v]


def _bodies(op: Operation, graphs: "list[Graph]") -> list[Body]:
    ins, outs = range(len(op.ins)), range(len(op.outs))
    if op.kind is Kind.BRANCH:
        return [Body(graph, [*ins[1:]], [*outs], {}) for graph in graphs]
    if op.name == "scan":
        first, carried = scan_sizes(op.eqn)
        return [Body(graphs[0], [*ins], [*outs], {first + k: k for k in range(carried)})]
    if op.name == "while":
        condition, body = graphs
        of_condition = len(condition.inputs) - len(outs)
        of_body = len(body.inputs) - len(outs)
        carry = ins[of_condition + of_body :]
        again = lambda first: {first + k: k for k in outs}
        return [
            Body(condition, [*ins[:of_condition], *carry], [None], again(of_condition)),
            Body(body, [*ins[of_condition:]], [*outs], again(of_body)),
        ]
    # Constants come first.
    return [Body(graphs[0], [*ins[len(ins) - len(graphs[0].inputs) :]], [*outs], {})]


def _through(
    op: Operation, ins: list[bool], of: Callable[..., Sequence[bool]], top: Operation
) -> list[bool]:
    """:meth:`Graph.spread` through a call."""
    outs = [False] * len(op.outs)
    for body in op.bodies:
        for i, k in body.again.items():
            outs[k] |= ins[body.inputs[i]]
    decides = op.kind is Kind.BRANCH and ins[0]
    while True:
        before = list(outs)
        for body in op.bodies:
            given = [ins[j] for j in body.inputs]
            for i, k in body.again.items():
                given[i] |= outs[k]
            for k, has_it in zip(body.outputs, body.graph.spread(given, of, top), strict=True):
                if k is None:
                    decides |= has_it
                else:
                    outs[k] |= has_it
        if outs == before:
            break
    of(op, [decides], top)
    return outs


# Calls in line


def inlined(
    jaxpr: Any,
    consts: Sequence[Any] | None,
    calls: Collection[str],
    whole: Collection[str] = (),
) -> Graph:
    """The graph in which calls are replaced by their operations. Equal scalars are merged.

    Args:
        jaxpr: a program.
        consts: the values of its constants; without values, they are the first inputs.
        calls: the names of the calls. A ``jit`` with shardings is kept.
        whole: the names of calls that are kept, with their operations ``inside``.
    """
    graph = Graph([], [], [])
    values = graph._start(jaxpr, consts)
    graph.results = _Inliner(graph, calls, whole).add(jaxpr, values)
    return graph


def inlined_branch(
    operations: Sequence[Operation],
    op: Operation,
    number: int,
    results: Sequence[Value],
    calls: Collection[str],
    whole: Collection[str] = (),
) -> tuple[Graph, list[Value]]:
    """A program of operations in which a branch replaces its ``cond``.

    Args:
        operations: the operations of a graph, in order.
        op: one of them, a ``cond``.
        number: the index of the branch.
        results: the results of the program.
        calls: as in :func:`inlined`.
        whole: as in :func:`inlined`.

    Returns:
        The program, and the outer values of its inputs.
    """
    graph, outside, within = Graph([], [], []), list[Value](), dict[Value, Value]()

    def enter(v):
        if v.literal is not None:
            return v
        if v not in within:
            within[v] = Value(v.aval)
            graph.inputs.append(within[v])
            outside.append(v)
        return within[v]

    inliner = _Inliner(graph, calls, whole)
    jaxpr, consts = list(closed_jaxprs(op.eqn))[number]
    for each in operations:
        if each is op:
            ins = [
                *(Value(v.aval, literal=c) for v, c in zip(jaxpr.constvars, consts, strict=True))
            ]
            ins += map(enter, op.ins[1:])
            values = dict(zip((*jaxpr.constvars, *jaxpr.invars), ins, strict=True))
            outs = inliner.add(jaxpr, values)
        else:
            outs = inliner.append(each.name, each.eqn, list(map(enter, each.ins)), each.jaxpr)
        within.update(zip(each.outs, outs, strict=True))
    graph.results = [within[v] for v in results]
    graph.operations = needed(graph.operations, graph.results)
    return graph, outside


class _Inliner:
    """Adds the equations of jaxprs to a graph."""

    def __init__(self, graph: Graph, calls: Collection[str], whole: Collection[str]):
        self.graph, self.calls, self.whole = graph, calls, whole
        self._made: dict[Any, list[Value]] = {}
        self._call: Any = None

    def add(self, jaxpr: Any, values: dict[Any, Value]) -> list[Value]:
        """Adds a jaxpr whose input and constant values are known; returns its results."""
        for eqn in jaxpr.eqns:
            ins, name = [_value(v, values) for v in eqn.invars], name_of(eqn)
            if name in self.calls and not has_shardings(eqn):
                outer, self._call = self._call, self._call or eqn
                outs = self._inside(self, eqn, ins)
                self._call = outer
            else:
                outs = self.append(name, eqn, ins, jaxpr)
            values.update(zip(eqn.outvars, outs, strict=True))
        return [_value(v, values) for v in jaxpr.outvars]

    def append(self, name: str, eqn: Any, ins: list[Value], jaxpr: Any) -> list[Value]:
        """Adds an equation on values of this graph, unless its results are known; returns them."""
        return _plain_again(name, ins) or self._append(name, eqn, ins, jaxpr)

    def _inside(self, inliner: "_Inliner", eqn: Any, ins: list[Value]) -> list[Value]:
        jaxpr, consts = next(closed_jaxprs(eqn))
        values = {v: Value(v.aval, literal=c) for v, c in zip(jaxpr.constvars, consts, strict=True)}
        values.update(zip(jaxpr.invars, ins[len(ins) - len(jaxpr.invars) :], strict=True))
        return inliner.add(jaxpr, values)

    def _append(self, name: str, eqn: Any, ins: list[Value], jaxpr: Any) -> list[Value]:
        key = _key(name, eqn, ins)
        if key in self._made:
            return self._made[key]
        outs = [Value(v.aval) for v in eqn.outvars]
        op = Operation(name, eqn, ins, outs, jaxpr, call=self._call)
        if name in self.whole and len(list(closed_jaxprs(eqn))) == 1:
            inside = Graph([], op.inside, [])
            results = self._inside(_Inliner(inside, self.calls, self.whole), eqn, ins)
            for v, result in zip(op.outs, results, strict=True):
                v.meaning = result
        self.graph._append(op)
        if key is not None:
            self._made[key] = op.outs
        return op.outs


def _plain_again(name: str, ins: list[Value]) -> list[Value] | None:
    """Removes pairs of operations that protect and unprotect row ids."""
    maker = ins[0].maker if name == "rows_plain" else None
    return maker.ins if maker is not None and maker.name == "rows_protect" else None


def _key(name: str, eqn: Any, ins: list[Value]) -> Any:
    """Equal for equations with equal results; None where duplicates are not searched."""
    if name != "rows_plain" and any(v.aval.shape for v in eqn.outvars):
        return None
    key = name, tuple((k, _hashable(p)) for k, p in eqn.params.items()), *(v.key for v in ins)
    return key if eqn.outvars and not eqn.effects else None


def _hashable(param: Any) -> Any:
    try:
        hash(param)
    except TypeError:
        return id(param)
    return param
