"""The rows of a group on a TPU: one Pallas kernel reads, computes and writes them.

The rows of a block of ids are copied from the tables to fast memory, one by one, computed together,
and copied back. While a block is computed, the rows of the next one are read and those of the last
one are written.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..core.compat import bind_equation
from .elementwise import SAME
from .groups import Rows, Unsupported
from .program import Operation, Value

_BLOCK = 128  # ids
_DEPTH = 3  # blocks in fast memory: one is read, one is computed, one is written
_MOST_BYTES = 8 * 2**20  # of fast memory, of which a v5e gives a kernel 16 MiB
_LEAST_IDS = 8  # with fewer the axis of the ids is not told from others
_WORDS = {"float32", "int32", "uint32"}  # elements whose rows the memory can copy one by one
_REDUCE = {"reduce_sum": jnp.sum, "reduce_max": jnp.max, "reduce_min": jnp.min}


def tpu_kernel(rows: Rows, *, interpret: Any = False) -> Callable[..., tuple[Array, ...]]:
    """The function of the inputs of a group that gives its outputs, by a kernel for TPUs.

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


def _check(rows: Rows) -> None:
    """Raises ``Unsupported`` if no kernel can be made of a group."""
    if rows.ids.maker is None or rows.ids.maker.name != "rows_merge":
        raise Unsupported("its rows may repeat, and are not merged")
    if rows.ids.shape[0] < _LEAST_IDS:
        raise Unsupported(f"it has fewer than {_LEAST_IDS} ids")
    wide = [v for v in rows.tables if not _is_single(v)]
    if not wide or any(len(v.shape) != 2 for v in wide):
        raise Unsupported("on a TPU rows are vectors of several elements")
    if kinds := {v.dtype for v in rows.tables} - _WORDS:
        raise Unsupported(f"on a TPU rows of {min(kinds)} cannot be copied one by one")


def _is_single(table: Value) -> bool:
    """Whether a row has one element. XLA gathers and scatters such rows."""
    return math.prod(table.shape[1:]) == 1


class _Block:
    """The values of a group for a block of ids, each computed once, as matrices or scalars.

    A matrix has the rows of the block, or one row that holds for all of them.

    Args:
        ids: the value whose elements are the numbers of the rows.
        read: gives a value that is in memory: ``read(value, by_rows)``.
        row_ids: gives the numbers of the rows in their table, as a column.
        positions: gives the numbers of the ids, as a column.
    """

    def __init__(
        self,
        ids: Value,
        read: Callable[[Value, bool], Array | None],
        row_ids: Callable[[], Array],
        positions: Callable[[], Array],
    ):
        self.ids, self.read, self.row_ids, self.positions = ids, read, row_ids, positions
        self._made: dict[Any, Array] = {}

    def of(self, value: Value, by_rows: bool = True, in_table: bool = False) -> Array:
        """A value.

        Args:
            value: which one.
            by_rows: whether its first axis is that of the ids, or of the rows of a table.
            in_table: whether it is of the rows of a table.
        """
        if value.literal is not None and not value.shape:
            return jnp.asarray(value.literal, value.aval.dtype)
        key = value, by_rows, in_table
        if key not in self._made:
            known = self.read(value, by_rows)
            made = self._compute(value, by_rows, in_table) if known is None else known
            self._made[key] = made
        return self._made[key]

    def _compute(self, value: Value, by_rows: bool, in_table: bool) -> Array:
        if value is self.ids:
            return self.row_ids().astype(value.dtype)
        if value.meaning is not None:
            return self.of(value.meaning, by_rows, in_table)
        op = value.maker
        if op is None:
            raise Unsupported(f"an array of shape {value.shape} is not one of rows")
        first, params = op.ins[0] if op.ins else value, op.eqn.params
        if op.name == "rows_gather":
            return self.of(first, True, True)
        if op.name == "iota":
            return self._iota(value, params["dimension"], by_rows, in_table)
        if op.name == "broadcast_in_dim":
            axes = params["broadcast_dimensions"]
            is_wide = 0 in axes and first.shape[axes.index(0)] != 1
            return self._shaped(value, self.of(first, by_rows and is_wide, in_table), by_rows)
        if op.name in ("reshape", "squeeze", "expand_dims"):
            return self._shaped(value, self.of(first, by_rows, in_table), by_rows)
        if op.name in _REDUCE:
            array = self.of(first, by_rows, in_table)
            row = jnp.broadcast_to(array, (len(array), math.prod(first.shape[by_rows:])))
            return _REDUCE[op.name](row, axis=1, keepdims=True)
        return self._by_element(op, value, by_rows, in_table)

    def _by_element(self, op: Operation, value: Value, by_rows: bool, in_table: bool) -> Array:
        args = []
        for v in op.ins:
            of_rows = by_rows and bool(v.shape) and v.shape[0] == value.shape[0]
            args.append(self.of(v, of_rows, in_table))
        if op.name in SAME:
            return args[0]
        shape = jnp.broadcast_shapes(*(a.shape for a in args))
        args = [jnp.broadcast_to(a, shape) for a in args]
        [made] = bind_equation(op.eqn, args)
        return made

    def _iota(self, value: Value, axis: int, by_rows: bool, in_table: bool) -> Array:
        if axis == 0 and by_rows:
            column = self.row_ids() if in_table else self.positions()
            return column.astype(value.aval.dtype)
        numbers = lax.broadcasted_iota(jnp.int32, (1, value.shape[axis]), 1)
        return numbers.astype(value.aval.dtype)

    def _shaped(self, value: Value, array: Array, by_rows: bool) -> Array:
        """The array as a matrix; who reads it repeats its one row or column."""
        long = [d for d in value.shape[by_rows:] if d != 1]
        if len(long) > 1:
            raise Unsupported("on a TPU rows are vectors")
        return jnp.reshape(array, (1, 1)) if array.ndim == 0 and value.shape else array


class _Kernel:
    """What a kernel reads, keeps in fast memory, and writes."""

    def __init__(self, rows: Rows):
        self.rows, self.num_rows = rows, rows.tables[0].shape[0]
        self.tables = [v for v in rows.tables if not _is_single(v)]
        self.writes = sorted(rows.writes, key=lambda write: _is_single(write.ins[0]))
        self.written = [w.ins[0] for w in self.writes if not _is_single(w.ins[0])]
        self.reads: list[tuple[Value, bool]] = []  # and whether their rows are those of the ids
        self.needs_ids = False
        self.block = _BLOCK
        jax.eval_shape(self._find_reads)
        self.block = self._largest_block()

    def _find_reads(self) -> list[Array]:
        """Computes on zeros, and notes what else than tables and scalars is read."""
        tables, scalars = self.tables, self.rows.scalars
        inputs = {*self.rows.tables, *self.rows.streams, self.rows.merged}

        def read(value, by_rows):
            if value in scalars:
                return jnp.zeros((), value.dtype)
            if value not in inputs:
                return None
            if value not in tables:
                self.reads.append((value, by_rows))
            return jnp.zeros((self.block if by_rows else 1, _width(value, by_rows)), value.dtype)

        def row_ids():
            self.needs_ids = True
            return jnp.zeros((self.block, 1), jnp.int32)

        return self._results(_Block(self.rows.ids, read, row_ids, row_ids))

    def _results(self, block: _Block) -> list[Array]:
        """The new rows of each table that is written."""
        found = []
        for write in self.writes:
            table, new = write.ins[0], block.of(write.ins[2])
            if write.name == "rows_add":
                new = block.of(table, in_table=True) + new
            found.append(jnp.broadcast_to(new, (self.block, _width(table))).astype(table.dtype))
        return found

    def _largest_block(self) -> int:
        """How many ids a block has, so that what is in fast memory fits."""
        lanes = lambda v, by_rows: 4 * 128 * -(-_width(v, by_rows) // 128) * by_rows
        a_row = sum(_DEPTH * lanes(v, True) for v in self.tables)
        a_row += sum(2 * lanes(*read) for read in self.reads)
        a_row += 2 * 4 * 128 * (len(self.writes) - len(self.written) + self.needs_ids)
        block = min(_BLOCK, -(-self.rows.ids.shape[0] // 8) * 8)
        while block * a_row > _MOST_BYTES:
            block = block // 16 * 8
        if not block:
            raise Unsupported("its rows are too long for the fast memory of a TPU")
        return block

    def run(self, known: dict[Value, Array], interpret: Any) -> tuple[Array, ...]:
        """The outputs of the group, given its inputs and, if it merges rows, what is merged."""
        rows, block, n = self.rows, self.block, self.rows.ids.shape[0]
        blocks = -(-n // block)
        ids = known[rows.ids]
        ids = jnp.where((ids >= 0) & (ids < self.num_rows), ids, self.num_rows).astype(jnp.int32)
        in_blocks = jnp.pad(ids, (0, blocks * block - n), constant_values=self.num_rows)
        in_blocks = in_blocks.reshape(blocks, 1, block)

        def given(value, by_rows):
            array = jnp.asarray(known[value]) if value.literal is None else value.literal
            if by_rows and value in rows.tables:  # of single elements
                array = jnp.take(array, ids, axis=0, mode="clip")
            return array.reshape(n if by_rows else 1, _width(value, by_rows))

        scalars = [_in_words(known[v]) for v in rows.scalars]
        read = [given(*each) for each in self.reads] + [ids[:, None]] * self.needs_ids
        tables = [known[v] for v in self.tables]
        by_block = lambda width: pl.BlockSpec((block, width), lambda b: (b, 0))
        specs = [
            pl.BlockSpec((1, 1, block), lambda b: (b, 0, 0), memory_space=pltpu.SMEM),
            pl.BlockSpec(
                (1, 1, block),
                lambda b: (jnp.minimum(b + 1, blocks - 1), 0, 0),
                memory_space=pltpu.SMEM,
            ),
            *[pl.BlockSpec(memory_space=pltpu.SMEM)] * len(scalars),
            *(
                by_block(_width(v)) if by_rows else pl.BlockSpec(a.shape, lambda b: (0, 0))
                for (v, by_rows), a in zip(self.reads, read, strict=False)
            ),
            *[by_block(1)] * self.needs_ids,
            *[pl.BlockSpec(memory_space=pl.ANY)] * len(tables),
        ]
        singles = self.writes[len(self.written) :]
        shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in self.written]
        shapes += [jax.ShapeDtypeStruct((n, 1), w.ins[0].dtype) for w in singles]
        first = len(specs) - len(tables)
        outs = pl.pallas_call(
            self._body,
            grid=(blocks,),
            in_specs=specs,
            out_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(self.written)
            + [by_block(1)] * len(singles),
            out_shape=shapes,
            input_output_aliases={
                first + self.tables.index(v): k for k, v in enumerate(self.written)
            },
            scratch_shapes=[
                *(pltpu.VMEM((_DEPTH, block, v.shape[1]), v.dtype) for v in self.tables),
                pltpu.SemaphoreType.DMA((_DEPTH,)),
                pltpu.SemaphoreType.DMA((_DEPTH,)),
                pltpu.SMEM((_DEPTH,), jnp.int32),
            ],
            cost_estimate=self._cost(),
            interpret=interpret,
            name="optzoo_rows",
        )(in_blocks, in_blocks, *scalars, *read, *tables)
        made = dict(zip((w.outs[0] for w in self.writes), outs, strict=True))
        for write in singles:
            table, values = write.ins[0], made[write.outs[0]]
            made[write.outs[0]] = (
                jnp.asarray(known[table])
                .at[ids]
                .set(values.reshape(n, *table.shape[1:]), mode="drop", unique_indices=True)
            )
        return tuple(made[v] for v in rows.outs)

    def _cost(self) -> pl.CostEstimate:
        n, rows = self.rows.ids.shape[0], self.rows
        width = max(map(_width, self.tables))
        moved = sum(map(_width, [*self.tables, *self.written]))
        moved += sum(_width(v) for v, by_rows in self.reads if by_rows)
        return pl.CostEstimate(
            flops=len(rows.operations) * n * width, bytes_accessed=4 * n * moved, transcendentals=0
        )

    def _body(self, *refs: Any) -> None:
        """The kernel, for one block of ids."""
        numbers = [2, len(self.rows.scalars), len(self.reads), self.needs_ids, len(self.tables)]
        numbers += [len(self.written), len(self.writes) - len(self.written), len(self.tables)]
        parts, refs = [], list(refs)
        for number in numbers:
            parts.append(refs[:number])
            refs = refs[number:]
        (ids, next_ids), scalars, reads, id_column, tables, outs, singles, buffers = parts
        arrived, left, counts = refs
        b, last = pl.program_id(0), pl.num_programs(0) - 1
        homes = dict(zip(self.tables, tables, strict=True))
        homes |= zip(self.written, outs, strict=True)  # the same memory
        buffer_of = dict(zip(self.tables, buffers, strict=True))

        def copies(values, slot, row, place, out):
            for v in values:
                far = homes[v].at[pl.ds(row, 1)]
                near = buffer_of[v].at[slot, pl.ds(place, 1)]
                ends = (near, far, left.at[slot]) if out else (far, near, arrived.at[slot])
                yield pltpu.make_async_copy(*ends)

        def start(values, ids, slot, out):
            def one(place, count):
                row = ids[0, 0, place]
                is_real = row < self.num_rows

                @pl.when(is_real)
                def _():
                    for copy in copies(values, slot, row, place, out):
                        copy.start()

                return count + is_real.astype(jnp.int32)

            return lax.fori_loop(jnp.int32(0), jnp.int32(self.block), one, jnp.int32(0))

        def wait(values, slot, out):
            def one(_, carry):
                for copy in copies(values, slot, 0, 0, out):
                    copy.wait()
                return carry

            lax.fori_loop(jnp.int32(0), counts[slot], one, jnp.int32(0))

        def read(ids, slot):
            counts[slot] = start(self.tables, ids, slot, False)

        slot, next_slot = lax.rem(b, _DEPTH), lax.rem(b + 1, _DEPTH)

        @pl.when(b == 0)
        def _():
            read(ids, slot)

        # The next block takes the memory of the one that was computed first of those in memory.
        @pl.when(b + 1 >= _DEPTH)
        def _():
            wait(self.written, next_slot, True)

        @pl.when(b < last)
        def _():
            read(next_ids, next_slot)

        wait(self.tables, slot, False)
        loaded = {each: ref for each, ref in zip(self.reads, reads, strict=True)}
        of_scalars = dict(zip(self.rows.scalars, scalars, strict=True))

        def given(value, by_rows):
            if value in of_scalars:
                return _out_of_words(of_scalars[value][0, 0], value)
            if value in buffer_of:
                return buffer_of[value][slot]
            return loaded[value, by_rows][...] if (value, by_rows) in loaded else None

        here = lambda: id_column[0][...]
        first = b * self.block
        places = lambda: first + lax.broadcasted_iota(jnp.int32, (self.block, 1), 0)
        results = self._results(_Block(self.rows.ids, given, here, places))
        for value, new in zip(self.written, results, strict=False):
            buffer_of[value][slot] = new
        for out, new in zip(singles, results[len(self.written) :], strict=True):
            out[...] = new
        start(self.written, ids, slot, True)

        @pl.when(b == last)
        def _():
            for before in range(_DEPTH - 1):

                @pl.when(b >= before)
                def _(before=before):
                    wait(self.written, lax.rem(b - before + _DEPTH, _DEPTH), True)


def _width(value: Value, by_rows: bool = True) -> int:
    """The elements of a row, or of an array that holds for all rows."""
    return math.prod(value.shape[by_rows:])


def _in_words(scalar: Any) -> Array:
    """A scalar as the memory for scalars has it."""
    scalar = jnp.asarray(scalar)
    return (scalar.astype(jnp.int32) if scalar.dtype == bool else scalar).reshape(1, 1)


def _out_of_words(scalar: Array, value: Value) -> Array:
    return scalar != 0 if value.dtype == "bool" else scalar
