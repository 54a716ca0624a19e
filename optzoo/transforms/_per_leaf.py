"""Helpers of this folder: functions applied to each gradient."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax
from jax import Array

from ..core.gradients import check_arrays
from ..core.numerics import upcast
from ..core.rows import SparseRows, is_rows, map_rows, rows_tree


def on_listed(f: Callable[[Array], Array], g: Any) -> Any:
    """``f`` applied to an array or to the values of unmerged rows; in the dtype of ``g``."""
    if is_rows(g):
        return g.with_values(on_listed(f, g.values))
    g = jnp.asarray(g)
    return f(upcast(g)).astype(g.dtype)


def on_each(f: Callable[[Any], Any]) -> optax.GradientTransformation:
    """Applies ``f`` to every gradient, an array or rows.

    Rows that share an index are summed first, so that the result is that of the dense gradient.
    """

    def update(updates, _):
        check_arrays(updates)
        return rows_tree.map(f, map_rows(SparseRows.coalesce, updates))

    return optax.stateless(update)
