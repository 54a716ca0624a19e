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
        TypeError: if a gradient, or the parameter of one, is not of a real floating-point dtype of
            at least 16 bits.
        ValueError: if a gradient's shape is not that of its parameter.
    """
    gs, treedef = jax.tree.flatten(updates, is_leaf=is_sparse_or_none)
    xs = [None] * len(gs) if params is None else treedef.flatten_up_to(params)
    for i, (g, x) in enumerate(zip(gs, xs, strict=True)):
        if g is None:
            continue
        dtype = g.dtype if is_rows(g) else jnp.result_type(g)
        if fix := _fix(dtype):
            raise TypeError(f"{_name(updates, i)} has a gradient of dtype {dtype}: {fix}")
        if x is None:
            continue
        if fix := _fix(jnp.result_type(x)):
            raise TypeError(f"{_name(updates, i)} has dtype {jnp.result_type(x)}: {fix}")
        if jnp.shape(x) != jnp.shape(g):
            raise ValueError(
                f"{_name(updates, i)} has shape {jnp.shape(x)} but its gradient {jnp.shape(g)}"
            )
    return [g if is_sparse_or_none(g) else jnp.asarray(g) for g in gs], xs, treedef


def _fix(dtype: Any) -> str:
    """What to do about a dtype that no optimizer takes; nothing if they do."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return "wrap the optimizer in optax.contrib.split_real_and_imaginary"
    if not jnp.issubdtype(dtype, jnp.floating):
        return "freeze the parameter with a gradient of None or optax.masked"
    if jnp.finfo(dtype).bits < 16:
        return "keep the parameter in bfloat16 or float32, and cast it in the loss"
    return ""


def _name(updates: Any, i: int) -> str:
    # Only for an error: to find paths takes longer than the check.
    path, _ = jax.tree_util.tree_leaves_with_path(updates, is_leaf=is_sparse_or_none)[i]
    return f"parameter '{path_name(path)}'"
