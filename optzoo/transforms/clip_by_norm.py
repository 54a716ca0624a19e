"""Clips the norm of each gradient separately."""

from __future__ import annotations

from typing import Any

import optax

from ..core.checks import check_positive
from ..core.norms import clipping_factor, norm, times
from ..core.optimizer import recorded
from ._per_leaf import on_each


def clipped_by_norm(g: Any, max_norm: Any) -> Any:
    """An array, or unmerged rows, whose norm is at most ``max_norm``."""
    return times(clipping_factor(norm(g), max_norm), g)


@recorded
def clip_by_norm(max_norm: float) -> optax.GradientTransformation:
    r"""Clips the norm of each gradient, as in RETURNN's ``gradient_clip_norm``.

    .. math::
        g \leftarrow g \cdot \frac{c}{\max(c, \lVert g \rVert)}

    for each parameter separately, unlike :func:`optzoo.clip_by_global_norm`. Row-sparse gradients
    stay row-sparse; rows that share an index are summed first, so that the result is that of the
    dense gradient.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.transforms.clip_by_norm(1.0)
        >>> gradients = {"w": jnp.array([30.0]), "b": jnp.array([0.5])}
        >>> updates, state = tx.update(gradients, tx.init(None))
        >>> print(updates["w"], updates["b"])  # each parameter by itself
        [1.] [0.5]

    Args:
        max_norm: :math:`c`, positive.

    Raises:
        ValueError: if ``max_norm`` is not positive.

    References:
        ``tf.clip_by_norm``; ``returnn.tf.updater``, option ``gradient_clip_norm``.

    Differences from the original:
        Rows that share an index are summed before the norm is computed; the original computes the
        norm without summing them.
    """
    check_positive(infinite=True, max_norm=max_norm)
    return on_each(lambda g: clipped_by_norm(g, max_norm))
