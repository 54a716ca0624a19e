"""Why the gradient of a looked-up table is dense: read off the jaxpr of the loss."""

from typing import Any, NamedTuple

from jax.extend.core import Literal

from ..core.compat import function_of, inner_jaxprs, map_equations
from .primitive import is_lookup


class _Lookup(NamedTuple):
    after: str  # the operation that computed the array from the table; empty for the table
    body: str  # the function of JAX in whose body it is; empty outside of bodies


def without_stop_gradient(jaxpr: Any) -> Any:
    """The jaxpr in which no ``stop_gradient`` depends on anything; not for evaluation."""

    def cut(eqn):
        if function_of(eqn) != "jax.lax.stop_gradient":
            return eqn
        return eqn.replace(invars=[Literal(0, v.aval) for v in eqn.invars])

    return map_equations(jaxpr, cut)


def why_dense(jaxpr: Any, table: Any, has_taps: bool) -> str | None:
    """The reason in words; None for an array that no lookup reads.

    Args:
        jaxpr: of the loss, in which lookups with a tap do not read the table.
        table: its input variable, which the loss depends on.
        has_taps: whether some lookup of the table has a tap.
    """
    lookups, uses = _follow(_needed(jaxpr), {id(table): ""}, table.aval.shape, "")
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
    eqns: list[Any], copies: dict[int, str], shape: tuple[int, ...], body: str
) -> tuple[list[_Lookup], dict[str, None]]:
    """The lookups of a table or of arrays computed from it, and what else uses the table itself.

    Args:
        eqns: of the jaxpr.
        copies: by the identity of the variable of the table, and of each array computed from it
            that may stand for it, the operation that computed it; extended in place.
        shape: of the table. An array of this shape, or a batch of such, may stand for it.
        body: the function of JAX in whose body the equations are.
    """
    lookups, uses = list[_Lookup](), dict[str, None]()
    for eqn in eqns:
        found = [v for v in eqn.invars if id(v) in copies]
        if not found:
            continue
        after, name = copies[id(found[0])], str(eqn.params.get("name", eqn.primitive.name))
        if is_lookup(eqn):
            lookups.append(_Lookup(after, body))
            continue
        within = list[_Lookup]()
        for inner in inner_jaxprs(eqn):
            # The operands of a body are the last ones: those of a `cond` follow its predicate.
            pairs = zip(reversed(eqn.invars), reversed(inner.invars), strict=False)
            known = {id(v): copies[id(x)] for x, v in pairs if id(x) in copies}
            within += _follow(inner.eqns, known, shape, function_of(eqn))[0]
        lookups += within
        if not after and not within:
            uses[name] = None
        for out in eqn.outvars:
            if shape and getattr(out.aval, "shape", ())[-len(shape) :] == shape:
                copies[id(out)] = after or name
    return lookups, uses


def _needed(jaxpr: Any) -> list[Any]:
    """The equations on which the outputs depend."""
    needed, eqns = set(map(id, jaxpr.outvars)), []
    for eqn in reversed(jaxpr.eqns):
        if any(id(out) in needed for out in eqn.outvars):
            needed.update(map(id, eqn.invars))
            eqns.append(eqn)
    return eqns[::-1]
