"""Groups of elements that share a number, such as the scale of their codes, in LLVM IR."""

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

from llvmlite import ir

from ..jaxprs.graph import Operation, Value, made_of
from .elements import Elements, Index
from .loops import memory
from .operations import bytes_of, store
from .totals import Totals

IndexOf = Callable[[Sequence[int]], Index]  # by the shape of a value that of its element
# A loop over the elements of a group in an array of a shape; the position of one in the group.
Lanes = Callable[[Sequence[int]], contextlib.AbstractContextManager[tuple[Any, IndexOf]]]


def write_group(
    b: ir.IRBuilder,
    elements: Elements,
    reductions: Sequence[Operation],
    results: Sequence[Value],
    given: Collection[Value],
    lanes: Lanes,
    length: int,
    keeps: Callable[[Value], bool],
    stores: Callable[[IndexOf], None],
    pieces: Callable[[], contextlib.AbstractContextManager[Lanes]] | None = None,
) -> None:
    """Computes the reductions of a group, then its results, which may depend on them.

    Elements needed by both are kept in between.

    Args:
        b: the builder.
        elements: computes elements.
        reductions: over a group.
        results: the values that ``stores`` needs for each element.
        given: the values in memory.
        lanes: makes a loop over the elements.
        length: the number of elements of a group.
        keeps: whether the elements of a value may be kept.
        stores: writes the results of an element, given the indices of values.
        pieces: makes a loop over pieces of a group, each reduced by itself; gives the loop over the
            elements of one.
    """
    pieces = pieces or (lambda: contextlib.nullcontext(lanes))
    is_read = lambda v: v in given or (v.maker is not None and v.maker.name == "rows_gather")
    parts = lambda v: () if is_read(v) else _parts(v)
    left, kept = list(reductions), dict[Value, Any]()
    while left:
        later = {v for op in left for v in op.outs}
        now = [op for op in left if not later.intersection(made_of(op.ins, parts))]
        left = [op for op in left if op not in now]
        cone = {*made_of([v for op in now for v in op.ins], parts)}
        wanted = [*results, *(v for op in left for v in op.ins)]
        # What others than the cone need of it, if it is computed.
        others = made_of(wanted, lambda v, cone=cone: () if v in cone else parts(v))
        common = [v for v in others if v in cone and v not in kept and parts(v) and keeps(v)]
        new = {v: memory(b, length * bytes_of(v.dtype)) for v in common}
        totals = Totals(b, now)
        with pieces() as of_piece:
            part = Totals(b, now)
            with of_piece(now[0].ins[0].shape) as (lane, index_of), _read(elements, kept, lane):
                part.add(lambda op: elements.of(op.ins[0], index_of(op.ins[0].shape)))
                for v, place in new.items():
                    store(b, v.dtype, place, lane, elements.of(v, index_of(v.shape)))
            totals.add(part.get)
        for op in now:
            elements.keep(op.outs[0], totals.get(op))
        kept |= new
    with lanes(results[0].shape) as (lane, index_of), _read(elements, kept, lane):
        stores(index_of)


@contextlib.contextmanager
def _read(elements: Elements, kept: dict[Value, Any], lane: Any):
    elements.stored = {v: (place, lane) for v, place in kept.items()}
    yield
    elements.stored = {}


def _parts(v: Value) -> Sequence[Value]:
    """The operands of a value."""
    if v.meaning is not None:
        return [v.meaning]
    return () if v.maker is None else v.maker.ins
