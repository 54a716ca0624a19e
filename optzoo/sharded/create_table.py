"""Creates tables shard by shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding

from ..core.checks import check, check_flags, check_floating, check_function, check_size, is_array
from ..core.compat import in_row_major
from ..core.lines import Lines, rows_per_line, shape_of_lines, to_lines
from ..core.meshes import check_axes, shard_map
from ..core.numerics import from_words, has_keys, words_of
from ..sparse.row_major import can_be_row_major
from .row_sharding import RowSharding


def create_table(
    sharding: RowSharding,
    mesh: Mesh,
    rows_of: Callable[[Array], Array],
    *,
    chunk: int = 1 << 14,
    lines: bool = False,
) -> Any:
    """A table sharded by rows, created shard by shard: no process holds the whole table.

    A device holds its own shard, and temporarily one chunk. On a TPU the table is row-major, as a
    step requires (:func:`optzoo.rows.row_major`).

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np, optzoo
        >>> mesh = jax.make_mesh((1,), ("shard",))
        >>> sharding = optzoo.sharded.RowSharding(10, 1, multiple=1)
        >>> rows = optzoo.sharded.uniform_rows(jax.random.key(0), 4)
        >>> optzoo.sharded.create_table(sharding, mesh, rows).shape
        (10, 4)

    Args:
        sharding: the sharding of the table.
        mesh: a mesh with the axes of the sharding.
        rows_of: a function of an array of ids that returns their rows, of shape
            ``(n, *row_shape)``. If the row of an id depends only on the id
            (:func:`optzoo.sharded.uniform_rows`), the table does not depend on the number of
            shards. The function is compiled, and gets ids of at least ``num_rows`` for rows that
            only pad the shards.
        chunk: the number of rows to create at once.
        lines: whether the table is in lines, which need less memory on TPUs
            (:func:`optzoo.rows.to_lines`). The number of rows of a shard must be a multiple of the
            rows of a line.

    Raises:
        TypeError: if an argument has a wrong type.
        ValueError: if the mesh does not have the axes of the sharding with the size ``num_shards``,
            if ``rows_of`` returns another number of rows, or if a shard is not a multiple of a
            line.

    Returns:
        An array; or :class:`optzoo.rows.Lines`.
    """
    check_mesh(mesh, sharding)
    check_flags(lines=lines)
    check_function("a function of ids", rows_of=rows_of)
    size = sharding.rows_per_shard
    chunk = min(check_size(1, chunk=chunk), size)
    dtype = jnp.int64 if sharding.stored_rows >= 2**31 else jnp.int32
    like = jax.eval_shape(rows_of, jax.ShapeDtypeStruct((chunk,), dtype))
    if not is_array(like) or like.shape[:1] != (chunk,):
        raise ValueError(
            f"rows_of must return an array of {chunk} rows for {chunk} ids, got "
            f"{like.shape if is_array(like) else like!r}"
        )
    per_line = rows_per_line(like.shape[1:]) if lines else 1
    if size % per_line:
        raise ValueError(
            f"lines: the {size} rows of a shard are not a multiple of the {per_line} rows of a "
            f"line: give RowSharding(..., multiple={per_line * sharding.num_shards}), or a "
            "multiple of it"
        )
    chunk = max(1, chunk // per_line) * per_line

    def shard():
        first = jax.lax.axis_index(sharding.axes).astype(dtype) * size

        def fill(i, rows):
            start = jnp.minimum(i * chunk, size - chunk)  # the last chunk overlaps the one before
            places = first + start + jnp.arange(chunk, dtype=dtype)
            some = rows_of(sharding.ids_of(places))
            if lines:
                some, start = to_lines(some).value, start // per_line
            return jax.lax.dynamic_update_slice_in_dim(rows, some, start, 0)

        shape = (size, *like.shape[1:])
        empty = jnp.zeros(shape_of_lines(shape) if lines else shape, like.dtype)
        return jax.lax.fori_loop(0, -(-size // chunk), fill, empty)

    # Nothing is differentiated here, so nothing depends on the check of replication.
    make = shard_map(shard, mesh, (), sharding.spec, check_vma=False)

    def make_row_major():
        table = make()
        return in_row_major(table) if can_be_row_major(table) else table

    table = jax.jit(make_row_major, out_shardings=NamedSharding(mesh, sharding.spec))()
    return Lines(table, (sharding.stored_rows, *like.shape[1:])) if lines else table


def uniform_rows(
    key: Array, width: int, scale: float = 0.05, dtype: jax.typing.DTypeLike = jnp.float32
) -> Callable[[Array], Array]:
    """Rows uniform in ``[-scale, scale)``, each generated from its id, for ``create_table``.

    Example:
        >>> import jax, jax.numpy as jnp, optzoo
        >>> rows_of = optzoo.sharded.uniform_rows(jax.random.key(0), width=2, scale=0.05)
        >>> print(rows_of(jnp.array([7, 7])).shape)  # both are the row of id 7
        (2, 2)

    Args:
        key: a key of ``jax.random``.
        width: the length of a row.
        scale: the bound, between 0 and half of the largest number of ``dtype``.
        dtype: the real dtype of the rows.

    Raises:
        TypeError: if an argument has a wrong type.
        ValueError: if ``width`` or ``scale`` is out of range.
    """
    of_key = getattr(key, "dtype", None)
    is_typed = has_keys(of_key)
    if not (is_typed or of_key == jnp.uint32) or jnp.ndim(key) != (0 if is_typed else 1):
        raise TypeError(f"key must be one random key, such as jax.random.key(0), got {key!r}")
    check_size(1, width=width)
    check_floating(dtype=dtype)
    most = float(jnp.finfo(jax.dtypes.canonicalize_dtype(dtype)).max) / 2
    check(f"in [0, {most}]", lambda v: 0 <= v <= most, scale=scale)
    # As words, which belong to no mesh: shard_map takes no array of explicit axes from outside.
    words, as_key = words_of(key), from_words(key)
    words = words if isinstance(words, jax.core.Tracer) else np.asarray(words)

    def rows_of(ids):
        key = as_key(jnp.asarray(words))
        row = lambda i: jax.random.uniform(
            jax.random.fold_in(key, i), (width,), dtype, minval=-scale, maxval=scale
        )
        return jax.vmap(row)(ids)

    return rows_of


def check_mesh(mesh: Mesh, sharding: RowSharding) -> None:
    """Raises an error unless the mesh has the axes and size of the sharding."""
    if not isinstance(sharding, RowSharding):
        raise TypeError(f"sharding must be an optzoo.sharded.RowSharding, got {sharding!r}")
    size = check_axes(mesh, sharding.axes, "RowSharding(..., axis_name=)")
    if size != sharding.num_shards:
        raise ValueError(
            f"num_shards must be the size of the mesh axes {sharding.axes}, {size}, "
            f"got {sharding.num_shards}"
        )
