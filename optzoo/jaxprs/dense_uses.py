"""Explains why the gradient of a looked-up table is dense, from the jaxpr of the loss."""

from typing import Any, NamedTuple

from jax.extend.core import Literal

from .equations import caller_of, map_equations
from .gathers import row_gather
from .graph import Graph, Operation, Value, needed
from .lookup import is_lookup
from .primitives import function_of


class _Lookup(NamedTuple):
    word: str  # a lookup or a gather
    after: str  # the operation that computed the array from the table; empty for the table
    body: str  # the function of JAX in whose body it is; empty outside of bodies
    line: str  # of the user's program


def without_stop_gradient(jaxpr: Any) -> Any:
    """The jaxpr with ``stop_gradient`` cut from its operands; not for evaluation."""

    def cut(eqn):
        if eqn.primitive.name != "stop_gradient":
            return eqn
        return eqn.replace(invars=[Literal(0, v.aval) for v in eqn.invars])

    return map_equations(jaxpr, cut)


def why_dense(graph: Graph, table: Value, has_taps: bool, gathers: bool) -> str | None:
    """The reason as text, with lines; None for an array whose rows are not read.

    Args:
        graph: the graph of the loss, in which lookups with a tap do not read the table.
        table: the input of the loss.
        has_taps: whether some lookup of the table has a tap.
        gathers: whether gathers of rows are treated like lookups.
    """
    lookups, uses = _of_table(graph, table, gathers)
    if not lookups and not has_taps:
        return None
    reasons = [_of_lookup(found) for found in lookups]
    # What computed the array of a lookup is not another use.
    after = {found.after for found in lookups}
    others = [_at(name, line) for name, line in uses.items() if name not in after]
    if others or not reasons:
        reasons.append("it is also used by " + (", ".join(others) or "other operations"))
    return "; ".join(dict.fromkeys(reasons))


def first_use(graph: Graph, table: Value) -> str:
    """The first operation that uses an input, with its line."""
    _, uses = _of_table(graph, table, gathers=False)
    return next((_at(name, line) for name, line in uses.items()), "the result")


def _at(name: str, line: str) -> str:
    return f"{name} ({line})" if line else name


def _of_lookup(found: _Lookup) -> str:
    if found.after:
        what = f"{found.word} reads the result of {found.after}"
        return f"{_at(what, found.line)}: look up first, then compute"
    if found.body:
        what = f"{found.word} is inside of {found.body}"
        return f"{_at(what, found.line)}: do the lookup outside and pass the rows in"
    what = f"{found.word} is inside of a jax.vmap that maps over the table"
    return f"{_at(what, found.line)}: give each member its own table"


def _of_table(graph: Graph, table: Value, gathers: bool) -> tuple[list[_Lookup], dict[str, str]]:
    operations = needed(graph.operations, graph.results)
    return _Follower(table.shape, gathers).follow(operations, {table: ""}, "", "")


class _Follower(NamedTuple):
    """Follows a table to its lookups and its other uses."""

    # Of the table. An array of this shape, or a batch of such, may stand for it.
    shape: tuple[int, ...]
    gathers: bool  # whether gathers of rows count

    def follow(
        self, operations: list[Operation], copies: dict[Value, str], body: str, line: str
    ) -> tuple[list[_Lookup], dict[str, str]]:
        """The lookups of a table or of arrays computed from it, and other uses of the table.

        Args:
            operations: the operations of the program.
            copies: for the table and each array that may replace it, the operation that computed
                it; extended in place.
            body: the function of JAX in whose body the operations are.
            line: the line of the outermost call around them. JAX reuses jaxprs with the lines of
                their first call.
        """
        lookups, uses = list[_Lookup](), dict[str, str]()
        for op in operations:
            found = [v for v in op.ins if v in copies]
            if not found:
                continue
            after, name = copies[found[0]], str(op.params.get("name", op.name))
            where = line or caller_of(op.eqn)
            if word := self._reads_rows(op):
                lookups.append(_Lookup(word, after, body, where))
                continue
            within, of_bodies = list[_Lookup](), dict[str, str]()
            for inner in op.bodies:
                pairs = zip(inner.graph.inputs, inner.inputs, strict=True)
                known = {v: copies[op.ins[i]] for v, i in pairs if op.ins[i] in copies}
                of_body = inner.graph.operations, known, function_of(op.name), where
                more, of_body = self.follow(*of_body)
                within += more
                of_bodies |= of_body
            lookups += within
            if not after and not within:
                # What replaces a call of the user has no line of its own.
                own = {name: where} if where else of_bodies or {name: ""}
                uses |= {name: line for name, line in own.items() if name not in uses}
            for out in op.outs:
                if self.shape and out.shape[-len(self.shape) :] == self.shape:
                    copies[out] = after or name
        return lookups, uses

    def _reads_rows(self, op: Operation) -> str:
        """A description of an operation that reads rows; empty for any other."""
        if is_lookup(op):
            return "a lookup"
        is_row_gather = self.gathers and op.ins[0].shape == self.shape and row_gather(op)
        return "a gather" if is_row_gather else ""
