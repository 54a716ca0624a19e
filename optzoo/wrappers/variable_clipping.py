"""Clips the norms of parameters, around any optimizer."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from ..core.checks import check_params, check_positive
from ..core.gradients import check_gradients
from ..core.norms import over_shards
from ..core.numerics import sqrt, upcast
from ..core.optimizer import About, Optimizer
from ..core.paths import is_masked, map_with_path, path_name, patterns_by_name
from ..core.rows import SparseRows, is_rows, is_sparse_or_none, map_rows
from ..state.inner import fitting, inner_transformation


def variable_clipping(
    inner: optax.GradientTransformation, dims: Any, max_norm: float
) -> optax.GradientTransformationExtraArgs:
    r"""Clips parameters after each update, as in ``tf.contrib.opt.VariableClippingOptimizer``.

    .. math::
        x' &= x_{t-1} + u_t \\
        x_t &= x' \cdot \frac{c}{\max(c, \lVert x' \rVert)}

    where :math:`u_t` is the update of ``inner`` and the norm is over the given axes: ``(1,)`` for
    an embedding table means the norm of each row. If a gradient is row-sparse, only its rows are
    clipped, unless axis 0 is among the axes: then the whole parameter is clipped. A parameter
    without a gradient is not clipped.

    It must be the last transformation of a chain: it clips the parameters plus this update.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> inner = optzoo.gradient_descent(0.1)
        >>> tx = optzoo.variable_clipping(inner, {"table": (1,)}, max_norm=1.0)
        >>> params = {"table": jnp.array([[3.0, 4.0], [0.3, 0.4]])}
        >>> updates, state = tx.update({"table": jnp.zeros((2, 2))}, tx.init(params), params)
        >>> print(params["table"] + updates["table"])  # rows of norm 1 at most
        [[0.6 0.8]
         [0.3 0.4]]

    Args:
        inner: a complete optimizer, including its learning rate.
        dims: a dict from patterns to axes, such as ``{".*/embedding": (1,)}``, by patterns of
            names (:func:`optzoo.param_groups`); or a tree like the parameters with a tuple of axes,
            or None, for each. An empty tuple clips the absolute value of each element.
        max_norm: :math:`c`, positive.

    Raises:
        ValueError: if ``max_norm`` is not positive, if no params are given to ``update``, or, at
            trace time, if a pattern matches no parameter, if two patterns with different axes match
            the same parameter, or if a parameter has no such axis.

    References:
        Hinton et al., `Improving neural networks by preventing co-adaptation of feature detectors
        <https://arxiv.org/abs/1207.0580>`_, 2012 (the bound on norms); ``tf.clip_by_norm``.

    Differences from the original:
        Rows that share an index are clipped once; the original subtracts the excess once for each
        of them, which makes the row too short or reverses its sign. A bound of zero or less is an
        error.
    """
    inner = inner_transformation(inner=inner)
    check_positive(max_norm=max_norm)
    if isinstance(dims, Mapping) and any(isinstance(axes, int) for axes in dims.values()):
        raise ValueError(f"dims must hold tuples of axes such as (1,), got {dims!r}")

    def clipped(g, x, axes):
        squares = jnp.sum(x**2, axis=axes, keepdims=True)
        if 0 in axes:
            [squares] = over_shards([g], [squares], lax.psum)
        return x * (max_norm / jnp.maximum(sqrt(squares), max_norm))

    def clip(g, u, x, axes):
        """The update that results in the clipped parameter."""
        if g is None or axes is None:
            return u
        to_clipped = lambda u, x: (clipped(g, x + u, axes) - x).astype(g.dtype)
        if is_rows(u) and 0 not in axes:
            u = u.coalesce()
            return u.with_values(to_clipped(upcast(u.values), upcast(u.gather(x)))).drop_padding()
        u, x = upcast(u.to_dense(x) if is_rows(u) else u), upcast(x)
        if not is_rows(g) or 0 in axes:
            return to_clipped(u, x)
        return g.scatter(u.astype(g.dtype), to_clipped(g.gather(u), g.gather(x)))

    def update(updates, state, params=None, **extra_args):
        check_params(params)
        check_gradients(updates, params)
        axes = _axes(dims, params)
        given = map_rows(SparseRows.coalesce, updates)
        updates, state = inner.update(given, state, params, **extra_args)
        gs, treedef = jax.tree.flatten(given, is_leaf=is_sparse_or_none)
        columns = [treedef.flatten_up_to(tree) for tree in (updates, params, axes)]
        done = [clip(*leaf) for leaf in zip(gs, *columns, strict=True)]
        return treedef.unflatten(done), state

    about = About(reads=inner.about.reads)
    return fitting(Optimizer(inner.init, update, about), moves="variable_clipping")


def _axes(dims: Any, params: Any) -> Any:
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
    ndim = jnp.ndim(x)
    if any(not -ndim <= a < ndim for a in axes):
        raise ValueError(
            f"dims: parameter '{path_name(path)}' of shape {jnp.shape(x)} has no axes {axes}"
        )
    return tuple(sorted({a % ndim for a in axes}))
