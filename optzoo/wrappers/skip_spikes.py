"""Skips updates at spikes of the loss or the gradient norm, around any optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from ..core.checks import check, check_choice, check_positive, check_size
from ..core.compat import TracedOnce, vary, varying
from ..core.gradients import check_gradients
from ..core.norms import global_norm
from ..core.numerics import next_count
from ..core.optimizer import Optimizer, recorded
from ..core.rows import SparseRows, map_rows, rows_tree, zeros_like_update
from ..distributed.engine.collectives import AxisName, Replicas
from ..state.inner import check_not_around_replicas, fitting, inner_transformation
from ..state.types import AccumulateState, SkipSpikesState, nodes_of

Watched = Literal["loss", "norm"]


@recorded
def skip_spikes(
    inner: optax.GradientTransformation,
    *,
    window: int = 128,
    deviations: float = 6.0,
    min_values: int | None = None,
    on: Watched | Sequence[Watched] = ("loss", "norm"),
    correction: Literal[0, 1] = 1,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Skips updates at spikes of loss or gradient norm, as OLMo-core's ``SkipStepOptimizer``.

    .. math::
        (u_t, s_t) = \begin{cases}
            (0, s_{t-1}) & \text{if } v_t > \mu_t + k\, \sigma_t \text{ for the loss or the norm}
            \\ \text{the update of the inner optimizer} & \text{otherwise} \end{cases}

    where :math:`v_t` is the loss of this step or the global norm of its gradients, and
    :math:`\mu_t` and :math:`\sigma_t` are the mean and the standard deviation of the ``window``
    values before it. The window includes the values of skipped steps, so that updates resume if a
    higher level persists. A step whose loss or norm is NaN or infinite is always skipped, and its
    values are excluded from the window.

    The loss is passed as ``update(..., value=loss)``, as in optax, and also passed to ``inner``.
    :func:`optzoo.minimize`, :func:`optzoo.sharded_minimize` and ``optzoo.nnx_minimize`` pass it
    automatically. The norm is that of :func:`optzoo.clip_by_global_norm`; rows that share an index
    are summed first.

    A skipped update is zero and leaves the state of ``inner``, with its step count, unchanged;
    ``num_skipped`` of the state counts such steps. ``accumulate(skip_spikes(tx), n)`` tests the sum
    of a cycle and the loss of its last step; ``skip_spikes(accumulate(tx, n))`` tests each step,
    and a cycle then consists of :math:`n` steps that were not skipped.

    The state has one float32 for each value of the window.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> sgd = optzoo.gradient_descent(0.5)
        >>> tx = optzoo.skip_spikes(sgd, window=8, min_values=3)
        >>> params = jnp.zeros(1)
        >>> state = tx.init(params)
        >>> for loss in (2.0, 2.1, 1.9, 9.0, 2.0):
        ...     updates, state = tx.update(jnp.ones(1), state, params, value=loss)
        ...     print(updates + 0)
        [-0.5]
        [-0.5]
        [-0.5]
        [0.]
        [-0.5]
        >>> print(state.num_skipped)
        1

    Args:
        inner: a complete optimizer, including its learning rate.
        window: the number of previous values over which mean and deviation are computed, at least
            2.
        deviations: :math:`k`, positive: the largest distance of a value above the mean, in standard
            deviations.
        min_values: the smallest number of values in the window at which finite values may be
            skipped, from 2 to ``window``; None for ``max(2, window // 2 - 1)``.
        on: the values that are tested: ``"loss"``, ``"norm"``, or both.
        correction: 0 or 1, subtracted from the number of values by which the sum of squares is
            divided, as in ``jnp.std``.
        axis_name: the axis, or axes, of ``shard_map``, ``pmap`` or ``vmap`` whose devices decide
            together, by the means of their losses and of their norms. None if loss and gradients
            are equal on all devices, as in :func:`optzoo.sharded_minimize`, or for one device.

    Raises:
        TypeError: if ``inner`` is not a transformation, or an argument is of the wrong type; in
            ``update``, if ``value`` is not a number.
        ValueError: if an argument is out of range, or ``min_values`` above ``window``; in ``init``,
            if ``inner`` is a method for replicas; in ``update``, if the loss is tested and
            ``value`` is missing, if ``value`` has axes, or if ``global_step`` is given and
            ``inner`` accumulates gradients.

    References:
        ``SkipStepOptimizer`` of `OLMo-core <https://github.com/allenai/OLMo-core>`_;
        ``SkipStepConfig`` of `Levanter <https://github.com/stanford-crfm/levanter>`_;
        ``skip_step_on_spikes`` of `MaxText <https://github.com/AI-Hypercomputer/maxtext>`_

    Differences from the original:
        The defaults are those of OLMo-core since version 2, and of MaxText with an interval of 128.
        With a window of less than 6 values, both skip the second step, as a single value has no
        deviation. Levanter's interval of :math:`n` corresponds to ``window=n + 1``,
        ``min_values=max(2, n // 2)`` and ``correction=0``; its deviation is at least 1e-6. In all
        three a value that is not finite enters the window, and is skipped only if there are enough
        values. OLMo-core and MaxText then skip every step until the value leaves the window;
        Levanter excludes NaN from its mean, but not infinity.
    """
    inner = inner_transformation(inner=inner)
    window = check_size(2, window=window)
    check_positive(deviations=deviations)
    watched = (on,) if isinstance(on, str) else tuple(on)
    if not watched:
        raise ValueError(f"on must name 'loss', 'norm' or both, got {on!r}")
    for name in watched:
        check_choice(Watched, on=name)
    check_choice((0, 1), correction=correction)
    least = max(2, window // 2 - 1) if min_values is None else min_values
    least = check_size(2, min_values=least)
    if least > window:
        raise ValueError(
            f"min_values must be at most window={window}, got {least}: no update would ever be "
            "skipped"
        )
    replicas = Replicas(axis_name)

    def init(params):
        state = inner.init(params)
        why = "whose exchanges need all replicas in every step"
        check_not_around_replicas("skip_spikes", why, state)
        values = {name: jnp.zeros(window, jnp.float32) for name in ("loss", "norm")}
        losses, norms = (values[name] if name in watched else () for name in ("loss", "norm"))
        zero = lambda: jnp.zeros([], jnp.int32)
        return SkipSpikesState(zero(), zero(), losses, norms, state)

    def is_usual(value, before, count):
        there, places = jnp.minimum(count, window), jnp.arange(window, dtype=count.dtype)
        number = jnp.maximum(there, 1).astype(jnp.float32)
        of_those = lambda values: jnp.sum(jnp.where(places < there, values, 0))
        mean = of_those(before) / number
        squares = of_those(jnp.square(before - mean))
        deviation = jnp.sqrt(squares / jnp.maximum(number - correction, 1))
        return (count < least) | (value - mean <= deviations * deviation)

    def update(updates, state, params=None, *, value=None, **extra_args):
        check_gradients(updates, params, allow_complex=True)
        if extra_args.get("global_step") is not None and nodes_of(AccumulateState, state.inner):
            raise ValueError(
                "global_step determines where a cycle of optzoo.accumulate begins, but "
                "skip_spikes around it may skip that step: leave global_step out, or write "
                "accumulate(skip_spikes(tx, ...), every)"
            )
        updates = map_rows(SparseRows.coalesce, updates)
        now = {}
        if "loss" in watched:
            now["loss"] = _loss(value)
        if "norm" in watched:
            norm = global_norm(rows_tree.leaves(updates))
            now["norm"] = norm.astype(jnp.float32)
        now = {name: x / replicas.size for name, x in replicas.sum(now).items()}

        before = {"loss": state.losses, "norm": state.norms}
        is_finite, keep = jnp.array(True), jnp.array(True)
        for name, x in now.items():
            is_finite &= jnp.isfinite(x)
            keep &= is_usual(x, before[name], state.count)
        keep &= is_finite

        if value is not None:
            extra_args["value"] = value
        apply = TracedOnce(lambda: inner.update(updates, state.inner, params, **extra_args))
        of_updates, of_inner = apply.types
        # In shard_map both branches must differ along the same axes.
        kept = jax.tree.map(lambda old, new: vary(old, varying(new)), state.inner, of_inner)
        skip = lambda: (zeros_like_update(of_updates), kept)
        updates, of_inner = lax.cond(keep, apply, skip)

        place = state.count % window
        put = lambda x, values: jnp.where(is_finite, values.at[place].set(x), values)
        after = before | {name: put(x, before[name]) for name, x in now.items()}
        count = jnp.where(is_finite, next_count(state.count, window), state.count)
        num_skipped = jnp.where(keep, state.num_skipped, next_count(state.num_skipped))
        return updates, SkipSpikesState(count, num_skipped, after["loss"], after["norm"], of_inner)

    about = inner.about._replace(row_wise=False, deferral=None)
    return fitting(Optimizer(init, update, about.reading("value") if "loss" in watched else about))


def _loss(value: Any) -> Array:
    if value is None:
        raise ValueError(
            "skip_spikes tests the loss, but update was called without it: pass update(..., "
            "value=loss), or set on='norm'"
        )
    fix = "it is the loss of this step"
    check("a number", lambda _: True, infinite=True, on_device=False, fix=fix, value=value)
    return jnp.asarray(value).astype(jnp.float32)
