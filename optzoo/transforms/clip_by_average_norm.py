"""Clips the norm of each gradient, relative to its number of elements."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax

from ..core.checks import check_positive
from ..core.norms import clipping_factor, norm, times
from ..core.optimizer import recorded
from ..core.rows import is_rows
from ._per_leaf import on_each


def clipped_by_average_norm(g: Any, size: int, max_norm: Any) -> Any:
    """An array, or unmerged rows, whose norm is at most ``max_norm`` times ``size``."""
    return times(clipping_factor(norm(g), max_norm * size), g)


@recorded
def clip_by_average_norm(max_norm: float) -> optax.GradientTransformation:
    r"""Clips norms relative to the number of elements, as in RETURNN's ``gradient_clip_avg_norm``.

    .. math::
        g \leftarrow g \cdot \frac{c\, n}{\max(c\, n, \lVert g \rVert)}

    for each parameter separately, where :math:`n` is the number of its elements. The clipped
    quantity is :math:`\lVert g \rVert / n`, not the root mean square (``optax.clip_by_block_rms``).
    Row-sparse gradients stay row-sparse; the norm is that of the summed gradient and :math:`n` is
    the size of the whole table.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.transforms.clip_by_average_norm(1.0)
        >>> updates, state = tx.update({"w": jnp.array([30.0, 40.0])}, tx.init(None))
        >>> print(updates["w"])  # norm 50 for 2 elements is 25 in the average
        [1.2 1.6]

    Args:
        max_norm: :math:`c`, positive.

    Raises:
        ValueError: if ``max_norm`` is not positive.

    References:
        ``tf.clip_by_average_norm``; ``returnn.tf.updater``, option ``gradient_clip_avg_norm``.
    """
    check_positive(infinite=True, max_norm=max_norm)
    return on_each(
        lambda g: clipped_by_average_norm(g, g.size if is_rows(g) else jnp.size(g), max_norm)
    )
