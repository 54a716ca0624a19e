"""Accumulated gradient normalization (AGN)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from ..core.checks import check_size
from ..core.meshes import placed_as
from ..core.numerics import cast, words_of
from ..core.optimizer import recorded
from ..core.rows import apply_not_none, map_not_none, update_tree
from ..state.averages import wide_zeros_like
from ..state.came import has_come, leave_out, none_came
from ..state.inner import fitting, inner_transformation
from ..state.slots import are_slots
from .engine.collectives import BUCKET_BYTES, AxisName, Replicas, from_sum, zero_unless
from .engine.local_sgd import LocalSGDMethod, Order, local_sgd


class AGNReplicated(NamedTuple):
    """State that is equal on all replicas."""

    center_inner: Any  # the state of the inner optimizer beside the center


class AGNPerReplica(NamedTuple):
    """State of each replica."""

    accumulated: Any  # params-shaped: the sum of the gradients since the last push
    since: Array  # the number of local steps since then
    came: Any  # whether a parameter had a gradient since then


@recorded
def agn(
    inner: optax.GradientTransformation,
    num_workers: int | None = None,
    *,
    axis_name: AxisName = "replica",
    communication_period: int = 10,
    order: Order = "simultaneous",
    bucket_bytes: int | None = BUCKET_BYTES,
    skip_nonfinite: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Accumulated gradient normalization, as in ``tf.contrib.opt.AGNOptimizer``.

    .. math::
        a_i &\leftarrow a_i + g_i, \quad x_i \leftarrow x_i + u_i(g_i) \\
        \text{every } \tau \text{ steps:} \quad
        c &\leftarrow c + u_c\Bigl(\frac{1}{n} \sum_{j \text{ pushing}} \frac{a_j}{\tau}\Bigr),
        \quad x_i \leftarrow c, \quad a_i \leftarrow 0

    where :math:`x_i` are the parameters of replica :math:`i`, :math:`c` is the center, :math:`u_i`
    and :math:`u_c` are the updates of ``inner`` with the slots of the replica and with those of the
    center, and :math:`n` replicas push at once. A push does not change the slots of the replica. A
    push uses and increments the step counts and powers of the replica (of the first one, if several
    push at once), as in the original. :func:`optzoo.eval_params` returns the center. With
    ``exchange=False``, row-sparse gradients make row-sparse local steps and are accumulated at
    their rows; a push sends whole tables.

    The wrapper must be the last transformation of a chain. Arguments of ``update`` are ``active``
    (bool per replica: whether it makes a step now) and ``exchange`` (a Python bool, equal on all
    replicas: whether to push now, independently of the step count; the mean is over the steps since
    the last push; see :func:`optzoo.replicas.scan_local_steps`). ``value``, the loss of a replica,
    is passed to the update of the center as the mean over the pushing replicas; other arguments for
    ``inner`` must be equal on all replicas.

    Example:
        >>> import jax.numpy as jnp, optax, optzoo
        >>> tx = optzoo.agn(optzoo.gradient_descent(0.1), communication_period=2)
        >>> params, state = optzoo.replicas.replicate(jnp.zeros(1), tx.init(jnp.zeros(1)), 2)
        >>> def step(params, state, gradient):
        ...     updates, state = tx.update(gradient, state, params)
        ...     return optax.apply_updates(params, updates), state
        >>> on_all = optzoo.replicas.map_over_replicas(step)
        >>> for _ in range(2):
        ...     params, state = on_all(params, state, jnp.array([[1.0], [3.0]]))
        >>> print(params)  # the push: the rate times the mean gradient of a step
        [[-0.2]
         [-0.2]]

    Args:
        inner: a complete optimizer, including its learning rate.
        num_workers: the expected number of replicas; None for the size of the axis.
        axis_name: the axis, or axes, of the replicas; None for a single replica.
        communication_period: :math:`\tau`, the number of local steps between pushes; static.
        order: ``"simultaneous"``: the center makes one step with the mean of all pushes, with one
            sum over the replicas; ``"round_robin"``: one step for each push, in the order of ranks,
            and each replica reads the center after its own step, as the original's workers.
        bucket_bytes: arrays up to this size are sent together; None sends each separately.
        skip_nonfinite: whether to skip local steps that give NaN or infinity, which would spread to
            all replicas. At an exchange, a replica that skips does not contribute, takes the
            center, and its slots are reset. Costs a copy of the slots at each step.

    Raises:
        ValueError: if no params are given to ``update``, if the size of the axis is not
            ``num_workers``, or if gradients are already summed over the replicas.
        NameError: at trace time, if there is no such axis.

    References:
        Hermans et al., `Accumulated Gradient Normalization <https://arxiv.org/abs/1710.02368>`_,
        2017; ``tf.contrib.opt.AGNOptimizer``.

    Differences from the original:
        With ordinary TensorFlow variables the original randomly pushes the sum instead of the mean;
        here it is always the mean. Accumulators and the center are at least float32.
    """
    period = check_size(1, communication_period=communication_period)
    replicas = Replicas(axis_name, bucket_bytes, num_workers)
    inner = inner_transformation(inner=inner)

    def accumulate(updates, params, per_replica, **_):
        accumulated, since, came = per_replica.method
        add = lambda g, a: a if g is None else placed_as(a + g.astype(a.dtype), a)
        accumulated = update_tree.map(add, updates, accumulated)
        method = AGNPerReplica(accumulated, since + 1, has_come(updates, came))
        return updates, per_replica._replace(method=method), None

    def push(pushes, params, replicated, per_replica, **extra_args):
        accumulated, since, came = per_replica.method
        state, is_slot = per_replica.inner, are_slots(inner, per_replica.inner)
        # The sum of the pushes also carries the counters of all replicas, side by side.
        here = (replicas.ranks == replicas.index) & pushes
        place = lambda a: jnp.where(here.reshape(-1, *(1,) * a.ndim), a[None], 0)
        beside = lambda a, is_slot: None if is_slot else place(words_of(a))
        counters = jax.tree.map(beside, state, is_slot)
        mean = lambda x, a: jnp.where(pushes, a / since.astype(a.dtype), 0)
        mean = map_not_none(mean, params, accumulated)
        # A parameter without a gradient on any replica is unchanged.
        arrived = jax.tree.map(lambda c: jnp.int32(c & pushes), came)
        pushed, counters, pushers, arrived = replicas.sum(
            (mean, counters, here.astype(jnp.int32), arrived)
        )
        number, first = jnp.sum(pushers, dtype=pushers.dtype), jnp.argmax(pushers)
        pushed = jax.tree.map(lambda g: g / jnp.maximum(number, 1).astype(g.dtype), pushed)

        center, center_inner = replicated.center, replicated.method.center_inner
        pick = lambda slot, c, is_slot: slot if is_slot else from_sum(slot, c[first])
        before = jax.tree.map(pick, center_inner, counters, is_slot)
        shared = replicas.shared_arguments(pushes, extra_args)
        updates, after = inner.update(pushed, before, center, **shared)
        arrived = jax.tree.map(lambda number: number > 0, arrived)
        updates, after = leave_out(inner, arrived, updates, after, before)
        # Each replica counts the push with its own counters; the rest is not used.
        own = jax.tree.map(lambda a, c, is_slot: c if is_slot else a, state, before, is_slot)
        ours = replicas.vary((pushed, own, center))
        _, counted = inner.update(*ours, **extra_args)
        moved = apply_not_none(center, updates)
        some = number > 0
        replicated = replicated._replace(
            center=optax.tree.where(some, moved, center),
            method=AGNReplicated(optax.tree.where(some, after, center_inner)),
            global_step=replicated.global_step + number,
        )
        count = lambda a, c, is_slot: a if is_slot else jnp.where(pushes, cast(c, a.dtype), a)
        per_replica = per_replica._replace(
            inner=jax.tree.map(count, state, counted, is_slot),
            method=AGNPerReplica(
                zero_unless(~pushes, accumulated),
                jnp.where(pushes, 0, since),
                jax.tree.map(lambda c: c & ~pushes, came),
            ),
        )
        pulled = map_not_none(lambda x, c: jnp.where(pushes, c, x), params, moved)
        return pulled, replicated, per_replica

    def init(center):
        zero = jnp.zeros([], jnp.int32)
        per_replica = AGNPerReplica(wide_zeros_like(center), zero, none_came(center))
        return AGNReplicated(inner.init(center)), per_replica

    options = {"order": order, "skip_nonfinite": skip_nonfinite}
    method = LocalSGDMethod([push], period, init=init, before_step=accumulate, **options)
    return fitting(local_sgd(inner, replicas, method), moves="agn", in_cycles=True)
