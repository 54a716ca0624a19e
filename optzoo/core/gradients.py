"""Gradients as lists, checked."""

from typing import Any

import jax
import jax.numpy as jnp

from .paths import path_name
from .rows import is_rows, is_sparse_or_none


def check_gradients(updates: Any, params: Any = None) -> None:
    """Raises as :func:`flatten_gradients`."""
    flatten_gradients(updates, params)


def flatten_gradients(updates: Any, params: Any) -> tuple[list[Any], list[Any], Any]:
    """The gradients (arrays, SparseRows or None), their parameters, and the tree structure.

    Args:
        updates: a tree of gradients.
        params: a tree like it, or None for a list of None.

    Raises:
        TypeError: if a gradient is neither real floating-point nor SparseRows of such.
        ValueError: if its shape is not that of its parameter.
    """
    gs, treedef = jax.tree.flatten(updates, is_leaf=is_sparse_or_none)
    xs = [None] * len(gs) if params is None else treedef.flatten_up_to(params)
    for i, (g, x) in enumerate(zip(gs, xs, strict=True)):
        if g is None:
            continue
        dtype = g.dtype if is_rows(g) else jnp.result_type(g)
        if not jnp.issubdtype(dtype, jnp.floating):
            fix = (
                "wrap the optimizer in optax.contrib.split_real_and_imaginary"
                if jnp.issubdtype(dtype, jnp.complexfloating)
                else "freeze the parameter with a gradient of None or optax.masked"
            )
            raise TypeError(f"{_name(updates, i)} has a gradient of dtype {dtype}: {fix}")
        if x is not None and jnp.shape(x) != jnp.shape(g):
            raise ValueError(
                f"{_name(updates, i)} has shape {jnp.shape(x)} but its gradient {jnp.shape(g)}"
            )
    return [g if is_sparse_or_none(g) else jnp.asarray(g) for g in gs], xs, treedef


def _name(updates: Any, i: int) -> str:
    # Only for an error: to find paths takes longer than the check.
    path, _ = jax.tree_util.tree_leaves_with_path(updates, is_leaf=is_sparse_or_none)[i]
    return f"parameter '{path_name(path)}'"
