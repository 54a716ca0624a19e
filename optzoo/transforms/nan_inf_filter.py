"""Replaces values that are not finite by zero."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax

from ..core.gradients import check_arrays
from ..core.optimizer import recorded
from ..core.rows import rows_tree
from ._per_leaf import on_listed


def filtered(g: Any) -> Any:
    """One gradient with zeros instead of NaN and infinities."""
    return on_listed(lambda v: jnp.where(jnp.isfinite(v), v, 0), g)


@recorded
def gradient_nan_inf_filter() -> optax.GradientTransformation:
    r"""Replaces NaN and infinities by zero, as in ``returnn.tf.util.basic.nan_to_num``.

    .. math::
        g_i \leftarrow \begin{cases} g_i & \text{if } g_i \text{ is finite} \\
            0 & \text{otherwise} \end{cases}

    for each element. In a row-sparse gradient, rows that share an index are filtered separately:
    the finite ones are kept. Put the filter after clipping, as RETURNN does: clipping by a norm
    that is not finite makes all elements NaN or zero, and the filter then makes all of them zero.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.transforms.gradient_nan_inf_filter()
        >>> updates, state = tx.update(jnp.array([1.0, jnp.nan, jnp.inf]), tx.init(None))
        >>> print(updates)
        [1. 0. 0.]

    References:
        ``returnn.tf.updater``, option ``gradient_nan_inf_filter``.

    Differences from the original:
        An infinity in a row-sparse gradient becomes zero; in the original it becomes 1e30.
    """

    def update(updates, params):
        del params
        check_arrays(updates)
        return rows_tree.map(filtered, updates)

    return optax.stateless(update)
