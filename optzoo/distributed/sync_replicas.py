"""Synchronous replicas: one update by the mean of their gradients, with backup workers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from ..core.checks import check_size
from ..core.gradients import check_gradients
from ..core.rows import zeros_like_update
from ..state.types import ReplicaState
from .engine.accumulator import add_to_held, divide_touched, init_accumulator, with_touches
from .engine.collectives import BUCKET_BYTES, AxisName, Replicas, divide_gradients

DIVISORS = ("count", "touches")


def sync_replicas(
    inner: optax.GradientTransformation,
    replicas_to_aggregate: int,
    total_num_replicas: int | None = None,
    *,
    axis_name: AxisName = "replica",
    hold: bool = True,
    rows_divisor: str = "count",
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
    if rows_divisor not in DIVISORS:
        raise ValueError(f"rows_divisor must be one of {DIVISORS}, got {rows_divisor!r}")
    if not hold and aggregate > total:
        raise ValueError(
            f"replicas_to_aggregate={aggregate} of {total} replicas take several ticks, which "
            "needs hold=True"
        )
    replicas = Replicas(axis_name, bucket_bytes)
    inner = optax.with_extra_args_support(inner)

    def init(params):
        zero = lambda *_: jnp.zeros([], jnp.int32)
        shared: dict[str, Any] = {n: zero() for n in ("count", "global_step", "dropped")}
        if hold:
            shared["held"] = init_accumulator(params)
        own = {"local_step": zero(), "waiting": jnp.zeros([], bool)}
        return ReplicaState({**shared, "inner": inner.init(params)}, own)

    def update(
        updates, state, params=None, *, arrived=None, priority=None, local_step=None, **extra_args
    ):
        replicas.check_size(total_num_replicas=total)
        check_gradients(updates, params)
        replicas.check_own(updates)
        replicas.check_shared(params)
        shared, own = state
        step = shared["global_step"]
        # Known when traced: this tick makes an update by itself.
        complete = arrived is None and local_step is None and total >= aggregate
        arrived = jnp.asarray(True if arrived is None else arrived)
        read_at = own["local_step"] if local_step is None else local_step
        count = jnp.zeros([], jnp.int32) if complete or not hold else shared["count"]

        is_in = arrived if complete else arrived & (read_at >= step)
        if not (complete and total == aggregate):
            is_in &= _number_ahead(replicas, is_in, priority) < aggregate - count
        waits = hold and not complete
        counts_touches = waits or rows_divisor == "touches"
        sums, (accepted, dropped) = replicas.sum_gradients(
            with_touches(updates) if counts_touches else updates,
            is_in,
            (is_in.astype(jnp.int32), (arrived & ~is_in).astype(jnp.int32)),
        )
        number, held = count + accepted, shared.get("held")
        if waits:
            now = {"update": step + 1, "accepted": accepted, "most": aggregate}
            sums, held = add_to_held(held, sums, updates, **now)
        safe_divide = divide_gradients
        if counts_touches:
            safe_divide = functools.partial(divide_touched, by_touches=rows_divisor == "touches")
        mean = safe_divide(sums, jnp.maximum(number, 1), updates)

        apply = lambda: inner.update(mean, shared["inner"], params, **extra_args)
        if complete:
            fire, (us, of_inner) = True, apply()
        else:
            fire = number >= aggregate
            nothing = lambda: (zeros_like_update(jax.eval_shape(apply)[0]), shared["inner"])
            us, of_inner = lax.cond(fire, apply, nothing)
            if not hold:
                dropped += jnp.where(fire, 0, accepted)
        new_step = step + jnp.int32(fire)
        new = {
            "count": jnp.where(fire, 0, number) if hold else shared["count"],
            "global_step": new_step,
            "dropped": shared["dropped"] + dropped,
            "inner": of_inner,
        }
        if hold:
            new["held"] = held
        # Whose gradient is in waits for the update; who was dropped goes on at once.
        waiting = own["waiting"] | (is_in & hold)
        goes_on = arrived | (waiting & fire)
        read_at = jnp.where(goes_on, new_step, own["local_step"])
        waiting &= jnp.logical_not(fire)
        return us, ReplicaState(new, {"local_step": read_at, "waiting": waiting})

    return optax.GradientTransformationExtraArgs(init, update)


def _number_ahead(replicas: Replicas, fresh: Array, priority: Any) -> Array:
    """How many fresh gradients came before that of this replica."""
    rank = replicas.index
    priority = rank if priority is None else jnp.asarray(priority)
    all_fresh, priorities = replicas.gather((fresh[None], priority[None]))
    ties = (priorities == priority) & (jnp.arange(replicas.size) < rank)
    return jnp.sum(all_fresh & ((priorities < priority) | ties))
