"""Zeroes all gradients of a step if their global norm is too large."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax
from jax import Array

from ..core.checks import check_positive
from ..core.gradients import check_arrays
from ..core.norms import global_norm
from ..core.optimizer import recorded
from ..core.rows import SparseRows, map_rows, rows_tree
from ._per_leaf import on_listed


def zero_unless(keep: Array, g: Any) -> Any:
    """The gradient if ``keep``, zeros otherwise."""
    return on_listed(lambda values: jnp.where(keep, values, 0), g)


def is_within(norm: Array, max_norm: Any) -> Array:
    """Whether a norm is finite and not above ``max_norm``."""
    return jnp.isfinite(norm) & (norm <= max_norm)


@recorded
def zero_if_norm_exceeds(max_norm: float) -> optax.GradientTransformation:
    r"""Zeroes gradients whose norm is too large, as in RETURNN's ``grad_norm_to_clip_to_zero``.

    .. math::
        g \leftarrow \begin{cases} g & \text{if } \lVert g \rVert \le c \\
            0 & \text{otherwise, or if the norm is not finite} \end{cases}

    where the norm is over all gradients together. Row-sparse gradients stay row-sparse, and rows
    that share an index are summed first. The next optimizer in the chain still makes a step, with
    zero gradients: momentum decays and moves the parameters, and the step is counted. With
    ``max_norm=math.inf`` only gradients with NaN or infinities become zero; before
    :func:`optzoo.accumulate`, such a step does not change the sum.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.transforms.zero_if_norm_exceeds(10.0)
        >>> gradients = {"w": jnp.array([30.0]), "b": jnp.array([0.5])}
        >>> updates, state = tx.update(gradients, tx.init(None))
        >>> print(updates["w"], updates["b"])  # the norm of all gradients together decides
        [0.] [0.]

    Args:
        max_norm: :math:`c`, positive.

    Raises:
        ValueError: if ``max_norm`` is not positive.

    References:
        ``returnn.tf.updater``, option ``grad_norm_to_clip_to_zero``.

    Differences from the original:
        Rows that share an index are summed before the norm is computed; the original computes the
        norm without summing them.
    """
    check_positive(infinite=True, max_norm=max_norm)

    def update(updates, _):
        check_arrays(updates)
        updates = map_rows(SparseRows.coalesce, updates)
        keep = is_within(global_norm(rows_tree.leaves(updates)), max_norm)
        return rows_tree.map(lambda g: zero_unless(keep, g), updates)

    return optax.stateless(update)
