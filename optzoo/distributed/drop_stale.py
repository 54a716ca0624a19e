"""Drops stale gradients: those that were computed from old parameters."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jax import Array, lax

from ..core.checks import check, check_params
from ..core.compat import TracedOnce
from ..core.gradients import check_gradients
from ..core.optimizer import About, Optimizer, recorded
from ..core.rows import (
    apply_not_none,
    is_rows,
    map_rows,
    rows_tree,
    update_tree,
    zeros_like_update,
)
from ..state.inner import fitting, inner_transformation
from ..state.types import SharedParamsState
from .engine.collectives import BUCKET_BYTES, AxisName, Replicas


class DropStaleReplicated(NamedTuple):
    """State that is equal on all replicas."""

    global_step: Array
    stale_counter: Array  # of dropped gradients
    inner: Any  # the state of the inner optimizer


class DropStalePerReplica(NamedTuple):
    """State of each replica."""

    local_step: Array  # the global step at which it read the parameters


@recorded
def drop_stale_gradient(
    inner: optax.GradientTransformation,
    staleness: int,
    *,
    num_workers: int | None = None,
    axis_name: AxisName = "replica",
    bucket_bytes: int | None = BUCKET_BYTES,
) -> optax.GradientTransformationExtraArgs:
    r"""Drops stale gradients, as in ``tf.contrib.opt.DropStaleGradientOptimizer``.

    .. math::
        (x, T) \leftarrow \begin{cases}
            (x + u(g_i), T + 1) & \text{if } T - t_i \le \text{staleness} \\
            (x, T) & \text{otherwise: the gradient is dropped and counted} \end{cases}

    for the active replicas :math:`i`, one after the other by rank, where :math:`u` is the update of
    ``inner``, :math:`T` the global step, and :math:`t_i` the global step at which replica :math:`i`
    read the parameters of its gradient. All replicas share parameters and slots. Row-sparse
    gradients stay rows if the updates of ``inner`` do.

    Arguments of ``update`` are ``active`` (bool per replica: whether it applies a gradient now) and
    ``local_step`` (int per replica: :math:`t_i`; by default the global step after its last
    gradient, as for workers that read the parameters immediately). If all replicas apply gradients
    of the same parameters, the first ``staleness + 1`` by rank are accepted, because each update
    increases the age of the remaining gradients by one. ``value``, the loss of a replica, is passed
    to ``inner`` with its gradient; other arguments for ``inner`` must be equal on all replicas.

    Example:
        >>> import jax.numpy as jnp, optax, optzoo
        >>> tx = optzoo.drop_stale_gradient(optzoo.gradient_descent(0.1), staleness=0)
        >>> params, state = optzoo.replicas.replicate(jnp.zeros(1), tx.init(jnp.zeros(1)), 2)
        >>> def step(params, state, gradient):
        ...     updates, state = tx.update(gradient, state, params)
        ...     return optax.apply_updates(params, updates), state
        >>> params, state = optzoo.replicas.map_over_replicas(step)(
        ...     params, state, jnp.array([[1.0], [3.0]])
        ... )
        >>> print(params)  # the gradient of the second replica was one update old
        [-0.1]

    Args:
        inner: a complete optimizer, including its learning rate.
        staleness: the largest age of a gradient, in updates; below 0, no gradient is accepted.
        num_workers: the expected number of replicas; None for the size of the axis.
        axis_name: the axis, or axes, of the replicas; None for a single replica.
        bucket_bytes: arrays up to this size are sent together; None sends each separately.

    Raises:
        TypeError: if ``inner`` is not a transformation, or ``staleness`` is not a number.
        ValueError: if ``staleness`` is NaN; at trace time, if the size of the axis is not
            ``num_workers``, or if gradients are already summed over the replicas.
        NameError: at trace time, if there is no such axis.

    References:
        ``tf.contrib.opt.DropStaleGradientOptimizer`` of `TensorFlow 1
        <https://github.com/tensorflow/tensorflow>`_.

    Differences from the original:
        In the original, another worker may update between the check and the update; here they are
        one step. The count of dropped gradients is an int, ``state.replicated.stale_counter``.
    """
    replicas = Replicas(axis_name, bucket_bytes, num_workers)
    inner = inner_transformation(inner=inner)
    check("a number", lambda v: not math.isnan(v), infinite=True, staleness=staleness)

    def init(params):
        zero = lambda: jnp.zeros([], jnp.int32)
        replicated = DropStaleReplicated(zero(), zero(), inner.init(params))
        return SharedParamsState(replicated, replicas.vary_new(DropStalePerReplica(zero())))

    def update(updates, state, params=None, *, active=None, local_step=None, **extra_args):
        check_params(params)
        check_gradients(updates, params)
        replicas.check_per_replica(updates)
        replicas.check_replicated(params)
        last_read = state.per_replica.local_step
        active = jnp.asarray(True if active is None else active)
        read_at = jnp.asarray(last_read if local_step is None else local_step)

        # Row ids are added as integers: all replicas but one add zeros.
        plain = map_rows(lambda g: (g.indices, g.values), updates)
        rows_like = lambda like, g: like.with_rows(*g) if is_rows(like) else g
        moves: list[bool] = []  # for each parameter, whether the inner optimizer updates it

        def turn(carry, of_rank):
            x, of_inner, step, dropped = carry
            rank, active, read_at = of_rank

            @TracedOnce
            def apply():
                is_next = replicas.index == rank
                g = replicas.sum_where(is_next, plain)
                g = rows_tree.map(rows_like, updates, g)
                shared = replicas.shared_arguments(is_next, extra_args)
                us, new = inner.update(g, of_inner, x, **shared)
                moves[:] = (u is not None for u in update_tree.leaves(us))
                rows = rows_tree.map(lambda u: u if is_rows(u) else None, us)
                return apply_not_none(x, us), new, rows

            fits = step - read_at <= staleness
            nothing = lambda: (x, of_inner, zeros_like_update(apply.types[2]))
            x, of_inner, rows = lax.cond(active & fits, apply, nothing)
            one = lambda wanted: wanted.astype(jnp.int32)
            carry = x, of_inner, step + one(active & fits), dropped + one(active & ~fits)
            return carry, rows

        def change(g, is_moved, new, old, rows):
            if not is_moved:
                return None
            if is_rows(rows):  # from all turns
                values = rows.values.reshape(-1, *rows.values.shape[2:])
                return rows.with_rows(rows.indices.ravel(), values)
            return (new - old).astype(old.dtype if g is None else g.dtype)

        step, dropped, of_inner = state.replicated
        first = params, of_inner, step, dropped
        of_ranks = replicas.ranks, *replicas.gather((active[None], read_at[None]))
        (x, of_inner, step, dropped), rows = lax.scan(turn, first, of_ranks)
        treedef = update_tree.structure(updates)
        of_each = treedef.unflatten(moves), x, params, rows
        us = update_tree.map(change, updates, *of_each)
        per_replica = DropStalePerReplica(jnp.where(active, step, last_read))
        return us, SharedParamsState(DropStaleReplicated(step, dropped, of_inner), per_replica)

    about = About(reads=inner.about.reads).reading("active", "local_step")
    return fitting(Optimizer(init, update, about))
