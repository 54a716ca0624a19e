"""Decoupled weight decay, around any optimizer."""

from __future__ import annotations

from typing import Any

import optax

from ..core.checks import check_not_negative, check_params, with_decay_per_step
from ..core.gradients import check_gradients
from ..core.numerics import upcast
from ..core.optimizer import Optimizer, recorded
from ..core.paths import check_mask, resolve_mask
from ..core.rows import SparseRows, is_rows, map_rows, update_tree
from ..state.inner import fitting, inner_transformation


@recorded
@with_decay_per_step
def decoupled_weight_decay(
    inner: optax.GradientTransformation, *, weight_decay_per_step: float, mask: Any = None
) -> optax.GradientTransformationExtraArgs:
    r"""Decoupled weight decay, as in ``tf.contrib.opt.extend_with_decoupled_weight_decay``.

    .. math::
        x' &= x_{t-1} - \lambda\, x_{t-1} \\
        x_t &= x' + u_t(g_t, x')

    where :math:`u_t` is the update of ``inner``, which reads the decayed parameters. The decay is
    not multiplied by the learning rate: ``weight_decay_per_step`` corresponds to ``weight_decay *
    rate`` of ``optax.adamw``. If a gradient is row-sparse, only its rows decay; a parameter without
    a gradient does not decay.

    Example:
        >>> import jax.numpy as jnp, optax, optzoo
        >>> mask = {"kernel": True, "bias": False}
        >>> sgd = optax.sgd(0.1)
        >>> tx = optzoo.decoupled_weight_decay(sgd, weight_decay_per_step=0.01, mask=mask)
        >>> params = {"kernel": jnp.ones(2), "bias": jnp.ones(2)}
        >>> gradients = {"kernel": jnp.ones(2), "bias": jnp.ones(2)}
        >>> updates, state = tx.update(gradients, tx.init(params), params)
        >>> print(updates["kernel"], updates["bias"])
        [-0.11 -0.11] [-0.1 -0.1]

    Args:
        inner: a complete optimizer, including its learning rate.
        weight_decay_per_step: :math:`\lambda`, the fraction of a parameter that is removed at each
            update, at least 0.
        mask: the parameters that decay, a mask such as ``"kernel"`` or ``("kernel", "embedding")``
            (:func:`optzoo.param_groups`); None for all.

    Raises:
        TypeError: if ``mask`` is of another type, if ``inner`` is not a transformation, or if
            ``weight_decay`` is given.
        ValueError: if ``weight_decay_per_step`` is negative or not finite; in ``update`` if no
            params are given, or if a pattern of ``mask`` matches no parameter.

    References:
        Loshchilov and Hutter, `Decoupled Weight Decay Regularization
        <https://arxiv.org/abs/1711.05101>`_, 2019.

    Differences from the original:
        ``mask`` is always applied; the original's ``minimize`` ignores its ``decay_var_list``, and
        an empty list selects all parameters. Around gradient descent the rows of row-sparse
        gradients decay, too. Around LARS both weight decays apply; in the original they share one
        attribute. The decay always precedes the update of an optimizer that reads the parameters;
        in the original the order is undefined.
    """
    inner = inner_transformation(inner=inner)
    check_not_negative(weight_decay_per_step=weight_decay_per_step)
    check_mask(mask=mask)

    def decay(g, x, is_marked):
        if g is None or not is_marked:
            return None
        if is_rows(g):
            return g.with_values(-weight_decay_per_step * upcast(g.gather(x))).drop_padding()
        return -weight_decay_per_step * upcast(x)

    def plus(decay, a):
        return a if decay is None or a is None else (upcast(a) + decay).astype(a.dtype)

    def update(updates, state, params=None, **extra_args):
        check_params(params)
        check_gradients(updates, params)
        updates = map_rows(SparseRows.coalesce, updates)
        everywhere = update_tree.map
        decays = everywhere(
            decay, updates, params, resolve_mask(True if mask is None else mask, updates)
        )
        decayed = everywhere(plus, decays, params)
        updates, state = inner.update(updates, state, decayed, **extra_args)
        return everywhere(plus, decays, updates), state

    def deferral(dense, found):
        if not dense or found is None:  # only the rows of the gradient decay
            return found
        if mask is not None or found.rule.shrink:  # one decay, of all tables
            return None
        return found._replace(rule=found.rule._replace(shrink=float(weight_decay_per_step)))

    about = inner.about.with_deferral(deferral)
    return fitting(Optimizer(inner.init, update, about), moves="decoupled_weight_decay")
