"""Gradient accumulation around any optimizer."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from ..core.checks import (
    check_flags,
    check_size,
    check_transformation,
    check_update_arguments,
)
from ..core.gradients import check_gradients
from ..core.numerics import saturating_cast
from ..core.rows import SparseRows, is_sparse_or_none, map_rows, zeros_like_update
from ..state.averages import wide_zeros_like


class AccumulateState(NamedTuple):
    """The number of steps, the sums of this cycle, and the state of the inner optimizer."""

    count: Array
    sums: Any  # params-shaped, in float32 at least; empty if every step is applied
    inner: Any


def accumulate(
    inner: optax.GradientTransformation, every: int, *, use_mean: bool = False
) -> optax.GradientTransformationExtraArgs:
    r"""Sums the gradients of several steps, as in RETURNN's ``accum_grad_multiple_step``.

    .. math::
        a_t &= \begin{cases} g_t & \text{if } t \bmod n = 0 \\
            a_{t-1} + g_t & \text{otherwise} \end{cases} \\
        x_{t+1} &= \begin{cases} x_t + u(a_t) & \text{if } t \bmod n = n - 1 \\
            x_t & \text{otherwise} \end{cases}

    where :math:`u` is the update of ``inner``, which is run in the last step of a cycle only: in
    other steps its slots and its step count are unchanged. The updates of other steps are exactly
    zero, even if a gradient is NaN (``optax.MultiSteps`` multiplies by zero, which keeps a NaN).
    Row-sparse gradients become dense.

    A cycle begins when the number :math:`t` of steps before this one is a multiple of :math:`n`.
    ``update(..., global_step=)`` sets :math:`t`; without it the steps are counted here. ``inner``
    gets ``global_step // every``, the number of its updates.

    To skip micro-steps with NaN or infinities, put ``zero_if_norm_exceeds(math.inf)`` before it in
    the chain.

    Args:
        inner: a complete optimizer, including its learning rate.
        every: :math:`n`, the number of steps in a cycle, at least 1.
        use_mean: divide the sum by ``every``, as ``optax.MultiSteps`` does.

    Raises:
        TypeError: if ``every`` is not an int.
        ValueError: if it is below 1.

    References:
        ``returnn.tf.updater``, option ``accum_grad_multiple_step``.
    """
    check_transformation(inner=inner)
    every = check_size(1, every=every)
    check_flags(use_mean=use_mean)
    inner = optax.with_extra_args_support(inner)

    def init(params):
        sums = () if every == 1 else wide_zeros_like(params)
        return AccumulateState(jnp.zeros([], jnp.int32), sums, inner.init(params))

    def update(updates, state, params=None, *, global_step=None, **extra_args):
        check_gradients(updates, params)
        updates = map_rows(SparseRows.to_dense, updates)
        check_update_arguments({"global_step": global_step, **extra_args})
        if global_step is not None:
            extra_args["global_step"] = global_step // every
        count = jnp.asarray(optax.safe_increment(state.count))
        if every == 1:
            updates, new = inner.update(updates, state.inner, params, **extra_args)
            return updates, AccumulateState(count, (), new)

        position = (state.count if global_step is None else global_step) % every
        before = jax.tree.map(lambda a: jnp.where(position == 0, 0, a), state.sums)
        plus = lambda g, a: a if g is None else a + jnp.asarray(g).astype(a.dtype)
        sums = jax.tree.map(plus, updates, before, is_leaf=is_sparse_or_none)
        scale = 1 / every if use_mean else 1
        total = lambda g, a: None if g is None else saturating_cast(a * scale, jnp.result_type(g))

        def apply():
            totals = jax.tree.map(total, updates, sums, is_leaf=is_sparse_or_none)
            return inner.update(totals, state.inner, params, **extra_args)

        shapes, _ = jax.eval_shape(apply)
        wait = lambda: (zeros_like_update(shapes), state.inner)
        updates, new = lax.cond(position == every - 1, apply, wait)
        return updates, AccumulateState(count, sums, new)

    return optax.GradientTransformationExtraArgs(init, update)
