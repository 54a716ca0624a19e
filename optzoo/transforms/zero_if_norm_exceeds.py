"""Drops all gradients of a step whose norm is too large."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from ..core.checks import check_positive
from ..core.rows import SparseRows, is_rows, map_rows
from ._per_leaf import global_norm, on_listed


def zero_unless(keep: Array, g: Any) -> Any:
    """One gradient, or zeros."""
    return on_listed(lambda values: jnp.where(keep, values, 0), g)


def is_within(norm: Array, max_norm: Any) -> Array:
    """Whether a norm is finite and not above ``max_norm``."""
    return jnp.isfinite(norm) & (norm <= max_norm)


def zero_if_norm_exceeds(max_norm: float) -> optax.GradientTransformation:
    r"""Zeroes all gradients of a bad step, as in RETURNN's ``grad_norm_to_clip_to_zero``.

    .. math::
        g \leftarrow \begin{cases} g & \text{if } \lVert g \rVert \le c \\
            0 & \text{otherwise, or if the norm is not finite} \end{cases}

    where the norm is that of all gradients together. Rows stay rows. The optimizer behind it still
    makes its step: momentum goes on, Adam counts. With ``max_norm=math.inf`` only steps with NaN
    or infinities are dropped; in front of :func:`optzoo.accumulate` they leave the sum alone.

    Args:
        max_norm: :math:`c`, positive.

    Raises:
        ValueError: if ``max_norm`` is not positive.

    References:
        ``returnn.tf.updater``, option ``grad_norm_to_clip_to_zero``.
    """
    check_positive(max_norm=max_norm)

    def update(updates, _):
        updates = map_rows(SparseRows.coalesce, updates)
        keep = is_within(global_norm(jax.tree.leaves(updates, is_leaf=is_rows)), max_norm)
        return jax.tree.map(lambda g: zero_unless(keep, g), updates, is_leaf=is_rows)

    return optax.stateless(update)
