"""Names of parameters, and masks by their paths."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax

from .rows import is_sparse_or_none


def path_name(path: Any) -> str:
    """``encoder/layers/0/kernel``, as in the names of TensorFlow's variables."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def owner_of(path: Any, owners: Mapping[Any, Any]) -> Any:
    """The entry of the longest prefix of a path; None if there is none.

    A slot has the path of its parameter, or a longer one if it has several arrays for a parameter.
    """
    prefixes = (path[:end] for end in range(len(path), -1, -1))
    return next((owners[prefix] for prefix in prefixes if prefix in owners), None)


def is_masked(x: Any) -> bool:
    """Whether ``x`` is what ``optax.masked`` puts in the place of a leaf that it hides."""
    return isinstance(x, optax.MaskedNode)


def check_mask(**arguments: Any) -> None:
    """Raises ``TypeError`` unless each argument is a mask as :func:`resolve_mask` takes it."""
    for name, which in arguments.items():
        if which is None or _are_fragments(which):
            continue
        if isinstance(which, str):
            raise TypeError(f"{name} must be a tuple of fragments of paths: ({which!r},)")
        for mark in jax.tree.leaves(which):
            if not isinstance(mark, bool | np.bool_):
                raise TypeError(
                    f"{name} must be a tree of bools or a tuple of fragments of paths, "
                    f"got {mark!r} in it"
                )


def resolve_mask(which: Any, tree: Any) -> Any:
    """A tree of bools like ``tree``.

    Args:
        which: a tuple or list of fragments of paths, which marks every parameter whose path
            contains one of them; or a tree of bools, or a prefix of such a tree; or None, which
            marks no parameter.
        tree: parameters or gradients.
    """
    if which is None or _are_fragments(which):
        contains = lambda path, _: any(f in path_name(path) for f in which or ())
        return jax.tree_util.tree_map_with_path(contains, tree, is_leaf=is_sparse_or_none)
    fill = lambda mark, part: jax.tree.map(lambda _: mark, part, is_leaf=is_sparse_or_none)
    return jax.tree.map(fill, which, tree)


def resolve_unmasked(which: Any, tree: Any) -> Any:
    """The opposite of :func:`resolve_mask`."""
    return jax.tree.map(lambda mark: not mark, resolve_mask(which, tree))


def _are_fragments(which: Any) -> bool:
    return isinstance(which, tuple | list) and all(isinstance(f, str) for f in which)
