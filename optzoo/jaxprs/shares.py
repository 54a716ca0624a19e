"""Runs an optimizer on shares of parameters inside of ``shard_map``, with equal results.

It is verified that each part of a parameter is computed only from this part, except for sums over
all parts, such as in a norm, to which the sums of the other devices are added. The optimizer is
traced, abstractly, on parameters whose divided dimensions have sizes that occur nowhere else, as in
``prove_rows.py``, with indices of such a dimension in place of rows.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..core.compat import gather_invarying, vary, varying
from .graph import Graph, Operation, Value, inlined, read
from .primitives import PLAIN_CALLS, Kind
from .prove_rows import NotRowWise, check_operation, check_shapes, primes, row_axes


class Shares(NamedTuple):
    """The operations of an update of shares that depend on other shares."""

    operations: list[Any]  # the names and constants of all operations, those in calls included
    sums: set[int]  # which of those that are not in calls go over all parts
    parts: list[bool]  # which results are parts; the others are the same on all devices


def prove_shares(
    f: Callable[..., Any],
    make: Callable[[Callable[[str, int], int]], Any],
    axes: frozenset[str],
    number: int,
    taken: Set[int],
    kept: int = 0,
) -> Shares:
    """Verifies that ``f`` treats each part by itself except for sums; raises :class:`NotRowWise`.

    Args:
        f: the ``init`` or ``update`` of an optimizer.
        make: ``make(resize)`` returns abstract arguments of ``f`` in which each divided dimension
            of a parameter has the size ``resize(name, size)``.
        axes: the mesh axes over which the types of shares vary.
        number: the number of shares, for choices of an optimizer by size.
        taken: all other sizes that occur.
        kept: the number of leading arguments that have the shapes of results.
    """
    taken, found = {*taken}, []
    for divisor in (1, number):
        sizes, names = dict[int, int](), dict[int, str]()

        def resize(name, size, divisor=divisor, sizes=sizes, names=names):
            if size not in sizes:  # equal sizes stay equal: an optimizer may group by shape
                start = max(11, size // divisor)
                sizes[size] = next(p for p in primes(start) if p not in taken)
                taken.add(sizes[size])
                names[sizes[size]] = name
            return sizes[size]

        arguments = make(resize)
        _, after = _checked(f, arguments, names)
        if kept:
            check_shapes(arguments[:kept], after, names)
        # As on a device, where the types of shares, and the casts to them, are others.
        as_share = lambda x, names=names: vary(x, axes) if row_axes(x, names) else x
        typed = lambda *xs, as_share=as_share: f(*jax.tree.map(as_share, xs))
        found.append(_checked(typed, arguments, names)[0])
    if found[0] != found[1]:
        raise NotRowWise("it depends on the size of a parameter")
    return found[0]


def run_shares(f: Callable[..., Any], shares: Any, proved: Shares, axes: tuple[str, ...]) -> Any:
    """``f(*shares)`` on this device, with sums over all devices.

    Raises:
        NotRowWise: if its operations on them differ from the verified ones.
    """
    graph, after = _traced(f, shares)
    if [*_written(graph)] != proved.operations:
        raise NotRowWise("it depends on the size of a parameter")
    known = dict(zip(graph.inputs, jax.tree.leaves(shares), strict=True))
    sums = {op for i, op in enumerate(_changing(graph)) if i in proved.sums}
    for op in graph.operations:
        outs = _evaluated(op, known)
        outs = [_SUMS[op.name](x, axes) for x in outs] if op in sums else outs
        known.update(zip(op.outs, outs, strict=True))
    results = [
        x if is_part or not varying(x).intersection(axes) else gather_invarying(x[None], axes)[0]
        for x, is_part in zip((read(known, v) for v in graph.results), proved.parts, strict=True)
    ]
    return jax.tree.structure(after).unflatten(results)


def _traced(f: Callable[..., Any], arguments: Any) -> tuple[Graph, Any]:
    """The program of a function, and the types of its results."""
    jaxpr, after = jax.make_jaxpr(f, return_shape=True)(*arguments)
    return inlined(jaxpr.jaxpr, jaxpr.consts, PLAIN_CALLS), after


def _checked(f: Callable[..., Any], arguments: Any, names: dict[int, str]) -> tuple[Shares, Any]:
    """The operations and results of an abstract program; raises if an operation may mix parts."""
    graph, after = _traced(f, arguments)
    position = {op: i for i, op in enumerate(_changing(graph))}
    sums = {position[op] for op in position if _is_sum(op, names)}
    for op, top, *_ in graph.walk():
        if position.get(op) not in sums:
            check_operation(op, names, top.line, "parts")
    parts = [bool(row_axes(v, names)) for v in graph.results]
    return Shares([*_written(graph)], sums, parts), after


# What depends on the place of an array alone, such as a sharding, is left out of comparisons.


def _written(graph: Graph) -> Iterator[Any]:
    """The names and the constants of all operations that change values, in order."""
    for op, *_ in graph.walk():
        if not _keeps(op):
            ins = map(_origin, op.ins)
            yield op.name, [str(v.literal) for v in ins if v.literal is not None and not v.shape]


def _changing(graph: Graph) -> Iterator[Operation]:
    return (op for op in graph.operations if not _keeps(op))


def _origin(v: Value) -> Value:
    while v.maker is not None and _keeps(v.maker):
        v = v.maker.ins[0]
    return v


def _keeps(op: Operation) -> bool:
    """Whether the result is the first operand."""
    return op.kind is Kind.SAME and len(op.outs) == 1


def _is_sum(op: Operation, names: dict[int, str]) -> bool:
    """Whether an operation reduces over all parts, with no axis of parts in the result."""
    [x] = op.ins if op.name in _SUMS else [None]
    is_bool = x is not None and x.dtype == "bool"
    return bool(
        x is not None
        and is_bool == (op.name in ("reduce_and", "reduce_or"))
        and row_axes(x, names)
        and not row_axes(op.outs[0], names)
    )


def _of_bools(combine: Callable[..., Any]) -> Callable[..., Array]:
    return lambda x, axes: combine(x.astype(jnp.int32), axes).astype(x.dtype)


_SUMS: dict[str, Callable[..., Any]] = {
    "reduce_sum": lax.psum,
    "reduce_max": lax.pmax,
    "reduce_min": lax.pmin,
    "reduce_or": _of_bools(lax.pmax),
    "reduce_and": _of_bools(lax.pmin),
}


def _evaluated(op: Operation, known: Mapping[Value, Any]) -> Sequence[Any]:
    """The results of an operation whose operands may vary over fewer axes than when traced."""
    values = [read(known, v) for v in op.ins]
    if op.name in ("pcast", "pvary"):
        return values
    if op.bodies:
        return op.evaluate([vary(x, varying(v)) for x, v in zip(values, op.ins, strict=True)])
    axes = functools.reduce(frozenset.union, map(varying, values), frozenset[str]())
    return op.evaluate([vary(x, axes) for x in values])
