"""Norms of parameters along axes, which are given by patterns, and updates that change norms."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from ..core.norms import over_shards
from ..core.numerics import sqrt, upcast
from ..core.paths import is_masked, map_with_path, path_name, patterns_by_name, stacks_of
from ..core.rows import is_rows, update_tree


def check_dims(dims: Any) -> None:
    """Raises ``ValueError`` if a dict of patterns contains numbers instead of tuples."""
    if isinstance(dims, Mapping) and any(isinstance(axes, int) for axes in dims.values()):
        raise ValueError(f"dims must contain tuples of axes such as (1,), got {dims!r}")


def norms(g: Any, axes: tuple[int, ...], *arrays: Array) -> list[Array]:
    """The norms of arrays like a parameter along these axes, which are kept with size 1.

    Args:
        g: the gradient of the parameter, which records whether rows are divided over devices.
        axes: the axes of the norm.
        *arrays: the parameter or its update, whole or the rows of one device.
    """
    squares = [jnp.sum(x**2, axis=axes, keepdims=True) for x in arrays]
    if 0 in axes:
        squares = over_shards([g] * len(squares), squares, lax.psum)
    return [sqrt(x) for x in squares]


def update_to(
    new: Callable[[Array, Array], Array], g: Any, u: Any, x: Any, axes: tuple[int, ...]
) -> Any:
    """The update that results in the parameter ``new(u, x)``, in the dtype of the gradient.

    Args:
        new: a function of the update and the parameter in at least float32; of rows only, if ``u``
            is rows and norms are not along axis 0.
        g: the gradient.
        u: the update of the inner optimizer.
        x: the parameter.
        axes: the axes of the norms.
    """
    to_new = lambda u, x: (new(u, x) - x).astype(g.dtype)
    if is_rows(u) and 0 not in axes:
        u = u.coalesce()
        return u.with_values(to_new(upcast(u.values), upcast(u.gather(x)))).drop_padding()
    return to_new(upcast(u.to_dense(x) if is_rows(u) else u), upcast(x))


def with_axes(
    change: Callable[[Any, Any, Any, tuple[int, ...]], Any],
    dims: Any,
    gradients: Any,
    updates: Any,
    params: Any,
) -> Any:
    """The updates ``change(g, u, x, axes)`` of parameters that have axes and a gradient.

    Args:
        change: returns the update of one parameter.
        dims: the axes, as for :func:`optzoo.variable_clipping`.
        gradients: a tree of arrays, rows and None.
        updates: the updates of the inner optimizer, returned for all other parameters.
        params: the parameters.
    """
    gs, treedef = update_tree.flatten(gradients)
    columns = [treedef.flatten_up_to(tree) for tree in (updates, params, axes_of(dims, params))]
    return treedef.unflatten(
        [
            u if g is None or axes is None else change(g, u, x, axes)
            for g, u, x, axes in zip(gs, *columns, strict=True)
        ]
    )


def axes_of(dims: Any, params: Any) -> Any:
    """A tree like ``params`` of sorted tuples of axes, or None."""
    by_name = patterns_by_name("dims", dims, params) if _are_patterns(dims) else {}

    def of_patterns(path, x):
        if is_masked(x):
            return x
        matching = by_name[path_name(path)]
        found = {_checked(dims[p], path, x) for p in matching}
        if len(found) > 1:
            raise ValueError(f"dims: {matching} all match parameter '{path_name(path)}'")
        return found.pop() if found else None

    def of_tree(path, x, axes):
        if is_masked(x):
            return x
        return None if axes is None else _checked(axes, path, x)

    walk = functools.partial(map_with_path, is_leaf=is_masked)
    return walk(of_patterns, params) if _are_patterns(dims) else walk(of_tree, params, dims)


def _are_patterns(dims: Any) -> bool:
    are_axes = lambda v: isinstance(v, tuple | list) and all(isinstance(a, int) for a in v)
    return isinstance(dims, Mapping) and all(
        isinstance(k, str) and are_axes(v) for k, v in dims.items()
    )


def _checked(axes: Any, path: Any, x: Any) -> Any:
    if stacks_of(path):
        raise ValueError(
            f"dims names axes of single parameters, but '{path_name(path)}' is in a stack along "
            "the first axis: put optzoo.stacked inside this wrapper"
        )
    ndim = jnp.ndim(x)
    if any(not -ndim <= a < ndim for a in axes):
        raise ValueError(
            f"dims: parameter '{path_name(path)}' of shape {jnp.shape(x)} has no axes {axes}"
        )
    return tuple(sorted({a % ndim for a in axes}))
