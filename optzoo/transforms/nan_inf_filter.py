"""Zero in the place of what is not finite."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..core.rows import is_rows
from ._per_leaf import on_listed


def filtered(g: Any) -> Any:
    """One gradient with zeros in the place of NaN and of infinities."""
    return on_listed(lambda v: jnp.where(jnp.isfinite(v), v, 0), g)


def gradient_nan_inf_filter() -> optax.GradientTransformation:
    r"""Zero in the place of NaN and infinities, as in ``returnn.tf.util.basic.nan_to_num``.

    .. math::
        g_i \leftarrow \begin{cases} g_i & \text{if } g_i \text{ is finite} \\
            0 & \text{otherwise} \end{cases}

    element by element. Of a row-sparse gradient each listed row is filtered by itself, so of rows
    that share an index the finite ones still count. Put it behind the clips, as RETURNN does: a
    clip by a norm that is not finite spoils all elements, and they all become zero.

    References:
        ``returnn.tf.updater``, option ``gradient_nan_inf_filter``.

    Differences from the original:
        An infinity in a row-sparse gradient becomes zero, too; there it becomes 1e30.
    """
    return optax.stateless(lambda updates, _: jax.tree.map(filtered, updates, is_leaf=is_rows))
