"""Deferred rows, against the loops that they stand for: decay rules, records, schedules."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo import SparseRows
from optzoo.deferred.motion import caught_up_rows, make_motion, tick
from optzoo.state.decay_rule import DecayRule, Form
from optzoo.testing import samples

from ..golden import RECORDS, build, load, worst
from ..golden.test_golden import tolerance
from ..selection import chosen_first

GOLDEN = [
    name
    for name in RECORDS
    if name.split("-")[0] in ("Adam", "AdamW", "Nadam") and {"sparse", "dup"} & {*name.split("-")}
]
# The loops below say more of the rules; these are of all that a record has beside them.
QUICK = ["Adam-other-dup-f64", "AdamW-some-dup-f64", "Nadam-default-sparse-f32"]


def replay(case):
    """The parameters after every step, all current, and the slots at the end, as in the record."""
    values = [case.group(group) for group in ("grad", "grad_idx", "grad_val")]
    params = {k: jnp.asarray(v) for k, v in case.group("init").items()}
    tables = {k: k in values[1] for k in params}
    tx = optzoo.caught_up(build(case.meta), mask=tables, horizon=500)

    def step(carry, inputs):
        params, state = optzoo.rows.catch_up(*carry, inputs[1])
        dense, ids, rows = inputs
        grads = dense | {k: SparseRows(ids[k], rows[k], len(params[k])) for k in ids}
        params, state = samples.step(tx, grads, params, state)
        return (params, state), optzoo.rows.catch_up(params, state)

    run = jax.jit(lambda params, values: jax.lax.scan(step, (params, tx.init(params)), values)[1])
    path, states = jax.device_get(run(params, values))
    state = jax.tree.map(lambda a: a[-1], states)
    slots = {
        f"slot/{s['checkpoint_name']}": optzoo.get_slot(state, s["slot"])[s["var"]]
        for s in case.meta["slots"]
    }
    return {f"param/{k}": v for k, v in path.items()} | slots


@pytest.mark.parametrize("name", chosen_first(GOLDEN, QUICK))
def test_follows_the_original(name, x64):
    case = load(name)
    with x64(case.meta["dtype"] == "float64"):
        error, where = worst(replay(case), case)
    assert error <= min(tolerance(case.meta), 1e-4), f"{name}: off by {error:.1e} in {where}"


def test_there_are_records():
    assert len(GOLDEN) >= 12


SCHEDULE = optax.cosine_decay_schedule(0.02, 1500)
# The optimizer, and what rows are compared with: row-sparse gradients or dense ones.
FAMILY = {
    "adam": (optzoo.adam(SCHEDULE), False),
    "adam, packed": (
        optzoo.slots_dtype(optzoo.adam(SCHEDULE, eps=1e-3), "float64", packed=True),
        False,
    ),
    "adam, b1=0": (optzoo.adam(SCHEDULE, b1=0.0), False),
    "adamw": (optzoo.adamw(SCHEDULE, weight_decay_per_step=1e-3), False),
    "adamw, all rows": (optzoo.adamw(SCHEDULE, weight_decay_per_step=1e-3), True),
    "nadam": (optzoo.nadam(SCHEDULE), False),
    "nadam, all rows": (optzoo.nadam(SCHEDULE), True),
    "add_sign": (optzoo.add_sign(SCHEDULE), False),
    "power_sign": (optzoo.power_sign(SCHEDULE), False),
    "momentum": (optzoo.momentum(SCHEDULE, 0.9), True),
    "nesterov": (optzoo.momentum(SCHEDULE, 0.9, nesterov=True), True),
    "momentumw": (optzoo.momentumw(SCHEDULE, 0.9, weight_decay_per_step=1e-3), True),
    "rmsprop": (optzoo.rmsprop(SCHEDULE), True),
    "rmsprop, centered, momentum": (optzoo.rmsprop(SCHEDULE, momentum=0.9, centered=True), True),
    "rmsprop, no momentum": (optzoo.rmsprop(SCHEDULE, momentum=None), True),
    "amsgrad": (optzoo.amsgrad(SCHEDULE, decay_learning_rate=True), True),
    "average of adam": (optzoo.moving_average(optzoo.adam(SCHEDULE), 0.9999), False),
    "average of momentum": (
        optzoo.moving_average(optzoo.momentum(SCHEDULE, 0.9), 0.9999, num_updates=5000),
        True,
    ),
    "average of adam by the count": (
        optzoo.moving_average(optzoo.adam(SCHEDULE), 0.995, num_updates="count"),
        False,
    ),
    "average of rows at rest by the count": (
        optzoo.moving_average(optzoo.add_sign(SCHEDULE), 0.9, num_updates="count"),
        False,
    ),
    "average of rows at rest": (optzoo.moving_average(optzoo.add_sign(SCHEDULE), 0.99), False),
    "adamax": (optzoo.adamax(SCHEDULE), True),
}
ROWS, STEPS = 30, 1500


@functools.cache
def family_errors():
    """For each optimizer the largest differences of parameters and slots; in one program."""
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 4, (STEPS, 5))  # most rows are deferred for long
    ids[:30] = rng.integers(0, ROWS, (30, 5))
    ids[700:710] = rng.integers(0, ROWS, (10, 5))
    values = rng.normal(size=(STEPS, 5, 2)) * 10.0 ** rng.uniform(-6, 1, ROWS)[ids][..., None]
    start = jnp.asarray(rng.normal(size=(ROWS, 2)))

    def of_one(plain, dense):
        tx = optzoo.caught_up(plain, mask=True, dense=dense, horizon=800)

        def step(carry, inputs):
            (x, state), (y, other) = carry
            ids, values = inputs
            x, state = optzoo.rows.catch_up(x, state, ids)
            g = SparseRows(ids, values, ROWS)
            other = samples.step(plain, g.to_dense() if dense else g, y, other)
            return (samples.step(tx, g, x, state), other), None

        def fifty_steps(carry, inputs):
            carry, _ = jax.lax.scan(step, carry, inputs)
            (x, state), (y, _) = carry
            x, current = optzoo.rows.catch_up(x, state)
            return carry, (jnp.abs(x - y).max(), current)

        def run(ids, values):
            parts = jax.tree.map(lambda a: a.reshape(-1, 50, *a.shape[1:]), (ids, values))
            carry = (start, tx.init(start)), (start, plain.init(start))
            ((_, state), (_, other)), (off, current) = jax.lax.scan(fifty_steps, carry, parts)
            worst, current = off.max(), jax.tree.map(lambda a: a[-1], current)
            slots = lambda state: [optzoo.get_slot(state, k) for k in optzoo.slot_names(other)]
            relative = lambda a, b: (jnp.abs(a - b) / jnp.maximum(jnp.abs(b), 1e-200)).max()
            of_slots = [relative(a, b) for a, b in zip(slots(current), slots(other), strict=True)]
            return worst, jnp.stack(of_slots).max(), (state.last.min(), current.inner)

        return run

    runs = {name: of_one(*case) for name, case in FAMILY.items()}
    program = jax.jit(lambda *args: {k: run(*args) for k, run in runs.items()})
    return jax.device_get(program(ids, values))


@pytest.mark.parametrize("name", FAMILY)
def test_equals_the_dense_loop(name, x64):
    with x64(True):
        off, of_slots, (longest, inner) = family_errors()[name]
        plain, _ = FAMILY[name]
        same = jax.tree.structure(plain.init(jnp.zeros((ROWS, 2))))
    assert off < 1e-11 and of_slots < 1e-11
    assert longest < STEPS - 300  # rows deferred beyond the window
    assert jax.tree.structure(inner) == same


SETTINGS = [
    (0.9, 0.999, 1e-8),
    (0.9, 0.999, 0.0),
    (0.9, 0.999, 0.1),
    (0.5, 0.9, 1e-8),
    (0.99, 0.999, 1e-3),
    (0.9, 0.9, 1e-3),
]


@pytest.mark.parametrize(("b1", "b2", "eps"), SETTINGS)
def test_the_series_is_exact_for_all_magnitudes(b1, b2, eps):
    """One deferral, by a random rate with zeros, from v = 1e-26 to 1e6."""
    checks, rng = [1, 2, 17, 100, 700, 3000], np.random.default_rng(1)
    motion = make_motion(DecayRule((("m", b1), ("v", b2)), "m", "v", eps=eps), "float32", 4000)
    v = 10 ** np.linspace(-26, 6, 65, dtype=np.float32)[:, None]
    m = (np.sqrt(v) * rng.uniform(0.3, 3, v.shape)).astype(np.float32)
    rates = rng.random(checks[-1]) < 0.7
    rates = (rates * 10 ** rng.uniform(-4, -1, len(rates))).astype(np.float32)

    @jax.jit
    def run(rates):
        def step(clock, rate):
            clock = tick(motion, clock, rate)
            slots = {"m": jnp.asarray(m), "v": jnp.asarray(v)}
            # As after the ages of `checks`, of rows as of the start.
            return clock, caught_up_rows(
                motion.rule.form, clock, jnp.zeros_like(m), slots, jnp.zeros(65, jnp.int32)
            )

        return jax.lax.scan(step, motion.start, rates)[1]

    xs, slots = jax.device_get(run(rates))
    low = [float(np.float32(b)) for b in (b1, b2)]
    m, v, x = m.astype(float), v.astype(float), 0.0
    for k, rate in enumerate(rates, 1):
        m, v = low[0] * m, low[1] * v
        down = np.sqrt(v) + float(np.float32(eps))
        x = x - float(rate) * m / down
        if k in checks:
            np.testing.assert_allclose(xs[k - 1], x, rtol=5e-6)
            real = v > 1e-30
            np.testing.assert_allclose(slots["v"][k - 1][real], v[real], rtol=1e-6)


@pytest.mark.parametrize(
    ("b1", "b2", "reason"),
    [
        (0.9, 0.8, "the mean must decay faster than the denominator"),
        (0.99, 0.9901**2, "too long to defer"),
        (0.9, 0.91**2, "more than 256 terms. Increase the decay of the denominator"),
    ],
)
def test_decays_too_near_to_each_other(b1, b2, reason):
    with pytest.raises(ValueError, match=reason):
        make_motion(DecayRule((("m", b1), ("v", b2)), "m", "v"), "float32", 500)


def test_the_longest_deferral_has_a_bound():
    motion = make_motion(DecayRule((("m", 0.9), ("v", 0.999)), "m", "v"), "float32", 500)
    assert len(motion.start.ring) == 500 and len(motion.start.young) < 250
    ages = np.array([0, motion.start.longest, motion.start.longest + 1, -1])
    clock = motion.start._replace(count=jnp.int32(5000))
    slots = {"m": np.ones((4, 1), "f"), "v": np.ones((4, 1), "f")}
    current = jax.jit(functools.partial(caught_up_rows, motion.rule.form))
    x, _ = current(clock, np.zeros((4, 1), "f"), slots, (5000 - ages).astype(np.int32))
    assert np.isnan(x)[:, 0].tolist() == [False, False, True, True]


def test_powers_are_products_from_short_tables():
    motion = make_motion(DecayRule((("m", 0.9), ("v", 0.999)), "m", "v"), "float32", 5000)
    ages = np.array([0, 1, 255, 256, 257, 511, 512, motion.start.longest])
    got = motion.start.power(motion.rule.form, "v", jnp.asarray(ages))
    exact = np.float64(np.float32(0.999)) ** ages
    np.testing.assert_allclose(got, exact, rtol=1e-6)
    assert motion.start.numbers.powers.shape == (2, 256 + 21)


def test_the_text_of_a_rule_in_old_checkpoints():
    rule = DecayRule((("m", 0.9), ("v", 0.999)), "m", "v", root=False, eps=1e-8)
    text = "decays=(('m', 0.9), ('v', 0.999)), moves=m, over=v, root=False, eps=1e-08"
    assert DecayRule.of_text(text) == rule
    assert DecayRule.of_text("decays=(('rms', 0.9),)") == DecayRule((("rms", 0.9),))


def test_columns_that_old_clocks_lack():
    """Old clocks have no column for the terms that a block lacks; in new ones it is zero."""
    rule = DecayRule((("m", 0.9), ("v", 0.95)), "m", "v", eps=1e-8, average=0.9)
    motion = make_motion(rule, "float32", 100)
    clock = jax.tree.map(jnp.asarray, motion.start)
    for _ in range(3):
        clock = tick(motion, clock, jnp.float32(0.1))
    entries = np.asarray(clock.young)
    is_kept = entries.any(0)
    assert is_kept.sum() == 94 and len(is_kept) == 100
    np.testing.assert_array_equal(motion.padded(entries[:, is_kept]), entries)


def test_the_key_of_a_form():
    """It is a part of checkpoints, so it stays."""
    rule = DecayRule((("m", 0.9), ("v", 0.999)), "m", "v_hat", eps=1e-8, average=0.9, varies=True)
    key = "decays_m__decays_v__moves_m__over_v_hat__root__eps__average__varies"
    assert rule.form.key == key
    assert Form.of_key(key) == rule.form
    assert rule._replace(eps=1e-7).form == rule.form
    assert Form.of_key("decays_m__moves") is None
    assert Form.of_key(str(rule)) is None


@pytest.mark.parametrize(
    ("b1", "b2", "message"),
    [(0.9, 0.81, "too long"), (0.9, 0.8, "b1 below"), (0.95, 0.9, "b1 below")],
)
def test_decays_that_allow_no_deferral(b1, b2, message):
    with pytest.raises(ValueError, match=message):
        optzoo.caught_up(optzoo.adam(1e-3, b1, b2))


@pytest.mark.full
def test_no_drift_over_many_steps():
    """100,000 steps with a falling rate: not further from float64 than the dense loop."""
    rows, steps = 200, 100_000
    rng = np.random.default_rng(1)
    p = 1 / np.arange(1, rows - 9) ** 1.1
    ids = rng.choice(rows - 10, (steps, 8), p=p / p.sum())
    scale = 10 ** rng.uniform(-9, 1, rows)[ids][..., None]
    values = (scale * (rng.normal(size=(steps, 8, 2)) + 0.5)).astype(np.float32)
    x0 = (0.1 * rng.normal(size=(rows, 2))).astype(np.float32)
    rate = optax.cosine_decay_schedule(1e-2, steps)
    rates = jax.vmap(rate)(jnp.arange(steps))
    plain = optzoo.adam(1e-2)
    tx = optzoo.caught_up(plain, mask=True, horizon=2000)

    @jax.jit
    def run(x0, values, rates):
        def step(carry, inputs):
            (x, state), (y, other) = carry
            ids, values, rate = inputs
            g = SparseRows(ids, values, rows)
            x, state = optzoo.rows.catch_up(x, state, ids)
            u, state = tx.update(g, state, x, learning_rate=rate)
            x = x + u
            u, other = plain.update(g, other, y, learning_rate=rate)
            return ((x, state), (y + u, other)), None

        carry = (x0, tx.init(x0)), (x0, plain.init(x0))
        ((x, state), (y, _)), _ = jax.lax.scan(step, carry, (ids, values, rates))
        return optzoo.rows.catch_up(x, state)[0], y

    mine, dense = run(jnp.asarray(x0), values, rates)
    exact = adam_in_float64(x0, ids, values, np.asarray(rates))
    off = [float(np.abs(np.asarray(x) - exact).max()) for x in (mine, dense)]
    moved = np.abs(exact - x0).max()
    print(f"moved {moved:.3g}, off by {off[0]:.2e}, the dense loop by {off[1]:.2e}")
    assert moved > 10 and off[0] < 1.2 * off[1]
    np.testing.assert_array_equal(mine[-10:], x0[-10:])


def adam_in_float64(x, ids, values, rates):
    """The dense loop with the constants and the powers of float32."""
    f, x = np.float32, x.astype(float)
    m, v, powers, bases = np.zeros_like(x), np.zeros_like(x), [f(0.9), f(0.999)], [f(0.9), f(0.999)]
    c = [float(f(1 - 0.9)), float(f(1 - 0.999))]
    for some, g, rate in zip(ids, values, rates, strict=True):
        total = np.zeros(x.shape, f)
        np.add.at(total, some, g)
        total = total.astype(float)
        correction = float(np.sqrt(f(1) - powers[1]) / (f(1) - powers[0]))
        m, v = m * float(bases[0]) + c[0] * total, v * float(bases[1]) + c[1] * total**2
        x = x - float(f(rate)) * correction * m / (np.sqrt(v) + float(f(1e-8)))
        powers = [p * b for p, b in zip(powers, bases, strict=True)]
    return x
