"""Tables and slots in the order of the ids, for checkpoints of any number of shards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Sharding

from ..core.boxes import unboxed
from ..core.meshes import automatically, spec_of
from ..core.paths import flatten_with_path, leaves_with_path, path_name
from ..core.rows import is_rows
from ..deferred.motion import Clock
from ..state.slots import is_state
from ..state.types import RowsOfCycle
from .row_sharding import RowSharding, Tables, by_pattern, shardings_by_leaf


def in_order_of_ids(tree: Any, tables: Tables, params: Any = None) -> Any:
    """Parameters, a state or both with rows in the order of the ids, for a checkpoint.

    This order does not depend on the number of shards. The tables are those of
    :func:`optzoo.sharded_minimize`. The slots of a table are the arrays in its place in each tree
    of the state that is structured like the parameters; slots with its rows are rearranged, too.
    All other arrays are returned unchanged. Ambiguous arrays raise an error.

    The order of an array cannot be detected: call this function once, before saving a checkpoint,
    and :func:`optzoo.sharded.from_order_of_ids` once, after restoring it.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tables = {"emb": optzoo.sharded.RowSharding(4, 2, multiple=1)}
        >>> stored = jnp.array([[0.0], [2.0], [1.0], [3.0]])  # even rows first
        >>> params = {"emb": stored, "kernel": stored}
        >>> state = optzoo.momentum(0.1, 0.9).init(params)
        >>> trained = {"params": params, "state": state}
        >>> ordered = optzoo.sharded.in_order_of_ids(trained, tables, params)["params"]
        >>> print(ordered["emb"].ravel(), ordered["kernel"].ravel())
        [0. 1. 2. 3.] [0. 2. 1. 3.]

    Args:
        tree: the parameters; or, if ``params`` are given, any tree of parameters, states or both.
            NumPy arrays are rearranged on the host; a ``jax.ShapeDtypeStruct`` is unchanged.
        tables: a dict from patterns of names (:func:`optzoo.param_groups`) to shardings; or a
            sharding if ``tree`` is one array.
        params: the parameters, or their shapes, in either order; not needed if ``tree`` is the
            parameters.

    Raises:
        TypeError: if ``tables`` is not a dict and ``tree`` is more than one array.
        ValueError: if a pattern matches no parameter, or two patterns match the same one; if a
            table and its sharding differ in the number of rows or shards; if ``tree`` has a state
            but ``params`` is None; if an array with as many rows as a table is in no tree like the
            parameters, may belong to several parameters, or has the rows in another axis; if the
            state stores row indices (``accumulate(max_rows=)``).

    Returns:
        Arrays of the same shapes and shardings. With ``"div"`` nothing changes. With ``"mod"`` rows
        move between devices, by one all-to-all and with two shards of temporary memory.
    """
    return _rearranged(tree, tables, params, lambda s: s.num_shards)


def from_order_of_ids(tree: Any, tables: Tables, params: Any = None) -> Any:
    """The inverse of :func:`optzoo.sharded.in_order_of_ids`, for any number of shards.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> sharding = optzoo.sharded.RowSharding(4, 2, multiple=1)
        >>> table = jnp.array([[0.0], [1.0], [2.0], [3.0]])
        >>> print(optzoo.sharded.from_order_of_ids(table, sharding).ravel())
        [0. 2. 1. 3.]
    """
    return _rearranged(tree, tables, params, lambda s: s.rows_per_shard)


def _rearranged(
    tree: Any, tables: Tables, params: Any, blocks_of: Callable[[RowSharding], int]
) -> Any:
    tables, is_array = by_pattern(tables, tree), jax.tree_util.all_leaves([tree])
    if params is None:
        if any(map(is_state, jax.tree.leaves(tree, is_leaf=is_state))):
            raise ValueError(
                "tree contains an optimizer state: give the parameters, too, as in "
                "in_order_of_ids(tree, tables, params)"
            )
        params = tree
    params = unboxed(params)
    if jax.tree_util.all_leaves([params]) and not is_array:
        raise ValueError(
            "params is one array without a name, so its slots cannot be identified: put it in a "
            "dict before tx.init, such as {'table': table}"
        )
    paths = leaves_with_path(params)
    shardings = shardings_by_leaf(tables, params)
    for (path, x), s in zip(paths, shardings, strict=True):
        _check_shards(path_name(path), x, s)
    owners = [_Owner(jnp.shape(x), _moving(s)) for (_, x), s in zip(paths, shardings, strict=True)]
    all_rows = {owner.sharding.stored_rows for owner in owners if owner.sharding is not None}
    if not all_rows:
        return tree
    _check_no_ids(tree)
    # The entries of a clock are steps, of which there may be as many as rows.
    is_leaf = lambda x: isinstance(x, Clock)
    leaves, treedef = flatten_with_path(tree, is_leaf=is_leaf)
    found = [list[_Owner]() for _ in leaves]
    _find(owners, params, treedef.unflatten(range(len(leaves))), found)
    moved = []
    for (path, x), of_leaf in zip(leaves, found, strict=True):
        s = None if is_leaf(x) else _sharding_of_leaf(path_name(path), x, of_leaf, all_rows)
        moved.append(x if s is None else _move(x, blocks_of(s)))
    return treedef.unflatten(moved)


class _Owner(NamedTuple):
    """A parameter: its shape, and its sharding if the order of its rows changes."""

    shape: tuple[int, ...]
    sharding: RowSharding | None


_NOBODY = _Owner((), None)


def _moving(s: RowSharding | None) -> RowSharding | None:
    """The sharding, if its order of rows differs from that of the ids."""
    return s if s is not None and s.partition == "mod" and s.num_shards > 1 else None


def _check_shards(name: str, x: Any, s: RowSharding | None) -> None:
    """Raises ``ValueError`` if the shards of a parameter are known to differ from its sharding."""
    placed = _placed(x)
    if s is None or placed is None or placed.num_devices == 1:
        return
    if (rows := placed.shard_shape(x.shape)[0]) != s.rows_per_shard:
        raise ValueError(
            f"parameter '{name}' has {rows} rows on each device, but its sharding in tables has "
            f"{s.rows_per_shard}, for {s.num_shards} shards: give the RowSharding of its mesh, "
            "and no pattern for a replicated parameter"
        )


def _placed(x: Any) -> Sharding | None:
    """The sharding of an array, if it is known."""
    sharding = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
    return sharding if isinstance(sharding, Sharding) else None


def _check_no_ids(tree: Any) -> None:
    """Raises ``ValueError`` if the tree stores row indices, which would have to change."""
    has_ids = lambda x: is_rows(x) or isinstance(x, RowsOfCycle)
    if any(map(has_ids, jax.tree.leaves(tree, is_leaf=has_ids))):
        raise ValueError(
            "tree stores row indices, which depend on the number of shards: SparseRows of "
            "gradients or of optzoo.accumulate(max_rows=...) cannot be saved in the order of the "
            "ids"
        )


# Which parameter an array of a tree belongs to


def _find(owners: list[_Owner], params: Any, x: Any, found: list[list[_Owner]]) -> set[int]:
    """Finds the owners of each array, by each tree like the parameters that contains it.

    Args:
        owners: the parameters, in order.
        params: their tree.
        x: a tree whose leaves are indices into ``found``.
        found: for each leaf, its owners so far; the function appends to them.

    Returns:
        The indices of the leaves of ``x`` that have an owner.
    """
    inside = set[int]()
    for child in _children(x).values():
        inside |= _find(owners, params, child, found)
    parts = _parts_like(params, x)
    if parts is None:
        return inside
    for owner, part in zip(owners, parts, strict=True):
        for place in jax.tree.leaves(part):
            # A tree around others may be like the parameters by chance, such as a tuple.
            found[place] += [owner] if place in inside or not inside else [owner, _NOBODY]
    return inside.union(jax.tree.leaves(x))


def _parts_like(params: Any, x: Any) -> list[Any] | None:
    """The subtree of ``x`` for each parameter; None if its structure is not like the parameters.

    Nodes are compared by names, not types: a checkpoint may have dicts in place of named tuples.
    """
    if jax.tree_util.all_leaves([params]):
        return [x]
    ours, theirs = _children(params), _children(x)
    if not theirs and not jax.tree_util.all_leaves([x]):  # masked or missing
        return [x] * len(jax.tree.leaves(params))
    if ours.keys() != theirs.keys():
        return None
    parts = list[Any]()
    for name, child in ours.items():
        of_child = _parts_like(child, theirs[name])
        if of_child is None:
            return None
        parts += of_child
    return parts


def _children(x: Any) -> dict[str, Any]:
    """The children of a node by their names."""
    children = jax.tree_util.tree_leaves_with_path(x, is_leaf=lambda child: child is not x)
    return {jax.tree_util.keystr(path, simple=True): child for path, child in children if path}


def _sharding_of_leaf(
    name: str, x: Any, found: list[_Owner], all_rows: set[int]
) -> RowSharding | None:
    """The sharding of the rows of an array; None if it is unchanged."""
    options = {_sharding_by(name, x, owner) for owner in found}
    if len(options) > 1:
        raise ValueError(
            f"the array at '{name}' may belong to several parameters, or to none: give them "
            "names, by a dict instead of a tuple, or call this function for parameters and state "
            "separately"
        )
    placed = _placed(x)
    is_whole = placed is not None and placed.num_devices > 1 and placed.is_fully_replicated
    if not found and not is_whole and all_rows.intersection(jnp.shape(x)[:1]):
        raise ValueError(
            f"the array at '{name}', of shape {jnp.shape(x)}, has as many rows as a stored table, "
            "but is in no tree like the parameters: give all parameters as params, or remove the "
            "array from tree"
        )
    return next(iter(options), None)


def _sharding_by(name: str, x: Any, owner: _Owner) -> RowSharding | None:
    """The sharding of the rows of an array that belongs to a parameter."""
    if (s := owner.sharding) is None:
        return None
    shape, whole, n = jnp.shape(x), owner.shape, s.stored_rows
    if shape != whole and n in shape and n in (*shape[1:], *whole[1:]):
        raise ValueError(
            f"the array at '{name}', of shape {shape}, may have the rows of its table, of shape "
            f"{whole}, in an axis other than the first, so it cannot be rearranged"
        )
    if len(shape) == len(whole) and shape[1:] == whole[1:] and shape[0] not in (1, n):
        raise ValueError(
            f"the array at '{name}' has {shape[0]} rows, but its table has {n} stored rows"
        )
    return s if shape[:1] == (n,) else None


# The rows of one array


def _move(x: Any, blocks: int) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    placed = _placed(x)
    return _swapped(x, blocks) if placed is None else _mover(placed)(x, blocks)


@functools.cache
def _mover(placed: Sharding) -> Callable[..., Array]:
    return jax.jit(_swapped, static_argnums=1, out_shardings=placed)


def _swapped(x: Any, blocks: int) -> Any:
    rest = x.shape[1:]
    swap = lambda x: x.reshape(blocks, -1, *rest).swapaxes(0, 1).reshape(-1, *rest)
    return automatically(swap, lambda _, x: spec_of(x))(x)
