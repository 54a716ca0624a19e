"""Long runs: counts are moved ahead, near the greatest that there is, rather than reached by steps.

A count matters only by what is periodic in it, by schedules, and by bias corrections, which do not
change any more after so many steps.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo import SparseRows
from optzoo.core.numerics import common_cycle, next_count
from optzoo.second_order.shampoo.refresh import is_due
from optzoo.testing import samples

from .selection import chosen_first
from .test_transformations import PERIODS, WRAPPED, everywhere, gradients, make, params

LAST = 2**31 - 2  # the greatest count that can still be increased
STEPS = 6
# Multiples of 12, as are all periods.
AHEAD = (0, 99_996, 999_996, LAST - STEPS)
COUNTS = ("count", "global_step", "local_step", "last")
# Their bias corrections or statistics are functions of the count, so the first steps are others.
OF_COUNT = (
    *("adam_gs", "blocked_shampoo", "counter_row_wise_adagrad", "cowclip_row_wise_adagrad"),
    *("ggt", "global_decay_row_wise_adagrad", "lamb", "lazy_adam_gs", "sparse_adamw"),
    *("partial_row_wise_adam", "row_wise_rmsprop", "skip_spikes", "soap"),
)
BY_SCHEDULE = {"adafactor", "scale_by_schedule", "transforms"}
CHEAP = [
    name
    for name in (*optzoo.CATALOG, *WRAPPED, *PERIODS, "drop_stale_gradient")
    if name not in BY_SCHEDULE | {"blocked_shampoo", "shampoo", "soap"}
]
CASES = [*CHEAP, "blocked_shampoo", "shampoo", "soap"]


@pytest.fixture(autouse=True)
def eager():
    with jax.disable_jit():
        yield


def ahead(state, steps):
    """The state with all counts of steps so much greater."""

    def move(path, a):
        names = {getattr(key, "name", "") for key in path}
        return (
            jnp.asarray(np.minimum(np.int64(a) + steps, LAST + 1), a.dtype)
            if names & {*COUNTS}
            else a
        )

    return jax.tree_util.tree_map_with_path(move, state)


def path_of(tx, x, grads, state):
    """The parameters after each step, and the last state."""
    path = []
    for g in grads:
        x, state = samples.step(tx, g, x, state)
        path.append(x)
    return path, state


def counts(state):
    return [a.tolist() for a in jax.tree.leaves(state) if np.issubdtype(a.dtype, np.integer)]


def assert_equal(got, want, **tolerance):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, **tolerance)


@pytest.mark.parametrize("name", chosen_first(CASES, CHEAP))
def test_a_count_is_only_a_count(name):
    tx, x = make(name), params(everywhere("float32"))
    all_grads = gradients(everywhere("float32"))
    grads = [jax.tree.map(lambda g, t=t: g[t % len(g)], all_grads) for t in range(STEPS)]
    begun = [steps for steps in AHEAD if steps or name not in OF_COUNT]
    paths = [path_of(tx, x, grads, ahead(tx.init(x), steps)) for steps in begun]
    want, last = paths[0]
    for (path, state), steps in zip(paths[1:], begun[1:], strict=True):
        assert_equal(path, want, rtol=1e-6, atol=1e-7)
        assert counts(state) == counts(ahead(last, steps - begun[0]))


OF_CYCLES = {
    **{name: lambda name=name: make(name) for name in ("accumulate", "ensemble", "ema_in_place")},
    **{name: lambda name=name: make(name) for name in PERIODS},
    "diloco, fragments": lambda: optzoo.diloco(
        optzoo.gradient_descent(0.1), axis_name=None, communication_period=4, fragments=2,
        overlap_steps=1, warmup_steps=1,
    ),
    "accumulate, 3": lambda: optzoo.accumulate(optzoo.adam(0.1), 3),
    "returnn": lambda: optzoo.interop.returnn.returnn_updater({
        "optimizer": {"class": "GradientDescent"}, "learning_rate": 0.1,
        "accum_grad_multiple_step": 3, "dynamic_learning_rate": {"interval": 4, "decay": 0.5},
    }),
    "ggt": lambda: make("ggt"),
    "soap": lambda: make("soap"),
    "blocked_shampoo": lambda: optzoo.blocked_shampoo(
        0.1, preconditioner_interval=2, statistics_interval=3, start_step=1
    ),
    "blocked_shampoo, stagger": lambda: make("blocked_shampoo, stagger"),
    "soap, stagger": lambda: make("soap, stagger"),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_CYCLES)
def test_cycles_go_on_where_counts_end(name):
    tx, x = OF_CYCLES[name](), params(everywhere("float32"))
    all_grads = gradients(everywhere("float32"))
    grads = [jax.tree.map(lambda g, t=t: g[t % len(g)], all_grads) for t in range(2 * STEPS)]
    starts = [ahead(tx.init(x), steps) for steps in (AHEAD[1], LAST - STEPS)]
    (want, _), (path, state) = (path_of(tx, x, grads, start) for start in starts)
    assert_equal(path, want, rtol=1e-6, atol=1e-7)
    names = lambda path: {getattr(key, "name", "") for key in path}
    counted = jax.tree_util.tree_leaves_with_path(state)
    assert all((a >= 0).all() for path, a in counted if names(path) & {*COUNTS})


@pytest.mark.parametrize("half_life", [-1, 3])
def test_the_largest_counter_is_found_where_counts_end(half_life):
    tx = optzoo.interop.fbgemm.counter_row_wise_adagrad(
        0.1, half_life=half_life, learning_rate_mode="tail_increase", max_counter_every=3
    )
    x = jnp.ones((2, 2))
    state, found = ahead(tx.init(x), LAST - STEPS), [1.0]
    for _ in range(3 * STEPS):
        _, state = tx.update(x, state, x)
        found.append(float(state.max_counter))
    changes = [i for i in range(1, len(found)) if found[i] != found[i - 1]]
    assert changes == [3, 6, 9, 12, 15, 18]  # of the counter: it is greater each time
    assert found[-1] <= 3 * STEPS + 1


@pytest.mark.parametrize("start", [0, 2**24 - 2, 2**31 - 14])
def test_intervals_that_are_no_ints(start):
    """Of a schedule, in float32."""
    steps = start + np.arange(1, 13)
    for interval in (3, 2.5):
        due = [bool(is_due(np.int32(step), jnp.float32(interval))) for step in steps]
        assert due == [step % interval < 1 for step in steps.tolist()]


def test_a_count_goes_back_by_a_common_cycle():
    most = np.int32(2**31 - 1)
    assert next_count(np.int32(5), 4) == 6 and next_count(most - 1, 4) == most
    for periods in ((1,), (3,), (2, 3), (10_000, 10_000), (2**31 - 1,), (7, lambda step: 5)):
        cycle = common_cycle(*periods)
        assert next_count(most, cycle) == 2**31 - cycle >= 0
        assert all(cycle % n == 0 for n in periods if isinstance(n, int))
    assert common_cycle(99_991, 100_003) == 100_003  # no int32 is a multiple of both


@pytest.mark.parametrize("known", [(), (7,)])
def test_periods_of_a_schedule_go_on_where_counts_end(known):
    """One of them has another length, and all multiples of what is known stay."""
    cycle, count = common_cycle(*known, lambda step: 5), np.int32(2**31 - 60)
    assert 2**30 - 7 < cycle <= 2**30
    due, multiples = [], []
    for i in range(120):
        count = np.int32(next_count(count, cycle))
        due += [i] * int(count % 5 == 0)
        multiples += [i] * int(count % 7 == 0)
    lengths = np.diff(due).tolist()
    assert len(due) > 20 and sum(n != 5 for n in lengths) == 1 and max(lengths) < 10
    assert not known or set(np.diff(multiples).tolist()) == {7}


def test_deferred_rows():
    """As from the start, whatever the clock shows: also a deferred row for a long time."""
    tx = optzoo.caught_up(optzoo.adam(0.1, b1=0.5, b2=0.9), mask="table", horizon=64)
    first, ids = {"table": jnp.ones((4, 2))}, np.array([0, 3] + [0, 1, 2] * 20 + [3])

    def step(carry, row):
        x, state = optzoo.rows.catch_up(*carry, {"table": row[None]})
        g = {"table": SparseRows(row[None], jnp.ones((1, 2)), 4)}
        return samples.step(tx, g, x, state), None

    def run(state):
        return optzoo.rows.catch_up(*jax.lax.scan(step, (first, state), ids)[0])

    with jax.disable_jit(False):
        run, begun = jax.jit(run), (0, 99_999, LAST - len(ids))
        (want, at_start), *others = [run(ahead(tx.init(first), steps)) for steps in begun]
    for (x, state), steps in zip(others, begun[1:], strict=True):
        assert_equal(x, want, rtol=1e-6)
        assert_equal(state.last, ahead(at_start, steps).last)


def test_deferred_rows_are_unknown_where_counts_end():
    """No row is caught up by a wrong number of steps."""
    tx, x = optzoo.caught_up(optzoo.adam(0.1), mask="table"), {"table": jnp.ones((3, 2))}
    g = {"table": SparseRows(jnp.array([1]), jnp.ones((1, 2)), 3)}
    state = ahead(tx.init(x), LAST)
    x, state = samples.step(tx, g, x, state)  # the update 2**31 - 1
    assert np.isfinite(optzoo.rows.catch_up(x, state)[0]["table"]).all()
    x, state = samples.step(tx, g, x, state)
    assert np.isnan(optzoo.rows.catch_up(x, state)[0]["table"]).all()


@pytest.mark.parametrize("count", [10**5, 10**6, 2**24 + 1, LAST])
def test_a_schedule_sees_the_count_itself(count):
    """Not one that was rounded to float32."""
    rate = lambda step: jnp.where(step == count, 1.0, 0.0)
    g, x = jnp.ones(2), jnp.ones(2)
    for tx in (
        optzoo.gradient_descent(rate),
        optzoo.adam(rate),
        optzoo.transforms.scale_by_schedule(rate),
        optzoo.moving_average(optzoo.momentum(rate, 0.9)),
        optzoo.slots_dtype(optzoo.adagrad(rate), "bfloat16"),
    ):
        moved = []
        for steps in (count - 1, count):
            updates, state = tx.update(g, ahead(tx.init(x), steps), x)
            moved.append(bool(np.any(updates)))
            [*_, last] = (a for a in jax.tree.leaves(state) if a.dtype == np.int32)
            assert last == steps + 1
        assert moved == [False, True]


@pytest.mark.parametrize("steps", [10**5, 10**6, LAST])
def test_a_decay_by_the_count(steps):
    tx = optzoo.moving_average(optax.sgd(0.0), average_decay=0.9999999, num_updates="count")
    x = jnp.zeros(1)
    state = ahead(tx.init(jnp.ones(1)), steps)
    _, state = tx.update(jnp.zeros(1), state, x)
    n = steps + 1
    want = min(np.float64(np.float32(0.9999999)), (1 + n) / (10 + n))
    np.testing.assert_allclose(optzoo.eval_params(x, state), want, rtol=1e-7)


@pytest.mark.parametrize("steps", [10**5, 10**6, LAST])
@pytest.mark.parametrize("name", ["adam", "lazy_adam", "adam_gs", "lazy_adam_gs", "nadam"])
def test_bias_corrections_end(name, steps):
    """Powers are zero, so the update is that of the moments."""
    x, g = jnp.ones(2), jnp.array([0.5, -2.0])
    b1, b2, eps = 0.9, 0.999, 1e-8
    tx = samples.make(optzoo.CATALOG[name], 0.1, b1=b1, b2=b2, eps=eps)
    state = ahead(tx.init(x), steps)
    zero = lambda path, a: a * 0 if "power" in jax.tree_util.keystr(path) else a
    state = jax.tree_util.tree_map_with_path(zero, state)
    updates, _ = tx.update(g, state, x)
    m, v = (1 - b1) * np.float64(g), (1 - b2) * np.float64(g) ** 2
    if name == "nadam":
        m = b1 * m + (1 - b1) * np.float64(g)
    np.testing.assert_allclose(updates, -0.1 * m / (np.sqrt(v) + eps), rtol=2e-6)
