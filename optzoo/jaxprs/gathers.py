"""Reads of whole rows of an array by JAX: ``table[ids]``, ``jnp.take`` and others."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.dtypes import canonicalize_dtype

from ..core.numerics import rounding_cast
from .graph import Operation

_Mode = lax.GatherScatterMode
_MODES = _Mode.CLIP, _Mode.FILL_OR_DROP, _Mode.PROMISE_IN_BOUNDS


class RowGather(NamedTuple):
    """A read of one row of an array for each id, after negative ids are converted.

    The mode determines the result of an id out of range. CLIP: it is replaced by the nearest id.
    FILL_OR_DROP: it reads ``fill``, and has no gradient. PROMISE_IN_BOUNDS: it reads the row of the
    nearest id, and has no gradient.
    """

    shape: tuple[int, ...]  # of the ids
    num_rows: int  # of the array
    mode: lax.GatherScatterMode
    fill: Any  # None for NaN

    @property
    def dtype(self) -> Any:
        """The dtype of the ids of the gradient."""
        is_long = self.num_rows > jnp.iinfo(jnp.int32).max
        return canonicalize_dtype(jnp.int64 if is_long else jnp.int32)

    def run(
        self, table: Array | None, operands: Sequence[Any], tap: Array, casts: Sequence[Any]
    ) -> tuple[Array, Array]:
        """The rows, plus a tap, and the ids of the gradient.

        Args:
            table: the array to read. None: the tap is the rows of these ids.
            operands: the operands of the operation.
            tap: a row for each id.
            casts: the dtypes to which the rows are cast, in order.
        """
        given = jnp.asarray(operands[1])
        # The first of the starts, of all axes or of the rows alone.
        given = given[..., 0] if given.ndim > len(self.shape) else given
        last = min(self.num_rows - 1, jnp.iinfo(given.dtype).max)
        near = jnp.clip(given, 0, last).astype(self.dtype)
        rows = tap if table is None else jnp.take(table, near, axis=0, mode="clip") + tap
        for dtype in casts:
            rows = rounding_cast(rows, dtype)
        if self.mode == _Mode.CLIP:
            return rows, near
        is_row = (given >= 0) & (given <= last)
        fill = lax.stop_gradient(rows)
        if self.mode == _Mode.FILL_OR_DROP:
            fill = jnp.asarray(jnp.nan if self.fill is None else self.fill, rows.dtype)
        wide = is_row.reshape(self.shape + (1,) * (rows.ndim - len(self.shape)))
        rows = jnp.where(wide, rows, fill)
        is_read = table is None and self.mode == _Mode.PROMISE_IN_BOUNDS
        # The number of rows is padding.
        return rows, near if is_read else jnp.where(is_row, near, self.num_rows)


def row_gather(op: Operation) -> RowGather | None:
    """The read of whole rows of the first operand by an operation; None for others."""
    if op.name not in ("gather", "dynamic_slice"):
        return None
    x, starts = op.ins[0], op.ins[1]
    if tuple(op.params["slice_sizes"]) != (1, *x.shape[1:]):
        return None
    if op.name == "dynamic_slice":
        return RowGather((), x.shape[0], _Mode.CLIP, None)
    axes, mode, shape = op.params["dimension_numbers"], op.params["mode"], starts.shape[:-1]
    # A dynamic slice under vmap has a start for each axis; those of the others are clipped to zero.
    # What is a row has no axis that is batched, and which of its axes are dropped is a reshape.
    starts_of = axes.start_index_map
    is_known = (
        starts_of[:1] == (0,)
        and mode in (_MODES if len(starts_of) == 1 else [_Mode.CLIP])
        and axes.offset_dims == tuple(range(len(shape), len(op.outs[0].shape)))
    )
    return RowGather(shape, x.shape[0], mode, op.params["fill_value"]) if is_known else None
