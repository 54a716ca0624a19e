"""A step as a graph of operations, made from its jaxpr."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..core.compat import bind_equation, closed_jaxprs, has_shardings, is_literal
from ..core.marks import mark_of

_JITS = {"jit", "pjit", "closed_call", "core_call"}  # their operations take their place
_WITH_DERIVATIVES = {"custom_jvp_call", "custom_vjp_call"}  # kept whole: they have their own


_name = functools.cache(str)


@dataclasses.dataclass(eq=False)
class Value:
    """A result of an operation, an input or a constant."""

    aval: Any
    maker: "Operation | None" = None
    literal: Any = None
    meaning: "Value | None" = None  # the same value inside of the call that made it

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.aval.shape

    @property
    def dtype(self) -> str:
        """The name of its dtype."""
        return _name(self.aval.dtype)

    @property
    def key(self) -> Any:
        """Equal for scalar constants of equal bits, however they print; else for itself alone."""
        if self.literal is None or self.shape:
            return id(self)
        return self.dtype, np.asarray(self.literal).tobytes()


@dataclasses.dataclass(eq=False)
class Operation:
    """An equation, on values. A marked operation on rows has the name of its mark."""

    name: str
    eqn: Any
    ins: list[Value]
    outs: list[Value]
    inside: "list[Operation]" = dataclasses.field(default_factory=list)

    def run(self, known: dict[Value, Any]) -> None:
        """Computes the outputs from what is known, and adds them."""
        results = bind_equation(self.eqn, [read(known, v) for v in self.ins])
        known.update(zip(self.outs, results, strict=True))


def read(known: dict[Value, Any], value: Value) -> Any:
    """A value that is known, or a literal."""
    return known[value] if value.literal is None else value.literal


@dataclasses.dataclass(eq=False)
class Program:
    """What computes the results from the inputs, without what no result needs."""

    inputs: list[Value]
    operations: list[Operation]
    results: list[Value]
    has_effects: bool = False  # such as prints, which no result needs

    def readers(self) -> dict[Value, list[Operation]]:
        """By each value the operations that read it."""
        found: dict[Value, list[Operation]] = {}
        for op in self.operations:
            for v in op.ins:
                found.setdefault(v, []).append(op)
        return found


def read_program(jaxpr: Any) -> Program:
    """The program of an open jaxpr, whose constants are inputs too, the first ones."""
    inputs = [Value(v.aval) for v in (*jaxpr.constvars, *jaxpr.invars)]
    operations: list[Operation] = []
    results = _inline(jaxpr, inputs, operations, {})
    has_effects = any(op.eqn.effects for op in operations)
    return Program(inputs, needed(operations, results), results, has_effects)


def needed(operations: Sequence[Operation], results: Iterable[Value]) -> list[Operation]:
    """The operations on which the results depend, in order."""
    wanted, found = set(results), []
    for op in reversed(operations):
        if wanted.intersection(op.outs):
            wanted.update(op.ins)
            found.append(op)
    return found[::-1]


def _inline(
    jaxpr: Any, inputs: Sequence[Value], operations: list[Operation], made: dict[Any, list[Value]]
) -> list[Value]:
    """Appends the operations of a jaxpr; gives its outputs. Equal scalars are made once."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))

    def value(v):
        return Value(v.aval, literal=np.asarray(v.val)) if is_literal(v) else values[v]

    for eqn in jaxpr.eqns:
        ins, mark = [value(v) for v in eqn.invars], mark_of(eqn)
        if mark is None and _is_plain_call(eqn):
            outs = _inside(eqn, ins, operations, made)
        else:
            outs = _plain_again(mark, ins) or _append(eqn, mark, ins, operations, made)
        values.update(zip(eqn.outvars, outs, strict=True))
    return [value(v) for v in jaxpr.outvars]


def _is_plain_call(eqn: Any) -> bool:
    if eqn.primitive.name not in _JITS:
        return False
    return "in_shardings" not in eqn.params or not has_shardings(eqn)


def _inside(
    eqn: Any, ins: list[Value], operations: list[Operation], made: dict[Any, list[Value]]
) -> list[Value]:
    [(jaxpr, consts)] = closed_jaxprs(eqn)
    constants = [Value(v.aval, literal=c) for v, c in zip(jaxpr.constvars, consts, strict=True)]
    return _inline(jaxpr, [*constants, *ins], operations, made)


def _plain_again(mark: str | None, ins: list[Value]) -> list[Value] | None:
    """Row ids that were protected for a moment are the ids again."""
    maker = ins[0].maker if mark == "rows_plain" else None
    return maker.ins if maker is not None and maker.name == "rows_protect" else None


def _append(
    eqn: Any,
    mark: str | None,
    ins: list[Value],
    operations: list[Operation],
    made: dict[Any, list[Value]],
) -> list[Value]:
    name = mark or eqn.primitive.name
    key = _key(name, eqn, ins)
    if key in made:
        return made[key]
    op = Operation(name, eqn, ins, [Value(v.aval) for v in eqn.outvars])
    for v in op.outs:
        v.maker = op
    if name in _WITH_DERIVATIVES and len(list(closed_jaxprs(eqn))) == 1:
        for v, inner in zip(op.outs, _inside(eqn, ins, op.inside, {}), strict=True):
            v.meaning = inner
    operations.append(op)
    if key is not None:
        made[key] = op.outs
    return op.outs


def _key(name: str, eqn: Any, ins: list[Value]) -> Any:
    """Equal for equations with equal results; None where there is no need to look for them."""
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
