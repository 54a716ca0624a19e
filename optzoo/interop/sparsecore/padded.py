"""Runs the program of a row on padded rows, with all arrays in the shape of a row.

XLA rewrites the function of a row as a function of up to 128 rows: it replaces the 1 in the shapes
``(1, D)`` by their number, but not in the bounds of a slice or in an iota. It does not support
reductions of scalars, or of values selected by a constant mask. Therefore

* a number of the row, and a scalar, is an array of ``D`` equal numbers,
* a sum over columns is followed by a broadcast,
* padding is not removed: its bits are set to those of the identity of the reduction, such as 0.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ...jaxprs.graph import Operation, Value, read
from ...jaxprs.primitives import Kind
from ...jaxprs.prove_rows import NotRowWise

_IDENTITIES = {"reduce_max": -np.inf, "reduce_min": np.inf, "reduce_prod": 1, "reduce_sum": 0}


class RowProgram(NamedTuple):
    """The operations that compute the outputs for a row, without calls.

    Attributes:
        operations: in order.
        inputs: the inputs of the row.
        scalars: the scalars, which are computed once in a step.
        outputs: the outputs of the row.
    """

    operations: list[Operation]
    inputs: list[Value]
    scalars: list[Value]
    outputs: list[Value]


def run_padded(
    program: RowProgram, width: int, scalars: Sequence[Array], values: Sequence[Array]
) -> list[Array]:
    """The outputs for a row.

    Args:
        program: the program of a row.
        width: its number of columns.
        scalars: arrays of equal numbers, in the shape of the padded row.
        values: the inputs, also in this shape.

    Returns:
        Arrays of the same shape, with zeros as padding; a number is repeated in all columns.

    Raises:
        NotRowWise: if an operation is not supported in this form.
    """
    columns = _Columns(width, values[0].shape[1])
    known = dict(zip(program.inputs, values, strict=True))
    for v, a in zip(program.scalars, scalars, strict=True):
        known[v] = a.astype(v.aval.dtype)

    def value(v):
        is_array = v.literal is not None and v.shape
        return columns.constant(v.literal) if is_array else read(known, v)

    for op in program.operations:
        known.update(zip(op.outs, columns.evaluate(op, list(map(value, op.ins))), strict=True))
    return [columns.output(value(v), v.shape) for v in program.outputs]


class _Columns(NamedTuple):
    """The columns of a row."""

    width: int
    padded: int

    def is_row(self, shape: Sequence[int]) -> bool:
        """Whether an array of the program has the columns of a row."""
        return tuple(shape) in ((1, self.width), (self.width,))

    def constant(self, a: Any) -> Any:
        """A constant of the program, in padded form."""
        if self.is_row(np.shape(a)):
            return np.pad(np.reshape(a, (1, -1)), ((0, 0), (0, self.padded - self.width)))
        return self.broadcast(a) if np.shape(a) in ((1,), (1, 1)) else a

    def output(self, a: Any, shape: Sequence[int]) -> Array:
        """An output in its padded form, from its shape in the program."""
        a = self.broadcast(a)
        return self.with_padding(a, 0) if self.is_row(shape) else a

    def broadcast(self, a: Any) -> Array:
        """A row, from a row or from one number."""
        shape = (1, self.padded)
        if np.shape(a) == shape:
            return a
        return lax.broadcast_in_dim(a, shape, tuple(range(np.ndim(a))))

    def with_padding(self, a: Array, value: Any) -> Array:
        """``a`` with its padding replaced by a number, and all other bits unchanged."""
        if self.width == self.padded:
            return a
        is_real = np.arange(self.padded) < self.width
        keep = np.where(is_real, -1, 0).astype(np.int32)
        put = np.where(is_real, 0, np.float32(value).view(np.int32)).astype(np.int32)
        over_rows = lambda words: lax.broadcast_in_dim(jnp.asarray(words), a.shape, (1,))
        words = lax.bitcast_convert_type(a, jnp.int32) & over_rows(keep)
        words = words | over_rows(put) if put.any() else words
        return lax.bitcast_convert_type(words, jnp.float32)

    def evaluate(self, op: Operation, operands: Sequence[Any]) -> list[Any]:
        """The results of an operation."""
        if op.kind in (Kind.ELEMENTWISE, Kind.SAME):
            return op.evaluate(operands)
        if self.is_row(op.outs[0].shape) or op.outs[0].shape in ((1,), (1, 1)):
            if op.kind is Kind.MOVE:
                return [self.broadcast(operands[0])]
            if op.name in _IDENTITIES and self._can_reduce(operands[0].dtype):
                return [self._reduced(op, operands[0])]
        raise NotRowWise(f"`{op.name}` ({op.line}) cannot be batched over rows")

    def _can_reduce(self, dtype: Any) -> bool:
        return self.width == self.padded or dtype == jnp.float32

    def _reduced(self, op: Operation, a: Array) -> Array:
        """A reduction over the columns of a row; a number is unchanged."""
        if not self.is_row(op.ins[0].shape):
            return a
        a = self.with_padding(a, _IDENTITIES[op.name])
        reduced = op.eqn.primitive.bind(a, **op.params | {"axes": (1,)})
        return lax.broadcast_in_dim(reduced, a.shape, (0,))
