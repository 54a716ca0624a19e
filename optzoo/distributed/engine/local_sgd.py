"""The frame of methods whose replicas train alone and exchange what they have now and then."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from ...core.checks import check_params, check_size
from ...core.gradients import check_gradients
from ...core.numerics import upcast
from ...core.rows import is_rows
from ...state.types import ReplicaState
from .collectives import Replicas, map_some, where

ORDERS = ("simultaneous", "round_robin")


def local_sgd(
    inner: optax.GradientTransformation,
    replicas: Replicas,
    rule: Callable[..., tuple[Any, dict[str, Any], dict[str, Any]]],
    *,
    period: int,
    shared: Callable[[Any], dict[str, Any]],
    own: Callable[[Any], dict[str, Any]] = lambda params: {},
    before: Callable[..., tuple[Any, dict[str, Any]]] | None = None,
    order: str = "simultaneous",
    together: bool = False,
    fragments: int = 1,
    all_until: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """A local step of ``inner`` on every replica, and an exchange every ``period`` steps.

    Replicas count their own steps, so those that were not ``active`` exchange later, unless
    all do it ``together``. A step on which no replica is due communicates nothing, unless some
    were inactive before: then one number tells whether any is.

    Args:
        inner: the optimizer of the local steps.
        replicas: those who exchange.
        rule: ``rule(who, params, shared, own, fragment=, **extra_args) -> (params, shared, own)``
            for a replica, with parameters in float32 at least after the local step, None where
            there was no gradient. ``who``: whether this replica takes part.
        period: local steps from one exchange to the next.
        shared: of the params, makes what all replicas have in common.
        own: of the params, makes what each has for itself.
        before: ``before(updates, params, own, count=, exchange=, arrived=) -> (updates, own)``
            in front of the local step.
        order: whether all take part at once, or one after the other by rank.
        together: whether inactive replicas take part in exchanges, too, and ``arrived`` masks.
        fragments: of the parameters, exchanged in turn within the period.
        all_until: the number of first steps each of which exchanges all fragments.
    """
    check_size(1, fragments=fragments)
    if order not in ORDERS:
        raise ValueError(f"order must be one of {ORDERS}, got {order!r}")
    inner = optax.with_extra_args_support(inner)

    def init(params):
        zero = lambda: jnp.zeros([], jnp.int32)
        counts = {"count": zero(), "global_step": zero()}
        apart = {} if together else {"apart": jnp.zeros([], bool)}
        return ReplicaState(
            {**counts, **apart, **shared(params)},
            {"local_step": zero(), "inner": inner.init(params), **own(params)},
        )

    def update(
        updates,
        state,
        params=None,
        *,
        active=None,
        arrived=None,
        exchange=None,
        fragment=None,
        **extra_args,
    ):
        check_params(params)
        check_gradients(updates, params)
        replicas.check_own(updates)
        params, old = replicas.vary((params, state.own))
        arrived = True if arrived is None else arrived
        count = state.shared["count"] + 1
        common = {**state.shared, "count": count}

        # The local step.
        new = old
        if before is not None:
            now = {"count": count, "exchange": exchange, "arrived": arrived}
            updates, new = before(updates, params, old, **now)
        us, of_inner = inner.update(updates, old["inner"], params, **extra_args)
        new = {**new, "inner": of_inner, "local_step": old["local_step"] + 1}
        if active is not None:
            us, new = where(active, us, 0), where(active, new, old)

        if active is not None and not together:
            common["apart"] |= replicas.any(jnp.logical_not(active))
        if exchange is False:
            return us, ReplicaState(common, new)

        # Who exchanges, if it is time.
        phase, due = count % period, count % period == 0
        mine = jnp.asarray(arrived if together else True if active is None else active)
        if not (together or exchange):
            mine &= jnp.asarray(new["local_step"]) % period == 0
            due = lax.cond(common["apart"], lambda: replicas.any(mine), lambda: phase == 0)
        # An exchange moves all rows; a parameter without a gradient takes no part, and is None.
        dense = jax.tree.map(lambda u: u.to_dense() if is_rows(u) else u, us, is_leaf=is_rows)
        start = map_some(lambda u, x: upcast(x), dense, params)

        def exchanged(carry, parts):
            us, common, new = carry
            carry = map_some(jnp.add, start, us), common, new
            for part in parts:
                carry = in_order(carry, part)
            after, common, new = carry
            change = lambda y, x, u: (y - x).astype(u.dtype)
            return jax.tree.map(change, after, start, us), common, new

        def in_order(carry, part):
            at = lambda who, carry: rule(who, *carry, fragment=part, **extra_args)
            if order == "simultaneous":
                return at(mine, carry)
            turn = lambda carry, rank: (at(mine & (replicas.index == rank), carry), None)
            return lax.scan(turn, carry, jnp.arange(replicas.size))[0]

        carry, every = (dense, common, new), range(fragments)
        if exchange:
            carry = exchanged(carry, every if fragment is None else [fragment])
        else:
            for i in every:
                if fragments > 1:  # each has a phase of its own
                    due = phase == (i + 1) * period // fragments % period
                is_time = due | (count <= all_until)
                carry = _change_if(is_time, lambda carry, i=i: exchanged(carry, [i]), carry)
        us, common, new = carry
        return us, ReplicaState(common, new)

    return optax.GradientTransformationExtraArgs(init, update)


def _change_if(due: Array, change: Callable[[Any], Any], carry: Any) -> Any:
    """``change(carry)`` if it is due, else ``carry``, in place.

    A loop of one turn or none. XLA keeps what a loop carries in its place, while ``lax.cond``
    copies all that it returns, changed or not; but a loop has no derivative in reverse mode.
    """
    turn = lambda state: (jnp.zeros_like(state[0]), change(state[1]))
    return lax.while_loop(lambda state: state[0], turn, (jnp.asarray(due), carry))[1]
