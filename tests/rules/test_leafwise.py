"""A user-defined rule, applied to trees, rows and schedules."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo import SparseRows
from optzoo.rules import leafwise
from optzoo.state import LeafwiseState
from optzoo.testing.samples import avals, params, row_grads, step, step_of


class Slots(NamedTuple):
    total: Any  # of the gradients
    calls: Any  # the number of updates of an element


def total_of_gradients(**kwargs):
    def rule(g, x, s, t):
        total, calls = s.total + g, s.calls + 1
        return -total * t, Slots(total, calls)

    return leafwise(rule, slots=Slots(optzoo.rules.zeros, optzoo.rules.full(10)), **kwargs)


X = {"x": jnp.arange(4.0)}
ROWS = SparseRows(jnp.array([2, 0, 2, 4]), jnp.array([1.0, 2, 3, 9]), 4)


def test_user_defined_rule():
    tx = total_of_gradients()
    state = tx.init(X)
    assert isinstance(state, LeafwiseState) and state.count == 0
    np.testing.assert_array_equal(state.slots.calls["x"], 10)
    for t, total in ((1, 2.0), (2, 4.0), (3, 6.0)):
        updates, state = tx.update({"x": jnp.full(4, 2.0)}, state)
        np.testing.assert_array_equal(updates["x"], -total * t)
    assert state.count == 3
    np.testing.assert_array_equal(state.slots.calls["x"], 13)


@pytest.mark.parametrize(
    ("policy", "moves", "calls"),
    [
        (optzoo.rules.lazy, [-2, 0, -4, 0], [11, 10, 11, 10]),
        (optzoo.rules.dense, [-2, 0, -4, 0], [11, 11, 11, 11]),
        (optzoo.rules.touched, [-2, 0, -4, 0], [11, 11, 11, 11]),
    ],
)
def test_rows_by_each_policy(policy, moves, calls):
    tx = total_of_gradients(rows=policy)
    updates, state = tx.update({"x": ROWS}, tx.init(X))
    np.testing.assert_array_equal(jnp.zeros(4) + updates["x"], moves)
    np.testing.assert_array_equal(state.slots.calls["x"], calls)
    # With the dense policy the totals of rows 0 and 2 move them again.
    again = SparseRows(jnp.array([1]), jnp.array([1.0]), 4)
    updates, state = tx.update({"x": again}, state)
    first = -4 if policy is optzoo.rules.dense else 0
    last = -8 if policy is optzoo.rules.dense else 0
    np.testing.assert_array_equal(jnp.zeros(4) + updates["x"], [first, -2, last, 0])


def test_linear_rows_are_not_merged():
    tx = leafwise(lambda g, x, s, t: (-g, s), rows=optzoo.rules.linear)
    updates, _ = tx.update({"x": ROWS}, tx.init(X))
    np.testing.assert_array_equal(updates["x"].indices, ROWS.indices)
    np.testing.assert_array_equal(updates["x"].values, -ROWS.values)


def test_user_defined_policy():
    """A policy that applies the largest gradient to all rows of a table."""

    def largest(rule):
        def on_rows(g, x, s, t, **scheduled):
            return rule(jnp.full(g.shape, jnp.max(g.values)), x, s, t, **scheduled)

        return on_rows

    tx = total_of_gradients(rows=largest)
    updates, _ = tx.update({"x": ROWS}, tx.init(X))
    np.testing.assert_array_equal(updates["x"], -9)


def test_rows_rule_sees_the_rows_of_the_parameter():
    x = params()
    tx = leafwise(lambda g, x, s, t: (g * x, s), needs_params=True)
    updates, _ = tx.update(row_grads(x), tx.init(x), x)
    want = row_grads(x)["table"].to_dense() * x["table"]
    np.testing.assert_allclose(updates["table"].to_dense(), want, rtol=1e-6)


def test_needed_params():
    tx = leafwise(lambda g, x, s, t: (x, s), needs_params=True)
    with pytest.raises(ValueError, match="requires the current value of parameters"):
        tx.update(X, tx.init(X))
    without = leafwise(lambda g, x, s, t: (g if x is None else x, s))
    updates, _ = without.update({"x": jnp.ones(4)}, without.init(X))
    np.testing.assert_array_equal(updates["x"], 1)


def scheduled(**values):
    return leafwise(lambda g, x, s, t, a, b: (a * t + b + 0 * g, s), scheduled=values)


def test_scheduled_values():
    tx = scheduled(a=lambda k: 10.0 * k, b=0.5)
    state, g = tx.init(X), {"x": jnp.ones(4)}
    for want in (0.5, 20.5, 60.5):  # 10 k t + b, where t = k + 1
        updates, state = tx.update(g, state)
        np.testing.assert_array_equal(updates["x"], want)
    assert avals(state) == avals(scheduled(a=1.0, b=2.0).init(X))


def test_global_step_moves_schedules_but_not_t():
    tx = scheduled(a=lambda k: 10.0 * k, b=0)
    state, g = tx.init(X), {"x": jnp.ones(4)}
    for t in (1, 2):
        updates, state = tx.update(g, state, global_step=7)
        np.testing.assert_array_equal(updates["x"], 70 * t)
    assert state.count == 2
    updates, _ = tx.update(g, state, global_step=0)  # zero is a step, not a missing one
    np.testing.assert_array_equal(updates["x"], 0)


def test_override_by_name():
    tx = scheduled(a=lambda k: 10.0, b=1)
    updates, state = tx.update({"x": jnp.ones(4)}, tx.init(X), a=3.0, c=99)
    np.testing.assert_array_equal(updates["x"], 4)
    updates, _ = tx.update({"x": jnp.ones(4)}, state, b=jnp.zeros(()))
    np.testing.assert_array_equal(updates["x"], 20)


def test_powers_are_running_products_in_float32():
    tx = leafwise(lambda g, x, s, t, beta: (beta + 0 * g, s), powers={"beta": 0.999})
    state, product = tx.init(X), np.float32(0.999)
    for _ in range(100):
        updates, state = tx.update({"x": jnp.ones(4)}, state)
        np.testing.assert_array_equal(updates["x"], product)
        product *= np.float32(0.999)
    assert state.shared["beta"].dtype == jnp.float32
    assert product != np.float32(0.999**101)  # rounded as in the originals


def test_float64_where_there_is_float64(x64):
    with x64(True):
        x = {"x": jnp.arange(4.0, dtype="float64")}
        tx = total_of_gradients()
        updates, state = tx.update({"x": jnp.full(4, 1 + 1e-12)}, tx.init(x))
        assert updates["x"].dtype == state.slots.total["x"].dtype == jnp.float64
        np.testing.assert_allclose(updates["x"], -1 - 1e-12, rtol=1e-15)


def test_computes_in_float32_and_stays_finite():
    """The square overflows in float16; a slot of a state restored in float16 is clipped."""

    def rule(g, x, s, t):
        total = s.total + g**2
        return g**2 / jnp.sqrt(total), Slots(total, s.calls)

    tx = leafwise(rule, slots=Slots(optzoo.rules.zeros, optzoo.rules.zeros))
    x = {"x": jnp.zeros(2, jnp.float16)}
    start = tx.init(x)
    half = start._replace(slots=jax.tree.map(lambda a: a.astype(jnp.float16), start.slots))
    for state, total in ((half, jnp.finfo(jnp.float16).max), (start, np.float32(3e4) ** 2)):
        updates, state = tx.update({"x": jnp.full(2, 3e4, jnp.float16)}, state)
        np.testing.assert_allclose(updates["x"], 3e4, rtol=1e-3)
        assert updates["x"].dtype == jnp.float16
        np.testing.assert_allclose(state.slots.total["x"], total, rtol=1e-3)
    updates, _ = tx.update({"x": jnp.full(2, jnp.nan, jnp.float16)}, state)
    assert jnp.all(jnp.isnan(updates["x"]))


def test_in_a_chain():
    tx = optax.chain(total_of_gradients(), optzoo.transforms.scale_by_learning_rate(0.5))
    moved, _ = step(tx, {"x": jnp.ones(4)}, X)
    chex.assert_trees_all_equal(moved, {"x": X["x"] + 0.5})


def test_a_gradient_that_does_not_fit_its_slots():
    """Without params only the slots show the error; broadcasting would hide it."""
    tx = optzoo.momentum(0.1, 0.9)
    state = tx.init(jnp.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"does not match.* \(1, 3\).*got .* \(2, 3\)"):
        tx.update(jnp.ones((1, 3)), state)


def test_a_rule_keeps_the_shapes_of_its_slots():
    tx = leafwise(
        lambda g, x, s, t: (g, Slots(g[:1], g)), slots=Slots(optzoo.rules.zeros, optzoo.rules.zeros)
    )
    with pytest.raises(
        ValueError, match=r"returned an array of shape \(1,\) for one of shape \(2,\)"
    ):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))


@pytest.mark.parametrize(
    ("rule", "got"),
    [
        (lambda g, x, s, t: -g, "got an array$"),
        (lambda g, x, s, t: (-g, s.total, s.calls), "got tuple"),
        (lambda g, x, s, t: Slots(-g, g), "got Slots"),
        (lambda g, x, s, t: (-g, s.total), "got an array for new_slots"),
        (lambda g, x, s, t: (-g, (s.total, s.calls)), "got tuple for new_slots"),
        (lambda g, x, s, t: (-g, s._asdict()), "got dict for new_slots"),
    ],
)
@pytest.mark.parametrize("wrap", [lambda tx: tx, lambda tx: optzoo.slots_dtype(tx, "bfloat16")])
@pytest.mark.parametrize("g", [jnp.ones(2), SparseRows(jnp.array([1]), jnp.ones(1), 2)])
def test_a_rule_returns_an_update_and_slots(rule, got, wrap, g):
    tx = wrap(leafwise(rule, slots=Slots(optzoo.rules.zeros, optzoo.rules.zeros)))
    what = r"must return \(update, new_slots\), where new_slots is Slots\(total, calls\), " + got
    with pytest.raises(TypeError, match=what):
        tx.update(g, tx.init(jnp.ones(2)), jnp.ones(2))


def test_shared_arrays_are_those_of_the_optimizer():
    tx = optzoo.transforms.scale_by_adam()
    state = tx.init(jnp.ones(2))
    other = state._replace(shared={**state.shared, "beta1_power": jnp.ones(2)})
    with pytest.raises(ValueError, match=r"as shared arrays, .*\(2,\)"):
        tx.update(jnp.ones(2), other)


def test_slots_are_a_named_tuple_of_functions():
    for wrong in ({"m": optzoo.rules.zeros}, (optzoo.rules.zeros,), Slots):
        with pytest.raises(TypeError, match=r"slots must be a named tuple of initializers, got"):
            leafwise(lambda g, x, s, t: (g, s), slots=wrong)
    with pytest.raises(TypeError, match=r"slots.calls must be a function of the parameter, got 0"):
        leafwise(lambda g, x, s, t: (g, s), slots=Slots(optzoo.rules.zeros, 0))
    with pytest.raises(
        TypeError, match=r"rows must be a policy such as optzoo.rules.lazy, got 'lazy'"
    ):
        leafwise(lambda g, x, s, t: (g, s), rows="lazy")
    with pytest.raises(TypeError, match=r"rule must be a function, got None"):
        leafwise(None)
    with pytest.raises(TypeError, match=r"precompute must be a function, got 3"):
        leafwise(lambda g, x, s, t: (g, s), precompute=3)


class Counted(NamedTuple):
    """A slot of integers and one of flags beside one of real numbers."""

    m: object
    seen: object
    was: object


COUNTED = Counted(
    optzoo.rules.zeros,
    lambda x: jnp.full(x.shape, 2**24 + 1, jnp.int32),  # no float32 is equal to it
    lambda x: jnp.zeros(x.shape, bool),
)


@pytest.mark.parametrize("how", ["dense", "rows", "native"])
def test_slots_of_integers_and_flags_keep_their_dtypes(how):
    def rule(g, x, s, t):
        return -g * s.seen.astype(jnp.float32), Counted(s.m + g, s.seen + 1, s.was | (g > 1))

    tx = leafwise(rule, slots=COUNTED, rows=optzoo.rules.lazy)
    x, g = jnp.zeros((4, 2)), jnp.array([[1.0, 2.0], [3.0, 0.5]])
    dense = jnp.zeros((4, 2)).at[1:3].set(g)
    grads = dense if how == "dense" else optzoo.SparseRows(jnp.array([1, 2]), g, 4)
    run = jax.jit(optzoo.native_step(tx)) if how == "native" else step_of(tx)
    _, state = run(x, tx.init(x), grads)
    seen = np.full((4, 2), 2**24 + 1, np.int32)
    seen[slice(None) if how == "dense" else slice(1, 3)] += 1
    np.testing.assert_array_equal(state.slots.seen, seen)
    np.testing.assert_array_equal(state.slots.was, np.asarray(dense) > 1)
    np.testing.assert_array_equal(state.slots.m, dense)


def test_a_slot_of_integers_that_becomes_another_kind():
    tx = leafwise(lambda g, x, s, t: (g, Counted(s.m, s.seen + 0.5, s.was)), slots=COUNTED)
    with pytest.raises(
        ValueError, match=r"the rule returned float32 for a slot of int32: return it in"
    ):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))


def test_precompute_is_called_once_for_each_dtype(x64):
    """With values of that dtype; rows get the same numbers as arrays do."""
    calls = []

    def precompute(t, rate, power):
        calls.append((rate.dtype, power.dtype))
        return {"factor": rate * (1 - power) / t}

    tx = leafwise(
        lambda g, x, s, t, factor: (-factor * g, s),
        scheduled={"rate": lambda n: 2.0 + n},
        powers={"power": 0.5},
        precompute=precompute,
    )
    with x64(True):
        grads = {
            "a": jnp.ones(4, "bfloat16"),
            "b": jnp.ones(3),
            "c": jnp.ones((2, 2), "float32"),
            "rows": SparseRows(jnp.array([2, 0]), jnp.ones((2, 1), "float32"), 3),
            "none": None,
        }
        state = tx.init({**grads, "rows": jnp.ones((3, 1), "float32")})
        for t in (1, 2):
            updates, state = tx.update(grads, state)
            got = (updates["a"], updates["b"], updates["c"], updates["rows"].values)
            for u in got:
                np.testing.assert_allclose(np.float64(u), -(1 + t) * (1 - 0.5**t) / t, rtol=4e-3)
    f32, f64 = jnp.dtype("float32"), jnp.dtype("float64")
    assert calls == [(f32, f32), (f64, f64)] * 2
