"""Catches up deferred rows: those of some ids, or all."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec

from ..core.gradients import check_leaves
from ..core.meshes import shard_map
from ..core.paths import leaves_with_path, path_name, value_by_name
from ..core.row_ids import integer_ids
from ..state.deferred import has_deferred
from ..state.of_nnx import refuse_nnx
from ..state.types import MasterWeightsState, nodes_of
from .tables import by_ids, map_tables, whole

NOTHING_FOLLOWS = (
    "the update includes the movement of deferred rows, so it must not be scaled, added to or "
    "replaced. Make optzoo.caught_up the last of its optax.chain, with no wrapper around it that "
    "changes updates, and transform gradients before it"
)


def catch_up(params: Any, state: Any, ids: Any = None) -> tuple[Any, Any]:
    """Catches up the rows that :func:`optzoo.caught_up` deferred: those of some ids, or all.

    With ``ids``: call it in a training loop of your own, before the loss reads these rows.
    (:func:`optzoo.minimize` does so itself.) Ids may repeat. Ids out of range are ignored.

    Without ``ids``: call it before evaluation, export, checkpoints and changes of settings. It
    reads and writes every row once. The result equals that of the optimizer without
    :func:`optzoo.caught_up`, and ``state.inner`` is its state; training may resume from either.
    Each device catches up its own shards. Inside ``jit``, where shardings are unknown, call it in a
    ``jax.shard_map`` (docs/caught_up.md).

    Outside of ``jit`` the tables are copied. To write them in place, use
    ``jax.jit(optzoo.rows.catch_up, donate_argnums=(0, 1))``.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.caught_up(optzoo.adam(0.1))
        >>> table = jnp.ones((3, 2))
        >>> table, state = optzoo.rows.catch_up(table, tx.init(table), jnp.array([0, 2]))
        >>> table, state = optzoo.rows.catch_up(table, state)
        >>> print(optzoo.slot_names(state.inner))  # a state of adam
        ('m', 'v')

    Args:
        params: the parameters.
        state: the state of :func:`optzoo.caught_up`, or of a chain or masks with it.
        ids: a dict from patterns of names (:func:`optzoo.param_groups`) to integers of any shape,
            such as ``{"users/embedding": user_ids}``; or integers if the parameters are one array;
            None for all rows of all tables.

    Returns:
        The parameters and the state.

    Raises:
        TypeError: if ids are not integers, a parameter is not an array, or the state has variables
            of Flax NNX.
        StateError: if the state does not match the parameters.
        ValueError: if the state has no part made by :func:`optzoo.caught_up`; with ``ids`` also if
            a pattern matches no parameter, or :func:`optzoo.caught_up` is not the last of its
            ``optax.chain``.
    """
    refuse_nnx(state)
    if not has_deferred(state):
        raise ValueError("this state has no part made by optzoo.caught_up, so no rows are deferred")
    check_leaves(abstract=False, params=params)
    if ids is None:
        return _all_rows(params, state)
    check_no_guard(state)
    _check_nothing_follows(state)
    names = [path_name(path) for path, _ in leaves_with_path(params)]
    given = value_by_name("ids", ids if isinstance(ids, Mapping) else {"": ids}, params)
    of_name = lambda name: integer_ids(given[name], f"the ids of '{name}'")
    by_leaf = {i: of_name(name) for i, name in enumerate(names) if name in given}
    change = lambda i, table: by_ids(table, by_leaf[i].reshape(-1)) if i in by_leaf else table
    return map_tables(params, state, change)


def check_no_guard(state: Any) -> None:
    """Raises ``ValueError`` if ``optax.apply_if_finite`` is around an unsupported transformation.

    It selects between updates and zeros like the gradients, so both must have the same types.
    """
    for node in nodes_of(optax.ApplyIfFiniteState, state):
        if nodes_of(MasterWeightsState, node.inner_state):
            raise ValueError(
                "optax.apply_if_finite does not support the updates of optzoo.master_weights, "
                "which are float32 where gradients are bfloat16: put it inside, "
                "optzoo.master_weights(optax.apply_if_finite(optimizer, n))"
            )
        if has_deferred(node.inner_state):
            raise ValueError(
                "optax.apply_if_finite does not support the updates of optzoo.caught_up, which "
                "have more rows than the gradients: put "
                "optzoo.transforms.zero_if_norm_exceeds(math.inf) before it in a chain"
            )


def _check_nothing_follows(state: Any) -> None:
    """Raises ``ValueError`` if something follows :func:`optzoo.caught_up` in an ``optax.chain``."""
    is_plain = lambda node: type(node) is tuple  # not a named tuple, which a wrapper has
    for node in jax.tree.leaves(state, is_leaf=is_plain):
        if not is_plain(node):
            continue
        for k, part in enumerate(node):
            # What is masked may be for other parameters.
            follow = [p for p in node[k + 1 :] if not isinstance(p, optax.MaskedState)]
            if has_deferred(part) and follow:
                raise ValueError(
                    f"optzoo.caught_up is transformation {k + 1} of {len(node)} in a chain: "
                    f"{NOTHING_FOLLOWS}"
                )
            _check_nothing_follows(part)


def _all_rows(params: Any, state: Any) -> tuple[Any, Any]:
    meshes = {x.sharding.mesh for x in jax.tree.leaves((params, state)) if _has_shards(x)}
    if len(meshes) != 1:
        return _whole(params, state)
    [mesh] = meshes

    def spec_on_mesh(x):
        on_mesh = getattr(getattr(x, "sharding", None), "mesh", None) == mesh
        return x.sharding.spec if on_mesh else PartitionSpec()

    def divided_as_parameter(i, table):
        """The table with its slots on the devices of the parameter, along all axes."""
        spec = spec_on_mesh(table.arrays[0])
        at = lambda a: NamedSharding(mesh, PartitionSpec(*spec[: a.ndim]))
        return table.with_arrays(jax.tree.map(lambda a: jax.device_put(a, at(a)), table.arrays))

    params, state = map_tables(params, state, divided_as_parameter)
    leaves, treedef = jax.tree.flatten((params, state))
    specs = tuple(map(spec_on_mesh, leaves))
    return _whole_of_shards(mesh, treedef, specs)(params, state)


def _has_shards(x: Any) -> bool:
    """Whether the rows of an array are known to be on several devices."""
    if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array) or x.ndim == 0:
        return False
    return isinstance(x.sharding, NamedSharding) and x.sharding.shard_shape(x.shape)[0] < len(x)


@jax.jit
def _whole(params: Any, state: Any) -> tuple[Any, Any]:
    return map_tables(params, state, lambda i, table: whole(table))


@functools.cache
def _whole_of_shards(mesh: Any, treedef: Any, specs: tuple[PartitionSpec, ...]) -> Any:
    tree = treedef.unflatten(specs)

    def caught_up(params, state):
        # The parameters are the first of the leaves.
        current = lambda i, table: whole(table.divided(_axes_of(specs[i])))
        return map_tables(params, state, current)

    return jax.jit(shard_map(caught_up, mesh, tree, tree))


def _axes_of(spec: PartitionSpec) -> tuple[str, ...]:
    """The mesh axes over which an array is divided."""
    return tuple(a for each in spec for a in ((each,) if isinstance(each, str) else each or ()))
