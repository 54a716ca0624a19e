"""Splits an update into the part computed once in a step and the part computed for each row."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from ...jaxprs.graph import Graph, inlined, needed, read
from ...jaxprs.primitives import KINDS, Kind
from ...jaxprs.prove_rows import NotRowWise, check_operation
from .padded import RowProgram

_INLINED = {name for name, kind in KINDS.items() if kind is Kind.CALL}


class Split(NamedTuple):
    """An update in two parts.

    Attributes:
        scalars: a function of the shared arrays that returns the scalars that the rows need.
        shared: a function of the shared arrays that returns these arrays after the step.
        row: a function of the scalars and the inputs that returns the outputs for a row.
        dtypes: the dtypes of the scalars.
    """

    scalars: Callable[[Sequence[Any]], list[Any]]
    shared: Callable[[Sequence[Any]], list[Any]]
    row: RowProgram
    dtypes: tuple[Any, ...]


def split(update: Callable[..., Any], row: Sequence[Any], shared: Sequence[Any]) -> Split:
    """Splits ``update(row_inputs, shared_inputs) -> (row_outputs, shared_outputs)``.

    All four are lists of arrays; ``row`` and ``shared`` are the abstract inputs.

    Raises:
        NotRowWise: if a shared output depends on a row.
    """
    closed, (row_outputs, _) = jax.make_jaxpr(update, return_shape=True)(list(row), list(shared))
    graph = inlined(closed.jaxpr, closed.consts, _INLINED)
    inputs, shared_inputs = graph.inputs[: len(row)], graph.inputs[len(row) :]
    outputs, shared_outputs = graph.results[: len(row_outputs)], graph.results[len(row_outputs) :]
    of_rows, of_shared = graph.depending(inputs), graph.depending(shared_inputs)
    if of_rows.intersection(shared_outputs):
        raise NotRowWise("the state that all rows share depends on the rows")

    crosses = lambda v: v in of_shared and v not in of_rows and v.shape == ()
    each = needed(graph.operations, outputs, crosses)
    reads = {*outputs, *(v for op in each for v in op.ins)}
    order = [*graph.inputs, *(v for op in graph.operations for v in op.outs)]
    crossing = [v for v in order if v in reads and crosses(v)]
    once = [op for op in graph.operations if not of_rows.intersection(op.outs)]

    def of_step(wanted, values):
        known = dict(zip(shared_inputs, values, strict=True))
        for op in once:
            outs = op.evaluate([read(known, v) for v in op.ins])
            known.update(zip(op.outs, outs, strict=True))
        return [read(known, v) for v in wanted]

    return Split(
        scalars=lambda values: of_step(crossing, values),
        shared=lambda values: of_step(shared_outputs, values),
        row=RowProgram(each, inputs, crossing, outputs),
        dtypes=tuple(v.aval.dtype for v in crossing),
    )


def mixes_elements(program: RowProgram) -> bool:
    """Whether an element of a row depends on the others, for rows of shape ``(1, a prime)``."""
    width = program.inputs[0].shape[1]
    try:
        for op, *_ in Graph([], program.operations, []).walk():
            check_operation(op, {width: "row"}, op.line)
    except NotRowWise:
        return True
    return any(v.shape != (1, width) for v in program.outputs)
