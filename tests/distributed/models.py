"""The methods with replicas, in NumPy: one replica after the other, as the docstrings say.

Each model has ``tick``; ``resized``; ``taken``, the ranks of the replicas whose gradients a tick
uses; and ``shown``, what a user sees of the parameters and of the state.
"""

import copy
import functools
from typing import NamedTuple

import numpy as np

PARAMS = {  # in the order of their names, which is that of fragments
    "layer": np.random.default_rng(4).normal(size=3),
    "table": np.random.default_rng(3).normal(size=(8, 2)),
}
DECAY = 0.9
OUTER_RATE = 0.7


class Gradient(NamedTuple):
    """Of a replica in a tick."""

    dense: dict  # an array for each parameter
    rows: dict  # for each parameter: which rows have a gradient


class Masks(NamedTuple):
    """Of a tick: one element for each replica, and whether to exchange."""

    active: np.ndarray
    arrived: np.ndarray
    priority: np.ndarray
    local_step: np.ndarray | None  # None: the method knows
    all_of_them: bool = False  # whether no mask is given
    exchange: bool | None = None
    fragment: int | None = None


def each(f, *trees):
    return {name: f(*(tree[name] for tree in trees)) for name in PARAMS}


def zeros():
    return each(np.zeros_like, PARAMS)


def is_finite(tree):
    return all(np.isfinite(a).all() for a in tree.values())


def stacked(trees):
    return each(lambda *a: np.stack(a), *trees)


def sum_of(gradients):
    """The sum; a row has a gradient if it has one in any of them."""
    rows = {name: np.zeros(len(x), bool) for name, x in PARAMS.items()}
    total = Gradient(zeros(), rows)
    for g in gradients:
        total = Gradient(
            each(np.add, total.dense, g.dense), each(np.logical_or, total.rows, g.rows)
        )
    return total


def rate(count):
    """The learning rate, by which a wrong count is seen in the parameters."""
    return 0.2 / (1.0 + 0.1 * count)


class Inner:
    """``optzoo.momentum``, which leaves rows without a gradient alone."""

    def __init__(self):
        self.slots, self.count = zeros(), 0

    def moved(self, x, g):
        """The parameters after an update; changes the slots."""

        def row_by_row(a, x, dense, rows):
            a, x = a.copy(), x.copy()
            a[rows] = DECAY * a[rows] + dense[rows]
            x[rows] -= rate(self.count) * a[rows]
            return a, x

        both = each(row_by_row, self.slots, x, g.dense, g.rows)
        self.slots = {name: a for name, (a, _) in both.items()}
        self.count += 1
        return {name: x for name, (_, x) in both.items()}


# Replicas that have their own parameters


class Replica:
    def __init__(self, own):
        self.x, self.inner, self.steps = PARAMS, Inner(), 0
        self.own = own  # what the method keeps for each replica, by name

    def copied(self):
        """A copy that can be changed; arrays never are."""
        new = copy.copy(self)
        new.inner = copy.copy(self.inner)
        return new


def mean_of(who, of):
    """The mean of a tree of each replica."""
    return each(lambda *a: sum(a) / len(a), *map(of, who))


class LocalSGD:
    """What the methods share: local steps, who takes part in an exchange, who is left out."""

    lockstep, fragments = False, 1

    def __init__(self, n, *, period, skip_nonfinite, order="simultaneous"):
        self.period, self.skip, self.order = period, skip_nonfinite, order
        self.center, self.ticks, self.global_step = PARAMS, 0, 0
        self.replicas = [Replica(self.fresh()) for _ in range(n)]

    def fresh(self):
        """What the method keeps for a replica that starts from the center."""
        return {}

    def changed(self, replica, g):
        """The gradient that the inner optimizer gets; may change what the method keeps."""
        return g

    def of_warm_up(self, gradients, masks):
        """The gradients of the replicas in a tick; None for a replica that makes no step."""
        return gradients

    def is_due(self, fragment, steps):
        return steps % self.period == 0

    def exchanged(self, fragment, who):
        """An exchange between some replicas, which are in the order of ranks."""
        raise NotImplementedError

    def taken(self, gradients, masks):
        return list(np.flatnonzero(masks.active))

    def tick(self, gradients, masks):
        self.ticks += 1
        gradients = self.of_warm_up(gradients, masks)
        unsound = []
        for replica, g, active in zip(self.replicas, gradients, masks.active, strict=True):
            if active and g is not None and not self.stepped(replica, g):
                unsound.append(replica)
        if masks.exchange is not False:
            chosen = range(self.fragments) if masks.fragment is None else [masks.fragment]
            for fragment in chosen:
                self.exchanged_if_due(fragment, unsound, masks)

    def stepped(self, replica, g):
        """A local step; False if it is left out."""
        replica.steps += 1
        new = replica.copied()
        new.x = new.inner.moved(replica.x, self.changed(new, g))
        if self.skip and not (is_finite(new.x) and is_finite(new.own)):
            return False
        replica.__dict__.update(new.__dict__)
        return True

    def exchanged_if_due(self, fragment, unsound, masks):
        counts = [self.ticks if self.lockstep else replica.steps for replica in self.replicas]
        due = [masks.exchange or self.is_due(fragment, count) for count in counts]
        mask = masks.arrived if self.lockstep else masks.active
        who = [r for r, d, m in zip(self.replicas, due, mask, strict=True) if d and m]
        if not any(due):
            return
        broken = [replica for replica in who if replica in unsound]
        for replica in broken:
            replica.inner.slots, replica.own = zeros(), self.fresh()
        sound = [replica for replica in who if replica not in broken]
        for together in [sound] if self.order == "simultaneous" else [[r] for r in sound]:
            self.exchanged(fragment, together)
        for replica in broken:
            replica.x = self.center

    def resized(self, n):
        old = self.replicas
        self.replicas = [old[i % len(old)].copied() for i in range(n)]
        for replica in self.replicas[len(old) :]:
            replica.x, replica.own = self.center, self.fresh()

    def shown(self):
        return {
            "params": stacked([replica.x for replica in self.replicas]),
            "center": self.center,
            "global_step": self.global_step,
            "local_step": np.array([replica.steps for replica in self.replicas]),
            "momentum": stacked([replica.inner.slots for replica in self.replicas]),
            "count": np.array([replica.inner.count for replica in self.replicas]),
        }


class ElasticAverage(LocalSGD):
    def __init__(self, n, *, moving_rate, rho, **options):
        self.moving_rate, self.rho = moving_rate, rho
        super().__init__(n, **options)

    def fresh(self):
        return self.center

    def changed(self, replica, g):
        if self.rho == 0:
            return g
        pull = lambda g, x, c: g + self.rho * (x - c)
        dense = each(pull, g.dense, replica.x, replica.own)
        return Gradient(dense, each(np.ones_like, g.rows))

    def exchanged(self, fragment, who):
        alpha = self.moving_rate or 0.9 / self.period / len(self.replicas)
        before = self.center
        for replica in who:
            d = each(lambda x, c: alpha * (x - c), replica.x, before)
            replica.own = before
            replica.x = each(np.subtract, replica.x, d)
            self.center = each(np.add, self.center, d)
            self.global_step += 1

    def shown(self):
        seen = stacked([replica.own for replica in self.replicas])
        return {**super().shown(), "local_center": seen}


class AGN(LocalSGD):
    def __init__(self, n, **options):
        super().__init__(n, **options)
        self.beside_center = Inner()

    def fresh(self):
        return {**zeros(), "since": 0}

    def changed(self, replica, g):
        replica.own = {**each(np.add, replica.own, g.dense), "since": replica.own["since"] + 1}
        return g

    def exchanged(self, fragment, who):
        if not who:
            return
        mean = mean_of(who, lambda r: each(lambda a: a / r.own["since"], r.own))
        # The count of steps is that of the replica, the slots are those of the center.
        self.beside_center.count = who[0].inner.count
        everywhere = {name: np.ones(len(x), bool) for name, x in PARAMS.items()}
        self.center = self.beside_center.moved(self.center, Gradient(mean, everywhere))
        for replica in who:
            replica.inner.count += 1
            replica.x, replica.own = self.center, self.fresh()
            self.global_step += 1

    def shown(self):
        since = np.array([replica.own["since"] for replica in self.replicas])
        return {
            **super().shown(),
            "accumulated": stacked([replica.own for replica in self.replicas]),
            "since": since,
            "came": dict.fromkeys(PARAMS, since > 0),
            "beside_center": self.beside_center.slots,
        }


class ModelAverage(LocalSGD):
    lockstep = True

    def __init__(self, n, *, slots, **options):
        self.slots = slots
        super().__init__(n, **options)

    def exchanged(self, fragment, who):
        if not who:
            return
        self.global_step += 1
        self.center = mean_of(who, lambda replica: replica.x)
        slots = mean_of(who, lambda replica: replica.inner.slots)
        for replica in self.replicas:  # those that did not arrive, too
            replica.x = self.center
            if self.slots != "keep":
                replica.inner.slots = slots if self.slots == "average" else zeros()


class DiLoCo(LocalSGD):
    """With the outer optimizer ``optax.sgd(0.7, decay, nesterov=True)``."""

    lockstep = True

    def __init__(self, n, *, outer_decay, warmup_steps, fragments, **options):
        self.outer_decay, self.outer = outer_decay, zeros()
        self.warmup_steps, self.fragments = warmup_steps, fragments
        super().__init__(n, **options)

    def of_warm_up(self, gradients, masks):
        if self.ticks > self.warmup_steps or masks.exchange is False:
            return gradients
        here = [gradients[i] for i in np.flatnonzero(masks.arrived & masks.active)]
        here = [g for g in here if not self.skip or is_finite(g.dense)]
        if not here:
            return [None] * len(gradients)
        total = sum_of(here)
        mean = Gradient(each(lambda a: a / len(here), total.dense), total.rows)
        return [mean] * len(gradients)

    def is_due(self, fragment, steps):
        phase = (fragment + 1) * self.period // self.fragments % self.period
        return steps % self.period == phase or steps <= self.warmup_steps

    def exchanged(self, fragment, who):
        if not who:
            return
        mean, names = mean_of(who, lambda replica: replica.x), list(PARAMS)
        if self.fragments == 2:  # the second one is the table
            names = names[fragment : fragment + 1]
        new = {name: self.after(name, mean[name]) for name in names}
        self.center = {**self.center, **new}
        for replica in self.replicas:
            replica.x = {**replica.x, **new}
        self.global_step += fragment == self.fragments - 1

    def after(self, name, mean):
        """A parameter of the center after an exchange."""
        if self.ticks <= self.warmup_steps:
            return mean
        delta = self.center[name] - mean
        slot = self.outer_decay * self.outer[name] + delta
        self.outer = {**self.outer, name: slot}
        return self.center[name] - OUTER_RATE * (delta + self.outer_decay * slot)

    def shown(self):
        return {**super().shown(), "outer": self.outer}


# Replicas that share parameters


class SharedParams:
    def __init__(self, n):
        self.x, self.inner, self.global_step, self.dropped = PARAMS, Inner(), 0, 0
        self.read_at = [0] * n

    def resized(self, n):
        self.read_at = [self.read_at[i % len(self.read_at)] for i in range(n)]

    def shown(self):
        return {
            "params": self.x,
            "global_step": self.global_step,
            "dropped": self.dropped,
            "local_step": np.array(self.read_at),
            "momentum": self.inner.slots,
            "count": self.inner.count,
        }


class SyncReplicas(SharedParams):
    def __init__(self, n, *, aggregate, hold, rows_divisor, skip_nonfinite):
        super().__init__(n)
        self.aggregate, self.hold, self.rows_divisor = aggregate, hold, rows_divisor
        self.skip = skip_nonfinite
        self.held, self.waiting = [], [False] * n

    def is_alone(self, masks):
        """Whether a tick makes an update without the gradients of earlier ticks."""
        return masks.all_of_them and not self.skip and len(self.read_at) >= self.aggregate

    def taken(self, gradients, masks):
        read_at = self.read_at if masks.local_step is None else masks.local_step
        is_fresh = lambda i: masks.all_of_them or read_at[i] >= self.global_step
        fresh = [i for i in np.flatnonzero(masks.arrived) if is_fresh(i)]
        if self.skip:
            fresh = [i for i in fresh if is_finite(gradients[i].dense)]
        fresh.sort(key=lambda i: (masks.priority[i], i))
        return fresh[: self.aggregate - (0 if self.is_alone(masks) else len(self.held))]

    def tick(self, gradients, masks):
        taken, ranks = self.taken(gradients, masks), range(len(gradients))
        if self.is_alone(masks):
            self.dropped += len(self.held)
            self.held = []
        self.dropped += sum(masks.arrived) - len(taken)
        self.held = self.held + [gradients[i] for i in taken]
        self.waiting = [self.waiting[i] or (self.hold and i in taken) for i in ranks]
        fires = len(self.held) == self.aggregate
        if fires:
            self.x = self.inner.moved(self.x, self.mean())
            self.global_step += 1
        elif not self.hold:
            self.dropped += len(self.held)
        if fires or not self.hold:
            self.held = []
        # Who waits reads after the update, and others at once.
        reads = [masks.arrived[i] or (self.waiting[i] and fires) for i in ranks]
        self.read_at = [self.global_step if reads[i] else self.read_at[i] for i in ranks]
        self.waiting = [waits and not fires for waits in self.waiting]

    def counts(self):
        """How many of the gradients that are held have each row."""
        none = each(lambda x: np.zeros(len(x), int), PARAMS)
        return functools.reduce(lambda counts, g: each(np.add, counts, g.rows), self.held, none)

    def mean(self):
        total, number = sum_of(self.held), len(self.held)
        divided = each(lambda a: a / number, total.dense)
        if self.rows_divisor == "touches":
            touches = np.maximum(self.counts()["table"], 1)
            divided["table"] = total.dense["table"] / touches[:, None]
        return Gradient(divided, total.rows)

    def resized(self, n):
        self.waiting = (self.waiting + [False] * n)[:n]
        super().resized(n)

    def shown(self):
        shown = {**super().shown(), "waiting": np.array(self.waiting)}
        if self.hold:
            shown |= {"held": len(self.held), "sums": sum_of(self.held).dense}
            shown["counts"] = self.counts()
        return shown


class DropStale(SharedParams):
    def __init__(self, n, *, staleness):
        super().__init__(n)
        self.staleness = staleness

    def taken(self, gradients, masks):
        read_at = self.read_at if masks.local_step is None else masks.local_step
        taken = []
        for i in np.flatnonzero(masks.active):
            if self.global_step + len(taken) - read_at[i] <= self.staleness:
                taken.append(i)
        return taken

    def tick(self, gradients, masks):
        taken = self.taken(gradients, masks)
        for i in taken:
            self.x = self.inner.moved(self.x, gradients[i])
        self.global_step += len(taken)
        self.dropped += sum(masks.active) - len(taken)
        # They read after the last update of the tick.
        reads = zip(masks.active, self.read_at, strict=True)
        self.read_at = [self.global_step if active else t for active, t in reads]
