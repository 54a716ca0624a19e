"""Synchronous replicas: one update with the mean of their gradients, with backup workers."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import optax
from jax import Array, lax

from ..core.checks import check_choice, check_size
from ..core.compat import TracedOnce
from ..core.gradients import check_gradients
from ..core.optimizer import About, Optimizer, recorded
from ..core.rows import update_tree, zeros_like_update
from ..state.came import late, leave_out
from ..state.inner import fitting, inner_transformation
from ..state.types import SharedParamsState
from .engine.accumulator import (
    GradientAccumulator,
    accumulate_sums,
    append_row_counts,
    divide_counted,
    have_come,
    init_accumulator,
)
from .engine.collectives import BUCKET_BYTES, AxisName, Replicas, all_finite, divide_gradients

RowsDivisor = Literal["count", "touches"]


class SyncReplicasReplicated(NamedTuple):
    """State that is equal on all replicas."""

    count: Array  # of gradients in the accumulator
    global_step: Array
    dropped: Array  # the number of dropped gradients
    accumulator: Any  # a GradientAccumulator; () with hold=False
    inner: Any  # the state of the inner optimizer


class SyncReplicasPerReplica(NamedTuple):
    """State of each replica."""

    local_step: Array  # the global step at which it read the parameters
    waiting: Array  # whether its gradient is in the accumulator


@recorded
def sync_replicas(
    inner: optax.GradientTransformation,
    replicas_to_aggregate: int | None = None,
    total_num_replicas: int | None = None,
    *,
    axis_name: AxisName = "replica",
    hold: bool = True,
    rows_divisor: RowsDivisor = "count",
    bucket_bytes: int | None = BUCKET_BYTES,
    skip_nonfinite: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Averages gradients over replicas, as in ``tf.train.SyncReplicasOptimizer``.

    .. math::
        A &\leftarrow A + \sum_{i \text{ accepted}} g_i, \quad n \leftarrow n + |\text{accepted}| \\
        \text{if } n \ge R: \quad x &\leftarrow x + u(A / n), \quad
        A, n \leftarrow 0, \quad T \leftarrow T + 1

    where :math:`u` is the update of ``inner``, :math:`R` is ``replicas_to_aggregate`` and :math:`T`
    the global step. A gradient is accepted if it arrived, is fresh (:math:`t_i \ge T` for the
    global step :math:`t_i` at which replica :math:`i` read the parameters), and is among the first
    that complete :math:`R`. Other gradients are dropped and counted, and their replicas read the
    new parameters. All replicas share parameters and slots. With :math:`R` replicas this is
    synchronous training; with more, the slowest do not delay an update (backup workers); with
    fewer, an update takes several ticks.

    Row-sparse gradients are gathered as rows and passed to ``inner`` as rows. To average the
    parameters, put the moving average inside: ``sync_replicas(moving_average(inner, ...), ...)``.

    Arguments of ``update`` are ``arrived`` (bool per replica: whether its gradient is available),
    ``priority`` (number per replica: the lowest arrived first; by default the rank) and
    ``local_step`` (int per replica: :math:`t_i`; by default a replica reads the parameters after
    the update that used its last gradient, or immediately if that gradient was dropped). Without
    ``arrived`` and ``local_step`` all gradients are available and fresh. If they suffice for an
    update, accumulated gradients are dropped (with ``skip_nonfinite`` they are included).
    ``value``, the loss of a replica, is passed to ``inner`` as the mean over the replicas whose
    gradients were accepted in this tick; other arguments for ``inner`` must be equal on all
    replicas.

    Example:
        >>> import jax.numpy as jnp, optax, optzoo
        >>> tx = optzoo.sync_replicas(optzoo.gradient_descent(0.1), 2)
        >>> params, state = optzoo.replicas.replicate(jnp.zeros(1), tx.init(jnp.zeros(1)), 2)
        >>> def step(params, state, gradient):
        ...     updates, state = tx.update(gradient, state, params)
        ...     return optax.apply_updates(params, updates), state
        >>> params, state = optzoo.replicas.map_over_replicas(step)(
        ...     params, state, jnp.array([[1.0], [3.0]])
        ... )
        >>> print(params)  # one copy for all replicas
        [-0.2]

    Args:
        inner: a complete optimizer, including its learning rate.
        replicas_to_aggregate: :math:`R`, at least 1; None for all replicas.
        total_num_replicas: the expected number of replicas; None for :math:`R`, or for the size of
            the axis if :math:`R` is None.
        axis_name: the axis, or axes, of the replicas; None for a single replica.
        hold: whether gradients are accumulated, in a copy of the parameters' size, until there are
            :math:`R`. If not, a tick with fewer gradients drops them and changes nothing.
        rows_divisor: ``"count"`` divides rows by :math:`n`, as dense gradients; ``"touches"``
            divides each row by the number of gradients that contain it, as in the original.
        bucket_bytes: arrays up to this size are sent together; None sends each separately.
        skip_nonfinite: whether a gradient with NaN or infinity is dropped. Without this option, NaN
            on one replica spreads to all.

    Raises:
        ValueError: if the size of the axis is not ``total_num_replicas``, or if gradients are
            already summed over the replicas.
        NameError: at trace time, if there is no such axis.

    References:
        Chen et al., `Revisiting Distributed Synchronous SGD <https://arxiv.org/abs/1604.00981>`_,
        2016; ``tf.train.SyncReplicasOptimizer``.

    Differences from the original:
        There is no token queue: replicas run in lockstep, so no gradient is lost to an old token.
        An update uses at most :math:`R` gradients; in the original a late chief uses all that have
        arrived. The original divides rows by the number of gradients that contain them.
    """
    aggregate, total = replicas_to_aggregate, total_num_replicas
    if aggregate is not None:
        aggregate = check_size(1, replicas_to_aggregate=aggregate)
    total = aggregate if total is None else check_size(1, total_num_replicas=total)
    check_choice(RowsDivisor, rows_divisor=rows_divisor)
    if not hold and aggregate is not None and total is not None and aggregate > total:
        raise ValueError(
            f"replicas_to_aggregate={aggregate} of {total} replicas take several ticks, which "
            "needs hold=True"
        )
    inner, replicas = inner_transformation(inner=inner), Replicas(axis_name, bucket_bytes)
    driver = _SyncReplicas(
        inner, replicas, aggregate, total, hold, rows_divisor == "touches", skip_nonfinite
    )
    about = About(reads=inner.about.reads).reading("arrived", "priority", "local_step")
    return fitting(Optimizer(driver.init, driver.update, about))


@dataclasses.dataclass(frozen=True)
class _SyncReplicas:
    """The ``init`` and the ``update`` of :func:`sync_replicas`."""

    inner: optax.GradientTransformationExtraArgs
    replicas: Replicas
    aggregate: int | None
    total: int | None
    hold: bool
    by_row_counts: bool
    skip_nonfinite: bool

    def init(self, params: Any) -> SharedParamsState:
        zero = lambda: jnp.zeros([], jnp.int32)
        accumulator = init_accumulator(params) if self.hold else ()
        return SharedParamsState(
            SyncReplicasReplicated(zero(), zero(), zero(), accumulator, self.inner.init(params)),
            self.replicas.vary_new(SyncReplicasPerReplica(zero(), jnp.zeros([], bool))),
        )

    def update(
        self,
        updates,
        state,
        params=None,
        *,
        arrived=None,
        priority=None,
        local_step=None,
        **extra_args,
    ):
        if self.total not in (None, size := self.replicas.size):
            raise ValueError(
                f"total_num_replicas must be the size of the axis {self.replicas.axis_name!r}, "
                f"{size}, got {self.total} (its default is replicas_to_aggregate="
                f"{self.aggregate}): pass total_num_replicas={size}"
            )
        aggregate = size if self.aggregate is None else self.aggregate
        check_gradients(updates, params)
        self.replicas.check_per_replica(updates)
        self.replicas.check_replicated(params)
        old, (last_read, waiting) = state
        all_of_them = arrived is None and local_step is None
        # Known when traced: this tick makes an update by itself.
        complete = all_of_them and size >= aggregate and not self.skip_nonfinite
        arrived = jnp.asarray(True if arrived is None else arrived)
        accumulates = self.hold and not complete

        read_at = last_read if local_step is None else local_step
        accepted = arrived if all_of_them else arrived & (read_at >= old.global_step)
        if self.skip_nonfinite:
            accepted &= all_finite(updates)
        if not (complete and size == aggregate):
            ahead = _number_ahead(self.replicas, accepted, priority)
            accepted &= ahead < aggregate - (old.count if accumulates else 0)
        number, mean, accumulator, dropped = self._mean(
            updates, arrived, accepted, old, aggregate if accumulates else 0
        )

        shared = self.replicas.shared_arguments(accepted, extra_args)

        def apply():
            done = self.inner.update(mean, old.inner, params, **shared)
            if not accumulates or not isinstance(accumulator, GradientAccumulator):
                return done
            came = have_come(accumulator, old.global_step + 1)
            return leave_out(self.inner, late(updates, came), *done, old.inner)

        if complete:
            fire, (updates, of_inner) = True, apply()
            dropped += old.count  # what was accumulated before
        else:
            fire = number >= aggregate
            once = TracedOnce(apply)
            nothing = lambda: (zeros_like_update(once.types[0]), old.inner)
            updates, of_inner = lax.cond(fire, once, nothing)
            if not self.hold:
                dropped += jnp.where(fire, 0, number)
        step = old.global_step + jnp.int32(fire)
        replicated = SyncReplicasReplicated(
            count=jnp.where(fire, 0, number) if self.hold else old.count,
            global_step=step,
            dropped=old.dropped + dropped,
            accumulator=accumulator,
            inner=of_inner,
        )
        # A replica whose gradient was accepted waits for the update; others read immediately.
        waiting |= accepted & self.hold
        reads = arrived | (waiting & fire)
        per_replica = SyncReplicasPerReplica(
            local_step=jnp.where(reads, step, last_read), waiting=waiting & jnp.logical_not(fire)
        )
        return updates, SharedParamsState(replicated, per_replica)

    def _mean(
        self,
        updates: Any,
        arrived: Array,
        accepted: Array,
        old: SyncReplicasReplicated,
        most: int,
    ) -> tuple[Array, Any, GradientAccumulator | tuple[()], Array]:
        """The mean of the accumulated gradients and of those accepted now.

        Args:
            updates: the gradients of this replica.
            arrived: whether they are available.
            accepted: whether they are accepted.
            old: the state before.
            most: the largest number of gradients in the accumulator; with 0 it is not used and its
                content is ignored.

        Returns:
            The number of gradients, their mean, the new accumulator, and the number of dropped
            gradients.
        """
        counts_rows = most > 0 or self.by_row_counts
        sums, (number, dropped) = self.replicas.sum_gradients(
            append_row_counts(updates) if counts_rows else updates,
            accepted,
            (accepted.astype(jnp.int32), (arrived & ~accepted).astype(jnp.int32)),
        )
        accumulator = old.accumulator
        if most:
            now = {"update": old.global_step + 1, "accepted": number, "most": most}
            sums, accumulator = accumulate_sums(accumulator, sums, updates, **now)
            number += old.count
            # For a gradient of None there may be a sum of earlier gradients.
            like = lambda g, total: total if g is None else g
            updates = update_tree.map(like, updates, sums)
        divide = divide_gradients
        if counts_rows:
            divide = functools.partial(divide_counted, by_row_counts=self.by_row_counts)
        return number, divide(sums, jnp.maximum(number, 1), updates), accumulator, dropped


def _number_ahead(replicas: Replicas, fresh: Array, priority: Any) -> Array:
    """The number of fresh gradients that arrived before that of this replica."""
    rank = replicas.index
    priority = rank if priority is None else jnp.asarray(priority)
    all_fresh, priorities = replicas.gather((fresh[None], priority[None]))
    ties = (priorities == priority) & (replicas.ranks < rank)
    return jnp.sum(all_fresh & ((priorities < priority) | ties), dtype=jnp.int32)
