"""Trees with other leaves than arrays."""

from collections.abc import Callable
from typing import Any

import jax


class Trees:
    """The functions of ``jax.tree`` for trees in which some nodes are leaves.

    Args:
        is_leaf: whether a node is a leaf.
    """

    def __init__(self, is_leaf: Callable[[Any], bool]):
        self.is_leaf = is_leaf

    def flatten(self, tree: Any) -> tuple[list[Any], Any]:
        """The leaves and the structure."""
        return jax.tree.flatten(tree, self.is_leaf)

    def leaves(self, tree: Any) -> list[Any]:
        """The leaves."""
        return jax.tree.leaves(tree, self.is_leaf)

    def structure(self, tree: Any) -> Any:
        """The structure."""
        return jax.tree.structure(tree, self.is_leaf)

    def map(self, f: Callable[..., Any], tree: Any, *rest: Any) -> Any:
        """The tree of ``f(leaf, *others)``, where ``rest`` has the others."""
        return jax.tree.map(f, tree, *rest, is_leaf=self.is_leaf)
