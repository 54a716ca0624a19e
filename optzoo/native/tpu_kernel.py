"""The rows of a group on a TPU: one Pallas kernel reads, computes and writes them.

The rows of a block of ids are copied from the tables to fast memory one by one, computed together,
and copied back. Meanwhile the rows of the next block are read and those of the previous one are
written.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..core.compat import shape_varying, vary, varying
from ..core.merge import in_range
from ..jaxprs.equations import bind_equation
from ..jaxprs.graph import Operation, Value
from .elementwise import SAME
from .groups import Unsupported
from .rows_groups import RowsGroup

_BLOCK = 128  # ids
_DEPTH = 3  # blocks in fast memory: one is read, one is computed, one is written
_MOST_BYTES = 8 * 2**20  # of fast memory, of which a v5e gives a kernel 16 MiB
_WORDS = {"float32", "int32", "uint32"}  # elements whose rows the memory can copy one by one
_KNOWN = {*_WORDS, "bfloat16", "bool", "uint16"}
_REDUCE = {"reduce_sum": jnp.sum, "reduce_max": jnp.max, "reduce_min": jnp.min}


def tpu_kernel(rows: RowsGroup, *, interpret: Any = False) -> Callable[..., tuple[Array, ...]]:
    """The function from the inputs of a group to its outputs, by a kernel for TPUs.

    Args:
        rows: the group.
        interpret: as in ``pallas_call``.

    Raises:
        Unsupported: with the reason why there is no kernel.
    """
    _check(rows)
    kernel = _Kernel(rows)

    def call(*args: Array) -> tuple[Array, ...]:
        known = dict(zip(rows.ins, args, strict=True))
        if rows.merged is not None:
            assert rows.ids.maker is not None
            rows.ids.maker.run(known)
        return kernel.run(known, interpret)

    return call


def _check(rows: RowsGroup) -> None:
    """Raises ``Unsupported`` if a group cannot become a kernel."""
    if rows.ids.maker is None or rows.ids.maker.name != "rows_merge":
        raise Unsupported("its rows may repeat, and are not merged")
    if rows.reads or rows.lists:
        raise Unsupported("a kernel for TPUs supports neither returned rows nor entries of lists")
    if rows.ids.shape[0] < 2:
        raise Unsupported("it has a single id")
    if any(len(v.shape) != 2 or v.shape[1] == 1 for v in rows.tables):
        # XLA gathers and scatters single elements for as much as whole rows, so a kernel for the
        # rest would save a tenth of the bytes.
        raise Unsupported("on a TPU rows of tables and slots must be vectors of several elements")
    if kinds := {v.dtype for v in rows.tables} - _WORDS:
        raise Unsupported(f"on a TPU rows of {min(kinds)} cannot be copied one by one")
    if kinds := {v.dtype for op in rows.operations for v in (*op.ins, *op.outs)} - _KNOWN:
        raise Unsupported(f"a kernel for TPUs does not compute in {min(kinds)}")


class _Block:
    """The values of a group for a block of ids, each computed once, as scalars or matrices.

    A matrix has a row for each id, or one row for all of them, and likewise for columns.

    Args:
        ids: the value whose elements are the row indices.
        first: the index of the first id of the block.
        read: ``read(value, by_rows)`` returns a value in memory; None for any other value.
    """

    def __init__(self, ids: Value, first: Any, read: Callable[[Value, bool], Array | None]):
        self.ids, self.first, self.read = ids, first, read
        self._made: dict[Any, Array] = {}

    def of(self, value: Value, by_rows: bool = True, in_table: bool = False) -> Array:
        """A value.

        Args:
            value: the value.
            by_rows: whether its first axis is that of the ids, or of the rows of a table.
            in_table: whether it is of the rows of a table.
        """
        if value.literal is not None and not value.shape:
            return jnp.asarray(value.literal, value.dtype)
        key = value, by_rows, in_table
        if key not in self._made:
            known = self.read(value, by_rows)
            made = self._compute(value, by_rows, in_table) if known is None else known
            self._made[key] = made
        return self._made[key]

    def _compute(self, value: Value, by_rows: bool, in_table: bool) -> Array:
        if value.meaning is not None:
            return self.of(value.meaning, by_rows, in_table)
        op = value.maker
        if op is None:
            raise Unsupported(f"an array of shape {value.shape} is not one of its rows")
        first, params = op.ins[0] if op.ins else value, op.eqn.params
        if op.name == "rows_gather":
            return self.of(first, in_table=True)
        if op.name == "iota":
            return self._iota(value, params["dimension"], by_rows, in_table)
        if op.name == "broadcast_in_dim":
            axes = params["broadcast_dimensions"]
            has_axis = 0 in axes and first.shape[axes.index(0)] != 1
            return self._as_matrix(value, self.of(first, by_rows and has_axis, in_table), by_rows)
        if op.name in ("reshape", "squeeze", "expand_dims"):
            return self._as_matrix(value, self.of(first, by_rows, in_table), by_rows)
        if op.name in _REDUCE:
            columns = self._columns(first, by_rows, in_table)
            return _REDUCE[op.name](columns, axis=1, keepdims=True)
        if op.name == "slice":
            start, end = params["start_indices"][-1], params["limit_indices"][-1]
            return self._columns(first, by_rows, in_table)[:, start:end]
        if op.name == "concatenate":
            parts = [self._columns(v, by_rows, in_table) for v in op.ins]
            return jnp.concatenate(parts, axis=1)
        return self._by_element(op, value, by_rows, in_table)

    def _columns(self, value: Value, by_rows: bool, in_table: bool) -> Array:
        """A value with all of its columns."""
        array = self.of(value, by_rows, in_table)
        return jnp.broadcast_to(array, (len(array), _width(value, by_rows)))

    def _by_element(self, op: Operation, value: Value, by_rows: bool, in_table: bool) -> Array:
        has_rows = lambda v: by_rows and bool(v.shape) and v.shape[0] == value.shape[0]
        args = [self.of(v, has_rows(v), in_table) for v in op.ins]
        if op.name in SAME:
            return args[0]
        shape = jnp.broadcast_shapes(*(a.shape for a in args))
        [made] = bind_equation(op.eqn, [jnp.broadcast_to(a, shape) for a in args])
        return made

    def _iota(self, value: Value, axis: int, by_rows: bool, in_table: bool) -> Array:
        if axis == 0 and by_rows and in_table:
            numbers = self.of(self.ids)
        elif axis == 0 and by_rows:
            many = len(self.of(self.ids))
            numbers = self.first + lax.broadcasted_iota(jnp.int32, (many, 1), 0)
        else:
            numbers = lax.broadcasted_iota(jnp.int32, (1, value.shape[axis]), 1)
        return numbers.astype(value.dtype)

    def _as_matrix(self, value: Value, array: Array, by_rows: bool) -> Array:
        """The value as a matrix; readers repeat a single row or column."""
        if sum(d != 1 for d in value.shape[by_rows:]) > 1:
            raise Unsupported("on a TPU rows are vectors")
        return jnp.reshape(array, (1, 1)) if array.ndim == 0 and value.shape else array


class _Kernel:
    """The values that a kernel reads, keeps in fast memory, and writes."""

    def __init__(self, rows: RowsGroup):
        self.rows, self.num_rows = rows, rows.tables[0].shape[0]
        self.tables, self.written = rows.tables, [write.ins[0] for write in rows.writes]
        # What else is read, scalars excepted, and whether it has a row for each id.
        self.reads: dict[tuple[Value, bool], None] = {}
        jax.eval_shape(self._find_reads)
        self.block = self._largest_block()

    def _find_reads(self) -> list[Array]:
        """Computes on zeros, and records what is read."""
        inputs = {self.rows.ids, self.rows.merged, *self.tables, *self.rows.streams}

        def read(value, by_rows):
            if value in self.rows.scalars:
                return jnp.zeros((), value.dtype)
            if value not in inputs:
                return None
            if value not in self.tables:
                self.reads[value, by_rows] = None
            rows = self.rows.ids.shape[0] if by_rows else 1
            return jnp.zeros((rows, _width(value, by_rows)), value.dtype)

        return self._results(_Block(self.rows.ids, 0, read))

    def _results(self, block: _Block) -> list[Array]:
        """The new rows of each table that is written."""
        found = []
        for write in self.rows.writes:
            table, new = write.ins[0], block.of(write.ins[2])
            if write.name == "rows_add":
                new = block.of(table, in_table=True) + new
            found.append(new.astype(table.dtype))
        return found

    def _largest_block(self) -> int:
        """The largest number of ids of a block that fits into fast memory."""
        lanes = lambda v: 4 * 128 * -(-_width(v) // 128)
        a_row = sum(_DEPTH * lanes(v) for v in self.tables)
        a_row += sum(2 * lanes(v) for v, by_rows in self.reads if by_rows)
        block = min(_BLOCK, self.rows.ids.shape[0])
        while block * a_row > _MOST_BYTES:
            block = block // 32 * 16
        if not block:
            raise Unsupported("its rows are too long for the fast memory of a TPU")
        return block

    def run(self, known: dict[Value, Array], interpret: Any) -> tuple[Array, ...]:
        """The outputs of the group for its inputs and, if it merges rows, merged gradients."""
        rows, block, n = self.rows, self.block, self.rows.ids.shape[0]
        blocks = -(-n // block)
        ids = known[rows.ids]
        ids = in_range(ids, self.num_rows).astype(jnp.int32)
        known = {**known, rows.ids: ids}
        in_blocks = jnp.pad(ids, (0, blocks * block - n), constant_values=self.num_rows)
        in_blocks = in_blocks.reshape(blocks, 1, block)

        def given(value, by_rows):
            array = known[value] if value.literal is None else jnp.asarray(value.literal)
            return array.reshape(n if by_rows else 1, _width(value, by_rows))

        args = (
            [in_blocks, in_blocks],
            [_in_words(known[v]) for v in rows.scalars],
            [given(*each) for each in self.reads],
            [known[v] for v in self.tables],
        )
        axes = frozenset[str]().union(*map(varying, jax.tree.leaves(args)))  # inside of shard_map
        args = jax.tree.map(lambda a: vary(a, axes), args)
        next_one = lambda b: jnp.minimum(b + 1, blocks - 1)
        of_block, in_place = pl.BlockSpec, pl.BlockSpec(memory_space=pl.ANY)
        in_specs = (
            [
                of_block((1, 1, block), lambda b: (b, 0, 0), memory_space=pltpu.SMEM),
                of_block((1, 1, block), lambda b: (next_one(b), 0, 0), memory_space=pltpu.SMEM),
            ],
            [pl.BlockSpec(memory_space=pltpu.SMEM)] * len(args[1]),
            [
                of_block((block, a.shape[1]), lambda b: (b, 0))
                if by_rows
                else of_block(a.shape, lambda b: (0, 0))
                for (_, by_rows), a in zip(self.reads, args[2], strict=True)
            ],
            [in_place] * len(self.tables),
        )
        first = len(jax.tree.leaves(args[:3]))
        return pl.pallas_call(
            self._body,
            grid=(blocks,),
            in_specs=in_specs,
            out_specs=(in_place,) * len(self.written),
            out_shape=tuple(shape_varying(v.shape, v.aval.dtype, axes) for v in self.written),
            input_output_aliases={
                first + self.tables.index(v): k for k, v in enumerate(self.written)
            },
            scratch_shapes=[
                pltpu.SemaphoreType.DMA((_DEPTH,)),
                pltpu.SemaphoreType.DMA((_DEPTH,)),
                pltpu.SMEM((_DEPTH,), jnp.int32),
                *(pltpu.VMEM((_DEPTH, block, v.shape[1]), v.aval.dtype) for v in self.tables),
            ],
            cost_estimate=self._cost(),
            interpret=interpret,
            name="optzoo_rows",
        )(*args)

    def _cost(self) -> pl.CostEstimate:
        n = self.rows.ids.shape[0]
        moved = [*self.tables, *self.written, *(v for v, by_rows in self.reads if by_rows)]
        elements = n * max(map(_width, self.tables))
        return pl.CostEstimate(
            flops=len(self.rows.operations) * elements,
            bytes_accessed=4 * n * sum(map(_width, moved)),
            transcendentals=0,
        )

    def _body(self, ids, scalars, reads, tables, *refs) -> None:
        """The kernel, for one block of ids: see the module."""
        outs, (arrived, left, counts, *buffers) = (
            refs[: len(self.written)],
            refs[len(self.written) :],
        )
        b, last = pl.program_id(0), pl.num_programs(0) - 1
        slot, next_slot = lax.rem(b, _DEPTH), lax.rem(b + 1, _DEPTH)
        buffer_of = dict(zip(self.tables, buffers, strict=True))
        memory_of = dict(zip(self.tables, tables, strict=True))
        memory_of |= zip(self.written, outs, strict=True)  # the same memory

        def reading(row, place, slot):
            for v in self.tables:
                near = buffer_of[v].at[slot, pl.ds(place, 1)]
                yield pltpu.make_async_copy(memory_of[v].at[pl.ds(row, 1)], near, arrived.at[slot])

        def writing(row, place, slot):
            for v in self.written:
                near = buffer_of[v].at[slot, pl.ds(place, 1)]
                yield pltpu.make_async_copy(near, memory_of[v].at[pl.ds(row, 1)], left.at[slot])

        def start(copies, ids, slot):
            """Starts to copy the rows of a block; returns their number."""

            def one(place, count):
                row = ids[0, 0, place]
                is_real = row < self.num_rows

                @pl.when(is_real)
                def _():
                    for copy in copies(row, place, slot):
                        copy.start()

                return count + is_real.astype(jnp.int32)

            return lax.fori_loop(jnp.int32(0), jnp.int32(self.block), one, jnp.int32(0))

        def wait(copies, slot):
            """Waits for copies of as many rows from or to these buffers."""

            def one(_, carry):
                for copy in copies(0, 0, slot):  # of the same size
                    copy.wait()
                return carry

            lax.fori_loop(jnp.int32(0), counts[slot], one, jnp.int32(0))

        @pl.when(b == 0)
        def _():
            counts[slot] = start(reading, ids[0], slot)

        # The rows of the next block take the place of those that have been in memory for longest.
        @pl.when(b + 1 >= _DEPTH)
        def _():
            wait(writing, next_slot)

        @pl.when(b < last)
        def _():
            counts[next_slot] = start(reading, ids[1], next_slot)

        wait(reading, slot)
        of_scalars = dict(zip(self.rows.scalars, scalars, strict=True))
        of_reads = dict(zip(self.reads, reads, strict=True))

        def read(value, by_rows):
            if value in of_scalars:
                return _out_of_words(of_scalars[value][0, 0], value)
            if value in buffer_of:
                return buffer_of[value][slot]
            return of_reads[value, by_rows][...] if (value, by_rows) in of_reads else None

        results = self._results(_Block(self.rows.ids, b * self.block, read))
        for value, new in zip(self.written, results, strict=True):
            buffer_of[value][slot] = jnp.broadcast_to(new, buffer_of[value].shape[1:])
        start(writing, ids[0], slot)

        @pl.when(b == last)
        def _():
            for before in range(_DEPTH - 1):

                @pl.when(b >= before)
                def _(before=before):
                    wait(writing, lax.rem(b - before + _DEPTH, _DEPTH))


def _width(value: Value, by_rows: bool = True) -> int:
    """The number of elements of a row, or of an array shared by all rows."""
    return math.prod(value.shape[by_rows:])


def _in_words(scalar: Any) -> Array:
    """A scalar in the format of scalar memory."""
    scalar = jnp.asarray(scalar)
    return (scalar.astype(jnp.int32) if scalar.dtype == bool else scalar).reshape(1, 1)


def _out_of_words(scalar: Array, value: Value) -> Array:
    return scalar != 0 if value.dtype == "bool" else scalar
