"""Every pair of options of a wrapper, run for six steps and compared with a model in NumPy.

A covering array has few cases, and any two options with any of their values are in one of them.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from allpairspy import AllPairs

import optzoo
from optzoo import SparseRows

pytestmark = pytest.mark.usefixtures("eager")

STEPS = 6
RATE = 0.1
IDS = np.random.default_rng(0).integers(0, 4, (STEPS, 3))  # of 5 rows; the last one is never read
VALUES = np.random.default_rng(1).normal(size=(STEPS, 4, 2))  # the last one is of the padding
LAYER = np.random.default_rng(2).normal(size=(STEPS, 3))
PARAMS = {
    "table": np.random.default_rng(3).normal(size=(5, 2)),
    "layer": np.random.default_rng(4).normal(size=3),
}


class Gradient(NamedTuple):
    """Of one parameter in one step: a dense array, and the rows that have a gradient."""

    dense: np.ndarray
    rows: np.ndarray  # True for all where the gradient is dense


def pairs(**options):
    """Parametrizes a test by a covering array."""
    cases = [case for case in AllPairs(list(options.values()))]
    return pytest.mark.parametrize(list(options), [tuple(case) for case in cases])


def gradients(kind, t):
    """What ``update`` gets, and what the model gets."""
    dense, rows = np.zeros((5, 2)), np.zeros(5, bool)
    np.add.at(dense, IDS[t], VALUES[t, :3])
    rows[IDS[t]] = True
    layer = Gradient(LAYER[t], np.ones(3, bool))
    given = {"layer": jnp.asarray(LAYER[t], "float32")}
    match kind:
        case "rows":
            ids = np.append(IDS[t], 5)
            given["table"] = SparseRows(jnp.asarray(ids), jnp.asarray(VALUES[t], "float32"), 5)
        case "dense":
            rows = np.ones(5, bool)
            given["table"] = jnp.asarray(dense, "float32")
        case "none":
            given["table"] = None
            return given, {"layer": layer}
    return given, {"layer": layer, "table": Gradient(dense, rows)}


def applied(x, updates):
    """A parameter without a gradient has no update."""
    return {name: v if updates[name] is None else v + updates[name] for name, v in x.items()}


class Momentum:
    """``optzoo.momentum``, which leaves rows without a gradient alone."""

    def __init__(self, decay):
        self.decay, self.rate = decay, RATE
        self.slots = {name: np.zeros_like(x) for name, x in PARAMS.items()}

    def transformation(self):
        return optzoo.momentum(RATE, self.decay)

    def moved(self, name, x, g):
        """The parameter after an update."""
        a = self.slots[name]
        a[g.rows] = (self.decay * a + g.dense)[g.rows]
        x = x.copy()
        x[g.rows] -= self.rate * a[g.rows]
        return x


# All parameters, or the table.
MASKS = {
    "none": None,
    "patterns": (".*abl.*",),
    "tree": {"layer": False, "table": True},
    "function": lambda params: {name: "t" in name for name in params},
}
INNER = {"descent": functools.partial(Momentum, 0.0), "momentum": functools.partial(Momentum, 0.9)}


def check(tx, kinds, model, *, extra=lambda t: {}, after=lambda state, want: None):
    """Compares the parameters in each step with those of ``model(t, params, gradients)``."""
    x = {name: jnp.asarray(value, "float32") for name, value in PARAMS.items()}
    want = {name: value.copy() for name, value in PARAMS.items()}
    state = tx.init(x)
    for t in range(STEPS):
        given, known = gradients(kinds[t % len(kinds)], t)
        updates, state = tx.update(given, state, x, **extra(t))
        x = applied(x, updates)
        want = model(t, want, known)
        for name, value in want.items():
            np.testing.assert_allclose(x[name], value, rtol=2e-5, atol=2e-6, err_msg=f"{t} {name}")
        after(state, want)


def plain(inner, want, known):
    """An update of the inner optimizer."""
    return {n: inner.moved(n, x, known[n]) if n in known else x for n, x in want.items()}


@pairs(
    every=[1, 2, 3],
    use_mean=[False, True],
    max_rows=[None, 4, 6],
    kind=["rows", "dense"],
    inner=sorted(INNER),
    counted=[True, False],
)
def test_accumulate(every, use_mean, max_rows, kind, inner, counted):
    kept = max_rows is not None and kind == "rows"
    inner = INNER[inner]()
    tx = optzoo.accumulate(
        inner.transformation(),
        every,
        use_mean=use_mean,
        max_rows={"table": max_rows} if kept else None,
    )
    sums = {}

    def model(t, want, known):
        for name, g in known.items():
            if t % every == 0 or name not in sums:
                sums[name] = Gradient(np.zeros_like(PARAMS[name]), np.zeros(len(g.rows), bool))
            touched = g.rows if kept or name == "layer" else np.ones(5, bool)
            sums[name] = Gradient(sums[name].dense + g.dense, sums[name].rows | touched)
        if t % every < every - 1:
            return want
        divisor = every if use_mean else 1
        return plain(inner, want, {n: g._replace(dense=g.dense / divisor) for n, g in sums.items()})

    check(tx, [kind], model, extra=lambda t: {} if counted else {"global_step": jnp.asarray(t)})


@pairs(
    average_decay=[0.0, 0.5, 0.9],
    num_updates=[None, 2.0, "count"],
    kind=["rows", "dense", "none"],
    inner=sorted(INNER),
    counted=[True, False],
)
def test_moving_average(average_decay, num_updates, kind, inner, counted):
    inner = INNER[inner]()
    tx = optzoo.moving_average(inner.transformation(), average_decay, num_updates)
    averages = {name: value.copy() for name, value in PARAMS.items()}

    def model(t, want, known):
        want = plain(inner, want, known)
        n = t + 1 if num_updates == "count" else num_updates
        decay = average_decay if n is None else min(average_decay, (1 + n) / (10 + n))
        for name in known:
            averages[name] = decay * averages[name] + (1 - decay) * want[name]
        return want

    def after(state, want):
        shown = optzoo.eval_params({n: jnp.asarray(x) for n, x in want.items()}, state)
        for name, average in averages.items():
            np.testing.assert_allclose(shown[name], average, rtol=2e-5, atol=2e-6)

    extra = lambda t: {} if counted else {"global_step": jnp.asarray(t)}
    check(tx, ["dense", kind], model, extra=extra, after=after)


@pairs(
    every=[1, 2],
    start_step=[0, 3],
    coefficient=[0.0, 0.6, 1.0],
    kind=["rows", "dense", "none"],
    inner=sorted(INNER),
)
def test_ema_in_place(every, start_step, coefficient, kind, inner):
    inner = INNER[inner]()
    tx = optzoo.interop.fbgemm.ema_in_place(inner.transformation(), every, start_step, coefficient)

    def model(t, want, known):
        if (t + 1) % every == 0 and t + 1 >= start_step and "table" in known:
            main, target = want["table"].T
            want["table"] = np.stack([main, target + coefficient * (main - target)], 1)
        return plain(inner, want, known)

    check(tx, [kind, "dense"], model)


@pairs(
    every=[1, 2],
    swap_every=[1, 2, 3],
    start_step=[0, 3],
    coefficient=[0.0, 0.6, 1.0],
    reset=[False, True],
    kind=["rows", "dense", "none"],
    inner=sorted(INNER),
)
def test_ensemble(every, swap_every, start_step, coefficient, reset, kind, inner):
    inner = INNER[inner]()
    tx = optzoo.interop.fbgemm.ensemble(
        inner.transformation(), every, swap_every, start_step, coefficient, reset
    )
    averages = {name: np.zeros_like(value) for name, value in PARAMS.items()}

    def model(t, want, known):
        t, moved = t + 1, dict(want)
        for name in known:
            kept = 0 if t <= start_step else coefficient
            if t % every == 0:
                averages[name] = kept * averages[name] + (1 - kept) * want[name]
            if t % swap_every == 0:
                moved[name] = averages[name]
            if t % every == 0 and reset:
                averages[name] = np.zeros_like(averages[name])
        return plain(inner, moved, known)

    check(tx, [kind, "dense"], model)


@pairs(
    axes=[(1,), (0,), (0, 1), ()],
    chosen=["pattern", "tree"],
    max_norm=[0.5, 2.0],
    kind=["rows", "dense", "none"],
    inner=sorted(INNER),
)
def test_variable_clipping(axes, chosen, max_norm, kind, inner):
    inner = INNER[inner]()
    dims = {"tab.*": axes} if chosen == "pattern" else {"layer": None, "table": axes}
    tx = optzoo.variable_clipping(inner.transformation(), dims, max_norm)

    def model(t, want, known):
        want = plain(inner, want, known)
        if "table" in known:
            x, rows = want["table"], known["table"].rows
            norms = np.sqrt((x**2).sum(axes, keepdims=True)) if axes else np.abs(x)
            clipped = x * max_norm / np.maximum(max_norm, norms)
            want["table"] = np.where(rows[:, None] | (0 in axes), clipped, x)
        return want

    check(tx, [kind], model)


@pairs(
    axes=[(1,), (0,), (0, 1), ()],
    chosen=["pattern", "tree"],
    rate=["number", "schedule", "given"],
    kind=["rows", "dense", "none"],
    inner=sorted(INNER),
    counted=[True, False],
)
def test_hyperball(axes, chosen, rate, kind, inner, counted):
    inner = INNER[inner]()
    dims = {"tab.*": axes} if chosen == "pattern" else {"layer": None, "table": axes}
    rates = {"number": 0.3, "schedule": lambda step: 0.1 * (step + 1), "given": 9.0}
    tx = optzoo.hyperball(inner.transformation(), rates[rate], dims)
    norm = lambda x: np.sqrt((x**2).sum(axes, keepdims=True)) if axes else np.abs(x)

    def model(t, want, known):
        new = plain(inner, want, known)
        if "table" in known:
            x = want["table"]
            u = new["table"] - x
            length = np.where(norm(u) == 0, 1, norm(u))
            y = x + (0.1 * (t + 1) if rate == "schedule" else 0.3) * norm(x) * u / length
            new["table"] = y * norm(x) / norm(y)
        return new

    def extra(t):
        given = {} if counted else {"global_step": jnp.asarray(t)}
        return {**given, "learning_rate": jnp.asarray(0.3)} if rate == "given" else given

    if rate == "given":  # it is that of the other parameters, too
        inner.rate = 0.3
    check(tx, [kind], model, extra=extra)


@pairs(
    decay=["number", "schedule", "zero"],
    mask=["none", "patterns", "tree", "function"],
    kind=["rows", "dense", "none"],
    inner=sorted(INNER),
    counted=[True, False],
)
def test_cautious_weight_decay(decay, mask, kind, inner, counted):
    inner = INNER[inner]()
    decays = {"number": 0.2, "schedule": lambda step: 0.1 * (step + 1), "zero": 0.0}
    tx = optzoo.cautious_weight_decay(
        inner.transformation(), weight_decay_per_step=decays[decay], mask=MASKS[mask]
    )

    def model(t, want, known):
        new = plain(inner, want, known)
        for name, g in known.items():
            if name == "table" or mask == "none":
                x, of_step = want[name], decays[decay](t) if decay == "schedule" else decays[decay]
                is_near = (new[name] - x) * x <= 0
                decays_here = is_near & (g.rows[:, None] if x.ndim > 1 else g.rows)
                new[name] = new[name] - of_step * np.where(decays_here, x, 0)
        return new

    check(tx, [kind], model, extra=lambda t: {} if counted else {"global_step": jnp.asarray(t)})


@pairs(
    lookahead=["number", "schedule", "zero"],
    decay=[0.0, 0.75],
    mask=["none", "patterns", "tree", "function"],
    kind=["rows", "dense", "none"],
    inner=sorted(INNER),
    counted=[True, False],
)
def test_ema_nesterov(lookahead, decay, mask, kind, inner, counted):
    inner = INNER[inner]()
    sizes = {"number": 0.5, "schedule": lambda step: 0.1 * (step + 1), "zero": 0.0}
    tx = optzoo.ema_nesterov(inner.transformation(), sizes[lookahead], decay, mask=MASKS[mask])
    iterates = {name: value.copy() for name, value in PARAMS.items()}
    directions = {name: np.zeros_like(value) for name, value in PARAMS.items()}

    def model(t, want, known):
        new = plain(inner, want, known)
        for name in known:
            if name == "table" or mask == "none":
                size = sizes[lookahead](t) if lookahead == "schedule" else sizes[lookahead]
                change = new[name] - iterates[name]
                directions[name] = decay * directions[name] + (1 - decay) * change
                iterates[name] = new[name]
                new[name] = new[name] + size * directions[name]
        return new

    def after(state, want):
        got = optzoo.eval_params(jax.tree.map(jnp.float32, want), state)
        for name, x in want.items():
            evaluated = iterates[name] if name == "table" or mask == "none" else x
            np.testing.assert_allclose(got[name], evaluated, rtol=2e-5, atol=2e-6)

    extra = lambda t: {} if counted else {"global_step": jnp.asarray(t)}
    check(tx, [kind], model, extra=extra, after=after)


@pairs(
    weight_decay_per_step=[0.0, 0.1, 1.0],
    mask=["none", "patterns", "tree", "function"],
    kind=["rows", "dense", "none"],
    inner=sorted(INNER),
)
def test_decoupled_weight_decay(weight_decay_per_step, mask, kind, inner):
    inner = INNER[inner]()
    tx = optzoo.decoupled_weight_decay(
        inner.transformation(), weight_decay_per_step=weight_decay_per_step, mask=MASKS[mask]
    )

    def model(t, want, known):
        for name, g in known.items():
            if name == "table" or mask == "none":
                want[name] = want[name].copy()
                want[name][g.rows] *= 1 - weight_decay_per_step
        return plain(inner, want, known)

    check(tx, [kind], model)


ALONE = {
    "adam": optzoo.adam(RATE),
    "lazy_adam": optzoo.lazy_adam(RATE),
    "momentum": optzoo.momentum(RATE, 0.9, nesterov=True),
    "optax": optax.rmsprop(RATE, momentum=0.9),
}


@pairs(
    mask=["all", "patterns", "tree", "function"],
    max_size=[0, 3, 256],
    max_members=[1, 2, 16],
    compares=[True, False],
    kind=["rows", "dense", "none"],
    inner=sorted(ALONE),
)
def test_stacked(mask, max_size, max_members, compares, kind, inner):
    """As without stacks. Three parameters have the shape of the layer, two that of the table."""
    alone = ALONE[inner]
    if inner == "optax":  # it wants dense gradients, of all parameters
        kind = "dense"
    missing = kind != "dense"
    chosen = {
        "all": None,
        "patterns": "layer.*",
        "tree": dict(layer=True, layer2=True, layer3=False, table=True, table2=True),
        "function": lambda params: {name: "2" not in name for name in params},
    }[mask]
    tx = optzoo.stacked(alone, chosen, max_size=max_size, max_members=max_members, check=compares)
    x = {name: jnp.asarray(value, "float32") for name, value in PARAMS.items()}
    x |= dict(layer2=x["layer"] + 1, layer3=-x["layer"], table2=x["table"][::-1])
    want, state, single = x, tx.init(x), alone.init(x)
    for t in range(STEPS):
        given, _ = gradients(["dense", kind][t % 2], t)
        third = None if missing and t == 3 else 2 * given["layer"]
        given |= dict(layer2=-given["layer"], layer3=third, table2=x["table"])
        updates, state = tx.update(given, state, x)
        expected, single = alone.update(given, single, want)
        x, want = applied(x, updates), applied(want, expected)
        for name in want:
            np.testing.assert_allclose(x[name], want[name], rtol=1e-6, atol=1e-7, err_msg=name)
