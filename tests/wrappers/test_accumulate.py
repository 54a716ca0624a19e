"""Accumulation: sums over a cycle, and an inner optimizer that runs at its end only."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo import SparseRows
from optzoo.testing.samples import (
    avals,
    dense_grads,
    last,
    params,
    row_grads,
    run,
    side_by_side,
    step,
    step_of,
    to_dense,
    trajectory,
)
from optzoo.transforms.zero_if_norm_exceeds import zero_if_norm_exceeds
from optzoo.wrappers.accumulate import accumulate

X = np.array([1.0, -2.0, 4.0], "float32")
GRADS = np.array(
    [[0.5, 0.1, -1], [1, 2, 3], [-2, 0.3, 1], [4, 1, 1], [0, 1, 0], [2, 2, -5]], "float32"
)


def one_step(tx, grads, x):
    return jax.jit(lambda g, x: step(tx, g, x)[0])(grads, x)


def two_steps(tx, grads, x):
    """Those of a cycle."""
    train = jax.jit(step_of(tx))
    return train(*train(x, tx.init(x), grads), grads)


@pytest.mark.parametrize("use_mean", [False, True])
def test_one_update_of_the_sum_in_each_cycle(use_mean):
    updates, states = run(accumulate(optzoo.adam(0.1), 3, use_mean=use_mean), GRADS)
    sums = np.stack([GRADS[:3].sum(0), GRADS[3:].sum(0)]) / np.float32(3 if use_mean else 1)
    want, inner = run(optzoo.adam(0.1), sums)
    np.testing.assert_array_equal(updates[[0, 1, 3, 4]], 0)
    np.testing.assert_allclose(updates[[2, 5]], want, rtol=1e-6)
    chex.assert_trees_all_close(last(states).inner, last(inner), rtol=1e-6)
    assert last(states).count == 6


def test_the_mean_is_that_of_optax():
    sgd = optax.sgd(0.1, momentum=0.9)
    txs = {"ours": accumulate(sgd, 2, use_mean=True), "theirs": optax.MultiSteps(sgd, 2)}
    updates, _ = run(side_by_side(txs), GRADS)
    np.testing.assert_allclose(updates["ours"], updates["theirs"], rtol=1e-6)


def test_the_inner_optimizer_runs_once_in_a_cycle():
    """Counts the calls by a callback; no operation of it is outside of the conditional."""
    calls = []

    def update(updates, state, params=None):
        jax.debug.callback(lambda: calls.append(1))
        return jax.tree.map(lambda g: -jnp.tanh(g), updates), state

    tx = accumulate(optax.GradientTransformation(lambda params: optax.EmptyState(), update), 3)
    run(tx, np.concatenate([GRADS, GRADS[:2]]))
    jax.effects_barrier()
    assert len(calls) == 2
    jaxpr = jax.make_jaxpr(tx.update)(X, tx.init(X), X)
    outside = [e.primitive.name for e in jaxpr.eqns]
    assert outside.count("cond") == 1 and "tanh" not in outside and "tanh" in str(jaxpr)


def test_updates_within_a_cycle_are_zero_for_all_gradients():
    spoilt = np.array(GRADS)
    spoilt[0, 0], spoilt[4, 1] = np.nan, np.inf
    updates, _ = run(accumulate(optax.sgd(1.0), 2), spoilt)
    np.testing.assert_array_equal(updates[::2], np.zeros((3, 3)))
    assert np.isnan(updates[1][0]) and np.all(np.isfinite(updates[1][1:]))
    np.testing.assert_array_equal(updates[3], -(GRADS[2] + GRADS[3]))


def test_micro_steps_that_are_not_finite_can_be_skipped():
    spoilt = GRADS.copy()
    spoilt[1, 0] = np.nan
    tx = optax.chain(zero_if_norm_exceeds(math.inf), accumulate(optax.sgd(1.0), 3))
    updates, _ = run(tx, spoilt)
    np.testing.assert_allclose(updates[2], -(GRADS[0] + GRADS[2]), rtol=1e-6)


def test_the_cycle_follows_a_global_step():
    """The inner optimizer gets the number of its updates."""

    def update(updates, state, params=None, *, global_step, **_):
        return jax.tree.map(lambda g: g + 10 * global_step, updates), state

    tx = accumulate(
        optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update), 3
    )
    updates, _ = run(tx, np.ones((9, 3), "float32"), global_step=np.arange(4, 13))
    # Steps 4 and 5 end a cycle that began before this run.
    np.testing.assert_array_equal(updates[:, 0], [0, 12, 0, 0, 23, 0, 0, 33, 0])


def test_extra_arguments_reach_the_inner_optimizer():
    rates = np.full(len(GRADS), 0.5, "float32")
    got, _ = run(accumulate(optzoo.momentum(0.1, 0.9), 2), GRADS, learning_rate=rates)
    want, _ = run(accumulate(optzoo.momentum(0.5, 0.9), 2), GRADS)
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_rows_become_dense():
    tx, x = accumulate(optzoo.lazy_adam(0.1), 2), params()
    moved, state = two_steps(tx, row_grads(x), x)
    dense = to_dense(row_grads(x))
    want = one_step(optzoo.lazy_adam(0.1), jax.tree.map(lambda a: 2 * np.asarray(a), dense), x)
    chex.assert_trees_all_close(moved, want, rtol=1e-6)
    assert avals(state) == avals(tx.init(x))


def test_a_cycle_of_one_is_the_inner_optimizer_without_a_buffer():
    tx, x = accumulate(optzoo.momentum(0.1, 0.9), 1), params()
    moved, state = step(tx, row_grads(x), x)
    want, inner = step(optzoo.momentum(0.1, 0.9), row_grads(x), x)
    chex.assert_trees_all_close(moved, want, rtol=1e-6)
    assert state.sums == () and avals(state.inner) == avals(inner)
    updates, _ = tx.update(row_grads(x), tx.init(x), x)
    assert avals(updates) == avals(x)  # dense


def test_missing_and_masked_gradients_stay():
    tx, x = accumulate(optzoo.adam(0.1), 2), params()
    some = {"table": None, "layer": (None, jnp.ones(())), "one_row": None}
    state, update = tx.init(x), jax.jit(tx.update)
    for _ in range(2):
        updates, state = update(some, state, x)
    assert not any(map(jnp.any, (updates["table"], updates["layer"][0], updates["one_row"])))
    assert updates["layer"][1] != 0
    masked = optax.masked(tx, {"table": False, "layer": True, "one_row": False})
    moved, state = two_steps(masked, dense_grads(x), x)
    assert avals(state) == avals(masked.init(x))
    want, state = two_steps(tx, dense_grads(x), x)
    chex.assert_trees_all_equal(moved["layer"], want["layer"])
    marked = optax.tree.map_params(tx, lambda _: "slot", state)
    assert marked.count is state.count and set(jax.tree.leaves(marked.sums)) == {"slot"}


# By steps the gradients of "a", "b" and "c"; "d" is frozen, and "i" of integers.
IN_TURN = [
    (1.0, None, None), (None, 2.0, None), (None, None, None),
    (3.0, 4.0, None), (None, 5.0, None), (6.0, None, None),
    (None, None, None), (None, None, 7.0), (None, 8.0, None),
]  # fmt: skip


def by_hand(decay, use_mean):
    """Momentum of the sums of cycles of three, for those that had a gradient, by NumPy."""
    out = []
    for column in zip(*IN_TURN, strict=True):
        x, m = 1.0, 0.0
        for k in range(0, 9, 3):
            came = [g for g in column[k : k + 3] if g is not None]
            if came:
                m = 0.9 * m + sum(came) / (3 if use_mean else 1)
                x = x - 0.1 * m - decay * x
        out.append((x, m))
    return out


@pytest.mark.parametrize("use_mean", [False, True])
@pytest.mark.parametrize("kind", ["dense", "rows", "max_rows", "int8", "chain", "eager"])
def test_tasks_in_turn(kind, use_mean):
    """A sum is applied if a gradient came in any step; what had none is not moved by anything."""
    tx = optzoo.momentum(0.1, 0.9)
    decay = 0.0
    if kind == "int8":
        tx = optzoo.slots_dtype(tx, "int8")
    if kind == "chain":
        decay = 0.01
        tx = optzoo.decoupled_weight_decay(tx, weight_decay_per_step=decay)
        tx = optax.chain(optax.identity(), tx)
    options = {"max_rows": {"[a-d]": 2}} if kind == "max_rows" else {}
    tx = accumulate(tx, 3, use_mean=use_mean, **options)
    x = {name: jnp.ones((4, 2)) for name in "abcd"} | {"i": jnp.arange(3), "none": None}
    rows = kind in ("rows", "max_rows")

    def gradient(g):
        if g is None:
            return None
        return (
            SparseRows(np.arange(2), np.full((2, 2), g, "f4"), 4) if rows else jnp.full((4, 2), g)
        )

    state, update = tx.init(x), tx.update if kind == "eager" else jax.jit(tx.update)
    for column in IN_TURN:
        grads = dict.fromkeys(x) | dict(zip("abc", map(gradient, column), strict=True))
        updates, state = update(grads, state, x)
        assert updates["i"] is None and updates["none"] is None
        x = {k: a if updates[k] is None else a + updates[k] for k, a in x.items()}
        assert avals(state) == avals(tx.init(x))
    momentum = optzoo.get_slot(state.inner, "momentum")
    for name, (want, m) in zip("abcd", [*by_hand(decay, use_mean), (1.0, 0.0)], strict=True):
        np.testing.assert_allclose(x[name][:2], want, rtol=1e-2 if kind == "int8" else 1e-5)
        if kind != "int8":
            np.testing.assert_allclose(momentum[name][0], m, rtol=1e-5)
        if rows:
            np.testing.assert_array_equal(x[name][2:], 1)


def test_a_state_whose_slots_are_not_known():
    """The slots of a parameter that had no gradient could not be told from the others."""
    inner = optax.chain(optax.sgd(0.1), optax.scale_by_backtracking_linesearch(3))
    tx, x = accumulate(inner, 2), {"a": jnp.ones(2), "b": jnp.ones(2)}
    more = {"value": 1.0, "grad": x, "value_fn": lambda p: jnp.sum(p["a"])}
    with pytest.raises(
        ValueError, match="finds no slots of its parameter in the state: give zeros"
    ):
        tx.update({"a": jnp.ones(2), "b": None}, tx.init(x), x, **more)


def test_half_precision_sums_in_float32():
    x = jnp.zeros(2, jnp.float16)
    tx = accumulate(optzoo.gradient_descent(1.0), 3)
    state, update = tx.init(x), jax.jit(tx.update)
    assert avals(jax.eval_shape(tx.init, x)) == avals(state)
    small = np.array([2048, 1], "float16")
    for g in (small, small / np.float16(2048), small / np.float16(2048)):
        updates, state = update(g, state, x)
        assert avals(state) == avals(tx.init(x)) and updates.dtype == jnp.float16
    np.testing.assert_array_equal(updates, jnp.array([-2050, -1.001], jnp.float16))


def test_vmap():
    tx = accumulate(optzoo.momentum(0.1, 0.9), 2)
    many = np.stack([GRADS, 2 * GRADS])
    got = jax.jit(jax.vmap(lambda grads: trajectory(tx, X, lambda _, g: g, grads)))(many)
    want = np.stack([trajectory(tx, X, lambda _, g: g, grads) for grads in many])
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_bad_arguments():
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        accumulate(optax.sgd(0.1), 0)
    with pytest.raises(TypeError, match=r"every must be an int, got 2\.5"):
        accumulate(optax.sgd(0.1), 2.5)
    tx = accumulate(optzoo.adam(0.1), 2)
    with pytest.raises(ValueError, match="has shape"):
        tx.update(jnp.ones(4), tx.init(X), X)


# Lengths by a schedule

LENGTHS = np.array([2, 1, 3, 3, 2, 2])
EVERY = {
    "ints": lambda updates: jnp.asarray(LENGTHS)[updates],
    "floats": lambda updates: jnp.asarray(LENGTHS - 0.5)[updates],
    "one": lambda updates: jnp.where(updates == 1, -3, jnp.asarray(LENGTHS)[updates]),
}


def by_numpy(grads, ends, use_mean, start=0):
    """Parameters after each step, of momentum."""
    x, m, cycle, updates, path = 1.0, 0.0, [], start, []
    for g, end in zip(grads, ends, strict=True):
        cycle.append(g)
        if end or len(cycle) == LENGTHS[min(updates, len(LENGTHS) - 1)]:
            m = 0.5 * m + sum(cycle) / (len(cycle) if use_mean else 1)
            x, cycle, updates = x - 0.1 * m, [], updates + 1
        path.append(x)
    return path


@pytest.mark.parametrize("use_mean", [False, True])
@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("every", EVERY)
def test_a_schedule_of_lengths(every, ends, use_mean):
    tx = accumulate(optzoo.momentum(0.1, 0.5), EVERY[every], use_mean=use_mean)
    grads = np.arange(1.0, 13)
    at = np.isin(np.arange(12), (3, 8)) & ends
    extra = {"end_cycle": at} if ends else {}
    x = {"w": jnp.ones((4, 2)), "rows": jnp.ones((4, 2))}

    def one(carry, g):
        values = jnp.full((4, 2), g["g"], jnp.float32)
        rows = SparseRows(jnp.arange(4), values, 4)
        more = {name: value for name, value in g.items() if name != "g"}
        x, state = carry
        updates, state = tx.update({"w": values, "rows": rows}, state, x, **more)
        return (optax.apply_updates(x, updates), state), x

    (last_x, state), path = jax.lax.scan(one, (x, tx.init(x)), {"g": grads, **extra})
    want = by_numpy(grads, at, use_mean)
    for name, a in path.items():
        got = np.concatenate([a, last_x[name][None]])[1:, 0, 0]
        np.testing.assert_allclose(got, want, rtol=1e-5)
    assert avals(state) == avals(tx.init(x)) and state.count == 12


def test_a_schedule_of_lengths_as_in_optax():
    sgd, every = optax.sgd(0.1, momentum=0.9), EVERY["ints"]
    txs = {"ours": accumulate(sgd, every, use_mean=True), "theirs": optax.MultiSteps(sgd, every)}
    updates, _ = run(side_by_side(txs), np.concatenate([GRADS, GRADS]))
    np.testing.assert_allclose(updates["ours"], updates["theirs"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("native", [False, True])
def test_a_schedule_of_lengths_in_a_compiled_step(native):
    """Its state is donated; rows and missing gradients."""
    tx = accumulate(optzoo.momentum(0.1, 0.5), EVERY["ints"])
    loss = lambda p, g: jnp.sum(optzoo.lookup(p["w"], jnp.arange(2))) * g
    train = optzoo.minimize(loss, tx, native=native)
    x = {"w": jnp.ones((4, 2)), "unused": jnp.ones(3)}
    state, grads = tx.init(x), np.arange(1.0, 12)
    for g, want in zip(grads, by_numpy(grads, np.zeros(11), use_mean=False), strict=True):
        x, state, _ = train(x, state, jnp.float32(g))
        np.testing.assert_allclose(x["w"][:2], want, rtol=1e-5)
    np.testing.assert_array_equal(x["w"][2:], 1)


def test_a_schedule_of_lengths_of_replicas():
    """By the mean of two replicas in each step."""
    inner = accumulate(optzoo.momentum(0.1, 0.5), EVERY["ints"])
    tx = optzoo.sync_replicas(inner, total_num_replicas=2)
    x, grads = jnp.ones(2), np.arange(1.0, 12)

    def one(x, state, g):
        updates, state = tx.update(g, state, x)
        return optax.apply_updates(x, updates), state

    train = optzoo.replicas.map_over_replicas(one)
    x, state = optzoo.replicas.replicate(x, tx.init(x), 2)
    for g, want in zip(grads, by_numpy(grads, np.zeros(11), use_mean=False), strict=True):
        x, state = train(x, state, jnp.array([[g - 1] * 2, [g + 1] * 2], jnp.float32))
        np.testing.assert_allclose(jnp.ravel(x), want, rtol=1e-5)


def test_a_schedule_of_lengths_where_the_count_of_updates_ends():
    tx = accumulate(optzoo.gradient_descent(1.0), lambda updates: jnp.where(updates < 9, 1, 2))
    x, most = jnp.zeros(2), jnp.int32(2**31 - 2)
    state = tx.init(x)
    state = state._replace(count=most, cycle=state.cycle._replace(updates=most))
    for want in (0, 2, 0, 2, 0, 2):
        updates, state = tx.update(jnp.ones(2), state, x)
        np.testing.assert_array_equal(updates, -want)
    assert state.cycle.updates == state.count == 2**31 - 1


def test_what_a_schedule_of_lengths_refuses():
    sgd, every = optzoo.gradient_descent(0.1), EVERY["ints"]
    with pytest.raises(ValueError, match=r"max_rows=\{'t': 3\}: .* a schedule does not bound"):
        accumulate(sgd, every, max_rows={"t": 3})
    tx = accumulate(sgd, every)
    with pytest.raises(
        ValueError, match="global_step=3: it does not determine where a cycle begins"
    ):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2), global_step=3)
    tx = accumulate(sgd, lambda updates: jnp.ones(1))
    with pytest.raises(ValueError, match="the schedule of every must return a scalar, got an"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2))


# Rows that stay rows


@pytest.mark.parametrize(
    ("inner", "use_mean"),
    [("lazy_adam", False), ("lazy_adam", True), ("adam", True), ("adagrad", False)],
)
def test_rows_of_a_cycle_are_merged_at_its_end(inner, use_mean):
    """Steps with fewer rows than there is room for, repeated ids, padding; two cycles."""
    inner, x = optzoo.CATALOG[inner].make(), {"table": params()["table"]}
    ids = np.array([[1, 3, 1], [3, 5, 5], [5, 5, 5], [0, 5, 5], [2, 2, 2], [0, 5, 5]])
    values = np.cos(np.arange(36.0)).reshape(6, 3, 2).astype("float32")

    @functools.partial(jax.jit, static_argnums=0)
    def path(tx, ids, values):
        body = lambda carry, g: 2 * (step_of(tx)(*carry, {"table": SparseRows(*g, 5)}),)
        return jax.lax.scan(body, (x, tx.init(x)), (ids, values))

    tx = accumulate(inner, 3, use_mean=use_mean, max_rows={"table": 4})
    (_, state), (moved, _) = path(tx, ids, values)
    totals = values.reshape(2, 9, 2) / (3 if use_mean else 1)
    (_, wanted), (want, _) = path(inner, ids.reshape(2, 9), totals)
    start, first, last = (np.stack(3 * [a]) for a in (x["table"], *want["table"]))
    path_of_all = np.concatenate([start[:2], first, last[:1]])
    np.testing.assert_allclose(moved["table"], path_of_all, rtol=1e-5, atol=1e-7)
    for still, before in ((0, x["table"]), (1, x["table"]), (3, moved["table"][2])):
        np.testing.assert_array_equal(moved["table"][still], before)
    np.testing.assert_array_equal(moved["table"][4], moved["table"][3])
    chex.assert_trees_all_close(state.inner, wanted, rtol=1e-5, atol=1e-7)


def test_rows_and_dense_parameters_together():
    x = params()
    tx = accumulate(optzoo.lazy_adam(0.1), 2, max_rows={"table": 4, "one_row": 2})
    moved, state = two_steps(tx, row_grads(x), x)
    twice = jax.tree.map(lambda a: 2 * np.asarray(a), row_grads(x)["layer"])
    tables = {name: row_grads(x)[name] for name in ("table", "one_row")}
    twice = {"layer": twice, **{name: g + g for name, g in tables.items()}}
    want = one_step(optzoo.lazy_adam(0.1), twice, x)
    chex.assert_trees_all_close(moved, want, rtol=1e-5)
    marked = optax.tree.map_params(tx, lambda _: "slot", state)
    assert set(jax.tree.leaves(marked.sums)) == {"slot"}


def test_a_step_without_a_gradient_adds_no_rows():
    """Nor does it keep the rows of the cycle before."""
    x, max_rows = params(), {"table": 1, "one_row": 1}
    tx = accumulate(optzoo.gradient_descent(1.0), 2, max_rows=max_rows)
    rows = lambda i: SparseRows(np.array([i]), np.ones((1, 2), "float32"), 5)
    one = SparseRows(np.array([0]), np.ones((1, 3), "float32"), 1)
    state, update, updates = tx.init(x), jax.jit(tx.update), None
    for g, of_one in ((rows(0), None), (rows(1), one), (None, None), (rows(2), None)):
        updates, state = update({"table": g, "layer": (None, None), "one_row": of_one}, state, x)
    np.testing.assert_array_equal(updates["table"].to_dense()[:, 0], [0, 0, -1, 0, 0])
    np.testing.assert_array_equal(updates["one_row"].to_dense(), 0)


def test_rows_of_a_cycle_have_the_dtype_of_a_parameter_without_a_gradient():
    x = {"table": jnp.ones((5, 2), "bfloat16")}
    tx = accumulate(optzoo.gradient_descent(1.0), 2, max_rows={"table": 1})
    updates, _ = jax.eval_shape(tx.update, {"table": None}, tx.init(x), x)
    assert updates["table"].dtype == jnp.bfloat16


def test_a_cycle_of_one_keeps_rows():
    tx, x = accumulate(optzoo.lazy_adam(0.1), 1, max_rows={"table": 8}), params()
    updates, state = tx.update(row_grads(x), tx.init(x), x)
    assert isinstance(updates["table"], SparseRows) and state.sums == ()
    assert not isinstance(updates["one_row"], SparseRows)  # it has no max_rows


@pytest.mark.optimized
def test_rows_cost_no_array_as_large_as_the_table():
    x = {"table": jnp.zeros((100_000, 16))}
    tx = accumulate(optzoo.gradient_descent(0.1), 4, max_rows={".*": 8})
    loss = lambda p, ids: jnp.sum(optzoo.lookup(p["table"], ids) ** 2)
    train = optzoo.minimize(loss, tx)
    compiled = train.lower(x, jax.eval_shape(tx.init, x), jnp.zeros(8, int)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.01 * x["table"].nbytes
    assert sum(a.nbytes for a in jax.tree.leaves(tx.init(x))) < 0.01 * x["table"].nbytes


def test_half_precision_rows_sum_in_float32():
    x = {"t": jnp.zeros((4, 1), jnp.float16)}
    tx = accumulate(optzoo.gradient_descent(1.0), 3, max_rows={"t": 1})
    state, update = tx.init(x), jax.jit(tx.update)
    for value in (2048.0, 1.0, 1.0):
        g = {"t": SparseRows(np.array([2]), np.full((1, 1), value, "float16"), 4)}
        updates, state = update(g, state, x)
    np.testing.assert_array_equal(updates["t"].to_dense()[:, 0], [0, 0, -2050, 0])


def test_bad_rows():
    x, sgd = params(), optzoo.gradient_descent(0.1)
    with pytest.raises(TypeError, match=r"max_rows must be a dict .* by pattern, .*, got 64"):
        accumulate(sgd, 2, max_rows=64)
    with pytest.raises(TypeError, match="max_rows must be an int"):
        accumulate(sgd, 2, max_rows={"table": 2.5})
    with pytest.raises(ValueError, match="max_rows must be at least 1, got 0"):
        accumulate(sgd, 2, max_rows={"table": 0})
    with pytest.raises(ValueError, match=r"no parameter matches \['tabel'\]; the parameters are"):
        accumulate(sgd, 2, max_rows={"tabel": 8}).init(x)
    with pytest.raises(ValueError, match="all match parameter 'table'"):
        accumulate(sgd, 2, max_rows={"table": 8, "t.*": 8}).init(x)
    tx = accumulate(sgd, 2, max_rows={"table": 2})
    with pytest.raises(TypeError, match="'table' is in max_rows but has a dense gradient"):
        tx.update(dense_grads(x), tx.init(x), x)
    many = {**row_grads(x), "table": SparseRows(jnp.zeros(3, int), jnp.ones((3, 2)), 5)}
    with pytest.raises(
        ValueError, match="'table' has a gradient of 3 rows, more than its max_rows of 2"
    ):
        tx.update(many, tx.init(x), x)


@pytest.mark.parametrize("use_mean", [False, True])
@pytest.mark.parametrize("kind", ["dense", "max_rows"])
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("start", [0, (2**31 - 1) // 3 * 3 - 6])
def test_a_cycle_that_ends_early(start, kind, use_mean, traced):
    """By NumPy: cycles of at most three steps, of which the marked ones are the last."""
    grads, ends = np.arange(1.0, 11), [0, 1, 0, 0, 0, 1, 0, 0, 1, 0]
    options = {"max_rows": {".*": 2}} if kind == "max_rows" else {}
    tx = accumulate(optzoo.momentum(0.1, 0.5), 3, use_mean=use_mean, **options)
    x = {"w": jnp.ones((4, 2))}
    state = tx.init(x)._replace(count=jnp.int32(start))
    update = jax.jit(tx.update, static_argnames=() if traced else "end_cycle")
    want, m, cycle = 1.0, 0.0, []
    for g, end in zip(grads, ends, strict=True):
        values = jnp.full((2, 2), g)
        g_x = SparseRows(np.arange(2), values, 4) if kind == "max_rows" else jnp.full((4, 2), g)
        updates, state = update({"w": g_x}, state, x, end_cycle=bool(end))
        x = optax.apply_updates(x, updates)
        cycle.append(g)
        if end or len(cycle) == 3:
            m = 0.5 * m + sum(cycle) / (len(cycle) if use_mean else 1)
            want, cycle = want - 0.1 * m, []
        np.testing.assert_allclose(x["w"][:2], want, rtol=1e-5)
        assert avals(state) == avals(tx.init(x))
    with pytest.raises(
        ValueError, match="end_cycle=True: a cycle cannot end early with global_step"
    ):
        tx.update({"w": g_x}, state, x, end_cycle=True, global_step=3)
