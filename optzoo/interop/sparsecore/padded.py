"""Runs the program of a row on rows that are padded, all of whose arrays have the shape of a row.

XLA makes of the function of a row one of up to 128 rows: it puts their number in the place of the 1
in the shapes ``(1, D)``, but not in the bounds of a slice, and not in an iota. It also refuses
reductions of scalars, and reductions of what is selected by a constant mask. So

* a number for the row, and a scalar, is an array of ``D`` equal numbers,
* a sum over columns is followed by a broadcast,
* padding is not cut off: its bits are set to those of the identity of the reduction, such as 0.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ...core.compat import evaluate_equation, is_literal, line_of
from ...sparse.rowwise_check import ELEMENTWISE, NotRowWise

_RESHAPES = {"broadcast_in_dim", "expand_dims", "reshape", "squeeze"}
_IDENTITIES = {"reduce_max": -np.inf, "reduce_min": np.inf, "reduce_prod": 1, "reduce_sum": 0}


class RowProgram(NamedTuple):
    """The equations that compute the outputs for a row, without calls.

    Attributes:
        jaxpr: of which they are a part.
        equations: in their order.
        known: the values of constants.
        inputs: of the row.
        scalars: that are computed once in a step.
        outputs: of the row.
    """

    jaxpr: Any
    equations: list[Any]
    known: dict[Any, Any]
    inputs: list[Any]
    scalars: list[Any]
    outputs: list[Any]


def run_padded(
    program: RowProgram, width: int, scalars: Sequence[Array], values: Sequence[Array]
) -> list[Array]:
    """The outputs for a row.

    Args:
        program: of a row.
        width: its number of columns.
        scalars: arrays of the shape of the padded row, of equal numbers.
        values: the inputs, also of this shape.

    Returns:
        Arrays of the same shape, with zeros for padding; a number is in all columns.

    Raises:
        NotRowWise: if an operation cannot be done in this form.
    """
    columns = _Columns(width, values[0].shape[1])
    env = {v: columns.constant(a) for v, a in program.known.items()}
    env |= dict(zip(program.inputs, values, strict=True))
    for v, a in zip(program.scalars, scalars, strict=True):
        env[v] = a.astype(v.aval.dtype)
    for eqn in program.equations:
        operands = [v.val if is_literal(v) else env[v] for v in eqn.invars]
        outs = columns.evaluate(program.jaxpr, eqn, operands)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [
        columns.output(v.val if is_literal(v) else env[v], v.aval.shape) for v in program.outputs
    ]


class _Columns(NamedTuple):
    """Those of a row."""

    width: int
    padded: int

    def is_row(self, shape: Sequence[int]) -> bool:
        """Whether an array of the program has the columns of a row."""
        return tuple(shape) in ((1, self.width), (self.width,))

    def constant(self, a: Any) -> Any:
        """A constant of the program in the form that it has here."""
        if self.is_row(np.shape(a)):
            return np.pad(np.reshape(a, (1, -1)), ((0, 0), (0, self.padded - self.width)))
        return self.broadcast(a) if np.shape(a) in ((1,), (1, 1)) else a

    def output(self, a: Any, shape: Sequence[int]) -> Array:
        """An output, which has a shape in the program."""
        a = self.broadcast(a)
        return self.with_padding(a, 0) if self.is_row(shape) else a

    def broadcast(self, a: Any) -> Array:
        """A row from a row, or from one number."""
        shape = (1, self.padded)
        if np.shape(a) == shape:
            return a
        return lax.broadcast_in_dim(a, shape, tuple(range(np.ndim(a))))

    def with_padding(self, a: Array, value: Any) -> Array:
        """``a`` with a number as padding, whatever was there, and not one other bit changed."""
        if self.width == self.padded:
            return a
        is_real = np.arange(self.padded) < self.width
        keep = np.where(is_real, -1, 0).astype(np.int32)
        put = np.where(is_real, 0, np.float32(value).view(np.int32)).astype(np.int32)
        over_rows = lambda words: lax.broadcast_in_dim(jnp.asarray(words), a.shape, (1,))
        words = lax.bitcast_convert_type(a, jnp.int32) & over_rows(keep)
        words = words | over_rows(put) if put.any() else words
        return lax.bitcast_convert_type(words, jnp.float32)

    def evaluate(self, jaxpr: Any, eqn: Any, operands: Sequence[Any]) -> list[Any]:
        """The outputs of an equation."""
        name, shape = eqn.primitive.name, eqn.outvars[0].aval.shape
        if name in ELEMENTWISE:
            return evaluate_equation(jaxpr, eqn, operands)
        if self.is_row(shape) or shape in ((1,), (1, 1)):
            if name in _RESHAPES:
                return [self.broadcast(operands[0])]
            if name in _IDENTITIES and self._can_reduce(operands[0].dtype):
                return [self._reduced(eqn, operands[0])]
        raise NotRowWise(f"`{name}` ({line_of(eqn)}) cannot be done for many rows at once")

    def _can_reduce(self, dtype: Any) -> bool:
        return self.width == self.padded or dtype == jnp.float32

    def _reduced(self, eqn: Any, a: Array) -> Array:
        """A reduction over the columns of a row; or of a number, which it does not change."""
        if not self.is_row(eqn.invars[0].aval.shape):
            return a
        a = self.with_padding(a, _IDENTITIES[eqn.primitive.name])
        reduced = eqn.primitive.bind(a, **eqn.params | {"axes": (1,)})
        return lax.broadcast_in_dim(reduced, a.shape, (0,))
