"""Shared driver for local-SGD methods: local steps with periodic synchronization."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from ...core.checks import check_choice, check_params
from ...core.gradients import check_gradients
from ...core.numerics import is_trainable, next_count, upcast
from ...core.optimizer import About, Optimizer, about_of
from ...core.rows import is_rows, map_not_none, update_tree
from ...state.averages import start_of_average
from ...state.deferred import refuse_deferred
from ...state.slots import are_slots
from ...state.types import LocalSGDPerReplica, LocalSGDReplicated, LocalSGDState
from .collectives import Replicas, all_finite, zero_unless
from .forward_only import forward_only

Order = Literal["simultaneous", "round_robin"]
# The two ends of an exchange that overlaps local steps.
Stage = Literal["start", "finish"]


class LocalSGDMethod(NamedTuple):
    """One method of local SGD, as run by the driver.

    Attributes:
        exchanges: the exchanges of a period; most methods have one. Each is
            ``exchange(participates, params, replicated, per_replica, **extra_args) -> (params,
            replicated, per_replica)``, called on every replica. ``participates`` (a bool array) is
            whether this replica takes part. The parameters are those after the local step, in at
            least float32, and None where there was no gradient.
        period: the number of steps after which the schedule repeats.
        due: ``due(steps)`` returns for each of ``starts`` and ``exchanges``, in this order, whether
            it is due after that many steps; None for one exchange at the end of each period.
        init: ``init(center) -> (replicated, per_replica)``: the named tuples of the method.
        before_step: ``before_step(updates, params, per_replica, count=, exchange=, arrived=) ->
            (updates, per_replica, makes_step)``, called before the inner optimizer; ``arrived`` is
            false for an inactive replica. ``makes_step`` is a mask, like ``active``, or None.
        lockstep: whether ``due`` counts ticks, so that all replicas exchange in the same tick,
            including inactive ones, and ``arrived`` masks their parameters. If not, ``due`` counts
            the steps of each replica, and an inactive replica does not take part.
        starts: functions that begin each of the exchanges some steps earlier, in the same form;
            empty without overlap. Only a start communicates, not its exchange.
        order: whether all replicas exchange at once, or one after the other by rank.
        weighted: whether its exchanges take ``weight``, the weight of this replica in a mean.
        skip_nonfinite: whether local steps that give NaN or infinity are skipped. If a skipped step
            includes an exchange, the replica does not take part and restarts from the center.
        on_host: whether the center and the replicated state of the method are in host memory; an
            exchange moves them to the devices and back. The rule receives them on the devices.
    """

    exchanges: Sequence[Callable[..., tuple[Any, LocalSGDReplicated, LocalSGDPerReplica]]]
    period: int
    due: Callable[[Array], Sequence[Array]] | None = None
    init: Callable[[Any], tuple[Any, Any]] = lambda center: ((), ())
    before_step: Callable[..., tuple[Any, LocalSGDPerReplica, Array | None]] | None = None
    lockstep: bool = False
    starts: Sequence[Callable[..., tuple[Any, LocalSGDReplicated, LocalSGDPerReplica]]] = ()
    order: Order = "simultaneous"
    weighted: bool = False
    skip_nonfinite: bool = False
    on_host: bool = False


def local_sgd(
    inner: optax.GradientTransformation, replicas: Replicas, method: LocalSGDMethod
) -> optax.GradientTransformationExtraArgs:
    """A local step of ``inner`` on every replica, and the exchanges of ``method`` when due.

    A tick without an exchange communicates nothing, except that one integer is summed if replicas
    count their own steps and one was inactive before.

    Args:
        inner: the optimizer of the local steps.
        replicas: the replicas.
        method: the exchanges and their schedule.

    Raises:
        ValueError: if the order of the method is unknown.
    """
    check_choice(Order, order=method.order)
    driver = _Driver(optax.with_extra_args_support(inner), replicas, method)
    about = About(reads=about_of(inner).reads)
    about = about.reading("active", "arrived", "exchange", "fragment")
    if method.weighted:
        about = about.reading("weight")
    return Optimizer(driver.init, driver.update, about)


# The values that an exchange may change: the updates, and both parts of the state.
_Carry = tuple[Any, LocalSGDReplicated, LocalSGDPerReplica]


@dataclasses.dataclass(frozen=True)
class _Driver:
    """The ``init`` and the ``update`` of :func:`local_sgd`."""

    inner: optax.GradientTransformationExtraArgs
    replicas: Replicas
    method: LocalSGDMethod

    def init(self, params: Any) -> LocalSGDState:
        zero = lambda: jnp.zeros([], jnp.int32)
        center = jax.tree.map(start_of_average, params)
        of_all, of_each = self.method.init(center)
        any_inactive = () if self.method.lockstep else jnp.zeros([], bool)
        replicated = LocalSGDReplicated(zero(), zero(), any_inactive, center, of_all)
        per_replica = LocalSGDPerReplica(zero(), self.inner.init(params), of_each)
        replicated = self._put(jax.memory.Space.Host, replicated)
        return LocalSGDState(replicated, self.replicas.vary_new(per_replica))

    def _put(self, space: jax.memory.Space, replicated: LocalSGDReplicated) -> LocalSGDReplicated:
        """Moves the state that may be on the host to this memory."""
        if not self.method.on_host:
            return replicated
        put = lambda a: jax.device_put(a, space) if jnp.ndim(a) else a
        center, method = jax.tree.map(put, (replicated.center, replicated.method))
        return replicated._replace(center=center, method=method)

    def update(
        self,
        updates,
        state,
        params=None,
        *,
        active=None,
        arrived=None,
        exchange=None,
        fragment=None,
        weight=None,
        **extra_args,
    ):
        check_params(params)
        if weight is not None and not self.method.weighted:
            raise ValueError(
                f"weight={weight!r} needs a method with a weighted mean, such as optzoo.diloco: "
                "leave weight out"
            )
        refuse_deferred(state, "an exchange of parameters")
        check_gradients(updates, params)
        self.replicas.check_per_replica(updates)
        arrived = True if arrived is None else arrived
        params, per_replica = self.replicas.vary((params, state.per_replica))
        replicated = state.replicated._replace(count=self._next(state.replicated.count))

        before = per_replica
        if self.method.before_step is not None:
            # A replica without a step has no gradient.
            gives = arrived if active is None else jnp.logical_and(arrived, active)
            now = {"count": replicated.count, "exchange": exchange, "arrived": gives}
            before_step = self.method.before_step
            updates, before, makes_step = before_step(updates, params, per_replica, **now)
            if makes_step is not None:
                active = makes_step if active is None else active & makes_step
        updates, inner = self.inner.update(updates, before.inner, params, **extra_args)
        after = before._replace(local_step=self._next(before.local_step), inner=inner)
        is_sound = None
        if self.method.skip_nonfinite:
            is_sound = _is_sound(params, updates, after.method)
            updates = zero_unless(is_sound, updates)
            unchanged = per_replica._replace(local_step=after.local_step)
            after = optax.tree.where(is_sound, after, unchanged)
        if active is not None:
            updates = zero_unless(active, updates)
            after = optax.tree.where(active, after, per_replica)
            if not self.method.lockstep:
                inactive = self.replicas.any(jnp.logical_not(active))
                replicated = replicated._replace(any_inactive=replicated.any_inactive | inactive)
        if exchange is False:
            return updates, LocalSGDState(replicated, after)

        if self.method.weighted:
            extra_args = {**extra_args, "weight": weight}
        # An exchange moves all rows, and parameters that have no gradient in this step alone.
        moving = update_tree.map(_of_all_rows, updates, params)
        carry = moving, replicated, after
        mask = arrived if self.method.lockstep else True if active is None else active
        if is_sound is not None and active is not None:
            is_sound |= jnp.logical_not(active)
        exchanged = functools.partial(self._exchanged, params, extra_args, is_sound)
        if exchange:
            carry = exchanged(jnp.asarray(mask), self._chosen(exchange, fragment), carry)
        else:
            timetable = self._timetable(jnp.asarray(mask), replicated, after)
            all_of = (*self.method.starts, *self.method.exchanges)
            for one, (participates, due) in zip(all_of, timetable, strict=True):
                carry = _change_if(due, functools.partial(exchanged, participates, [one]), carry)
        updates, replicated, after = carry
        return updates, LocalSGDState(replicated, after)

    def _timetable(
        self, mask: Array, replicated: LocalSGDReplicated, per_replica: LocalSGDPerReplica
    ) -> list[tuple[Array, Array]]:
        """For each exchange, whether this replica takes part, and whether any replica does."""
        all_due = self._due(replicated.count)
        if self.method.lockstep:
            return [(mask, due) for due in all_due]

        def of_one(due, is_due_here):
            participates = mask & is_due_here
            any_due = lambda: self.replicas.any(participates)
            return participates, lax.cond(replicated.any_inactive, any_due, lambda: due)

        return list(map(of_one, all_due, self._due(jnp.asarray(per_replica.local_step))))

    def _next(self, count: Array) -> Array:
        return next_count(count, self.method.period)

    def _due(self, steps: Array) -> Sequence[Array]:
        due = self.method.due
        return [steps % self.method.period == 0] if due is None else due(steps)

    def _chosen(self, exchange: bool | Stage, fragment: int | None) -> Sequence[Callable[..., Any]]:
        starts, exchanges = self.method.starts, self.method.exchanges
        if isinstance(exchange, str):
            check_choice(Stage, exchange=exchange)
            if not starts:
                raise ValueError(
                    f"exchange={exchange!r} needs an exchange that overlaps local steps: make the "
                    "optimizer with overlap_steps of at least 1, or pass exchange=True"
                )
            starts, exchanges = (starts, ()) if exchange == "start" else ((), exchanges)
        if fragment is None:
            return (*starts, *exchanges)
        number = len(self.method.exchanges)
        if fragment not in range(number):
            raise ValueError(f"fragment must be below fragments={number}, got {fragment!r}")
        return (*starts[fragment : fragment + 1], *exchanges[fragment : fragment + 1])

    def _exchanged(
        self,
        params: Any,
        extra_args: dict[str, Any],
        is_sound: Array | None,
        participates: Array,
        exchanges: Sequence[Callable[..., Any]],
        carry: _Carry,
    ) -> _Carry:
        """The updates and the state after several exchanges, one after the other."""
        updates, replicated, per_replica = carry
        replicated = self._put(jax.memory.Space.Device, replicated)
        # Integer parameters do not take part, and are None.
        start = map_not_none(lambda u, x: upcast(x), updates, params)
        # Gradients may be wider than parameters; what an exchange carries keeps its dtype.
        add = lambda x, u: x + u.astype(x.dtype)
        is_broken = None
        if is_sound is not None:
            is_broken, participates = participates & ~is_sound, participates & is_sound
            per_replica = self._fresh(is_broken, params, replicated.center, per_replica)
        moved = map_not_none(add, start, updates), replicated, per_replica
        for exchange in exchanges:
            moved = self._in_order(exchange, extra_args, participates, moved)
        after, replicated, per_replica = moved
        if is_broken is not None:
            take_center = lambda x, c: jnp.where(is_broken, c, x)
            after = map_not_none(take_center, after, replicated.center)
        change = lambda y, x, u: (y - x).astype(u.dtype)
        replicated = self._put(jax.memory.Space.Host, replicated)
        return jax.tree.map(change, after, start, updates), replicated, per_replica

    def _fresh(
        self, is_broken: Array, params: Any, center: Any, per_replica: LocalSGDPerReplica
    ) -> LocalSGDPerReplica:
        """The state of this replica; if it is not finite, with new slots for the center."""
        choose = lambda old, new: jnp.where(is_broken, new.astype(old.dtype), old)
        of_slots = lambda old, new, is_slot: choose(old, new) if is_slot else old
        start = jax.tree.map(lambda x, c: c.astype(x.dtype), params, center)
        state, new = per_replica.inner, self.inner.init(start)
        is_slot = are_slots(self.inner, state)
        return per_replica._replace(
            inner=jax.tree.map(of_slots, state, new, is_slot),
            method=jax.tree.map(choose, per_replica.method, self.method.init(center)[1]),
        )

    def _in_order(
        self,
        exchange: Callable[..., Any],
        extra_args: dict[str, Any],
        participates: Array,
        moved: _Carry,
    ) -> _Carry:
        if self.method.order == "simultaneous":
            return exchange(participates, *moved, **extra_args)
        is_next = lambda rank: participates & (self.replicas.index == rank)
        turn = lambda moved, rank: (exchange(is_next(rank), *moved, **extra_args), None)
        return lax.scan(turn, moved, self.replicas.ranks)[0]


def _of_all_rows(u: Any, x: Any) -> Any:
    """An update as an array; None for a parameter that cannot be trained."""
    if u is None and x is not None and is_trainable(x):
        return jnp.zeros_like(x)
    return u.to_dense(x) if is_rows(u) else u


def _is_sound(params: Any, updates: Any, method: Any) -> Array:
    """Whether the parameters after a local step, and the state of the method, are finite."""

    def after(x, u):
        return None if u is None else u.values if is_rows(u) else (x + u).astype(x.dtype)

    return all_finite((jax.tree.map(after, params, updates), method))


def _change_if(due: Array, change: Callable[[Any], Any], carry: Any) -> Any:
    """``change(carry)`` if it is due, otherwise ``carry``, in place.

    A loop with one iteration or none: XLA updates the carry of a loop in place, while ``lax.cond``
    copies all its results. A loop has no reverse-mode derivative.
    """
    turn = lambda state: (jnp.zeros_like(state[0]), change(state[1]))
    after = lax.while_loop(lambda state: state[0], turn, (jnp.asarray(due), carry))[1]
    return forward_only(after)
