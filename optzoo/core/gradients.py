"""Gradients as lists, checked."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from .paths import path_name
from .rows import fits, is_rows, is_sparse_or_none


def check_gradients(updates: Any, params: Any = None, *, allow_complex: bool = False) -> None:
    """Raises as :func:`flatten_gradients`; of optax's ``LookaheadParams`` the fast ones count."""
    params = params.fast if isinstance(params, optax.LookaheadParams) else params
    flatten_gradients(updates, params, allow_complex=allow_complex)


def flatten_gradients(
    updates: Any, params: Any, *, allow_complex: bool = False
) -> tuple[list[Any], list[Any], Any]:
    """The gradients (arrays, SparseRows or None), their parameters, and the tree structure.

    Args:
        updates: a tree of gradients.
        params: a tree like it, or None for a list of None.
        allow_complex: whether complex numbers pass, which an inner optimizer may take.

    Raises:
        TypeError: if a gradient, or the parameter of one, is not of a real floating-point dtype of
            at least 16 bits; or if a real parameter has a complex gradient.
        ValueError: if a gradient's shape is not that of its parameter.
    """
    gs, treedef = jax.tree.flatten(updates, is_leaf=is_sparse_or_none)
    xs = [None] * len(gs) if params is None else treedef.flatten_up_to(params)
    for i, (g, x) in enumerate(zip(gs, xs, strict=True)):
        if g is None:
            continue
        dtype = g.dtype if is_rows(g) else jnp.result_type(g)
        if fix := _fix(dtype, allow_complex):
            raise TypeError(f"{_name(updates, i)} has a gradient of dtype {dtype}: {fix}")
        if x is None:
            continue
        if fix := _fix(jnp.result_type(x), allow_complex):
            raise TypeError(f"{_name(updates, i)} has dtype {jnp.result_type(x)}: {fix}")
        if _is_complex(dtype) and not _is_complex(jnp.result_type(x)):
            raise TypeError(f"{_name(updates, i)} is real but its gradient of dtype {dtype}")
        if not fits(g, x):
            raise ValueError(
                f"{_name(updates, i)} has shape {jnp.shape(x)} but its gradient {jnp.shape(g)}"
            )
    return [g if is_sparse_or_none(g) else jnp.asarray(g) for g in gs], xs, treedef


def _is_complex(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.complexfloating)


def _fix(dtype: Any, allow_complex: bool) -> str:
    """What to do about a dtype that no optimizer takes; nothing if they do."""
    if _is_complex(dtype):
        return (
            "" if allow_complex else "wrap the optimizer in optax.contrib.split_real_and_imaginary"
        )
    if not jnp.issubdtype(dtype, jnp.floating):
        return "freeze the parameter with a gradient of None or optax.masked"
    if jnp.finfo(dtype).bits < 16:
        return "keep the parameter in bfloat16 or float32, and cast it in the loss"
    return ""


def _name(updates: Any, i: int) -> str:
    # Only for an error: to find paths takes longer than the check.
    path, _ = jax.tree_util.tree_leaves_with_path(updates, is_leaf=is_sparse_or_none)[i]
    return f"parameter '{path_name(path)}'"
