"""Why the gradient of a looked-up table is dense: read off the jaxpr of the loss."""

from typing import Any, NamedTuple

from jax.extend.core import Literal

from .equations import map_equations
from .graph import Graph, Operation, Value, needed
from .lookup import is_lookup
from .primitives import function_of


class _Lookup(NamedTuple):
    after: str  # the operation that computed the array from the table; empty for the table
    body: str  # the function of JAX in whose body it is; empty outside of bodies


def without_stop_gradient(jaxpr: Any) -> Any:
    """The jaxpr in which no ``stop_gradient`` depends on anything; not for evaluation."""

    def cut(eqn):
        if eqn.primitive.name != "stop_gradient":
            return eqn
        return eqn.replace(invars=[Literal(0, v.aval) for v in eqn.invars])

    return map_equations(jaxpr, cut)


def why_dense(graph: Graph, table: Value, has_taps: bool) -> str | None:
    """The reason in words; None for an array that no lookup reads.

    Args:
        graph: of the loss, in which lookups with a tap do not read the table.
        table: its input, which the loss depends on.
        has_taps: whether some lookup of the table has a tap.
    """
    operations = needed(graph.operations, graph.results)
    lookups, uses = _follow(operations, {table: ""}, table.shape, "")
    if not lookups and not has_taps:
        return None
    reasons = [_of_lookup(found) for found in lookups]
    # What computed the array of a lookup is not another use.
    others = [name for name in uses if name not in {found.after for found in lookups}]
    if others or not reasons:
        reasons.append("it is also used by " + (", ".join(others) or "other operations"))
    return "; ".join(dict.fromkeys(reasons))


def _of_lookup(found: _Lookup) -> str:
    if found.after:
        return f"a lookup reads what {found.after} made of it: look up first, then compute"
    if found.body:
        return f"a lookup is inside of {found.body}: do the lookup outside and pass the rows in"
    return (
        "a lookup is inside of a jax.vmap that maps over the table: give each member a table of "
        "its own"
    )


def _follow(
    operations: list[Operation], copies: dict[Value, str], shape: tuple[int, ...], body: str
) -> tuple[list[_Lookup], dict[str, None]]:
    """The lookups of a table or of arrays computed from it, and what else uses the table itself.

    Args:
        operations: of the program.
        copies: by the table, and by each array computed from it that may stand for it, the
            operation that computed it; extended in place.
        shape: of the table. An array of this shape, or a batch of such, may stand for it.
        body: the function of JAX in whose body the operations are.
    """
    lookups, uses = list[_Lookup](), dict[str, None]()
    for op in operations:
        found = [v for v in op.ins if v in copies]
        if not found:
            continue
        after, name = copies[found[0]], str(op.params.get("name", op.name))
        if is_lookup(op):
            lookups.append(_Lookup(after, body))
            continue
        within = list[_Lookup]()
        for inner in op.bodies:
            pairs = zip(inner.graph.inputs, inner.inputs, strict=True)
            known = {v: copies[op.ins[i]] for v, i in pairs if op.ins[i] in copies}
            within += _follow(inner.graph.operations, known, shape, function_of(op.name))[0]
        lookups += within
        if not after and not within:
            uses[name] = None
        for out in op.outs:
            if shape and out.shape[-len(shape) :] == shape:
                copies[out] = after or name
    return lookups, uses
