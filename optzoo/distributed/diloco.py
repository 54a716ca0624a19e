"""DiLoCo: local steps, and an outer optimizer for the mean change of the parameters."""

from __future__ import annotations

import functools
import itertools
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from ..core.boxes import marks_of_boxes
from ..core.checks import check_choice, check_flags, check_fraction, check_size
from ..core.optimizer import recorded
from ..core.rows import map_not_none, replace_not_none
from ..state.averages import wide_zeros_like
from ..state.inner import fitting, inner_transformation
from .engine.collectives import BUCKET_BYTES, AxisName, Replicas, all_finite, zero_unless
from .engine.few_bits import NAMES, Few, sum_in_few_bits
from .engine.local_sgd import LocalSGDMethod, local_sgd

# Kinds of memory that are not that of the devices.
Placement = Literal["pinned_host"]


class DiLoCoReplicated(NamedTuple):
    """State that is equal on all replicas."""

    outer: tuple[Any, ...]  # the state of the outer optimizer for each fragment
    pending: Any = ()  # Pending; () if an exchange needs no time


class Pending(NamedTuple):
    """The exchanges that have started but not ended."""

    delta: Any  # params-shaped: the pseudo-gradient
    enough: tuple[Array, ...]  # whether enough replicas arrived, for each fragment


class DiLoCoPerReplica(NamedTuple):
    """State of each replica, with ``error_feedback``."""

    residual: Any  # params-shaped: the rounding error of its last exchange


@recorded
def diloco(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation | None = None,
    *,
    num_workers: int | None = None,
    axis_name: AxisName = "replica",
    communication_period: int = 100,
    warmup_steps: int = 0,
    fragments: int = 1,
    overlap_steps: int = 0,
    mixing: float = 0.0,
    min_arrived: int = 1,
    exchange_dtype: Few | None = None,
    error_feedback: bool = False,
    placement: Placement | None = None,
    bucket_bytes: int | None = BUCKET_BYTES,
    skip_nonfinite: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Low-communication training: local steps, and an outer optimizer for their mean change.

    .. math::
        x_i &\leftarrow x_i + u(g_i) \\
        \text{every } \tau \text{ steps:} \quad
        \Delta &= c - \frac{1}{n} \sum_{j \text{ arrived}} x_j, \quad
        c \leftarrow c + U(\Delta), \quad x_i \leftarrow (1 - a)\, c + a\, x_i

    where :math:`x_i` are the parameters of replica :math:`i`, :math:`u` is the update of ``inner``,
    :math:`c` is the center, the parameters after the last exchange (:func:`optzoo.eval_params`),
    :math:`\Delta` is the pseudo-gradient, :math:`U` the update of ``outer``, and :math:`a` is
    ``mixing``. With ``overlap_steps``, :math:`\Delta` is computed that many steps before it is
    used, to hide the time of the exchange. Slots of ``inner`` stay on their replica. With
    ``outer=gradient_descent(1.0)`` the method is :func:`optzoo.model_average`. With
    ``exchange=False`` row-sparse gradients make row-sparse local steps; the pseudo-gradient has
    whole tables.

    The wrapper must be the last transformation of a chain. Arguments of ``update``:

    - ``arrived``: bool per replica, whether its parameters are included in the mean; every replica
      takes the result;
    - ``active``: bool per replica, whether it makes a step now;
    - ``exchange``: a Python bool, equal on all replicas, whether to exchange now, independently of
      the step count; with ``overlap_steps`` also ``"start"`` and ``"finish"`` (see
      :func:`optzoo.replicas.scan_local_steps`);
    - ``fragment``: a Python int, with ``exchange`` the only fragment to exchange;
    - ``weight``: a number of at least 0 per replica, its weight in the mean, such as its tokens or
      samples since the last exchange; with 0 its parameters are excluded, even if they are NaN.

    ``arrived`` and ``weight`` are used when an exchange starts.

    Example:
        >>> import jax.numpy as jnp, optax, optzoo
        >>> tx = optzoo.diloco(optzoo.gradient_descent(0.1), optax.sgd(1.0), communication_period=2)
        >>> params, state = optzoo.replicas.replicate(jnp.zeros(1), tx.init(jnp.zeros(1)), 2)
        >>> def step(params, state, gradient):
        ...     updates, state = tx.update(gradient, state, params)
        ...     return optax.apply_updates(params, updates), state
        >>> on_all = optzoo.replicas.map_over_replicas(step)
        >>> for _ in range(2):
        ...     params, state = on_all(params, state, jnp.array([[1.0], [3.0]]))
        >>> print(params)  # both replicas: the mean of -0.2 and -0.6
        [[-0.4]
         [-0.4]]

    Args:
        inner: a complete optimizer, including its learning rate.
        outer: the optimizer for the pseudo-gradient; None for ``optax.sgd(0.7, momentum=0.9,
            nesterov=True)``.
        num_workers: the expected number of replicas; None for the size of the axis.
        axis_name: the axis, or axes, of the replicas; None for a single replica.
        communication_period: :math:`\tau`, the number of local steps between exchanges; static.
        warmup_steps: the number of initial steps with synchronous training, in which gradients are
            averaged and ``outer`` is not used; static. No effect in steps with ``exchange=False``.
        fragments: the number of fragments of similar size into which the parameters are divided, at
            most ``communication_period``; static. Each is exchanged once in a period, one after the
            other, which reduces the peak bandwidth ("streaming").
        overlap_steps: the number of local steps from the start of an exchange to its end, below
            ``communication_period // fragments``; static. These steps use parameters without the
            result. The state has one more copy of the parameters. The first exchange after a
            warm-up is skipped if it would start during the warm-up.
        mixing: :math:`a`, in [0, 1]: the weight of a replica's own parameters in an exchange; with
            0 the steps of the overlap are lost.
        min_arrived: the number of replicas that must have arrived, at most that of all; static.
            With fewer, the exchange is skipped, and its changes are included in the next one.
        exchange_dtype: ``"bfloat16"``, ``"int8"``, ``"int4"`` or ``"int2"`` sends the changes
            :math:`c - x_j` in this format, integers with a scale for every 512 elements; None sends
            parameters in their own dtype, at least float32. Each replica sums a part of the codes
            of all replicas, rounds the sum, and sends it to all.
        error_feedback: whether the rounding error is stored and added to the next exchange. Each
            replica stores one copy of the parameters for it.
        placement: ``"pinned_host"`` stores the center and the state of ``outer`` in host memory,
            from which an exchange moves them to the devices and back; None for device memory.
        bucket_bytes: arrays up to this size are sent together; None sends each separately.
        skip_nonfinite: whether to skip local steps that give NaN or infinity, which would spread to
            all replicas. At an exchange, a replica that skips does not contribute, takes the
            center, and its slots are reset. Costs a copy of the slots at each step.

    Raises:
        ValueError: if ``overlap_steps`` is too large; in ``init``, if ``placement`` would move
            nothing; if no params are given to ``update``; if the size of the axis is not
            ``num_workers``; if ``min_arrived`` is above the number of replicas; if
            ``exchange_dtype`` is given with ``warmup_steps`` or without an axis, or
            ``error_feedback`` without ``exchange_dtype``; if ``fragment`` is out of its range; if
            ``exchange`` is ``"start"`` or ``"finish"`` without ``overlap_steps``; or if gradients
            are already summed over the replicas.
        NameError: at trace time, if there is no such axis.

    References:
        Douillard et al., `DiLoCo: Distributed Low-Communication Training of Language Models
        <https://arxiv.org/abs/2311.08105>`_, 2023; Douillard et al., `Streaming DiLoCo with
        overlapping communication: Towards a Distributed Free Lunch
        <https://arxiv.org/abs/2501.18512>`_, 2025.
    """
    period = check_size(1, communication_period=communication_period)
    warmup_steps = check_size(warmup_steps=warmup_steps)
    fragments = check_size(1, fragments=fragments)
    if fragments > period:
        raise ValueError(
            f"fragments must be at most communication_period={period}, so that each fragment has "
            f"its own step, got {fragments}"
        )
    overlap_steps = check_size(overlap_steps=overlap_steps)
    if overlap_steps >= period // fragments and overlap_steps > 0:
        raise ValueError(
            f"overlap_steps must be below communication_period // fragments = {period} // "
            f"{fragments} = {period // fragments}, so that a fragment starts after its last "
            f"exchange, got {overlap_steps}"
        )
    check_fraction(on_device=False, mixing=mixing)
    min_arrived = check_size(1, min_arrived=min_arrived)
    check_flags(error_feedback=error_feedback)
    if exchange_dtype is not None:
        check_choice((*NAMES, None), exchange_dtype=exchange_dtype)
        if axis_name is None or warmup_steps:
            name = "warmup_steps" if warmup_steps else "axis_name=None"
            reason = "must stay equal" if warmup_steps else "send nothing"
            raise ValueError(
                f"exchange_dtype={exchange_dtype!r} rounds what replicas send, but they {reason} "
                f"with {name}: pass exchange_dtype=None"
            )
    elif error_feedback:
        raise ValueError(
            "error_feedback=True needs an exchange_dtype, whose rounding errors it stores: one "
            f"of {', '.join(NAMES)}"
        )
    check_choice((*get_args(Placement), None), placement=placement)
    replicas = Replicas(axis_name, bucket_bytes, num_workers)
    inner = inner_transformation(inner=inner)
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True) if outer is None else outer
    outer = inner_transformation(outer=outer)
    outers = [
        optax.masked(outer, lambda tree, i=i: marks_of_boxes(_members(tree, fragments, i)))
        for i in range(fragments)
    ]

    def synchronous(updates, params, per_replica, *, count, exchange, arrived):
        if warmup_steps == 0 or exchange is False:
            return updates, per_replica, None
        everyone = arrived is True and not skip_nonfinite
        if skip_nonfinite:
            arrived = arrived & all_finite(updates)
        branches = replicas.mean_gradients, replicas.spread_gradients
        of_warmup = count <= warmup_steps
        means, some = lax.cond(of_warmup, *branches, updates, jnp.asarray(arrived))
        # Without any gradient there is no step: zeros would move parameters by their slots.
        return means, per_replica, None if everyone else some

    def of_fragment(fragment, center, tree):
        is_in = _members(center, fragments, fragment)
        return map_not_none(lambda x, is_in: x if is_in else None, tree, is_in)

    def pseudo_gradient(fragment, arrived, params, replicated, per_replica, weight=None):
        """The pseudo-gradient of the fragment, whether enough arrived, and the rounding error."""
        replicas.check_at_most(min_arrived=min_arrived)
        center = replicated.center
        sent = of_fragment(fragment, center, params)
        share = None if weight is None else jnp.where(arrived, weight, 0).astype(jnp.float32)

        def weighted(x):
            if share is None:
                return x
            # A replica with weight 0 is excluded, even if its parameters are NaN.
            return jnp.where(share == 0, 0, x * share.astype(x.dtype))

        counts = arrived.astype(jnp.int32), share
        sums, lost = None, None
        if exchange_dtype is None:
            sent = zero_unless(arrived, map_not_none(weighted, sent))
            sums, number, total = replicas.sum((sent, *counts))
        else:
            number, total = replicas.sum(counts)
        enough = number > 0 if min_arrived == 1 else number >= min_arrived
        divisor = jnp.maximum(number, 1)
        if share is not None:
            enough &= total > 0
            divisor = jnp.where(total > 0, total, 1)
        mean = lambda total: total / divisor.astype(total.dtype)
        if exchange_dtype is None:
            change = lambda c, s: c - mean(s)
        else:
            # Changes are small, and so are their rounding errors. The sent values sum to the
            # pseudo-gradient itself: the rounding error is a part of it, and can be added to the
            # next one for any weights and arrivals.
            sent = map_not_none(lambda x, c: mean(weighted(c - x)), sent, center)
            if error_feedback:
                residual = of_fragment(fragment, center, per_replica.method.residual)
                sent = map_not_none(jnp.add, sent, residual)
            sums, lost = sum_in_few_bits(replicas, zero_unless(arrived, sent), exchange_dtype)
            change = lambda c, s: s
        difference = lambda c, s: jnp.zeros_like(c) if s is None else change(c, s)
        delta = jax.tree.map(difference, center, sums)
        if error_feedback:
            # A replica that did not arrive has rounded the others' sum, and keeps its error.
            keep = lambda new, r: jnp.where(enough, jnp.where(arrived, new, r + new), r)
            old = per_replica.method.residual
            residual = replace_not_none(old, map_not_none(keep, lost, old))
            per_replica = per_replica._replace(method=DiLoCoPerReplica(residual))
        return delta, enough, per_replica

    def move(fragment, delta, enough, params, replicated):
        """Moves the center by a pseudo-gradient, and the replicas to the center."""
        center, states = replicated.center, list(replicated.method.outer)
        warm = replicated.count <= warmup_steps
        updates, state = outers[fragment].update(delta, states[fragment], center)
        states[fragment] = optax.tree.where(enough & ~warm, state, states[fragment])
        step = lambda _, c, d, u: jnp.where(enough, jnp.where(warm, c - d, c + u), c)
        taking_part = of_fragment(fragment, center, params)
        moved = map_not_none(step, taking_part, center, delta, updates)
        # Without mixing, a replica that is not finite also takes the center.
        mixed = lambda c, x: jnp.where(mixing == 0, c, c + mixing * (x - c))
        take = lambda c, x: jnp.where(enough, mixed(c, x), x)
        params = replace_not_none(params, map_not_none(take, moved, params))
        is_last = enough.astype(jnp.int32) if fragment == fragments - 1 else 0
        replicated = replicated._replace(
            center=replace_not_none(center, moved),
            method=replicated.method._replace(outer=tuple(states)),
            global_step=replicated.global_step + is_last,
        )
        return params, replicated

    def exchange(fragment, arrived, params, replicated, per_replica, weight=None, **_):
        delta, enough, per_replica = pseudo_gradient(
            fragment, arrived, params, replicated, per_replica, weight
        )
        return *move(fragment, delta, enough, params, replicated), per_replica

    def start(fragment, arrived, params, replicated, per_replica, weight=None, **_):
        delta, enough, per_replica = pseudo_gradient(
            fragment, arrived, params, replicated, per_replica, weight
        )
        pending, is_in = replicated.method.pending, _members(delta, fragments, fragment)
        choose = lambda old, new, is_in: new if is_in else old
        delta = jax.tree.map(choose, pending.delta, delta, is_in)
        pending = Pending(delta, _with(pending.enough, fragment, enough))
        method = replicated.method._replace(pending=pending)
        return params, replicated._replace(method=method), per_replica

    def finish(fragment, arrived, params, replicated, per_replica, **_):
        del arrived  # it is said at the start
        pending = replicated.method.pending
        enough = pending.enough[fragment]
        # It is not pending any more: the start of the next one may be in the warm-up.
        used = pending._replace(enough=_with(pending.enough, fragment, jnp.zeros_like(enough)))
        replicated = replicated._replace(method=replicated.method._replace(pending=used))
        return *move(fragment, pending.delta, enough, params, replicated), per_replica

    def due(count):
        ends = [(i + 1) * period // fragments for i in range(fragments)]
        starts = [end - overlap_steps for end in ends] if overlap_steps else []
        phases = [step % period for step in (*starts, *ends)]
        return [(count % period == phase) | (count <= warmup_steps) for phase in phases]

    def init(center):
        if placement is not None:
            _check_memory(placement)
        pending = ()
        if overlap_steps:
            none = jnp.zeros([], bool)
            pending = Pending(wide_zeros_like(center), (none,) * fragments)
        of_all = DiLoCoReplicated(tuple(outer.init(center) for outer in outers), pending)
        return of_all, DiLoCoPerReplica(wide_zeros_like(center)) if error_feedback else ()

    of_each = lambda f: [functools.partial(f, i) for i in range(fragments)]
    starts = of_each(start) if overlap_steps else ()
    exchanges = of_each(finish if overlap_steps else exchange)
    method = LocalSGDMethod(
        exchanges,
        period,
        due,
        init=init,
        before_step=synchronous,
        lockstep=True,
        starts=starts,
        weighted=True,
        skip_nonfinite=skip_nonfinite,
        on_host=placement is not None,
    )
    return fitting(local_sgd(inner, replicas, method), moves="diloco", in_cycles=True)


def _check_memory(placement: str) -> None:
    """Raises ``ValueError`` if the devices do not have this memory in addition to their own."""
    device = jax.local_devices()[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if placement not in kinds or placement == device.default_memory().kind:
        raise ValueError(
            f"placement={placement!r} would move nothing: devices of {device.platform!r} have the "
            f"memories {', '.join(kinds)} and use {device.default_memory().kind}; pass "
            "placement=None"
        )


def _with(values: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    """The tuple with another value at one position."""
    return (*values[:at], value, *values[at + 1 :])


def _members(tree: Any, fragments: int, fragment: int) -> Any:
    """Whether each leaf is in a fragment: consecutive leaves, of similar size for each fragment."""
    leaves, treedef = jax.tree.flatten(tree)
    ends = list(itertools.accumulate(leaf.size for leaf in leaves))
    middles = [end - leaf.size / 2 for end, leaf in zip(ends, leaves, strict=True)]
    of = [min(int(m * fragments / max(ends[-1], 1)), fragments - 1) for m in middles]
    return treedef.unflatten([i == fragment for i in of])
