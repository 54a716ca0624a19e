"""Elastic averaging SGD (EASGD)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..core.checks import check, check_not_negative, check_size
from ..core.numerics import upcast
from ..core.optimizer import recorded
from ..core.rows import map_not_none, replace_not_none, update_tree
from ..state.averages import start_of_average
from ..state.inner import fitting, inner_transformation
from .engine.collectives import BUCKET_BYTES, AxisName, Replicas
from .engine.local_sgd import LocalSGDMethod, Order, local_sgd


class ElasticAveragePerReplica(NamedTuple):
    """State of each replica."""

    local_center: Any  # params-shaped: the center before the last exchange of this replica


@recorded
def elastic_average(
    inner: optax.GradientTransformation,
    num_workers: int | None = None,
    *,
    axis_name: AxisName = "replica",
    communication_period: int = 10,
    moving_rate: float | None = None,
    rho: float = 0.0,
    order: Order = "simultaneous",
    bucket_bytes: int | None = BUCKET_BYTES,
    skip_nonfinite: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Elastic averaging, as in ``tf.contrib.opt.ElasticAverageOptimizer``.

    .. math::
        x_i &\leftarrow x_i + u(g_i + \rho\, (x_i - \tilde c_i)) \\
        \text{every } \tau \text{ steps:} \quad
        \tilde c_i \leftarrow c, \quad
        d_i &= \alpha\, (x_i - c), \quad
        x_i \leftarrow x_i - d_i, \quad
        c \leftarrow c + \sum_j d_j

    where :math:`x_i` are the parameters of replica :math:`i`, :math:`u` the update of ``inner``,
    :math:`c` the center, and :math:`\tilde c_i` the center that this replica read last, before its
    own exchange. Each replica has its own parameters and slots; :func:`optzoo.eval_params` returns
    the center. With ``exchange=False`` row-sparse gradients make row-sparse local steps; other
    steps, and ``rho``, make dense updates of whole tables.

    The wrapper must be the last transformation of a chain. Arguments of ``update`` are ``active``
    (bool per replica: whether it makes a step now) and ``exchange`` (a Python bool, equal on all
    replicas: whether to exchange now, independently of the step count; see
    :func:`optzoo.replicas.scan_local_steps`).

    Example:
        >>> import jax.numpy as jnp, optax, optzoo
        >>> tx = optzoo.elastic_average(
        ...     optzoo.gradient_descent(0.1), 2, communication_period=1, moving_rate=0.5
        ... )
        >>> params, state = optzoo.replicas.replicate(jnp.zeros(1), tx.init(jnp.zeros(1)), 2)
        >>> def step(params, state, gradient):
        ...     updates, state = tx.update(gradient, state, params)
        ...     return optax.apply_updates(params, updates), state
        >>> params, state = optzoo.replicas.map_over_replicas(step)(
        ...     params, state, jnp.array([[1.0], [3.0]])
        ... )
        >>> print(params.ravel(), optzoo.eval_params(params, state))
        [-0.05 -0.15] [-0.2]

    Args:
        inner: a complete optimizer, including its learning rate.
        num_workers: the expected number of replicas; None for the size of the axis.
        axis_name: the axis, or axes, of the replicas; None for a single replica.
        communication_period: :math:`\tau`, the number of local steps between exchanges; static.
        moving_rate: :math:`\alpha`, in (0, 1]; None for :math:`0.9 / (\tau n)` with :math:`n`
            replicas. The center stays within the range of the replicas if :math:`n \alpha \le 1`.
        rho: :math:`\rho`, at least 0.
        order: ``"simultaneous"``: all replicas read the same center, with one sum over the
            replicas; ``"round_robin"``: one after the other by rank, as the original's workers.
        bucket_bytes: arrays up to this size are sent together; None sends each separately.
        skip_nonfinite: whether to skip local steps that give NaN or infinity, which would spread to
            all replicas. At an exchange, a replica that skips does not contribute, takes the
            center, and its slots are reset. Costs a copy of the slots at each step.

    Raises:
        ValueError: if no params are given to ``update``, if the size of the axis is not
            ``num_workers``, or if gradients are already summed over the replicas.
        NameError: at trace time, if there is no such axis.

    References:
        Zhang et al., `Deep learning with Elastic Averaging SGD <https://arxiv.org/abs/1412.6651>`_,
        2015; ``tf.contrib.opt.ElasticAverageOptimizer``.

    Differences from the original:
        ``rho`` is 0 by default; the original uses ``moving_rate`` divided by the learning rate,
        which it finds in some optimizers only. ``rho`` applies to all gradients. Centers of 16-bit
        parameters are float32.
    """
    period = check_size(1, communication_period=communication_period)
    check("in (0, 1]", lambda v: 0 < v <= 1, none=True, moving_rate=moving_rate)
    check_not_negative(rho=rho)
    inner = inner_transformation(inner=inner)
    replicas = Replicas(axis_name, bucket_bytes, num_workers)

    def pull(updates, params, per_replica, **_):
        if isinstance(rho, float | int) and rho == 0:
            return updates, per_replica, None

        def towards_center(g, x, center):
            if g is None:
                return None
            pulled = upcast(g) + rho * (upcast(x) - center)
            return pulled.astype(g.dtype)

        center = per_replica.method.local_center
        pulled = update_tree.map(towards_center, updates, params, center)
        return pulled, per_replica, None

    def exchange(participates, params, replicated, per_replica, **_):
        center, last_seen = replicated.center, per_replica.method.local_center
        rate = 0.9 / period / replicas.size if moving_rate is None else moving_rate
        difference = lambda x, c: jnp.where(participates, (rate * (x - c)).astype(x.dtype), 0)
        d = map_not_none(difference, params, center)
        total, number = replicas.sum((d, participates.astype(jnp.int32)))
        see = lambda d, c, old: jnp.where(participates, c, old)
        seen = replace_not_none(last_seen, map_not_none(see, d, center, last_seen))
        replicated = replicated._replace(
            center=replace_not_none(center, map_not_none(jnp.add, total, center)),
            global_step=replicated.global_step + number,
        )
        per_replica = per_replica._replace(method=ElasticAveragePerReplica(seen))
        return jax.tree.map(jnp.subtract, params, d), replicated, per_replica

    def init(center):
        return (), ElasticAveragePerReplica(jax.tree.map(start_of_average, center))

    options = {"order": order, "skip_nonfinite": skip_nonfinite}
    method = LocalSGDMethod([exchange], period, init=init, before_step=pull, **options)
    return fitting(local_sgd(inner, replicas, method), moves="elastic_average", in_cycles=True)
