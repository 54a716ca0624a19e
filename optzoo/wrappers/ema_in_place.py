"""A moving average of the first half of each row in its second half, around any optimizer."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jax import Array

from ..core.checks import check_fraction, check_params, check_size
from ..core.gradients import check_gradients
from ..core.meshes import like_first
from ..core.numerics import next_count, upcast
from ..core.optimizer import About, Optimizer, recorded
from ..core.paths import leaves_with_path, path_name
from ..core.rows import is_sparse_or_none, update_tree
from ..core.short import short_repr
from ..state.inner import fitting, inner_transformation
from ._moved import moved_update


class EMAInPlaceState(NamedTuple):
    """The number of updates, and the state of the inner optimizer."""

    count: Array
    inner: Any

    __repr__ = short_repr


@recorded
def ema_in_place(
    inner: optax.GradientTransformation,
    every: int = 10,
    start_step: int = 0,
    coefficient: float = 0.6,
) -> optax.GradientTransformationExtraArgs:
    r"""Moves the second half of each row towards its first half, periodically.

    .. math::
        x'_{i, d/2 + j} &= x_{i, d/2 + j} + \kappa\, (x_{i, j} - x_{i, d/2 + j})
            \quad \text{if } t \bmod k = 0 \text{ and } t \ge s \\
        x_t &= x' + u_t(g_t, x')

    for all rows :math:`i` of all parameters with at least two axes, where :math:`u_t` is the update
    of ``inner``. The first half is trained, and the second half is a target that follows it. Other
    parameters, and those without a gradient, are updated by ``inner`` only (see
    :func:`optzoo.param_groups`).

    Every row moves, so the update of a table is dense: each step reads and writes the whole table,
    also in steps without averaging. The original averages before its lookup: the gradient of such a
    step is then that of the averaged rows.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.interop.fbgemm.ema_in_place(
        ...     optzoo.row_wise_adagrad(0.1), every=1, coefficient=0.5
        ... )
        >>> table = jnp.array([[4.0, 0.0]])
        >>> updates, state = tx.update(jnp.zeros((1, 2)), tx.init(table), table)
        >>> print(table + updates)  # the second half moves towards the first
        [[4. 2.]]

    Args:
        inner: a complete optimizer, including its learning rate.
        every: :math:`k`, an int, at least 1.
        start_step: :math:`s`, the first update that may average, an int, at least 0.
        coefficient: :math:`\kappa`, in [0, 1].

    Raises:
        TypeError: if ``inner`` is not a transformation, or a number of updates is not an int.
        ValueError: in ``update``, if no params are given or a row has an odd number of elements.

    References:
        ``EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD`` of `FBGEMM
        <https://github.com/pytorch/FBGEMM>`_, which is this wrapper around
        :func:`optzoo.row_wise_adagrad`.
    """
    inner = inner_transformation(inner=inner)
    every, start_step = check_size(1, every=every), check_size(start_step=start_step)
    check_fraction(coefficient=coefficient)

    def averaged(path, x, g, is_due):
        if g is None or jnp.ndim(x) < 2:
            return x
        if x.shape[-1] % 2:
            raise ValueError(
                f"parameter '{path_name(path)}' has rows of {x.shape[-1]} elements, an odd "
                "number, which cannot be halved: give it another optimizer by optzoo.param_groups"
            )
        return like_first(moved)(upcast(x), is_due)

    def moved(x, is_due):
        main, target = jnp.split(x, 2, axis=-1)
        ahead = jnp.concatenate([main, target + coefficient * (main - target)], axis=-1)
        return jnp.where(is_due, ahead, x)

    def init(params):
        return EMAInPlaceState(jnp.zeros([], jnp.int32), inner.init(params))

    def update(updates, state, params=None, **extra_args):
        check_params(params)
        check_gradients(updates, params)
        t = next_count(state.count, every)
        gs, treedef = update_tree.flatten(updates)
        paths = [path for path, _ in _paths(updates)]
        xs = treedef.flatten_up_to(params)
        is_due = (t % every == 0) & (t >= start_step)
        news = [averaged(*leaf, is_due) for leaf in zip(paths, xs, gs, strict=True)]
        moved = [
            new.astype(x.dtype) if new is not x else x for new, x in zip(news, xs, strict=True)
        ]
        us, inner_state = inner.update(updates, state.inner, treedef.unflatten(moved), **extra_args)
        us = treedef.flatten_up_to(us)
        sums = [moved_update(*leaf) for leaf in zip(us, news, xs, strict=True)]
        return treedef.unflatten(sums), EMAInPlaceState(t, inner_state)

    return fitting(Optimizer(init, update, About(reads=inner.about.reads)), moves="ema_in_place")


def _paths(updates: Any) -> Any:
    return leaves_with_path(updates, is_leaf=is_sparse_or_none)
