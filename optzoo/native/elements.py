"""Single elements of the values of a program, in LLVM IR.

Each value is a function of its index, followed back to values in memory, so that nothing is stored
between the operations of a group.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from llvmlite import ir

from ..jaxprs.graph import Operation, Value
from .loops import ZERO
from .operations import I64, compute, constant, convert, load

_MOVES = {"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "slice", "split"}
Index = tuple[Any, ...]  # an integer for each axis


class Elements:
    """Computes single elements of values, each once.

    Args:
        b: the builder.
        known: returns an element of a value in memory, given the value and its index; None for any
            other value.
        constant_of: returns the element of a constant.
    """

    def __init__(
        self,
        b: ir.IRBuilder,
        known: Callable[[Value, Any], Any],
        constant_of: Callable[[Value], Any] = lambda v: constant(v.dtype, v.literal),
    ):
        self.b, self.known, self.constant_of = b, known, constant_of
        self.stored: dict[Value, tuple[Any, Any]] = {}  # by values the memory and the position
        self._made: list[dict[Any, Any]] = [{}]
        # Of indices in a part of an axis: the index in the part, where that begins, and its size.
        self._parts: dict[Any, tuple[Any, int, int]] = {}
        # Of elements in a group: the group, the position in it, and its length, by that in the row.
        self._groups: dict[Any, tuple[Any, Any, int]] = {}

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """A scope whose computed elements are discarded after the body, such as of a loop."""
        self._made.append({})
        yield
        self._made.pop()

    def keep(self, value: Value, element: Any) -> None:
        """Sets the single element of a value in a row."""
        self._made[-1][value, None] = element

    def in_group(self, group: Any, lane: Any, length: int) -> Any:
        """The index in a row of an element of one of its groups."""
        for found, place in self._groups.items():
            if place == (group, lane, length):
                return found
        found = self.b.add(self.b.mul(group, I64(length)), lane)
        self._groups[found] = group, lane, length
        return found

    def _split(self, i: Any, length: int) -> tuple[Any, Any]:
        """The group of an element of a row, and its index in the group."""
        group, lane, known = self._groups.get(i, (None, None, 0))
        if known == length:
            return group, lane
        return self.b.udiv(i, I64(length)), self.b.urem(i, I64(length))

    def of(self, value: Value, index: Index) -> Any:
        """The element of a value at an index."""
        if value.literal is not None and not value.shape:
            return self.constant_of(value)
        key = value, tuple(map(id, index))
        for made in self._made:
            if (value, None) in made or key in made:
                return made[(value, None) if (value, None) in made else key]
        if value in self.stored:
            element = load(self.b, value.dtype, *self.stored[value])
        else:
            element = self.known(value, index)
        if element is None:
            element = self._compute(value, index)
        self._made[-1][key] = element
        return element

    def _compute(self, value: Value, index: Index) -> Any:
        if value.meaning is not None:
            return self.of(value.meaning, index)
        op = value.maker
        if op is None:
            raise AssertionError(f"a value of shape {value.shape} is neither computed nor read")
        if op.name == "iota":
            at = index[op.eqn.params["dimension"]]
            return convert(self.b, at, "int64", value.dtype)
        if op.name in _MOVES:
            return self._moved(value, op, index)
        if op.name == "concatenate":
            return self._concatenated(op, index)
        return compute(self.b, op, [self.of(v, self._within(index, value, v)) for v in op.ins])

    def _moved(self, value: Value, op: Operation, index: Index) -> Any:
        """An element of an operation that only moves elements."""
        inner, params = op.ins[0], op.params
        if op.name == "broadcast_in_dim":
            axes = zip(params["broadcast_dimensions"], inner.shape, strict=True)
            return self.of(inner, tuple(ZERO if d == 1 else index[axis] for axis, d in axes))
        if op.name in ("reshape", "squeeze", "expand_dims"):
            long = [i for i, d in zip(index, value.shape, strict=True) if d != 1]
            more = sum(d != 1 for d in inner.shape) - len(long)
            if more > 0:
                long[-1:] = self._split(long[-1], inner.shape[-1])
            elif more < 0:
                group, lane = long[-2:]
                long[-2:] = [self.in_group(group, lane, value.shape[-1])]
            left = iter(long)
            return self.of(inner, tuple(ZERO if d == 1 else next(left) for d in inner.shape))
        if op.name == "slice":
            axes = zip(index, params["start_indices"], value.shape, strict=True)
            in_inner = lambda i, start, d: self.in_part(i, start, d) if start else i
            return self.of(inner, tuple(in_inner(*axis) for axis in axes))
        if op.name == "split":
            axis, before = params["axis"], params["sizes"][: op.outs.index(value)]
            size = value.shape[axis]
            at = self.in_part(index[axis], sum(before), size) if before else index[axis]
            return self.of(inner, (*index[:axis], at, *index[axis + 1 :]))
        raise AssertionError(f"{op.name} does not only move elements")

    def _within(self, index: Index, value: Value, operand: Value) -> Index:
        """The index in an operand, whose axes may be missing or of length 1."""
        if operand.shape == value.shape:
            return index
        return tuple(ZERO if d == 1 else i for d, i in zip(operand.shape, index, strict=False))

    def in_part(self, i: Any, start: int, size: int) -> Any:
        """Converts an index in a part of an axis, from ``start``, to an index of the axis."""
        key = "part", id(i), start, size
        for made in self._made:
            if key in made:
                return made[key]
        found = self._made[-1][key] = self.b.add(i, I64(start))
        self._parts[found] = i, start, size
        return found

    def _concatenated(self, op: Operation, index: Index) -> Any:
        axis = op.eqn.params["dimension"]
        i, ends = index[axis], list(itertools.accumulate(v.shape[axis] for v in op.ins))
        starts = [0, *ends[:-1]]
        at = lambda j: (*index[:axis], j, *index[axis + 1 :])
        inside, first, size = self._parts.get(i, (None, None, 0))
        if first in starts and size <= op.ins[starts.index(first)].shape[axis]:
            return self.of(op.ins[starts.index(first)], at(inside))
        found = None
        for v, start, end in zip(op.ins, starts, ends, strict=True):
            is_after = self.b.icmp_signed(">=", i, I64(start))
            is_in = self.b.and_(is_after, self.b.icmp_signed("<", i, I64(end)))
            element = self.of(v, at(self.b.select(is_in, self.b.sub(i, I64(start)), ZERO)))
            found = element if found is None else self.b.select(is_in, element, found)
        return found


def in_memory(
    b: ir.IRBuilder, scalars: Mapping[Value, Any], pointers: Mapping[Value, Any]
) -> Callable[[Value, Index], Any]:
    """A function that reads elements of scalars, and of arrays with one index."""

    def known(value, index):
        if value in scalars:
            return scalars[value]
        return load(b, value.dtype, pointers[value], *index) if value in pointers else None

    return known


class FlatElements(Elements):
    """Elements of values indexed by the position among all elements, or groups of elements."""

    def _moved(self, value: Value, op: Operation, index: Index) -> Any:
        return self.of(op.ins[0], self._within(index, value, op.ins[0]))

    def _within(self, index: Index, value: Value, operand: Value) -> Index:
        if not operand.shape:
            return ()
        if math.prod(operand.shape) == math.prod(value.shape):
            return index
        return self._groups[index[0]][:1]
