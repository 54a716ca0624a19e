"""Gathers of 16-bit rows whose gradients are summed in float32.

The transposition of a gather adds the gradients of rows in their dtype: the sum of 1,000 ones in
bfloat16 is 256.
"""

from collections.abc import Collection
from typing import Any

import jax

from ..core.compat import custom_jvp
from ..core.numerics import has_16_bits, upcast
from .equations import map_equations


def with_wide_sums(closed: Any, shapes: Collection[tuple[int, ...]]) -> Any:
    """A closed jaxpr in which the dense gradients of tables are summed in float32 at least.

    Args:
        closed: the jaxpr.
        shapes: the shapes of tables, which may be read in 16 bits.
    """

    def widen(eqn):
        if eqn.primitive.name != "gather":
            return eqn
        table = eqn.invars[0].aval
        if table.shape not in shapes or not has_16_bits(table.dtype):
            return eqn
        [new] = jax.make_jaxpr(_wide_gather(eqn))(*(v.aval for v in eqn.invars)).jaxpr.eqns
        return eqn.replace(primitive=new.primitive, params=new.params, effects=new.effects)

    return closed.replace(jaxpr=map_equations(closed.jaxpr, widen)) if shapes else closed


def _wide_gather(eqn: Any) -> custom_jvp:
    gather = custom_jvp(lambda table, starts: eqn.primitive.bind(table, starts, **eqn.params))

    @gather.defjvp
    def _(primals, tangents):
        table, starts = primals
        params = eqn.params | {"fill_value": 0}
        change = eqn.primitive.bind(upcast(tangents[0]), starts, **params)
        return gather(table, starts), change.astype(table.dtype)

    return gather
