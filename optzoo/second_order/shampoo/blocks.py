"""Parameters cut into equal blocks, so that no matrix of statistics is large."""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from ...core.checks import check_flags, check_size


class Blocks(NamedTuple):
    """The blocks of an array: each dimension is cut into equal parts, padded where necessary."""

    shape: tuple[int, ...]
    dims: tuple[int, ...]  # the dimensions, of which some may have been merged
    parts: tuple[int, ...]  # the number of parts of each
    full: tuple[bool, ...]  # whether it has a matrix of statistics
    diagonal: tuple[bool, ...]  # whether it has only the diagonal of one
    preconditioned: bool  # whether there are statistics at all

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape of one block."""
        return tuple(math.ceil(d / n) for d, n in zip(self.dims, self.parts, strict=True))

    @property
    def number(self) -> int:
        """The number of blocks."""
        return math.prod(self.parts)

    @property
    def factors(self) -> list[tuple[int, bool, bool]]:
        """For each dimension its size in a block, and whether it has a matrix or a diagonal."""
        factors = zip(self.sizes, self.full, self.diagonal, strict=True)
        return list(factors) if self.preconditioned else []

    @property
    def rank(self) -> int:
        """The number of dimensions with statistics."""
        return sum(self.full) + sum(self.diagonal)

    def of_rows(self, n: int) -> "Blocks":
        """The blocks of ``n`` of the rows, where rows are not cut."""
        return self._replace(shape=(n, *self.shape[1:]), dims=(n, *self.dims[1:]))

    def stack(self, *shape: int) -> tuple[int, ...]:
        """The shape in which a state stores an array of this shape for each block."""
        return shape if self.number == 1 else (self.number, *shape)

    def split(self, x: Array) -> Array:
        """The blocks ``(n * number, *sizes)`` of a stack ``(n, *shape)`` or of one parameter."""
        stacked = x.shape[: x.ndim - len(self.shape)]
        x = x.reshape(math.prod(stacked), *self.dims)
        padded = [n * size for n, size in zip(self.parts, self.sizes, strict=True)]
        if tuple(padded) != self.dims:
            missing = [(0, p - d) for p, d in zip(padded, self.dims, strict=True)]
            x = jnp.pad(x, [(0, 0), *missing])
        if self.number > 1:
            pairs = zip(self.parts, self.sizes, strict=True)
            x = x.reshape(len(x), *[n for pair in pairs for n in pair])
            x = x.transpose(0, *range(1, x.ndim, 2), *range(2, x.ndim, 2))
        return x.reshape(math.prod(stacked) * self.number, *self.sizes)

    def join(self, blocks: Array) -> Array:
        """The stack, of shape ``(n, *shape)``, whose blocks these are."""
        n, rank = len(blocks) // self.number, len(self.dims)
        x = blocks.reshape(n, *self.parts, *self.sizes)
        x = x.transpose(0, *[axis for i in range(rank) for axis in (1 + i, 1 + rank + i)])
        x = x.reshape(n, *[k * size for k, size in zip(self.parts, self.sizes, strict=True)])
        return x[(slice(None), *map(slice, self.dims))].reshape(n, *self.shape)


def as_stack(a: Array, ndim: int) -> Array:
    """A stack of arrays with ``ndim`` axes: the leading axes are merged into one."""
    before = a.ndim - ndim
    return a.reshape(math.prod(a.shape[:before]), *a.shape[before:])


@dataclasses.dataclass(eq=False)
class Cutting:
    """Which dimensions have matrices, and how parameters are cut into blocks."""

    max_matrix_size: int  # larger dimensions have only the diagonal, and are not cut
    block_size: int | None  # the largest dimension of a block; None: no dimension is cut
    merge_dims: bool  # whether neighbouring dimensions become one as long as it fits in a block
    skip_vectors: bool  # whether vectors have no statistics
    one_sided: bool = False  # whether there is only one matrix, the smallest, and no diagonal
    diagonals: bool = True  # whether a dimension that is too large for a matrix has a diagonal

    def __post_init__(self) -> None:
        self.max_matrix_size = check_size(max_matrix_size=self.max_matrix_size)
        if self.block_size is not None:
            self.block_size = check_size(1, block_size=self.block_size)
        check_flags(
            merge_dims=self.merge_dims, skip_vectors=self.skip_vectors, one_sided=self.one_sided
        )

    def blocks(self, shape: tuple[int, ...]) -> Blocks:
        """The blocks of a parameter of this shape; a scalar is treated as a vector of one."""
        largest = self.max_matrix_size
        limit = largest if self.block_size is None else min(self.block_size, largest)
        dims = shape or (1,)
        if self.merge_dims:
            dims = _merged(dims, limit)
        full = tuple(d <= largest for d in dims)
        diagonal = tuple(self.diagonals and not self.one_sided and not f for f in full)
        if self.one_sided and any(full):
            least = min((d, i) for i, d in enumerate(dims) if full[i])[1]
            full = tuple(i == least for i in range(len(dims)))
        parts = tuple(_parts(d, limit) if f else 1 for d, f in zip(dims, full, strict=True))
        skipped = 0 in dims or (self.skip_vectors and len(dims) == 1)
        return Blocks(shape, dims, parts, full, diagonal, any(full + diagonal) and not skipped)


def _parts(d: int, limit: int) -> int:
    """The number of parts of ``d``: the smallest, or up to a quarter more if they divide ``d``."""
    least = math.ceil(d / limit) if d > limit else 1
    return next((n for n in range(least, least + least // 4 + 1) if d % n == 0), least)


def _merged(dims: tuple[int, ...], limit: int) -> tuple[int, ...]:
    """Neighbouring dimensions merged up to the limit; of two or more, at least two remain."""
    some = [d for d in dims if d != 1] or [1]
    merged = some[:1]
    for d in some[1:]:
        if merged[-1] * d <= limit:
            merged[-1] *= d
        else:
            merged.append(d)
    if len(merged) == 1 < len(some):
        merged = [math.prod(some[:-1]), some[-1]]
    return tuple(merged)
