"""AGN: replicas that push the mean of their gradients to a center."""

import jax
import jax.numpy as jnp
import optax

from ..core.checks import check_size
from ..core.rows import is_sparse_or_none
from ..state.averages import start_of_average, zeros_of_average
from ..state.slots import are_slots
from .engine.collectives import BUCKET_BYTES, AxisName, Replicas, apply_some, map_some, where
from .engine.local_sgd import local_sgd


def agn(
    inner: optax.GradientTransformation,
    *,
    axis_name: AxisName = "replica",
    communication_period: int = 10,
    order: str = "simultaneous",
    bucket_bytes: int | None = BUCKET_BYTES,
) -> optax.GradientTransformationExtraArgs:
    r"""Accumulated gradient normalization, as in ``tf.contrib.opt.AGNOptimizer``.

    .. math::
        a_i &\leftarrow a_i + g_i, \quad x_i \leftarrow x_i + u_i(g_i) \\
        \text{every } \tau \text{ steps:} \quad
        c &\leftarrow c + u_c\Bigl(\frac{1}{n} \sum_{j \text{ pushing}} \frac{a_j}{\tau}\Bigr),
        \quad x_i \leftarrow c, \quad a_i \leftarrow 0

    where :math:`x_i` are the parameters of replica :math:`i`, :math:`c` is the center,
    :math:`u_i` and :math:`u_c` are the updates of ``inner`` with the slots of the replica and
    those of the center, and :math:`n` replicas push at once. A replica's slots stay as they are.
    What ``inner`` keeps beside slots (step counts, Adam's powers) belongs to the replica, goes
    along with its push and counts it, as in the original. :func:`optzoo.eval_params` gives the
    center. Row-sparse gradients make row-sparse local steps (``exchange=False``) and are
    accumulated at their rows; the push is of whole tables.

    It must be the last link of a chain. ``update`` takes ``active`` (bool per replica: whether it
    makes a step now) and ``exchange`` (a Python bool, the same on all replicas: whether to push
    now, in the place of the count; the mean is then over the steps since the last push; see
    :func:`optzoo.scan_local_steps`).

    Args:
        inner: a whole optimizer, its learning rate included.
        axis_name: the axis, or axes, of the replicas; None for a single one.
        communication_period: :math:`\tau`, local steps from one push to the next; static.
        order: ``"simultaneous"``: the center makes one step by the mean of all pushes, with one
            sum over the replicas; ``"round_robin"``: one step for each, in the order of ranks,
            and each replica pulls what its own step made, as the original's workers.
        bucket_bytes: arrays up to this size are sent as one; None sends each by itself.

    Raises:
        ValueError: if an argument is out of its range, if no params are given to ``update``, or
            if gradients are summed already.
        NameError: at trace time, if there is no such axis.

    References:
        Hermans et al., `Accumulated Gradient Normalization <https://arxiv.org/abs/1710.02368>`_,
        2017; ``tf.contrib.opt.AGNOptimizer``.

    Differences from the original:
        With ordinary TensorFlow variables the original at times pushes the sum in the place of
        the mean, at random; this is the mean. Accumulators and the center are in float32 at
        least.
    """
    period = check_size(1, communication_period=communication_period)
    replicas = Replicas(axis_name, bucket_bytes)
    inner = optax.with_extra_args_support(inner)

    def accumulate(updates, params, own, **_):
        add = lambda g, a: a if g is None else a + g.astype(a.dtype)
        total = jax.tree.map(add, updates, own["accumulated"], is_leaf=is_sparse_or_none)
        return updates, {**own, "accumulated": total, "since": own["since"] + 1}

    def push(who, params, shared, own, *, fragment, **extra_args):
        del fragment
        state, is_slot = own["inner"], are_slots(inner, own["inner"])
        # The counters of all replicas side by side, for the sum of the pushes to carry along.
        here = (jnp.arange(replicas.size) == replicas.index) & who
        place = lambda a: jnp.where(here.reshape(-1, *(1,) * a.ndim), a[None], 0)
        counters = jax.tree.map(lambda a, is_slot: None if is_slot else place(a), state, is_slot)
        mean = lambda x, a: jnp.where(who, a / own["since"].astype(a.dtype), 0)
        mean = map_some(mean, params, own["accumulated"])
        pushed, counters, pushers = replicas.sum((mean, counters, here.astype(jnp.int32)))
        number, first = jnp.sum(pushers), jnp.argmax(pushers)
        pushed = jax.tree.map(lambda g: g / jnp.maximum(number, 1).astype(g.dtype), pushed)

        center, of_center = shared["center"], shared["center_inner"]
        pick = lambda slot, c, is_slot: slot if is_slot else c[first].astype(slot.dtype)
        before = jax.tree.map(pick, of_center, counters, is_slot)
        moves, after = inner.update(pushed, before, center, **extra_args)
        moved = apply_some(center, moves)
        some = number > 0
        shared = {
            **shared,
            "center": where(some, moved, center),
            "center_inner": where(some, after, of_center),
            "global_step": shared["global_step"] + number,
        }
        go_on = lambda a, c, is_slot: a if is_slot else jnp.where(who, c.astype(a.dtype), a)
        own = {
            **own,
            "inner": jax.tree.map(go_on, state, after, is_slot),
            "accumulated": where(~who, own["accumulated"], 0),
            "since": jnp.where(who, 0, own["since"]),
        }
        pulled = map_some(lambda x, c: jnp.where(who, c, x), params, moved)
        return pulled, shared, own

    def shared(params):
        center = jax.tree.map(start_of_average, params)
        return {"center": center, "center_inner": inner.init(center)}

    def own(params):
        return {"accumulated": zeros_of_average(params), "since": jnp.zeros([], jnp.int32)}

    return local_sgd(
        inner,
        replicas,
        push,
        period=period,
        shared=shared,
        own=own,
        before=accumulate,
        order=order,
    )
