"""Periodic replacement of the parameters by their average, around any optimizer."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from ..core.checks import check_flags, check_fraction, check_params, check_size
from ..core.gradients import check_gradients
from ..core.numerics import common_cycle, next_count, upcast, wide_dtype
from ..core.optimizer import About, Optimizer, recorded
from ..core.rows import update_tree
from ..core.short import short_repr
from ..state.inner import fitting, inner_transformation
from ._moved import moved_update


class EnsembleState(NamedTuple):
    """The number of updates, the averages, and the state of the inner optimizer."""

    count: Array
    average: Any  # like the parameters, in float32 at least
    inner: Any

    __repr__ = short_repr


@recorded
def ensemble(
    inner: optax.GradientTransformation,
    every: int = 10000,
    swap_every: int = 10000,
    start_step: int = 0,
    coefficient: float = 0.6,
    reset: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Averages the parameters periodically and replaces them by their averages.

    .. math::
        e_t &= \kappa_t\, e_{t-1} + (1 - \kappa_t)\, x_{t-1} \quad \text{if } t \bmod k = 0 \\
        x' &= e_t \quad \text{if } t \bmod k' = 0 \text{, otherwise } x_{t-1} \\
        x_t &= x' + u_t(g_t, x')

    where :math:`u_t` is the update of ``inner``, :math:`e_0 = 0`, and :math:`\kappa_t` is 0 up to
    update ``start_step`` and :math:`\kappa` later. With ``reset`` the average is set to zero after
    each update that averaged. A parameter without a gradient is unchanged.

    Every row may move, so the update of a table is dense: each step reads and writes the whole
    table. The original averages before its lookup: the gradient of such a step is then that of the
    new parameters.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> inner = optzoo.gradient_descent(1.0)
        >>> tx = optzoo.interop.fbgemm.ensemble(inner, every=1, swap_every=2, coefficient=0.5)
        >>> params = jnp.array([4.0])
        >>> state = tx.init(params)
        >>> for _ in range(2):
        ...     updates, state = tx.update(jnp.array([1.0]), state, params)
        ...     params = params + updates
        >>> print(params)  # the average, and then a step
        [1.5]

    Args:
        inner: a complete optimizer, including its learning rate.
        every: :math:`k`, the number of updates between averages, an int, at least 1.
        swap_every: :math:`k'`, the number of updates between replacements, an int, at least 1.
        start_step: the last update at which the average is restarted, an int, at least 0.
        coefficient: :math:`\kappa`, the weight of the old average, in [0, 1].
        reset: whether the average becomes zero after each update that averaged.

    Raises:
        TypeError: if ``inner`` is not a transformation, or a number of updates is not an int.
        ValueError: in ``update``, if no params are given.

    References:
        ``EmbOptimType.ENSEMBLE_ROWWISE_ADAGRAD`` of `FBGEMM <https://github.com/pytorch/FBGEMM>`_,
        which is this wrapper around :func:`optzoo.row_wise_adagrad`. It needs a GPU and was not run
        for comparison: the formula follows its source code.
    """
    inner = inner_transformation(inner=inner)
    every, swap_every = check_size(1, every=every), check_size(1, swap_every=swap_every)
    start_step = check_size(start_step=start_step)
    check_fraction(coefficient=coefficient)
    check_flags(reset=reset)

    def of_leaf(g, x, e, t):
        """The parameter before the update of ``inner``, and the average after it."""
        if g is None:
            return x, e
        averages, swaps = t % every == 0, t % swap_every == 0
        wide, kept = upcast(x), jnp.where(t <= start_step, 0, coefficient)
        new = jnp.where(averages, e + (1 - kept) * (wide - e), e)
        moved = jnp.where(swaps, new, wide)
        return moved, (jnp.where(averages, 0, new) if reset else new)

    def init(params):
        average = jax.tree.map(lambda x: jnp.zeros_like(x, wide_dtype(x)), params)
        return EnsembleState(jnp.zeros([], jnp.int32), average, inner.init(params))

    def update(updates, state, params=None, **extra_args):
        check_params(params)
        check_gradients(updates, params)
        t = next_count(state.count, common_cycle(every, swap_every))
        gs, treedef = update_tree.flatten(updates)
        xs, es = treedef.flatten_up_to(params), treedef.flatten_up_to(state.average)
        pairs = [of_leaf(*leaf, t) for leaf in zip(gs, xs, es, strict=True)]
        moved = [
            x if x is None else new.astype(x.dtype) for (new, _), x in zip(pairs, xs, strict=True)
        ]
        us, inner_state = inner.update(updates, state.inner, treedef.unflatten(moved), **extra_args)
        us = treedef.flatten_up_to(us)
        sums = [moved_update(u, new, x) for u, (new, _), x in zip(us, pairs, xs, strict=True)]
        average = treedef.unflatten([e for _, e in pairs])
        return treedef.unflatten(sums), EnsembleState(t, average, inner_state)

    return fitting(Optimizer(init, update, About(reads=inner.about.reads)), moves="ensemble")
