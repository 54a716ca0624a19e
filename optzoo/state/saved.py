"""States of checkpoints whose names or boxes differ from those of ``init``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..core.boxes import content, is_box, refilled
from ..core.paths import members_of, path_name
from ..core.rows import is_rows
from .fit import kind_of
from .stacks import owners_in, resized
from .types import GROUP


def state_like(saved: Any, like: Any) -> Any:
    """Restores a state from the content of a checkpoint, possibly of an older version.

    Arrays are matched by the names of fields and keys, ignoring boxes of parameters, such as Flax
    variables. Keys of groups (:func:`optzoo.param_groups`), of stacks (:func:`optzoo.stacked`) and
    of the clock of :func:`optzoo.caught_up` differ between versions, and are matched by their
    contents.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.momentum(0.1, 0.9)
        >>> slots = {"momentum": {"w": {"value": jnp.ones(2)}}}
        >>> saved = [{"count": jnp.array(3), "slots": slots}, {}]
        >>> state = optzoo.state.state_like(saved, tx.init({"w": jnp.zeros(2)}))
        >>> print(optzoo.get_slot(state, "momentum")["w"])
        [1. 1.]

    Args:
        saved: the tree of a checkpoint: nested dicts, lists or tuples of arrays, as restored by
            Orbax without a target or by ``flax.serialization.msgpack_restore``; or a state of an
            older version.
        like: ``tx.init(params)``, or its shapes by ``jax.eval_shape``.

    Returns:
        A tree like ``like`` with the arrays of ``saved``.

    Raises:
        ValueError: if an array is missing, unused, ambiguous, or has another shape or another kind
            of numbers (real, complex, integers).
    """
    return _build(saved, like, ())


def _build(saved: Any, like: Any, path: tuple[Any, ...]) -> Any:
    if is_box(like):
        return refilled(like, _build(content(saved), content(like), path))
    children, treedef = jax.tree_util.tree_flatten_with_path(like, is_leaf=lambda x: x is not like)
    if children and children[0][1] is like:
        return _array(saved, like, path)
    wanted = {_key(keys): child for keys, child in children}
    found = _entries(saved)
    if hasattr(type(like), "of_older"):
        found = type(like).of_older(found)
    if len(found) == 1 and not found.keys() & wanted.keys() and not isinstance(like, dict):
        [inside] = found.values()  # of a box
        return _build(inside, like, path)
    names = _names(found, wanted, like, path)
    if left := [k for k in found if k not in names.values() and jax.tree.leaves(found[k])]:
        raise ValueError(f"saved has {left} at '{path_name(path)}', but the state does not")
    parts = [
        _build(found[names[key]], child, (*path, *keys))
        if key in names
        else _empty(child, (*path, *keys))
        for (keys, child), key in zip(children, wanted, strict=True)
    ]
    return treedef.unflatten(parts)


def _array(saved: Any, like: Any, path: tuple[Any, ...]) -> Any:
    while len(parts := _entries(saved)) == 1:
        [saved] = parts.values()  # out of boxes
    if is_rows(saved) or (
        not hasattr(saved, "shape") and not isinstance(saved, int | float | bool)
    ):
        raise ValueError(f"saved has no array at '{path_name(path)}'")
    if owners_in(path) and jnp.shape(saved)[1:] == jnp.shape(like)[1:]:
        return resized(saved, jnp.shape(like)[0])
    if jnp.shape(saved) != jnp.shape(like):
        raise ValueError(
            f"saved has an array of shape {jnp.shape(saved)} at '{path_name(path)}', but the "
            f"state has {jnp.shape(like)}"
        )
    (_, kind), (_, wanted) = kind_of(saved), kind_of(like)
    if kind != wanted:
        raise ValueError(
            f"saved has {kind} at '{path_name(path)}', but the state has {wanted}: give the "
            "arrays in the dtypes in which they were saved"
        )
    return saved


def _names(found: Any, wanted: Any, like: Any, path: tuple[Any, ...]) -> dict[str, str]:
    """For each key of a state, the key of the same part of the saved state."""
    names = {key: key for key in wanted if key in found}
    others = [key for key in wanted if key not in found and jax.tree.leaves(wanted[key])]
    if not isinstance(like, dict):
        return names
    for key in others:
        left = [k for k in found if k not in names.values()]
        if key.startswith(GROUP):
            fits = [k for k in left if _fits(found[k], wanted[key])]
        else:
            fits = [k for k in left if k == _old_key(key)]
        if len(fits) > 1:
            raise ValueError(f"several parts of saved at '{path_name(path)}' match {key!r}: {fits}")
        if fits:
            names[key] = fits[0]
    return names


def _old_key(key: str) -> str | None:
    """The key of a stack in older versions."""
    members = members_of(key)
    return str(members) if members else None


def _fits(saved: Any, like: Any) -> bool:
    try:
        _build(saved, like, ())
    except ValueError:
        return False
    return True


def _empty(like: Any, path: tuple[Any, ...]) -> Any:
    if jax.tree.leaves(like):
        raise ValueError(f"saved has nothing at '{path_name(path)}'")
    return like


def _entries(saved: Any) -> dict[str, Any]:
    """The parts of a saved node, by their names; none for an array."""
    if isinstance(saved, Mapping):
        return {str(k): v for k, v in saved.items()}
    children, _ = jax.tree_util.tree_flatten_with_path(saved, is_leaf=lambda x: x is not saved)
    return {_key(keys): child for keys, child in children if child is not saved}


def _key(keys: Any) -> str:
    return jax.tree_util.keystr(keys, simple=True)
