"""Periodic averaging of the parameters of all replicas."""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from ..core.checks import check_choice, check_size
from ..core.numerics import upcast
from ..core.optimizer import recorded
from ..core.rows import map_not_none, replace_not_none
from ..state.inner import fitting, inner_transformation
from ..state.slots import are_slots
from .engine.collectives import BUCKET_BYTES, AxisName, Replicas, zero_unless
from .engine.local_sgd import LocalSGDMethod, local_sgd

Slots = Literal["keep", "average", "reset"]


@recorded
def model_average(
    inner: optax.GradientTransformation,
    num_workers: int | None = None,
    *,
    axis_name: AxisName = "replica",
    interval_steps: int = 100,
    slots: Slots = "keep",
    bucket_bytes: int | None = BUCKET_BYTES,
    skip_nonfinite: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Averages the parameters of all replicas, as in ``tf.contrib.opt.ModelAverageOptimizer``.

    .. math::
        x_i &\leftarrow x_i + u(g_i) \\
        \text{every } \tau \text{ steps:} \quad
        c &= \frac{1}{n} \sum_{j \text{ arrived}} x_j, \quad x_i \leftarrow c

    where :math:`x_i` are the parameters of replica :math:`i`, :math:`u` is the update of ``inner``
    and :math:`n` the number of replicas that arrived. Replicas that did not arrive also take the
    average; if no replica arrived, there is no average. :func:`optzoo.eval_params` returns the last
    average. With ``exchange=False`` row-sparse gradients make row-sparse local steps; the average
    is of whole tables.

    The wrapper must be the last transformation of a chain. Arguments of ``update`` are ``arrived``
    (bool per replica: whether its parameters are included in the mean), ``active`` (bool per
    replica: whether it makes a step now) and ``exchange`` (a Python bool, equal on all replicas:
    whether to average now, independently of the step count; see
    :func:`optzoo.replicas.scan_local_steps`).

    Example:
        >>> import jax.numpy as jnp, optax, optzoo
        >>> tx = optzoo.model_average(optzoo.gradient_descent(0.1), interval_steps=1)
        >>> params, state = optzoo.replicas.replicate(jnp.zeros(1), tx.init(jnp.zeros(1)), 2)
        >>> def step(params, state, gradient):
        ...     updates, state = tx.update(gradient, state, params)
        ...     return optax.apply_updates(params, updates), state
        >>> params, state = optzoo.replicas.map_over_replicas(step)(
        ...     params, state, jnp.array([[1.0], [3.0]])
        ... )
        >>> print(params.ravel())  # the mean of -0.1 and -0.3
        [-0.2 -0.2]

    Args:
        inner: a complete optimizer, including its learning rate.
        num_workers: the expected number of replicas; None for the size of the axis.
        axis_name: the axis, or axes, of the replicas; None for a single replica.
        interval_steps: :math:`\tau`, the number of local steps between averages; static.
        slots: the effect of an average on each replica's slots: ``"keep"`` leaves them unchanged,
            as in the original; ``"average"`` averages them; ``"reset"`` sets them to their initial
            values, also for parameters without a gradient. Counts and powers are always kept.
        bucket_bytes: arrays up to this size are sent together; None sends each separately.
        skip_nonfinite: whether to skip local steps that give NaN or infinity, which would spread to
            all replicas. At an exchange, a replica that skips does not contribute, takes the
            center, and its slots are reset. Costs a copy of the slots at each step.

    Raises:
        ValueError: if no params are given to ``update``, if the size of the axis is not
            ``num_workers``, or if gradients are already summed over the replicas.
        NameError: at trace time, if there is no such axis.

    References:
        McMahan et al., `Communication-Efficient Learning of Deep Networks from Decentralized Data
        <https://arxiv.org/abs/1602.05629>`_, 2016; ``tf.contrib.opt.ModelAverageOptimizer``.

    Differences from the original:
        The original waits for every worker, and averages only variables with a gradient. Averages
        of 16-bit parameters are float32.
    """
    period = check_size(1, interval_steps=interval_steps)
    check_choice(Slots, slots=slots)
    inner = inner_transformation(inner=inner)
    replicas = Replicas(axis_name, bucket_bytes, num_workers)

    def exchange(arrived, params, replicated, per_replica, **_):
        state = per_replica.inner
        is_slot = are_slots(inner, state)
        sent = jax.tree.map(lambda a, is_slot: upcast(a) if is_slot else None, state, is_slot)
        sent = zero_unless(arrived, (params, sent if slots == "average" else ()))
        (sums, slot_sums), number = replicas.sum((sent, arrived.astype(jnp.int32)))
        some, divisor = number > 0, jnp.maximum(number, 1)
        mean = lambda total: total / divisor.astype(total.dtype)
        center = replicated.center
        average = map_not_none(lambda s, c: jnp.where(some, mean(s), c), sums, center)
        if slots != "keep":
            # A parameter without a gradient is None here, but has slots.
            start = replace_not_none(center, params)
            new = slot_sums if slots == "average" else inner.init(start)
            take = mean if slots == "average" else lambda a: a
            replace = lambda a, b, is_slot: (
                jnp.where(some, take(b).astype(a.dtype), a) if is_slot else a
            )
            # An optimizer of optax may have None for the slot of such a parameter.
            with_none = functools.partial(jax.tree.map, is_leaf=lambda a: a is None)
            per_replica = per_replica._replace(inner=with_none(replace, state, new, is_slot))
        replicated = replicated._replace(
            center=replace_not_none(center, average),
            global_step=replicated.global_step + some.astype(jnp.int32),
        )
        return optax.tree.where(some, average, params), replicated, per_replica

    options = {"lockstep": True, "skip_nonfinite": skip_nonfinite}
    method = LocalSGDMethod([exchange], period, **options)
    return fitting(local_sgd(inner, replicas, method), moves="model_average", in_cycles=True)
