"""Helpers of this folder: functions applied to each gradient, and the global norm."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from ..core.numerics import sqrt, upcast
from ..core.rows import SparseRows, is_rows, map_rows


def on_listed(f: Callable[[Array], Array], g: Any) -> Any:
    """``f`` of an array or of the values of rows, which are not merged; in the dtype of ``g``."""
    if is_rows(g):
        return g.with_values(on_listed(f, g.values))
    g = jnp.asarray(g)
    return f(upcast(g)).astype(g.dtype)


def on_each(f: Callable[[Array, int], Array]) -> optax.GradientTransformation:
    """Applies ``f(values, size)`` to every gradient, where ``size`` is that of the whole array.

    Rows that share an index are summed first, so that the result is that of the dense gradient.
    """

    def on_leaf(g):
        size = math.prod(jnp.shape(g))
        return on_listed(lambda values: f(values, size), g)

    def update(updates, _):
        return jax.tree.map(on_leaf, map_rows(SparseRows.coalesce, updates), is_leaf=is_rows)

    return optax.stateless(update)


def global_norm(gradients: Iterable[Any]) -> Array:
    """The Euclidean norm of all gradients, without merging rows; in float32 at least."""
    listed = [g.values if is_rows(g) else jnp.asarray(g) for g in gradients if g is not None]
    squares = [jnp.sum(upcast(v) ** 2) for v in listed]
    return sqrt(sum(squares, jnp.zeros([], jnp.float32)))
