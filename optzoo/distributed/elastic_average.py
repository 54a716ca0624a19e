"""EASGD: replicas that pull one another through a center."""

import jax
import jax.numpy as jnp
import optax

from ..core.checks import check, check_not_negative, check_size
from ..core.numerics import upcast
from ..core.rows import is_sparse_or_none
from ..state.averages import start_of_average
from .engine.collectives import BUCKET_BYTES, AxisName, Replicas, map_some, merge
from .engine.local_sgd import local_sgd


def elastic_average(
    inner: optax.GradientTransformation,
    num_workers: int,
    *,
    axis_name: AxisName = "replica",
    communication_period: int = 10,
    moving_rate: float | None = None,
    rho: float = 0.0,
    order: str = "simultaneous",
    bucket_bytes: int | None = BUCKET_BYTES,
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
    :math:`c` the center, and :math:`\tilde c_i` what this replica last saw of it: the center
    before its exchange. Each replica has its own parameters and slots; :func:`optzoo.eval_params`
    gives the center. Row-sparse gradients make row-sparse local steps (``exchange=False``); the
    exchange, and ``rho``, move whole tables.

    It must be the last link of a chain. ``update`` takes ``active`` (bool per replica: whether it
    makes a step now) and ``exchange`` (a Python bool, the same on all replicas: whether to
    exchange now, in the place of the count; see :func:`optzoo.scan_local_steps`).

    Args:
        inner: a whole optimizer, its learning rate included.
        num_workers: the number of replicas.
        axis_name: the axis, or axes, of the replicas; None for a single one.
        communication_period: :math:`\tau`, local steps from one exchange to the next; static.
        moving_rate: :math:`\alpha`, in (0, 1]; None for :math:`0.9 / \tau /` ``num_workers``. The
            center stays among the replicas if ``num_workers`` times it is at most 1.
        rho: :math:`\rho`, at least 0.
        order: ``"simultaneous"``: all see the same center, with one sum over the replicas;
            ``"round_robin"``: one after the other by rank, as the original's workers.
        bucket_bytes: arrays up to this size are sent as one; None sends each by itself.

    Raises:
        ValueError: if an argument is out of its range, if no params are given to ``update``, if
            the axis has another size than ``num_workers``, or if gradients are summed already.
        NameError: at trace time, if there is no such axis.

    References:
        Zhang et al., `Deep learning with Elastic Averaging SGD <https://arxiv.org/abs/1412.6651>`_,
        2015; ``tf.contrib.opt.ElasticAverageOptimizer``.

    Differences from the original:
        ``rho`` is 0 by default, where the original takes ``moving_rate`` over the learning rate,
        which it finds in some optimizers only; and it holds with any gradient, however computed.
        Centers of parameters in 16 bits are kept in float32.
    """
    num_workers = check_size(1, num_workers=num_workers)
    period = check_size(1, communication_period=communication_period)
    check("in (0, 1]", lambda v: 0 < v <= 1, moving_rate=moving_rate)
    check_not_negative(rho=rho)
    replicas = Replicas(axis_name, bucket_bytes)
    rate = 0.9 / period / num_workers if moving_rate is None else moving_rate

    def pull(updates, params, own, **_):
        replicas.check_size(num_workers=num_workers)
        if isinstance(rho, float | int) and rho == 0:
            return updates, own

        def towards_center(g, x, center):
            if g is None:
                return None
            pulled = g + rho * (upcast(x) - center)
            return pulled.astype(g.dtype)

        center = own["local_center"]
        return jax.tree.map(towards_center, updates, params, center, is_leaf=is_sparse_or_none), own

    def exchange(who, params, shared, own, **_):
        center = shared["center"]
        d = map_some(lambda x, c: jnp.where(who, rate * (x - c), 0), params, center)
        pushed, number = replicas.sum((d, who.astype(jnp.int32)))
        seen = map_some(lambda d, c, old: jnp.where(who, c, old), d, center, own["local_center"])
        moved = jax.tree.map(jnp.subtract, params, d)
        own = {**own, "local_center": merge(own["local_center"], seen)}
        center = merge(center, map_some(jnp.add, pushed, center))
        return (
            moved,
            {**shared, "center": center, "global_step": shared["global_step"] + number},
            own,
        )

    return local_sgd(
        inner,
        replicas,
        exchange,
        period=period,
        shared=lambda params: {"center": jax.tree.map(start_of_average, params)},
        own=lambda params: {"local_center": jax.tree.map(start_of_average, params)},
        before=pull,
        order=order,
    )
