"""Every wrapper around every other: as the two are defined, in float64, or refused.

A definition is a class with one step in NumPy, of which the inner one is a part. So the expected
value of a pair is that of the definitions in the same order.
"""

import copy
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo import SparseRows

from ..selection import chosen_first

START = {
    "a": np.array([[1.0, -2.0], [0.5, 1.5]]),
    "b": np.array([[-1.0, 0.25], [2.0, -0.75]]),
}
STEPS = 7
# Numbers of bfloat16. Some gradients are zero, as multitask skips them.
GRADS = [
    {
        name: np.round(8 * np.random.default_rng([t, i]).normal(size=(2, 2))) / 8
        for i, name in enumerate(START)
    }
    for t in range(STEPS)
]
for step, name in ((2, "a"), (3, "a"), (4, "b")):
    GRADS[step][name] = np.zeros((2, 2))


class Momentum:
    """The optimizer inside, and what all definitions have: slots by parameter, and a count."""

    def __init__(self, rate=0.1):
        self.rate, self.count, self.slots = rate, 0, {}

    def parts(self):
        """All definitions of which this one consists."""
        return [self]

    def step(self, gs, xs):
        """The new parameters."""
        new = dict(xs)
        for name, g in gs.items():
            self.slots[name] = 0.5 * self.slots.get(name, 0.0) + g
            new[name] = xs[name] - self.rate * self.slots[name]
        return new


class Same(Momentum):
    """The definition of a wrapper that changes how arrays are stored, or does what is inside."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def parts(self):
        return [self, *self.inner.parts()]

    def step(self, gs, xs):
        self.count += 1
        return self.inner.step(gs, xs)


class Accumulate(Same):
    def step(self, gs, xs):
        for name, g in gs.items():
            self.slots[name] = g if self.count % 2 == 0 else self.slots[name] + g
        self.count += 1
        return xs if self.count % 2 else self.inner.step({n: self.slots[n] for n in gs}, xs)


class Decay(Same):
    def step(self, gs, xs):
        return self.inner.step(gs, {name: 0.75 * x for name, x in xs.items()})


class EMAInPlace(Same):
    def step(self, gs, xs):
        self.count += 1
        if self.count % 2 == 0:
            halfway = lambda x: np.stack([x[:, 0], (x[:, 0] + x[:, 1]) / 2], 1)
            xs = {name: halfway(x) for name, x in xs.items()}
        return self.inner.step(gs, xs)


class Ensemble(Same):
    def step(self, gs, xs):
        self.count += 1
        for name, x in xs.items():
            e = self.slots.get(name, np.zeros_like(x))
            self.slots[name] = (e + x) / 2 if self.count % 2 == 0 else e
        swapped = {name: self.slots[name] for name in xs}
        return self.inner.step(gs, swapped if self.count % 3 == 0 else xs)


class Average(Same):
    def step(self, gs, xs):
        new = self.inner.step(gs, xs)
        for name, x in new.items():
            self.slots[name] = 0.5 * self.slots.get(name, START[name]) + 0.5 * x
        return new


class Multitask(Same):
    def step(self, gs, xs):
        skipped = [name for name, g in gs.items() if not g.any()]
        before = [copy.copy(part.slots) for part in self.inner.parts()]
        new = self.inner.step(gs, xs)
        for part, slots in zip(self.inner.parts(), before, strict=True):
            for name in skipped:
                part.slots.pop(name, None)
                part.slots |= {n: slots[n] for n in slots.keys() & {name}}
        return {name: xs[name] if name in skipped else x for name, x in new.items()}


class Clipping(Same):
    def step(self, gs, xs):
        new = self.inner.step(gs, xs)
        norms = {name: np.linalg.norm(x, axis=0, keepdims=True) for name, x in new.items()}
        return {name: x * 1.25 / np.maximum(1.25, norms[name]) for name, x in new.items()}


class Cautious(Same):
    def step(self, gs, xs):
        new = self.inner.step(gs, xs)
        decay = lambda x, y: y - 0.25 * np.where((y - x) * x <= 0, x, 0)
        return {name: decay(xs[name], y) for name, y in new.items()}


class CautiousOfRows(Cautious):
    """Around multitask, which leaves no rows in the update of a parameter that it skips."""

    def step(self, gs, xs):
        new = super().step(gs, xs)
        return {name: new[name] if gs[name].any() else x for name, x in xs.items()}


class Ahead(Same):
    def step(self, gs, xs):
        new = self.inner.step(gs, xs)
        for name, x in new.items():
            iterate, direction = self.slots.get(name, (START[name], 0.0))
            direction = 0.75 * direction + 0.25 * (x - iterate)
            self.slots[name] = np.stack([x, direction])
            new[name] = x + 0.5 * direction
        return new


class Hyperball(Same):
    def step(self, gs, xs):
        new = self.inner.step(gs, xs)
        for name, x in xs.items():
            u = new[name] - x
            radius, length = (np.linalg.norm(a, axis=0, keepdims=True) for a in (x, u))
            y = x + 0.125 * radius * u / np.where(length == 0, 1, length)
            new[name] = y * radius / np.linalg.norm(y, axis=0, keepdims=True)
        return new


class Skip(Same):
    def __init__(self, inner):
        super().__init__(inner)
        self.norms = []

    def step(self, gs, xs):
        norm = np.sqrt(sum(np.sum(g**2) for g in gs.values()))
        self.norms, before = [norm, *self.norms[:1]], self.norms
        if len(before) == 2 and norm > np.mean(before) + np.std(before):
            return dict(xs)
        return self.inner.step(gs, xs)


class CautiousOfSkipped(Cautious):
    """Around skip_spikes, which leaves no rows in an update that it skips."""

    def step(self, gs, xs):
        new = self.inner.step(gs, xs)
        if all(np.array_equal(new[name], x) for name, x in xs.items()):
            return new
        decay = lambda x, y: y - 0.25 * np.where((y - x) * x <= 0, x, 0)
        return {name: decay(xs[name], y) for name, y in new.items()}


class Groups(Same):
    def __init__(self, inner):
        super().__init__(inner)
        self.other = Momentum(0.25)

    def parts(self):
        return [*super().parts(), self.other]

    def step(self, gs, xs):
        part = lambda tree, name: {n: x for n, x in tree.items() if n == name}
        a = self.inner.step(part(gs, "a"), part(xs, "a"))
        return a | self.other.step(part(gs, "b"), part(xs, "b"))


class AGN(Same):
    def __init__(self, inner):
        super().__init__(inner)
        self.center, self.values = copy.deepcopy(inner), Momentum()
        self.values.slots = dict(START)

    def parts(self):
        return [*super().parts(), *self.center.parts(), self.values]

    def step(self, gs, xs):
        self.count += 1
        xs = self.inner.step(gs, xs)
        for name, g in gs.items():
            self.slots[name] = self.slots.get(name, 0.0) + g
        if self.count % 2 == 0:
            for center, own in zip(self.center.parts(), self.inner.parts(), strict=True):
                center.count = own.count
            mean = {name: self.slots.pop(name) / 2 for name in gs}
            xs = self.center.step(mean, {name: self.values.slots[name] for name in xs})
            self.values.slots |= xs
            for center, own in zip(self.center.parts(), self.inner.parts(), strict=True):
                own.count = center.count
        return xs


class DiLoCo(Same):
    def step(self, gs, xs):
        new = super().step(gs, xs)
        if self.count % 2 == 0:
            for name, x in new.items():
                center = self.slots.get(name, START[name])
                self.slots[name] = center - 0.5 * (center - x)
            new = {name: self.slots[name] for name in new}
        return new


class Elastic(Same):
    def step(self, gs, xs):
        new = super().step(gs, xs)
        if self.count % 2 == 0:
            for name, x in new.items():
                center = self.slots.get(name, START[name])
                new[name] = x - 0.25 * (x - center)
                self.slots[name] = center + 0.25 * (x - center)
        return new


# The methods have a single replica.
ALONE = {"axis_name": None}
WRAPPERS = {
    "accumulate": (lambda tx: optzoo.accumulate(tx, 2), Accumulate),
    "agn": (lambda tx: optzoo.agn(tx, communication_period=2, **ALONE), AGN),
    "caught_up": (lambda tx: optzoo.caught_up(tx, dense=True), Same),
    "cautious_weight_decay": (
        lambda tx: optzoo.cautious_weight_decay(tx, weight_decay_per_step=0.25),
        Cautious,
    ),
    "decoupled_weight_decay": (
        lambda tx: optzoo.decoupled_weight_decay(tx, weight_decay_per_step=0.25),
        Decay,
    ),
    "diloco": (
        lambda tx: optzoo.diloco(
            tx, communication_period=2, outer=optzoo.gradient_descent(0.5), **ALONE
        ),
        DiLoCo,
    ),
    "drop_stale_gradient": (lambda tx: optzoo.drop_stale_gradient(tx, 0, **ALONE), Same),
    "elastic_average": (
        lambda tx: optzoo.elastic_average(
            tx, 1, communication_period=2, moving_rate=0.25, rho=0.0, **ALONE
        ),
        Elastic,
    ),
    "ema_in_place": (
        lambda tx: optzoo.interop.fbgemm.ema_in_place(tx, 2, coefficient=0.5),
        EMAInPlace,
    ),
    "ema_nesterov": (lambda tx: optzoo.ema_nesterov(tx, 0.5, 0.75), Ahead),
    "ensemble": (
        lambda tx: optzoo.interop.fbgemm.ensemble(tx, 2, 3, coefficient=0.5),
        Ensemble,
    ),
    "hyperball": (lambda tx: optzoo.hyperball(tx, 0.125, {".*": (0,)}), Hyperball),
    "master_weights": (lambda tx: optzoo.master_weights(tx, bits=32), Same),
    "model_average": (lambda tx: optzoo.model_average(tx, interval_steps=2, **ALONE), Same),
    "moving_average": (lambda tx: optzoo.moving_average(tx, 0.5), Average),
    "multitask": (optzoo.multitask, Multitask),
    "on_rows": (optzoo.on_rows, Same),
    "param_groups": (
        lambda tx: optzoo.param_groups({"a": tx, "b": optzoo.momentum(0.25, 0.5)}),
        Groups,
    ),
    "skip_spikes": (
        lambda tx: optzoo.skip_spikes(
            tx, window=2, min_values=2, deviations=1.0, correction=0, on="norm"
        ),
        Skip,
    ),
    "slots_dtype": (lambda tx: optzoo.slots_dtype(tx, "float32", packed=True), Same),
    "stacked": (optzoo.stacked, Same),
    "sync_replicas": (lambda tx: optzoo.sync_replicas(tx, 1, **ALONE), Same),
    "variable_clipping": (lambda tx: optzoo.variable_clipping(tx, {".*": (0,)}, 1.25), Clipping),
}
SHARED = {"drop_stale_gradient", "sync_replicas"}
CENTERED = {"agn", "diloco", "elastic_average", "model_average"}
METHODS = SHARED | CENTERED
MOVE = {"decoupled_weight_decay", "ema_in_place", "ensemble", "moving_average", "variable_clipping"}
MOVE |= {"cautious_weight_decay", "ema_nesterov", "hyperball"}
ALL = {*WRAPPERS}
# What is refused, with the words of the error: by the wrappers outside and inside.
REFUSED = [
    ({"accumulate"}, METHODS, "accumulate is around a method for replicas"),
    ({"multitask"}, METHODS, "multitask is around a method for replicas"),
    ({"skip_spikes"}, METHODS, "skip_spikes is around a method for replicas"),
    ({"multitask"}, {"accumulate"}, r"write accumulate\(multitask\(tx\), every\)"),
    ({"multitask"}, {"stacked"}, "multitask is around optzoo.stacked or an optimizer with owners"),
    (MOVE, {"accumulate"}, r"not in each update: write accumulate\("),
    (MOVE, SHARED, r"not in each update: put it inside, as in sync_replicas\("),
    (MOVE | CENTERED - {"agn"}, {"master_weights"}, r"write master_weights\("),
    ({"agn", "master_weights"}, {"master_weights"}, "no parameter is bfloat16"),
    ({"param_groups", "stacked"}, {"master_weights"}, "put master_weights around them"),
    ({"moving_average"}, {"caught_up"}, "moving_average cannot be around deferred rows"),
    (
        {"ema_nesterov", "hyperball"},
        {"caught_up"},
        "incompatible with the deferred rows of optzoo.caught_up",
    ),
    (CENTERED, {"caught_up"}, "does not support the deferred rows of optzoo.caught_up"),
    (
        {"caught_up"},
        ALL - {"decoupled_weight_decay", "moving_average", "slots_dtype"},
        "has no decay rule for rows without a gradient",
    ),
    ({"stacked"}, {"stacked"}, "is inside optzoo.stacked"),
    ({"stacked"}, {"hyperball"}, "is in a stack along the first axis"),
    (
        {"stacked"},
        {"accumulate", "agn", "caught_up", "param_groups", "sync_replicas"},
        "has a slot whose shape is not that of parameter",
    ),
]
# Of dense gradients, as stacks have no rows; and of rows.
REFUSED_OF_KIND = {
    "dense": [
        ({"stacked"}, {"ema_in_place", "multitask", "skip_spikes"}, "and on its stack differ in"),
        ({"stacked"}, {"variable_clipping"}, "along the first axis"),
    ],
    "rows": [
        ({"on_rows"}, CENTERED, "cannot run this optimizer row by row"),
        (
            {"on_rows"},
            {"hyperball", "multitask", "skip_spikes", "variable_clipping"},
            "cannot run this optimizer row by row",
        ),
        ({"on_rows"}, {"stacked"}, "keep tables out of the stacks"),
    ],
}
# Cheap ones of each wrapper: the order in which they are run.
FIRST = [
    ("moving_average", "decoupled_weight_decay"),
    ("accumulate", "multitask"),
    ("multitask", "accumulate"),
    ("stacked", "variable_clipping"),
]
# Definitions by the wrappers outside and inside and the kind of gradients.
OTHERWISE = {
    ("cautious_weight_decay", "multitask", "rows"): CautiousOfRows,
    ("cautious_weight_decay", "skip_spikes", "rows"): CautiousOfSkipped,
}
PAIRS = [(outer, inner) for outer in WRAPPERS for inner in WRAPPERS]


def refusal(kind, outer, inner):
    """The words of the error, None if the pair is accepted."""
    for outers, inners, words in REFUSED + REFUSED_OF_KIND[kind]:
        if outer in outers and inner in inners:
            return words
    return None


def run(tx, kind, dtype):
    """The parameters after each step, and the last state."""
    x, path = {name: jnp.asarray(a, dtype) for name, a in START.items()}, []
    state, update = tx.init(x), jax.jit(tx.update)
    for gs in GRADS:
        gs = {name: jnp.asarray(g, dtype) for name, g in gs.items()}
        if kind == "rows":
            gs = {name: SparseRows(jnp.arange(2), g, 2) for name, g in gs.items()}
        updates, state = update(gs, state, x)
        is_rows = lambda u: isinstance(u, SparseRows)
        dense = {n: u.to_dense(x[n]) if is_rows(u) else u for n, u in updates.items()}
        x = optax.apply_updates(x, dense)
        path.append(optzoo.wide_params(x, state) if dtype == "bfloat16" else x)
    return x, state, path


@pytest.mark.parametrize("kind", ["dense", "rows"])
@pytest.mark.parametrize(("outer", "inner"), chosen_first(PAIRS, FIRST))
def test_pair(outer, inner, kind):
    (wrap, define), (wrap_inner, define_inner) = WRAPPERS[outer], WRAPPERS[inner]
    make = lambda: wrap(wrap_inner(optzoo.momentum(0.1, 0.5)))
    dtype = "bfloat16" if "master_weights" in (outer, inner) else "float32"
    if words := refusal(kind, outer, inner):
        with pytest.raises((TypeError, ValueError), match=re.compile(words, re.DOTALL)):
            run(make(), kind, dtype)
        return
    x, state, path = run(make(), kind, dtype)
    defined = OTHERWISE.get((outer, inner, kind), define)(define_inner(Momentum()))
    want = START
    for got, gs in zip(path, GRADS, strict=True):
        want = defined.step(gs, want)
        for name, a in want.items():
            np.testing.assert_allclose(got[name], a, rtol=1e-5, atol=1e-6)
    averages = [part for part in defined.parts() if isinstance(part, Average)]
    if len(averages) == 1 and not {outer, inner} & {*METHODS, "master_weights"}:
        for name, a in averages[0].slots.items():
            got = optzoo.eval_params(x, state)[name]
            np.testing.assert_allclose(got, a, rtol=1e-5, atol=1e-6)


def test_all_wrappers_are_here():
    others = {"caught_up", "on_rows", "param_groups", "slots_dtype"}
    assert others | {*optzoo.catalog.WRAPPERS} | {*optzoo.catalog.DISTRIBUTED} == ALL
