"""Parameters named by their paths."""

from typing import Any

import jax

from .rows import is_gradient


def path_name(path: Any) -> str:
    """``encoder/layers/0/kernel``, as in the names of TensorFlow's variables."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def marked(which: Any, tree: Any) -> Any:
    """A tree of bools like ``tree``.

    Args:
        which: fragments of paths in a tuple or list, any of which marks a parameter whose path
            contains it; or a tree of bools, whole or a prefix; or None, for no parameter.
        tree: parameters or gradients.

    Raises:
        TypeError: if a string is given, where a tuple of strings is meant.
    """
    if isinstance(which, str):
        raise TypeError(f"expected a tuple of fragments of paths, got {which!r}: use ({which!r},)")
    if which is None or _are_fragments(which):
        contains = lambda path, _: any(f in path_name(path) for f in which or ())
        return jax.tree_util.tree_map_with_path(contains, tree, is_leaf=is_gradient)
    fill = lambda mark, part: jax.tree.map(lambda _: mark, part, is_leaf=is_gradient)
    return jax.tree.map(fill, which, tree)


def unmarked(which: Any, tree: Any) -> Any:
    """The opposite of :func:`marked`."""
    return jax.tree.map(lambda mark: not mark, marked(which, tree))


def _are_fragments(which: Any) -> bool:
    return isinstance(which, tuple | list) and all(isinstance(f, str) for f in which)
