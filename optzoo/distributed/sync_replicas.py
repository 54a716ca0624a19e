"""Synchronous replicas: one update by the mean of their gradients, with backup workers."""

import functools
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from ..core.checks import check_size
from ..core.gradients import check_gradients
from ..core.rows import zeros_like_update
from ..state.types import SharedParamsState
from .engine.accumulator import (
    accumulate_sums,
    append_row_counts,
    divide_counted,
    init_accumulator,
)
from .engine.collectives import BUCKET_BYTES, AxisName, Replicas, divide_gradients

RowsDivisor = Literal["count", "touches"]


class SyncReplicasReplicated(NamedTuple):
    """What is the same on all replicas."""

    count: Array  # of gradients in the accumulator
    global_step: Array
    dropped: Array  # the number of dropped gradients
    accumulator: Any  # a GradientAccumulator; () with hold=False
    inner: Any  # the state of the inner optimizer


class SyncReplicasPerReplica(NamedTuple):
    """What each replica has for itself."""

    local_step: Array  # the global step at which it read the parameters
    waiting: Array  # whether its gradient is in the accumulator


def sync_replicas(
    inner: optax.GradientTransformation,
    replicas_to_aggregate: int,
    total_num_replicas: int | None = None,
    *,
    axis_name: AxisName = "replica",
    hold: bool = True,
    rows_divisor: RowsDivisor = "count",
    bucket_bytes: int | None = BUCKET_BYTES,
) -> optax.GradientTransformationExtraArgs:
    r"""Averages gradients over replicas, as in ``tf.train.SyncReplicasOptimizer``.

    .. math::
        A &\leftarrow A + \sum_{i \text{ accepted}} g_i, \quad n \leftarrow n + |\text{accepted}| \\
        \text{if } n \ge R: \quad x &\leftarrow x + u(A / n), \quad
        A, n \leftarrow 0, \quad T \leftarrow T + 1

    where :math:`u` is the update of ``inner``, :math:`R` is ``replicas_to_aggregate`` and
    :math:`T` the global step. A gradient is accepted if it arrived, is fresh (:math:`t_i \ge T`
    for the global step :math:`t_i` at which replica :math:`i` read the parameters), and is among
    the first that complete :math:`R`; the others are dropped and counted, and their replicas go on
    from the new parameters. All replicas share parameters and slots. With as many replicas as
    :math:`R` that is synchronous training; with more, the slowest do no harm (backup workers);
    with fewer, an update takes several ticks.

    Row-sparse gradients are gathered as rows and stay rows for ``inner``; each replica's rows
    count as a part of its gradient. A moving average of the parameters belongs inside:
    ``sync_replicas(moving_average(inner, ...), ...)``.

    ``update`` takes ``arrived`` (bool per replica: whether its gradient is in), ``priority``
    (number per replica: the lowest came first; by default the rank) and ``local_step`` (int per
    replica: :math:`t_i`; by default a replica reads the parameters after the update that its last
    gradient was a part of, or at once if that was dropped). Without
    ``arrived`` and ``local_step`` all gradients are in and fresh; if they are enough, they make
    the update by themselves, and what was held before is dropped.

    Args:
        inner: a whole optimizer, its learning rate included.
        replicas_to_aggregate: :math:`R`, at least 1.
        total_num_replicas: how many replicas there are; None for :math:`R`.
        axis_name: the axis, or axes, of the replicas; None for a single one.
        hold: whether gradients wait, in a copy of the parameters' size, until :math:`R` are in.
            If not, a tick with fewer changes nothing, and its gradients are dropped.
        rows_divisor: ``"count"``: rows are divided by :math:`n`, as dense gradients;
            ``"touches"``: each row by the number of gradients that have it, as in the original.
        bucket_bytes: arrays up to this size are sent as one; None sends each by itself.

    Raises:
        ValueError: if an argument is out of its range, if the axis has another size than
            ``total_num_replicas``, or if gradients are summed already.
        NameError: at trace time, if there is no such axis.

    References:
        Chen et al., `Revisiting Distributed Synchronous SGD <https://arxiv.org/abs/1604.00981>`_,
        2016; ``tf.train.SyncReplicasOptimizer``.

    Differences from the original:
        No token queue: replicas tick together, so none races ahead with an old token, and none of
        the first gradients is wasted. An update takes no more than :math:`R` gradients, where a
        late chief of the original takes all that are in. The original divides rows by their
        touches.
    """
    aggregate = check_size(1, replicas_to_aggregate=replicas_to_aggregate)
    total = aggregate if total_num_replicas is None else total_num_replicas
    total = check_size(1, total_num_replicas=total)
    if rows_divisor not in get_args(RowsDivisor):
        raise ValueError(
            f"rows_divisor must be one of {get_args(RowsDivisor)}, got {rows_divisor!r}"
        )
    if not hold and aggregate > total:
        raise ValueError(
            f"replicas_to_aggregate={aggregate} of {total} replicas take several ticks, which "
            "needs hold=True"
        )
    replicas = Replicas(axis_name, bucket_bytes)
    inner = optax.with_extra_args_support(inner)

    def init(params):
        zero = lambda: jnp.zeros([], jnp.int32)
        accumulator = init_accumulator(params) if hold else ()
        return SharedParamsState(
            SyncReplicasReplicated(zero(), zero(), zero(), accumulator, inner.init(params)),
            SyncReplicasPerReplica(zero(), jnp.zeros([], bool)),
        )

    def update(
        updates, state, params=None, *, arrived=None, priority=None, local_step=None, **extra_args
    ):
        replicas.check_size(total_num_replicas=total)
        check_gradients(updates, params)
        replicas.check_own(updates)
        replicas.check_shared(params)
        replicated, (last_read, waiting) = state
        step = replicated.global_step
        # Known when traced: this tick makes an update by itself.
        complete = arrived is None and local_step is None and total >= aggregate
        arrived = jnp.asarray(True if arrived is None else arrived)
        read_at = last_read if local_step is None else local_step
        count = jnp.zeros([], jnp.int32) if complete or not hold else replicated.count

        is_in = arrived if complete else arrived & (read_at >= step)
        if not (complete and total == aggregate):
            is_in &= _number_ahead(replicas, is_in, priority) < aggregate - count
        accumulates = hold and not complete
        counts_rows = accumulates or rows_divisor == "touches"
        sums, (accepted, dropped) = replicas.sum_gradients(
            append_row_counts(updates) if counts_rows else updates,
            is_in,
            (is_in.astype(jnp.int32), (arrived & ~is_in).astype(jnp.int32)),
        )
        number, accumulator = count + accepted, replicated.accumulator
        if accumulates:
            now = {"update": step + 1, "accepted": accepted, "most": aggregate}
            sums, accumulator = accumulate_sums(accumulator, sums, updates, **now)
        divide = divide_gradients
        if counts_rows:
            divide = functools.partial(divide_counted, by_row_counts=rows_divisor == "touches")
        mean = divide(sums, jnp.maximum(number, 1), updates)

        apply = lambda: inner.update(mean, replicated.inner, params, **extra_args)
        if complete:
            fire, (us, of_inner) = True, apply()
        else:
            fire = number >= aggregate
            nothing = lambda: (zeros_like_update(jax.eval_shape(apply)[0]), replicated.inner)
            us, of_inner = lax.cond(fire, apply, nothing)
            if not hold:
                dropped += jnp.where(fire, 0, accepted)
        new_step = step + jnp.int32(fire)
        replicated = SyncReplicasReplicated(
            count=jnp.where(fire, 0, number) if hold else replicated.count,
            global_step=new_step,
            dropped=replicated.dropped + dropped,
            accumulator=accumulator,
            inner=of_inner,
        )
        # A replica whose gradient was accepted waits for the update; the others read at once.
        waiting |= is_in & hold
        reads = arrived | (waiting & fire)
        per_replica = SyncReplicasPerReplica(
            local_step=jnp.where(reads, new_step, last_read),
            waiting=waiting & jnp.logical_not(fire),
        )
        return us, SharedParamsState(replicated, per_replica)

    return optax.GradientTransformationExtraArgs(init, update)


def _number_ahead(replicas: Replicas, fresh: Array, priority: Any) -> Array:
    """How many fresh gradients came before that of this replica."""
    rank = replicas.index
    priority = rank if priority is None else jnp.asarray(priority)
    all_fresh, priorities = replicas.gather((fresh[None], priority[None]))
    ties = (priorities == priority) & (jnp.arange(replicas.size) < rank)
    return jnp.sum(all_fresh & ((priorities < priority) | ties))
