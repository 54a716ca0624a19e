"""Finds the arguments of a program of which results are copies with some rows changed."""

import functools
from collections.abc import Callable
from typing import NamedTuple

from ..core.marks import WRITES
from .graph import Graph, Operation
from .primitives import CALLS, Kind

_REPLACES = {"scatter", "scatter-add", "scatter_add"}


class Origin(NamedTuple):
    """The input that a value equals except for some rows."""

    position: int
    is_changed: bool  # whether some rows may differ
    is_inside: bool = False  # whether some of them are changed in a loop or a branch


def changed_rows(graph: Graph) -> list[Origin | None]:
    """For each result, the argument in which it replaces rows, or to which it adds rows.

    None if there is no such argument. Rows may be changed in calls, loops and branches.
    """
    return [origin if origin and origin.is_changed else None for origin in _origins(graph)]


def _origins(graph: Graph) -> list[Origin | None]:
    """For each result, the input of which it is a copy with changed rows, or None."""
    inputs = {v: i for i, v in enumerate(graph.inputs)}
    of_bodies = functools.cache(_origins)  # a call has several results

    def follow(v):
        is_changed = is_inside = False
        while v.maker is not None:
            origin = _before(v.maker, v.maker.outs.index(v), of_bodies)
            if origin is None:
                return None
            is_changed |= origin.is_changed
            is_inside |= origin.is_inside
            v = v.maker.ins[origin.position]
        return Origin(inputs[v], is_changed, is_inside) if v in inputs else None

    return [follow(v) for v in graph.results]


def _before(
    op: Operation, k: int, of_bodies: Callable[[Graph], list[Origin | None]]
) -> Origin | None:
    """The operand of which the ``k``-th result is a copy with changed rows, or None."""
    if op.name in WRITES:
        return Origin(0, True)
    if op.name in _REPLACES:
        is_by_rows = op.params["dimension_numbers"].scatter_dims_to_operand_dims == (0,)
        is_one_row = op.ins[1].aval.ndim == 1  # XLA writes it in any layout
        return Origin(0, not is_one_row) if is_by_rows else None
    if op.kind is Kind.SAME:
        return Origin(k, False)
    if "changed_rows" in op.params:  # as the primitive of a native call declares
        table = dict(op.params["changed_rows"]).get(k)
        return None if table is None else Origin(table, True)
    if op.kind not in CALLS and op.kind is not Kind.MAP:
        return None
    found = []
    for body in op.bodies:
        if k not in body.outputs:
            continue
        result = body.outputs.index(k)
        origin = of_bodies(body.graph)[result]
        # What a loop carries has to come back to its place.
        if origin is None or (body.again and body.again.get(origin.position) != k):
            return None
        found.append(origin._replace(position=body.inputs[origin.position]))
    if len({origin.position for origin in found}) != 1:
        return None
    is_changed = any(origin.is_changed for origin in found)
    is_inside = is_changed and op.kind in (Kind.BRANCH, Kind.LOOP)
    is_inside |= any(origin.is_inside for origin in found)
    return Origin(found[0].position, is_changed, is_inside)
