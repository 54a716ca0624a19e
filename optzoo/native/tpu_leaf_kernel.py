"""Arrays whose slots are in groups of elements that share a scale, as a Pallas kernel for TPUs.

XLA would convert the groups, 32 elements of a row, to a separate layout and back. In the kernel all
values have one number for each element, in the layout of the array. Products with matrices of 0 and
1 repeat the number of a group for its elements, and extract it; they are applied to its two bytes,
for which they are exact. The maximum of a group is computed by rolls.
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
from ..jaxprs.equations import bind_equation
from ..jaxprs.graph import Operation, Value
from ..jaxprs.primitives import Kind
from .elementwise import SAME
from .groups import REDUCTIONS, LeafGroup, Unsupported, each

_ROWS = 32  # of a block: those of a tile of 8-bit elements
_LANES = 128
_COLUMNS = 128 * 32  # of a block in a wide array: as many groups as lanes
_FAST_MEMORY = 64 * 2**20  # of 128 MiB
_SMALL = {"int8", "uint8", "uint16"}  # computed in 32 bits


def tpu_leaf_kernel(leaf: LeafGroup, *, interpret: Any = False) -> Callable[..., tuple[Array, ...]]:
    """The function from the inputs of a leaf to its outputs, by a kernel for TPUs.

    Args:
        leaf: a leaf with groups of elements.
        interpret: as in ``pallas_call``.

    Raises:
        Unsupported: with the reason why there is no kernel.
    """
    kernel = _Kernel(leaf)
    return lambda *args: kernel.run(dict(zip(leaf.ins, args, strict=True)), interpret)


class _Kernel:
    def __init__(self, leaf: LeafGroup):
        self.leaf, self.columns = leaf, leaf.shape[-1]
        self.rows = math.prod(leaf.shape[:-1])
        if self.columns % _LANES or (self.columns > _COLUMNS and self.columns % _COLUMNS):
            raise Unsupported(
                f"on a TPU arrays with slots in groups must have rows of a multiple of {_LANES} "
                f"elements, or of {_COLUMNS}"
            )
        if len(leaf.shape) > 2 and leaf.shape[-2] % _ROWS:
            raise Unsupported(f"the length of its second-last axis is not a multiple of {_ROWS}")
        self.block = min(self.columns, _COLUMNS), min(self.columns, _COLUMNS) // leaf.length

    def _of_groups(self, value: Value) -> bool:
        return math.prod(value.shape) < math.prod(self.leaf.shape)

    def run(self, known: dict[Value, Array], interpret: Any) -> tuple[Array, ...]:
        """The outputs, given the inputs."""
        leaf, (columns, groups) = self.leaf, self.block
        grid = -(-self.rows // _ROWS), self.columns // columns
        place = jnp.arange(columns, dtype=jnp.int32)
        of_group = place[None, :] // leaf.length == jnp.arange(groups, dtype=jnp.int32)[:, None]
        first = of_group & (place[None, :] % leaf.length == 0)
        in_rows = lambda v: known[v].reshape(self.rows, -1)
        as_word = lambda v: known[v].reshape(1, 1)
        args = (
            [of_group.astype(jnp.bfloat16), first.astype(jnp.bfloat16).T],
            list(map(as_word, leaf.scalars)),
            list(map(in_rows, leaf.arrays)),
        )
        axes = frozenset[str]().union(*map(varying, jax.tree.leaves(args)))  # inside of shard_map
        args = jax.tree.map(lambda a: vary(a, axes), args)
        shape = lambda v: (_ROWS, groups if self._of_groups(v) else columns)
        block = lambda v: pl.BlockSpec(shape(v), lambda i, j: (i, j))
        whole = lambda a: pl.BlockSpec(a.shape, lambda i, j: (0, 0))
        in_specs = (
            list(map(whole, args[0])),
            [pl.BlockSpec(memory_space=pltpu.SMEM)] * len(leaf.scalars),
            list(map(block, leaf.arrays)),
        )
        before = len(args[0])
        width = lambda v: self.columns // (leaf.length if self._of_groups(v) else 1)
        found = pl.pallas_call(
            self._body,
            grid=grid,
            in_specs=in_specs,
            out_specs=tuple(map(block, leaf.outs)),
            out_shape=tuple(
                shape_varying((self.rows, width(v)), v.aval.dtype, axes) for v in leaf.outs
            ),
            input_output_aliases={before + i: o for i, o in leaf.aliases.items()},
            cost_estimate=self._cost(),
            compiler_params=pltpu.CompilerParams(vmem_limit_bytes=_FAST_MEMORY),
            interpret=interpret,
            name="optzoo_groups",
        )(*args)
        return tuple(a.reshape(v.shape) for a, v in zip(found, leaf.outs, strict=True))

    def _cost(self) -> pl.CostEstimate:
        moved = [*self.leaf.arrays, *self.leaf.outs]
        nbytes = sum(math.prod(v.shape) * v.aval.dtype.itemsize for v in moved)
        flops = len([*each(self.leaf.operations)]) * math.prod(self.leaf.shape)
        return pl.CostEstimate(flops=flops, bytes_accessed=nbytes, transcendentals=0)

    def _body(self, matrices, scalars, arrays, *outs) -> None:
        """The kernel, for a block."""
        repeat, take = (m[...] for m in matrices)
        leaf, made = self.leaf, dict[Value, Any]()
        for v, ref in zip(leaf.scalars, scalars, strict=True):
            made[v] = ref[0, 0]
        for v, ref in zip(leaf.arrays, arrays, strict=True):
            x = _wide(ref[...])
            made[v] = _by_bytes(x, repeat) if self._of_groups(v) else x
        results = [self._of(v, made) for v in leaf.outs]
        for v, ref, x in zip(leaf.outs, outs, results, strict=True):
            x = jnp.broadcast_to(x, (_ROWS, self.block[0]))
            x = _by_bytes(x.astype(jnp.int32), take) if self._of_groups(v) else x
            ref[...] = x.astype(ref.dtype)

    def _of(self, value: Value, made: dict[Value, Any]) -> Any:
        """A value, with one number for each element."""
        if value.literal is not None and not value.shape:
            return jnp.asarray(value.literal, value.dtype)
        if value not in made:
            inner = value.meaning
            made[value] = self._compute(value, made) if inner is None else self._of(inner, made)
        return made[value]

    def _compute(self, value: Value, made: dict[Value, Any]) -> Any:
        op = value.maker
        assert op is not None
        ins = [self._of(v, made) for v in op.ins]
        if op.kind is Kind.MOVE or op.name in SAME:
            return ins[0]
        if op.name in REDUCTIONS:
            return self._reduced(op, ins[0])
        if op.name == "convert_element_type":
            kind = jnp.int32 if value.dtype in _SMALL else value.aval.dtype
            return ins[0].astype(kind)
        shapes = {jnp.shape(x) for x in ins} - {()}
        if shapes:
            ins = [jnp.broadcast_to(x, max(shapes)) for x in ins]
        (found,) = bind_equation(op.eqn, ins)
        return found

    def _reduced(self, op: Operation, x: Array) -> Array:
        """A reduction over the elements of each group, repeated for its elements."""
        join = {"reduce_max": jnp.maximum, "reduce_min": jnp.minimum}[op.name]
        place = lax.broadcasted_iota(jnp.int32, x.shape, 1)
        shift = self.leaf.length // 2
        while shift:
            # By axis lengths modulo: the other way round is the same.
            up, down = (pltpu.roll(x, s, 1) for s in (shift, x.shape[1] - shift))
            x = join(x, jnp.where(place & shift == 0, down, up))
            shift //= 2
        return x


def _wide(x: Array) -> Array:
    return x.astype(jnp.int32) if x.dtype.name in _SMALL else x


def _by_bytes(x: Array, matrix: Array) -> Array:
    """The exact product of integers below 2**16 and a matrix with one 1 per column."""
    parts = x & 255, x >> 8
    dot = lambda p: jnp.dot(
        p.astype(jnp.float32).astype(jnp.bfloat16), matrix, preferred_element_type=jnp.float32
    )
    low, high = (dot(p).astype(jnp.int32) for p in parts)
    return low + (high << 8)
