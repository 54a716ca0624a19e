"""Why the gradient of a looked-up table is dense: read off the jaxpr of the loss."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Literal

from ..core.compat import inner_jaxprs

SCOPE = "optzoo.lookup"  # the name scope of lookups that `value_and_grad` cannot record

_FUNCTIONS = {
    "jit": "jax.jit",
    "pjit": "jax.jit",
    "checkpoint": "jax.checkpoint",
    "remat": "jax.checkpoint",
    "remat2": "jax.checkpoint",
    "scan": "jax.lax.scan",
    "while": "jax.lax.while_loop",
    "cond": "jax.lax.cond",
    "custom_jvp_call": "jax.custom_jvp",
    "custom_vjp_call": "jax.custom_vjp",
    "custom_vjp_call_jaxpr": "jax.custom_vjp",
    "shard_map": "jax.shard_map",
}


class _Lookup(NamedTuple):
    after: str  # the primitive that computed the array from the table; empty for the table
    body: str  # the primitive in whose body it is; empty outside of bodies


def without_stop_gradient(jaxpr: Any) -> Any:
    """The jaxpr in which no ``stop_gradient`` depends on anything; not for evaluation."""

    # In the bodies of loops and the like they stay: a dense gradient, which is correct.
    def cut(eqn):
        if eqn.primitive.name != "stop_gradient":
            return eqn
        return eqn.replace(invars=[Literal(0, v.aval) for v in eqn.invars])

    return jaxpr.replace(eqns=list(map(cut, jaxpr.eqns)))


def find_casts(jaxpr: Any, tables: list[Any]) -> dict[int, int]:
    """By position those of some variables that are a cast of an input, and which input it is."""
    inputs = {id(v): i for i, v in enumerate(jaxpr.invars)}
    sources = {
        id(eqn.outvars[0]): inputs[id(eqn.invars[0])]
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "convert_element_type" and id(eqn.invars[0]) in inputs
    }
    return {
        k: sources[id(v)]
        for k, v in enumerate(tables)
        if id(v) in sources and jnp.issubdtype(v.aval.dtype, jnp.floating)
    }


def why_dense(jaxpr: Any, table: Any, is_recorded: bool) -> str | None:
    """The reason in words; None for an array that no lookup reads.

    Args:
        jaxpr: of the loss, in which recorded lookups do not read the table.
        table: its input variable, which the loss depends on.
        is_recorded: whether some lookup of the table is recorded.
    """
    lookups, uses = _follow(_needed(jaxpr), {id(table): ""}, table.aval.shape, "")
    if not lookups and not is_recorded:
        return None
    reasons = [_of_lookup(found) for found in lookups]
    # What computed the array of a lookup is not another use.
    others = [name for name in uses if name not in {found.after for found in lookups}]
    if others or not reasons:
        reasons.append("it is also used by " + (", ".join(others) or "other operations"))
    return "; ".join(dict.fromkeys(reasons))


def _of_lookup(found: _Lookup) -> str:
    if found.body:
        name = _FUNCTIONS.get(found.body, found.body)
        return f"a lookup is inside of {name}: do the lookup outside and pass the rows in"
    if found.after:
        return f"a lookup reads what {found.after} made of it: look up first, then compute"
    return (
        "a lookup is inside of another transformation, such as jax.vmap or an inner "
        "value_and_grad: do the lookup outside"
    )


def _follow(
    eqns: list[Any], copies: dict[int, str], shape: tuple[int, ...], body: str
) -> tuple[list[_Lookup], dict[str, None]]:
    """The lookups of a table or of arrays computed from it, and what else uses the table itself.

    Args:
        eqns: of the jaxpr.
        copies: by the identity of the variable of the table, and of each array computed from it
            that may stand for it, the primitive that computed it; extended in place.
        shape: of the table. An array of this shape, or a batch of such, may stand for it.
        body: the primitive in whose body the equations are.
    """
    lookups, uses = list[_Lookup](), dict[str, None]()
    for eqn in eqns:
        found = [v for v in eqn.invars if id(v) in copies]
        if not found:
            continue
        after, name = copies[id(found[0])], eqn.primitive.name
        if SCOPE in str(eqn.source_info.name_stack):
            lookups.append(_Lookup(after, body))
            continue
        within = list[_Lookup]()
        for inner in inner_jaxprs(eqn):
            # The operands of a body are the last ones: those of a `cond` follow its predicate.
            pairs = zip(reversed(eqn.invars), reversed(inner.invars), strict=False)
            known = {id(v): copies[id(x)] for x, v in pairs if id(x) in copies}
            within += _follow(inner.eqns, known, shape, name)[0]
        lookups += within
        if not after and not within:
            uses[str(eqn.params.get("name", name))] = None
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
