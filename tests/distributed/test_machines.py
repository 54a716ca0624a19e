"""Every method through random histories, compared with its model in NumPy after each tick.

A history has ticks with masks and gradients that are not finite, exchanges that are due or forced,
more and fewer replicas, and states that are saved and restored. A covering array chooses the
options of a method: any two of them with any of their values are in one case.
"""

import copy
import functools
import io
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest
from allpairspy import AllPairs
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import optzoo
from optzoo import SparseRows
from optzoo.testing import samples

from . import models

TICKS = 24  # of a history
MOST, FEWER = 3, 2  # replicas
ROWS = 2  # of the table in the gradient of a replica
ERROR = 1e-5
SETTINGS = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=5,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


class Method(NamedTuple):
    """A method of optzoo, for an inner optimizer and a number of replicas; and its model."""

    make: Callable[..., Any]
    model: Callable[..., Any]
    options: dict[str, list]
    masks: tuple[str, ...]  # the arguments of update
    more_masks: tuple[str, ...] = ()  # that are not always given
    is_valid: Callable[..., bool] = lambda **options: True


# How a history goes on: by the count of steps, and with another number of replicas at times; or by
# ``exchange=``. Each needs two programs for a case.
DRIVES = ["counted", "forced"]


def sgd(decay):
    return None if decay == 0.9 else optax.sgd(models.OUTER_RATE, decay, nesterov=True)


METHODS = {
    "elastic_average": Method(
        lambda inner, n, period, **options: optzoo.elastic_average(
            inner, n, communication_period=period, **options
        ),
        models.ElasticAverage,
        {
            "drive": DRIVES,
            "order": ["simultaneous", "round_robin"],
            "rho": [0.0, 0.3],
            "skip_nonfinite": [True, False],
            "moving_rate": [None, 0.4],
            "period": [2],
        },
        ("active",),
    ),
    "agn": Method(
        lambda inner, period, **options: optzoo.agn(inner, communication_period=period, **options),
        models.AGN,
        {
            "drive": DRIVES,
            "order": ["simultaneous", "round_robin"],
            "skip_nonfinite": [True, False],
            "period": [2],
        },
        ("active",),
    ),
    "model_average": Method(
        lambda inner, period, **options: optzoo.model_average(
            inner, interval_steps=period, **options
        ),
        models.ModelAverage,
        {
            "drive": DRIVES,
            "slots": ["keep", "average", "reset"],
            "skip_nonfinite": [True, False],
            "period": [2],
        },
        ("active", "arrived"),
    ),
    "diloco": Method(
        lambda inner, period, outer_decay, **options: optzoo.diloco(
            inner, sgd(outer_decay), communication_period=period, **options
        ),
        models.DiLoCo,
        {
            "drive": DRIVES,
            "fragments": [1, 2],
            "warmup_steps": [0, 4],
            "skip_nonfinite": [True, False],
            "outer_decay": [0.9, 0.5],
            "period": [3],
        },
        ("active", "arrived"),
    ),
    "sync_replicas": Method(
        lambda inner, n, aggregate, **options: optzoo.sync_replicas(inner, aggregate, n, **options),
        models.SyncReplicas,
        {
            "given": ["sometimes", "all", "arrived"],
            "aggregate": [3, 2, 1],
            "hold": [False, True],
            "rows_divisor": ["touches", "count"],
            "skip_nonfinite": [False, True],
        },
        ("arrived",),
        ("priority", "local_step"),
        # Without hold, FEWER replicas would be too few.
        lambda hold=True, aggregate=0, **options: hold or aggregate <= FEWER,
    ),
    "drop_stale_gradient": Method(
        optzoo.drop_stale_gradient,
        models.DropStale,
        {"given": ["active", "all"], "staleness": [0, 1]},
        ("active",),
        ("local_step",),
    ),
}


class Case(NamedTuple):
    method: str
    drive: str  # one of DRIVES, or which masks are given
    options: tuple[tuple[str, Any], ...]

    def __str__(self):
        all_options = METHODS[self.method].options
        shown = (f"{name}={value}" for name, value in self.options if len(all_options[name]) > 1)
        return ", ".join([self.method, self.drive, *shown])

    def masks(self):
        _, _, _, masks, more, _ = METHODS[self.method]
        return masks + more if self.drive == "all" else masks

    def model(self, n):
        return METHODS[self.method].model(n, **dict(self.options))


def cases():
    found = []
    for name, method in METHODS.items():
        named = lambda values, method=method: dict(zip(method.options, values, strict=False))
        is_valid = lambda values, named=named, method=method: method.is_valid(**named(values))
        for values in AllPairs(list(method.options.values()), filter_func=is_valid):
            drive, *options = named(values).items()
            found.append(Case(name, drive[1], tuple(options)))
    return found


@functools.cache
def transformation(case, n):
    inner = optzoo.momentum(models.rate, models.DECAY)
    make, options = METHODS[case.method].make, dict(case.options)
    if case.method in ("elastic_average", "sync_replicas"):
        return make(inner, n, **options)
    return make(inner, **options)


PARAMS = {name: x.astype(np.float32) for name, x in models.PARAMS.items()}


@functools.cache
def start(case, n):
    with jax.disable_jit():
        return optzoo.replicas.replicate(PARAMS, transformation(case, n).init(PARAMS), n)


def keeps_rows(case, exchange=None, fragment=None):
    """Whether the updates of rows are rows."""
    shares_params = case.method in ("sync_replicas", "drop_stale_gradient")
    return shares_params or (exchange is False and not dict(case.options).get("rho"))


@functools.cache
def train(case, n, **static):
    """The compiled step of all replicas."""
    tx = transformation(case, n)

    def step(params, state, ids, values, layer, masks):
        gradient = {"layer": layer, "table": SparseRows(ids, values, len(PARAMS["table"]))}
        updates, state = tx.update(gradient, state, params, **masks, **static)
        assert isinstance(updates["table"], SparseRows) == keeps_rows(case, **static)
        return optax.apply_updates(params, updates), state

    return jax.jit(optzoo.replicas.map_over_replicas(step))


# What is drawn


class Tick(NamedTuple):
    first: str | None  # what is done before it
    seed: int
    active: tuple[bool, ...]
    arrived: tuple[bool, ...]
    priority: tuple[int, ...]
    behind: tuple[int, ...]  # how many updates ago a replica read its parameters
    spoilt: tuple[int, str, float] | None  # the replica, the parameter, the value
    exchange: int  # which of those that the case has


# Few numbers for each tick, because each that is drawn takes time.
masks = st.sampled_from([(True,) * MOST] * 4 + list(itertools.product([False, True], repeat=MOST)))
ticks = st.builds(
    Tick,
    first=st.sampled_from([None] * 6 + ["save", "restore", "resize"]),
    seed=st.integers(0, 999),
    active=masks,
    arrived=masks,
    priority=st.sampled_from(list(itertools.product(range(3), repeat=MOST))),
    behind=st.sampled_from([(0,) * MOST, *itertools.product([0, 1, 2, -1], repeat=MOST)]),
    spoilt=st.sampled_from(
        [None] * 9
        + list(itertools.product(range(MOST), ["layer", "table"], [np.nan, np.inf, -np.inf]))
    ),
    exchange=st.integers(0, 11),
)


class Gradients(NamedTuple):
    """Of all replicas in a tick."""

    ids: np.ndarray
    values: np.ndarray
    layer: np.ndarray


def gradients(seed, n):
    rng = np.random.default_rng(seed)
    rows = len(PARAMS["table"])
    ids = rng.integers(0, rows + 1, (n, ROWS))  # the last one is padding
    ids[:, 0] %= rows
    values = rng.normal(size=(n, ROWS, 2)).astype(np.float32)
    return Gradients(ids, values, rng.normal(size=(n, 3)).astype(np.float32))


def known(given, n):
    """What the model gets: the gradient of each replica."""

    def of_one(i):
        table, rows = np.zeros((9, 2)), np.zeros(9, bool)
        np.add.at(table, given.ids[i], given.values[i].astype(float))
        rows[given.ids[i]] = True
        dense = {"layer": given.layer[i].astype(float), "table": table[:8]}
        return models.Gradient(dense, {"layer": np.ones(3, bool), "table": rows[:8]})

    return [of_one(i) for i in range(n)]


class Pair:
    """A method beside its model."""

    def __init__(self, case):
        self.case, self.n = case, MOST if case.drive == "forced" else FEWER
        self.model = case.model(self.n)
        self.now = start(case, self.n)
        self.save()

    def follow(self, tick):
        if tick.first is not None and not (tick.first == "resize" and self.case.drive == "forced"):
            getattr(self, tick.first)()
            self.compare()
        self.tick(tick)
        self.compare()

    def tick(self, tick):
        static = self.static(tick)
        names = () if self.case.drive == "sometimes" and tick.exchange % 2 else self.case.masks()
        masks = self.masks(tick, names)._replace(**static)
        given = gradients(tick.seed, self.n)
        if tick.spoilt is not None:
            self.spoil(given, masks, *tick.spoilt)
        arrays = {name: np.asarray(getattr(masks, name)) for name in names}
        self.now = train(self.case, self.n, **static)(*self.now, *given, arrays)
        with np.errstate(invalid="ignore"):
            self.model.tick(known(given, self.n), masks)

    def static(self, tick):
        if self.case.drive != "forced":
            return {}
        choices = [{"exchange": False}, {"exchange": True}]
        if dict(self.case.options).get("fragments", 1) > 1:
            choices += [{"exchange": True, "fragment": fragment} for fragment in range(2)]
        return choices[tick.exchange % len(choices)]

    def masks(self, tick, names):
        drawn = {
            name: np.array(getattr(tick, name))[: self.n]
            for name in ("active", "arrived", "priority")
        }
        drawn["local_step"] = self.model.global_step - np.array(tick.behind)[: self.n]
        everyone = np.ones(self.n, bool)
        masks = models.Masks(everyone, everyone, np.arange(self.n), None, not names)
        return masks._replace(**{name: drawn[name] for name in names})

    def spoil(self, given, masks, who, name, value):
        """NaN or infinity in the gradient of a replica, which must not matter."""
        who %= self.n
        skips = dict(self.case.options).get("skip_nonfinite", False)
        if not skips and who in self.model.taken(known(given, self.n), masks):
            return
        if name == "layer":
            given.layer[who, 1] = value
        else:
            given.values[who, 0, 1] = value

    def resize(self):
        self.n = FEWER if self.n == MOST else MOST
        with jax.disable_jit():
            self.now = optzoo.replicas.resize_replicas(
                transformation(self.case, self.n), *self.now, self.n
            )
        assert samples.avals(self.now) == samples.avals(start(self.case, self.n))
        self.model.resized(self.n)

    def save(self):
        file = io.BytesIO()
        np.savez(file, *jax.tree.leaves(self.now))
        self.saved = self.n, file.getvalue(), copy.deepcopy(self.model)

    def restore(self):
        self.n, data, model = self.saved
        leaves = list(np.load(io.BytesIO(data)).values())
        self.now = jax.tree.unflatten(jax.tree.structure(start(self.case, self.n)), leaves)
        self.model = copy.deepcopy(model)

    def compare(self):
        agree(shown(*self.now), self.model.shown())


def shown(params, state):
    """What a model shows, of optzoo."""
    replicated, per_replica = state
    inner = getattr(per_replica, "inner", None) or replicated.inner
    seen = {
        "params": params,
        "global_step": replicated.global_step,
        "local_step": per_replica.local_step,
        "momentum": optzoo.get_slot(inner, "momentum"),
        "count": inner[0].count,
    }
    for name in ("dropped", "stale_counter"):
        if hasattr(replicated, name):
            seen["dropped"] = getattr(replicated, name)
    if hasattr(replicated, "center"):
        seen["center"] = optzoo.eval_params(params, state)
        for name, value in getattr(per_replica.method, "_asdict", dict)().items():
            seen[name] = value
    if hasattr(per_replica, "waiting"):
        seen["waiting"] = per_replica.waiting
        if replicated.accumulator != ():
            seen |= held(replicated)
    of_method = getattr(replicated, "method", ())
    if hasattr(of_method, "center_inner"):
        seen["beside_center"] = optzoo.get_slot(of_method.center_inner, "momentum")
    if hasattr(of_method, "outer"):
        seen["outer"] = dict(zip(PARAMS, jax.tree.leaves(of_method.outer), strict=True))
    return seen


def held(replicated):
    """The gradients that wait for others."""
    sums, targets, counts = replicated.accumulator
    is_kept = jax.tree.map(lambda target: np.asarray(target) == replicated.global_step + 1, targets)
    kept = lambda a, is_kept: np.where(is_kept.reshape(-1, *[1] * (a.ndim - 1)), a, 0)
    sums, counts = (jax.tree.map(kept, tree, is_kept) for tree in (sums, counts))
    return {"held": replicated.count, "sums": sums, "counts": counts}


def agree(got, want):
    leaves, structure = jax.tree_util.tree_flatten_with_path(want)
    for (path, b), a in zip(leaves, structure.flatten_up_to(got), strict=True):
        a, b = np.asarray(a, float), np.asarray(b, float)
        assert a.shape == b.shape, jax.tree_util.keystr(path)
        if not np.all(np.abs(a - b) <= ERROR * (1 + np.abs(b))):  # faster than assert_allclose
            name = jax.tree_util.keystr(path)
            np.testing.assert_allclose(a, b, rtol=ERROR, atol=ERROR, err_msg=name)


@pytest.mark.parametrize("case", cases(), ids=str)
def test_every_history_is_that_of_the_model(case):
    @SETTINGS
    @given(st.data())
    def follow(data):
        pair = Pair(case)
        for _ in range(TICKS):
            pair.follow(data.draw(ticks))

    follow()
