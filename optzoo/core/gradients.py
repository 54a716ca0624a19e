"""Gradients as lists, checked."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .checks import is_array
from .meshes import spec_of
from .numerics import dtype_of, has_keys
from .paths import leaves_with_path, path_name
from .row_ids import is_protected
from .rows import fits, is_rows, is_sparse_or_none, update_tree

_FREEZE = "freeze the parameter with a gradient of None or optax.masked"


class GradientTypeError(TypeError):
    """A gradient, or its parameter, has a type that no optimizer supports."""


class GradientShapeError(ValueError):
    """A gradient does not have the shape of its parameter."""


def check_gradients(
    updates: Any, params: Any = None, *, allow_complex: bool = False
) -> tuple[list[Any], list[Any], Any]:
    """The gradients (arrays, SparseRows or None), their parameters, and the tree structure.

    Args:
        updates: a tree of gradients; the arrays may be abstract.
        params: a tree like it, or None for a list of None. For optax's ``LookaheadParams``, the
            fast parameters are used.
        allow_complex: whether complex numbers pass, which an inner optimizer may support.

    Raises:
        GradientTypeError: if a gradient or its parameter does not have a real floating-point dtype
            of at least 16 bits; if a real parameter has a complex gradient; or if a gradient is
            unreduced, or a parameter reduced, along an axis of a mesh.
        GradientShapeError: if a gradient does not have the shape of its parameter, or is not in its
            box.
    """
    params = params.fast if isinstance(params, optax.LookaheadParams) else params
    gs, treedef = update_tree.flatten(updates)
    try:
        xs = [None] * len(gs) if params is None else treedef.flatten_up_to(params)
    except ValueError as error:
        raise GradientShapeError(
            "the gradients do not have the structure of the parameters: give a tree like them, "
            "with None for a parameter without a gradient"
        ) from error
    for i, (g, x) in enumerate(zip(gs, xs, strict=True)):
        if found := _mistake(g, x, allow_complex):
            kind, text = found
            path, _ = leaves_with_path(updates, is_leaf=is_sparse_or_none)[i]
            raise kind(f"parameter '{path_name(path)}' {text}")
    return gs, xs, treedef


def check_leaves(*, abstract: bool = True, **trees: Any) -> None:
    """Raises ``TypeError`` unless all leaves are arrays of any dtype, optionally ``abstract``."""
    for name, tree in trees.items():
        for path, x in leaves_with_path(tree):
            if not is_array(x) or (not abstract and isinstance(x, jax.ShapeDtypeStruct)):
                at = f" at '{path_name(path)}'" if path else ""
                raise TypeError(f"{name} must be a tree of arrays, got {x!r}{at}")


def check_arrays(tree: Any, *, abstract: bool = True) -> None:
    """Checks arrays: new parameters, tables, or gradients without parameters.

    Args:
        tree: a tree of arrays, or one array.
        abstract: whether shapes without values pass.

    Raises:
        GradientTypeError: if a leaf is not an array; if an array has random keys or is a gradient
            of integers; or if an array is unreduced, or reduced, along an axis of a mesh.
    """
    for path, x in leaves_with_path(tree):
        if not is_array(x):
            raise GradientTypeError(f"array '{path_name(path)}' must have numbers, got {x!r}")
        if not abstract and isinstance(x, jax.ShapeDtypeStruct):
            raise GradientTypeError(
                f"array '{path_name(path)}' has no values, got {x!r}: use jax.eval_shape for shapes"
            )
        dtype = None if is_protected(x) else getattr(x, "dtype", None)
        fix = _fix_special(dtype)
        if found := f"has dtype {_name(dtype)}: {fix}" if fix else _partial_sum(x):
            raise GradientTypeError(f"array '{path_name(path)}' {found}")


def _partial_sum(x: Any) -> str:
    """The error for an array that is unreduced or reduced along a mesh axis, or an empty text."""
    spec = spec_of(x)
    if spec.unreduced:
        return (
            f"is unreduced along mesh axes {sorted(spec.unreduced)}, so each device has a part of "
            "the sum: sum it with jax.reshard"
        )
    if spec.reduced:
        return (
            f"is reduced along mesh axes {sorted(spec.reduced)}: give the array from which "
            "jax.reshard made it"
        )
    return ""


def _mistake(g: Any, x: Any, allow_complex: bool) -> tuple[type[Exception], str] | None:
    """The type and the text of the error of a gradient and its parameter; None without an error."""
    if g is None:
        if type(x) not in (dict, list, tuple):  # it may be a box
            return None
        return GradientShapeError, (
            f"has a gradient of None, but is a {type(x).__name__}: give a tree like it, with None "
            "for each parameter without a gradient"
        )
    if not is_array(g):
        return GradientTypeError, f"has a gradient that is not an array, got {g!r}"
    if x is not None and not jax.tree_util.all_leaves([x]):
        return GradientShapeError, (
            f"is in a {type(x).__name__}, but its gradient is not: differentiate with respect to "
            "the same parameters, or put the gradient into one, too"
        )
    of_x = None if x is None else dtype_of(x)
    if of_x is not None and (fix := _fix(of_x, allow_complex)):
        return GradientTypeError, f"has dtype {_name(of_x)}: {fix}"
    if x is not None and (found := _partial_sum(x)):
        return GradientTypeError, found
    dtype = g.dtype if is_rows(g) else dtype_of(g)
    if fix := _fix(dtype, allow_complex):
        return GradientTypeError, f"has a gradient of dtype {_name(dtype)}: {fix}"
    for part in jax.tree.leaves(g) if is_rows(g) else [g]:
        if found := _partial_sum(part):
            return GradientTypeError, f"has a gradient that {found}"
    if x is None:
        return None
    if _is_complex(dtype) and not _is_complex(of_x):
        return GradientTypeError, (
            f"is real, but its gradient has dtype {dtype}: take its real part, or make the "
            "parameter complex, with optax.contrib.split_real_and_imaginary around the optimizer"
        )
    if not fits(g, x):
        return GradientShapeError, f"has shape {jnp.shape(x)}, but its gradient {jnp.shape(g)}"
    return None


def _is_complex(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.complexfloating)


@functools.cache
def _fix(dtype: Any, allow_complex: bool) -> str:
    """The fix for a dtype that no optimizer supports; empty for others."""
    if fix := _fix_special(dtype):
        return fix
    if _is_complex(dtype):
        fix = "wrap the optimizer in optax.contrib.split_real_and_imaginary"
        return "" if allow_complex else fix
    if not jnp.issubdtype(dtype, jnp.floating):
        return _FREEZE
    short = "keep the parameter in bfloat16 or float32, and cast it in the loss"
    return short if jnp.finfo(dtype).bits < 16 else ""


def _fix_special(dtype: Any) -> str:
    """The fix for a dtype without arithmetic; empty for others."""
    if dtype == jax.dtypes.float0:  # of jax.grad with allow_int
        return _FREEZE
    is_key = has_keys(dtype)
    return "keep random keys out of the parameters, or hide them by optax.masked" if is_key else ""


def _name(dtype: Any) -> str:
    return "float0" if dtype == jax.dtypes.float0 else str(dtype)
