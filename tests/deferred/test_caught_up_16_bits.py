"""Deferred rows in tables and slots of 16 bits: the error bounds, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optzoo
from optzoo import SparseRows
from optzoo.testing.samples import step

from . import test_caught_up as cases

ROWS, WIDTH, AGE, RATE = 4, 2048, 60, 1e-2
# Of the values between two that a dtype has, the largest distance to the next, relative.
UNIT = {jnp.bfloat16: 2.0**-7, jnp.float16: 2.0**-10}


def wide(a):
    return np.asarray(a, np.float64)


def deferred_steps(tx, x):
    """A row after one gradient, then after it was deferred: caught up at once, and step by step."""
    g = jnp.linspace(0.01, 1, x.size).reshape(x.shape).astype(x.dtype)
    rows = SparseRows(jnp.arange(ROWS), g, ROWS)
    none = SparseRows(jnp.zeros(0, jnp.int32), g[:0], ROWS)

    def run(x):
        start, deferred = step(tx, rows, x, tx.init(x)), optzoo.caught_up(tx, mask=True)
        of = lambda each, carry: jax.lax.scan(
            lambda c, _: (step(each, none, *c), None), carry, length=AGE
        )[0]
        x, state = of(deferred, (start[0], optzoo.rows.take_over(deferred, *start)))
        return start, optzoo.rows.catch_up(x, state), of(tx, start)

    ends = jax.jit(run)(x)
    return [[x, *(optzoo.get_slot(state, name) for name in ("m", "v"))] for x, state in ends]


def rule(before):
    """The same steps in float64, and the updates of all steps."""
    x, m, v = map(wide, before)
    b1, b2, eps = (float(np.float32(b)) for b in (0.9, 0.999, 1e-8))
    updates = []
    for t in range(2, AGE + 2):
        m, v = b1 * m, b2 * v
        size = RATE * np.sqrt(1 - b2**t) / (1 - b1**t)
        updates.append(-size * m / (np.sqrt(v) + eps))
        x = x + updates[-1]
    return [x, m, v], np.array(updates)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_slots_rounded_at_random_are_right_on_average(packed):
    """One rounding for a deferral, not one for a step: the same mean, less noise."""
    tx = optzoo.slots_dtype(optzoo.adam(RATE), "bfloat16", stochastic=True, packed=packed)
    before, at_once, by_step = deferred_steps(tx, jnp.ones((ROWS, WIDTH)))
    exact, _ = rule(before)
    assert at_once[1].dtype == at_once[2].dtype == jnp.bfloat16
    for k in (1, 2):
        off, of_steps = (wide(each[k]) / exact[k] - 1 for each in (at_once, by_step))
        assert np.abs(off).max() <= 2.0**-7  # a unit in the last place
        for each in (off, of_steps):
            assert abs(each.mean()) < 4 * each.std() / np.sqrt(each.size)
        assert 3 * off.std() < of_steps.std()
    # The parameters are caught up from the slots as they were.
    np.testing.assert_allclose(wide(at_once[0]), exact[0], rtol=0, atol=3e-7)
    assert np.abs(wide(by_step[0]) - exact[0]).max() > 1e-4


@pytest.mark.unique
def test_each_table_has_random_bits_of_its_own():
    """In its own group too. The slots are equal, and exact in 16 bits for two deferred steps."""
    slots = optzoo.slots_dtype(optzoo.momentum(RATE, 13 / 16), "bfloat16", stochastic=True)
    of_table = lambda: optzoo.caught_up(slots, mask=True, dense=True)
    tx = optzoo.param_groups({"a": of_table(), "b": of_table()})
    [clock] = jax.eval_shape(of_table().init, jnp.ones((1, 1))).clock.values()
    n = len(clock.ring) - 2  # each step sweeps one of so many rows
    ones = np.ones((n, 32), np.float32)
    ids = np.full((5, n), n)
    ids[0] = range(n)

    @jax.jit
    def run(x):
        def one(carry, ids):
            return step(tx, dict.fromkeys("ab", SparseRows(ids, ones, n)), *carry), None

        return jax.lax.scan(one, (x, tx.init(x)), ids)[0][1]

    state = run(dict.fromkeys("ab", ones))
    a, b = (wide(slot[4]) for slot in jax.tree.leaves(state) if slot.dtype == jnp.bfloat16)
    assert {*np.unique([a, b])} == {137 / 256, 138 / 256}  # around (13 / 16)**3
    assert not np.array_equal(a, b)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_tables_in_16_bits(dtype):
    """Half a unit in the last place from the rule; the loop of steps within its own roundings."""
    x = jnp.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH).astype(dtype)
    with jax.numpy_dtype_promotion("strict"):
        before, at_once, by_step = deferred_steps(optzoo.adam(RATE), x)
    exact, updates = rule(before)
    assert at_once[0].dtype == dtype
    unit = UNIT[dtype] * 2.0 ** np.floor(np.log2(np.abs(exact[0]) + np.abs(updates).sum(0)))
    off = np.abs(wide(at_once[0]) - exact[0])
    assert (off <= 0.501 * unit).all()
    of_steps = np.abs(wide(by_step[0]) - exact[0])
    # Each step of the loop loses its update, or half a unit; the update itself is rounded twice.
    lost = np.minimum(np.abs(updates), 0.5 * unit) + 1.1 * UNIT[dtype] * np.abs(updates)
    assert (of_steps <= lost.sum(0) + 0.01 * unit).all()
    assert 5 * off.mean() < of_steps.mean()
    for k in (1, 2):  # in float32
        np.testing.assert_allclose(wide(at_once[k]), exact[k], rtol=1e-5)


def test_minimize_with_a_table_in_16_bits():
    """As in float32 from the same start, up to the roundings of a step."""
    half = lambda p: {**p, "users": p["users"].astype(jnp.float16)}
    tx = optzoo.caught_up(cases.packed(cases.ADAM), mask="users")
    fn = lambda p, ids: cases.few_loss({**p, "users": p["users"].astype(jnp.float32)}, ids)
    step, ends = optzoo.minimize(fn, tx), []
    for of_start in (half, lambda p: jax.tree.map(lambda x: x.astype(jnp.float32), half(p))):
        p = of_start(cases.few_params())
        state = tx.init(p)
        for ids in cases.batches(20):
            p, state, value = step(p, state, ids)
        ends.append((optzoo.eval_params(p, state), value))
    (got, value), (want, wanted) = ends
    assert got["users"].dtype == jnp.float16
    np.testing.assert_allclose(value, wanted, rtol=0.02)
    np.testing.assert_allclose(wide(got["users"]), want["users"], rtol=0, atol=0.02)


def refused(match, tx, dtype=jnp.float32):
    with pytest.raises(TypeError, match=match):
        optzoo.caught_up(tx, mask=True).init({"table": jnp.ones((5, 2), dtype)})


def test_what_is_refused(x64):
    adam, stored = optzoo.adam(0.1), optzoo.slots_dtype
    nearest = r"'table' has slots in bfloat16: with rounding to nearest.*stochastic=True"
    refused(nearest, stored(adam, "bfloat16"), jnp.bfloat16)
    refused(nearest, stored(adam, "bfloat16"))
    refused(nearest, stored(adam, "bfloat16", packed=True))
    refused("slots in float16: with rounding to nearest", stored(adam, "float16"))
    small = "slots in float16: the exponent range of float16 is too small"
    refused(small, stored(adam, "float16", stochastic=True))
    with x64(True):
        refused("must all be float32 or all float64", stored(adam, "float64"))
        both = {"a": jnp.ones((5, 2), jnp.float32), "b": jnp.ones((5, 2), jnp.float64)}
        with pytest.raises(TypeError, match="all be float64 or none"):
            optzoo.caught_up(adam, mask=True).init(both)


@pytest.mark.optimized
def test_words_of_two_slots_stay_where_they_are():
    """No pass over the table for the random bits either."""
    slots = optzoo.slots_dtype(optzoo.adam(), "bfloat16", stochastic=True, packed=True)
    tx, x = optzoo.caught_up(slots), jnp.ones((50_000, 16))
    step = optzoo.minimize(lambda x, ids: jnp.sum(optzoo.lookup(x, ids) ** 2), tx)
    memory = step.lower(x, tx.init(x), jnp.array([1, 3, 1])).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.1 * x.nbytes
