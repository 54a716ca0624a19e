"""Shardings of the parameters of a model with sharded tables."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from ..core.meshes import EVERYWHERE, as_typed
from .create_table import check_mesh
from .row_sharding import Tables, by_pattern, shardings_by_leaf


def params_sharding(params: Any, mesh: Mesh, tables: Tables) -> Any:
    """The shardings of parameters: tables by rows, all others replicated.

    They are those of :func:`optzoo.sharded_minimize` for the same ``mesh`` and ``tables``. Use them
    by ``jax.device_put(params, params_sharding(params, mesh, tables))``, with the rows of a table
    in the order of its shards (:func:`optzoo.sharded.from_order_of_ids`), or in abstract
    parameters, as the target of a restored checkpoint.

    Example:
        >>> import jax, jax.numpy as jnp, optzoo
        >>> mesh = jax.make_mesh((1,), ("shard",))
        >>> tables = {"table": optzoo.sharded.RowSharding(4, 1, multiple=1)}
        >>> params = {"table": jnp.ones((4, 2)), "kernel": jnp.ones(2)}
        >>> places = optzoo.sharded.params_sharding(params, mesh, tables)
        >>> tuple(places["table"].spec), tuple(places["kernel"].spec)
        (('shard', None), (None,))

    Args:
        params: arrays, or ``jax.ShapeDtypeStruct``.
        mesh: a mesh with the axes of the shardings.
        tables: a dict from patterns of names (:func:`optzoo.param_groups`) to the shardings of
            tables; or one sharding if ``params`` is one array.

    Raises:
        TypeError: if ``tables`` is not a dict and ``params`` is more than one array; if ``mesh`` is
            not a mesh.
        ValueError: if a pattern matches no parameter, or two patterns match the same one; if a
            table does not have the stored rows of its sharding; if the mesh does not have its axes
            with the size ``num_shards``.
    """
    tables = by_pattern(tables, params)
    for sharding in tables.values():
        check_mesh(mesh, sharding)
    leaves, treedef = jax.tree.flatten(params)
    specs = [EVERYWHERE if s is None else s.spec for s in shardings_by_leaf(tables, params)]
    pairs = zip(leaves, specs, strict=True)
    place = lambda x, spec: as_typed(NamedSharding(mesh, spec), jnp.ndim(x))
    return treedef.unflatten([place(*pair) for pair in pairs])
