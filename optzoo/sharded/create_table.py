"""Tables made shard by shard."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding

from ..core.checks import check_size
from .row_sharding import RowSharding


def create_table(
    sharding: RowSharding,
    mesh: Mesh,
    rows_of: Callable[[Array], Array],
    *,
    chunk: int = 1 << 16,
) -> Array:
    """A table sharded by rows, made shard by shard: no process ever holds the whole table.

    A process holds its own shards, and one shard and one chunk more while it makes them.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np, optzoo
        >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("shard",))
        >>> sharding = optzoo.RowSharding(10, 1, multiple=1)
        >>> rows = optzoo.uniform_rows(jax.random.key(0), 4)
        >>> optzoo.create_table(sharding, mesh, rows).shape
        (10, 4)

    Args:
        sharding: of the table.
        mesh: with the axis of the sharding.
        rows_of: gives the rows of an array of ids, of shape ``(n, *row_shape)``. The row of an id
            must depend on the id alone (:func:`optzoo.uniform_rows`), then the table does not
            depend on the number of shards. It is compiled, and gets ids of at least ``num_rows``
            for the rows that only fill up the shards.
        chunk: the number of rows to make at once.

    Raises:
        ValueError: if the mesh does not have the axes of the sharding, of the size ``num_shards``.
    """
    check_mesh(mesh, sharding)
    chunk = min(check_size(1, chunk=chunk), sharding.rows_per_shard)
    compiled = jax.jit(rows_of)
    dtype = np.int64 if sharding.stored_rows >= 2**31 else np.int32
    like = jax.eval_shape(rows_of, jax.ShapeDtypeStruct((chunk,), dtype))

    def shard_at(index):
        start, stop, _ = index[0].indices(sharding.stored_rows)
        shard = np.empty((stop - start, *like.shape[1:]), like.dtype)
        for i in range(start, stop, chunk):
            places = np.arange(i, i + chunk)  # always as many: one compilation
            rows = np.asarray(compiled(jnp.asarray(sharding.ids_of(places), dtype)))
            shard[i - start : i - start + chunk] = rows[: stop - i]
        return shard

    shape = (sharding.stored_rows, *like.shape[1:])
    return jax.make_array_from_callback(shape, NamedSharding(mesh, sharding.spec), shard_at)


def uniform_rows(
    key: Array, width: int, scale: float = 0.05, dtype: jax.typing.DTypeLike = jnp.float32
) -> Callable[[Array], Array]:
    """For :func:`optzoo.create_table`: uniform rows in ``[-scale, scale)``, each from its id.

    Args:
        key: of ``jax.random``.
        width: the length of a row.
        scale: the bound.
        dtype: of the rows.
    """

    def rows_of(ids):
        row = lambda i: jax.random.uniform(
            jax.random.fold_in(key, i), (width,), dtype, minval=-scale, maxval=scale
        )
        return jax.vmap(row)(ids)

    return rows_of


def check_mesh(mesh: Mesh, sharding: RowSharding) -> None:
    """Raises ``ValueError`` unless the mesh has the axes of the sharding, of its size."""
    if missing := [name for name in sharding.axes if name not in mesh.shape]:
        raise ValueError(
            f"mesh must have the axis {missing[0]!r} of the sharding, it has {dict(mesh.shape)}: "
            "give RowSharding(axis_name=...) or another mesh"
        )
    size = int(np.prod([mesh.shape[name] for name in sharding.axes]))
    if size != sharding.num_shards:
        raise ValueError(
            f"num_shards must be the size of the mesh axes {sharding.axes}, {size}, "
            f"got {sharding.num_shards}"
        )
