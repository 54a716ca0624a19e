"""Clips the global norm of all gradients."""

from __future__ import annotations

import optax

from ..core.checks import check_positive
from ..core.norms import clipped_by_global_norm
from ..core.optimizer import recorded


@recorded
def clip_by_global_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
    r"""Clips the global norm of all gradients, as in ``tf.clip_by_global_norm``.

    .. math::
        g \leftarrow g \cdot \frac{c}{\max(c, \lVert g \rVert)}

    where :math:`g` are all gradients together, row-sparse ones included. Rows that share an index
    are summed first, so that the result is that of the dense gradient.

    ``optax.clip_by_global_norm`` is equal for arrays, but does not accept row-sparse gradients.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.clip_by_global_norm(1.0)
        >>> gradients = {"w": jnp.array([30.0]), "b": jnp.array([40.0])}
        >>> updates, state = tx.update(gradients, tx.init(None))
        >>> print(updates["w"], updates["b"])
        [0.6] [0.8]

    Args:
        max_norm: :math:`c`, positive.

    Raises:
        ValueError: if ``max_norm`` is not positive.

    References:
        Pascanu et al., `On the difficulty of training Recurrent Neural Networks
        <https://arxiv.org/abs/1211.5063>`_, 2013.

    Differences from the original:
        Rows that share an index are summed before the norm is computed; the original computes the
        norm without summing them.

        If the norm is infinite (a square overflows), finite gradients become zero; in the original,
        all become NaN. Infinite elements become NaN in both.
    """
    check_positive(max_norm=max_norm)

    clip = optax.stateless(lambda updates, _: clipped_by_global_norm(updates, max_norm))
    return optax.with_extra_args_support(clip)
