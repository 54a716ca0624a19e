"""Deferred rows in the train step, in loops by hand, and where something else would read them."""

import functools
import pickle
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo import SparseRows
from optzoo.core import merge
from optzoo.core.optimizer import Optimizer
from optzoo.deferred import optimizer, tables
from optzoo.state.fit import StateError
from optzoo.testing.samples import step, with_global_step

from ..round_trips import through_flax, through_orbax

ROWS, SCHEDULE = 40, optax.linear_schedule(0.1, 0.02, 200)
TABLES = ("users", "items", "bias")


def params(seed=0):
    rng = np.random.default_rng(seed)
    array = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    return {
        "users": array(ROWS, 4),
        "items": array(60, 2, 2),
        "bias": array(ROWS),
        "layer": {"kernel": array(4, 4), "scale": array()},
    }


def loss(p, ids):
    """Two lookups of a table, repeats, padding, a table without columns and dense layers."""
    users = optzoo.lookup(p["users"], ids[:3]) + optzoo.lookup(p["users"], ids[1:4])
    items = optzoo.lookup(p["items"], ids.reshape(-1, 1)).reshape(-1, 4)[:3]
    bias = optzoo.lookup(p["bias"], ids[:3])
    h = users @ p["layer"]["kernel"] + items + bias[:, None]
    return jnp.mean((h * p["layer"]["scale"] - 1) ** 2)


def batches(number, seed=1):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, ROWS, (60, 5)) * (rng.random((60, 5)) < 0.3)
    ids[::3, 3] = ids[::3, 0]  # a repeated id
    ids[::4, 2] = ROWS  # padding of users, but not of items
    return [jnp.asarray(i, jnp.int32) for i in ids[:number]]


def packed(tx):
    return optzoo.slots_dtype(tx, "float32", packed=True)


ADAM = optzoo.adam(SCHEDULE)
DEFERRED = optzoo.caught_up(ADAM, mask=TABLES, horizon=1)
step_of = functools.cache(lambda tx, of: optzoo.minimize(of, tx))


def run(tx, p, state, some, of=loss, **extra_args):
    """Trains with the ids ``some``; keeps what it is given."""
    copy = lambda a: jnp.asarray(np.array(a))
    step, (p, state), values = step_of(tx, of), jax.tree.map(copy, (p, state)), []
    for ids in some:
        p, state, value = step(p, state, ids, **extra_args)
        values.append(float(value))
    return p, state, values


def train(tx, steps):
    p = params()
    return run(tx, p, tx.init(p), batches(steps))


dense = functools.cache(lambda: train(ADAM, 60))


# A model of one table, for optimizers of which each is compiled.


def few_params():
    return {name: params()[name] for name in ("users", "bias")}


def few_loss(p, ids):
    rows = optzoo.lookup(p["users"], ids[:3]) * optzoo.lookup(p["users"], ids[1:4])
    return jnp.mean((rows.sum(1) + jnp.mean(p["bias"]) - 1) ** 2)


def train_few(tx, steps, **extra_args):
    p = few_params()
    return run(tx, p, tx.init(p), batches(steps), few_loss, **extra_args)


FEW_DEFERRED = optzoo.caught_up(ADAM, mask="users", horizon=1)


@pytest.mark.parametrize("mask", ["users", {"a": False, "users": True, "bias": False}, None])
def test_a_parameter_that_is_none(mask, monkeypatch):
    """Whatever marks the tables, all others are as without it."""
    monkeypatch.setattr(optimizer, "_LEAST_ROWS", ROWS)
    tx = optzoo.caught_up(ADAM, mask=mask, horizon=1)
    p = {"a": None, **few_params()}
    p, state, _ = run(tx, p, tx.init(p), batches(4), few_loss)
    of_two = train_few(FEW_DEFERRED, 4)[:2]
    got, want = optzoo.rows.catch_up(p, state), optzoo.rows.catch_up(*of_two)
    chex.assert_trees_all_equal(got[0], {"a": None, **want[0]})
    for name in ("m", "v"):
        slots = (optzoo.get_slot(state, name) for _, state in (got, want))
        chex.assert_trees_all_equal(*map(jax.tree.leaves, slots))


def test_flush_in_blocks(monkeypatch):
    """In blocks of which the last one overlaps, the same as at once."""
    p, state, _ = train(DEFERRED, 12)
    assert any((np.asarray(last) < 12).any() for last in jax.tree.leaves(state.last))
    with jax.disable_jit():
        at_once = optzoo.rows.catch_up(p, state)
        monkeypatch.setattr(tables, "_BLOCK", 16)
        chex.assert_trees_all_equal(optzoo.rows.catch_up(p, state), at_once)


@pytest.mark.parametrize("layout", ["plain", "packed, as on an accelerator"])
def test_minimize_equals_dense_adam(layout, monkeypatch):
    tx = DEFERRED
    if layout != "plain":
        monkeypatch.setattr(merge, "elect", merge._elect_by_sort)
        tx = optzoo.caught_up(packed(ADAM), mask=TABLES, horizon=1)
    train(tx, 1)
    compiled = step_of(tx, loss)._cache_size()
    p, state, values = train(tx, 60)
    assert step_of(tx, loss)._cache_size() == compiled
    assert any((np.asarray(last) < 60).any() for last in jax.tree.leaves(state.last))
    p, state = optzoo.rows.catch_up(p, state)
    np.testing.assert_allclose(values, dense()[2], rtol=1e-4)
    chex.assert_trees_all_close(p, dense()[0], rtol=2e-4, atol=2e-5)
    for name in ("m", "v"):
        got, want = (optzoo.get_slot(s, name) for s in (state, dense()[1]))
        chex.assert_trees_all_close(got, want, rtol=1e-3, atol=1e-6)


def test_a_loop_by_hand():
    tx = optzoo.caught_up(ADAM, mask=TABLES)

    @jax.jit
    def step(p, state, ids):
        p, state = optzoo.rows.catch_up(p, state, dict.fromkeys(TABLES, ids))
        _, grads = optzoo.value_and_grad(loss)(p, ids)
        updates, state = tx.update(grads, state, p)
        assert isinstance(updates["users"], SparseRows)
        return optax.apply_updates(p, updates), state

    p = params()
    state = tx.init(p)
    for ids in batches(60):
        p, state = step(p, state, ids)
    p, state = optzoo.rows.catch_up(p, state)
    chex.assert_trees_all_close(p, dense()[0], rtol=2e-4, atol=2e-5)


@pytest.mark.unique
def test_averages_of_deferred_rows():
    """They follow rows that move; in float32, with packed slots and parameters of no table.

    The schedule follows a global step that is given. The decay is smaller, as of a 100th update.
    """
    plain, ends = optzoo.moving_average(packed(ADAM), 0.95, num_updates=100), []
    for tx in (plain, optzoo.caught_up(plain, mask="users")):
        p, state, _ = train_few(tx, 30, global_step=10)
        p, state, _ = run(tx, p, state, batches(30, 5), few_loss, global_step=150)
        averages = optzoo.eval_params(p, state)
        if tx is not plain:
            with pytest.raises(ValueError, match="deferred rows"):
                optzoo.get_slot(state, "average")
            p, state = optzoo.rows.catch_up(p, state)
            assert optzoo.slot_names(state) == ("m", "v", "average")
        ends.append((p, averages, optzoo.get_slot(state, "average")))
    chex.assert_trees_all_close(*ends, rtol=2e-4, atol=2e-5)
    assert np.abs(ends[0][0]["users"] - ends[0][1]["users"]).max() > 0.01


@pytest.mark.unique
def test_averages_whose_decay_changes():
    """By the number of updates, as of dense Adam."""
    plain = optzoo.moving_average(optzoo.adam(0.01), 0.99, num_updates="count")
    deferred, ids = optzoo.caught_up(plain, mask=True), np.arange(40) ** 2 % 7

    def train(tx, x, state):
        def one(carry, i):
            if tx is deferred:
                carry = optzoo.rows.catch_up(*carry, i[None])
            return step(tx, SparseRows(i[None], jnp.full((1, 2), 0.5), 7), *carry), None

        (x, state), _ = jax.lax.scan(one, (x, state), jnp.asarray(ids))
        return optzoo.rows.catch_up(x, state) if tx is deferred else (x, state)

    x = jnp.ones((7, 2))
    both = [(tx, x, tx.init(x)) for tx in (plain, deferred)]
    ends = jax.jit(lambda: [train(*each) for each in both])()
    for (x, a), (y, b) in [[(x, optzoo.eval_params(x, state)) for x, state in ends]]:
        np.testing.assert_allclose(y, x, rtol=1e-6)
        np.testing.assert_allclose(b, a, rtol=1e-6)
        assert jnp.abs(x - a).max() > 0.01


def test_a_rate_inside_the_momentum():
    """What moves a deferred row of RMSProp is the rate of past steps, not that of this one."""
    plain = optzoo.rmsprop(7.0, momentum=0.9)
    ends = []
    tx = optzoo.caught_up(plain, mask="users", dense=True)
    for each in (tx, optax.chain(optzoo.rows.densify(), plain)):
        step, p = optzoo.minimize(few_loss, each), few_params()
        state = each.init(p)
        for t, ids in enumerate(batches(30)):
            p, state, _ = step(p, state, ids, learning_rate=0.01 * (1 + t % 3))
        ends.append(optzoo.eval_params(p, state) if each is tx else p)
    chex.assert_trees_all_close(*ends, rtol=1e-4, atol=1e-5)
    with pytest.raises(TypeError, match="this transformation does not use 'wrong'"):
        optzoo.minimize(few_loss, tx)(p, tx.init(p), ids, wrong=1.0)


def test_a_restored_state_continues_equally():
    p, state, _ = train_few(FEW_DEFERRED, 20)
    saved = jax.tree.map(np.array, (p, state))
    again = optzoo.caught_up(optzoo.adam(SCHEDULE), mask="users", horizon=1)
    rest = batches(20, 5)
    later, other = (run(tx, *saved, rest, few_loss)[:2] for tx in (FEW_DEFERRED, again))
    chex.assert_trees_all_equal(later, other)
    flushed = run(FEW_DEFERRED, *optzoo.rows.catch_up(p, state), rest, few_loss)[:2]
    chex.assert_trees_all_close(
        optzoo.rows.catch_up(*flushed)[0], optzoo.rows.catch_up(*later)[0], rtol=1e-4, atol=1e-5
    )


def test_from_adam_and_back():
    p, inner, _ = train(ADAM, 20)
    p, state, _ = run(DEFERRED, p, optzoo.rows.take_over(DEFERRED, p, inner), batches(60)[20:40])
    p, state = optzoo.rows.catch_up(p, state)
    chex.assert_trees_all_equal_structs(state.inner, dense()[1])
    p, inner, _ = run(ADAM, p, state.inner, batches(60)[40:])
    chex.assert_trees_all_close((p, inner), dense()[:2], rtol=2e-3, atol=2e-5)
    with pytest.raises(TypeError, match="made by optzoo"):
        optzoo.rows.take_over(ADAM, p, inner)
    with pytest.raises(TypeError, match="made by optzoo"):
        optzoo.rows.take_over(None, p, inner)
    with pytest.raises(ValueError, match="not a state of the optimizer in tx"):
        optzoo.rows.take_over(DEFERRED, p, optzoo.momentum(0.1, 0.9).init(p))


def test_other_readers():
    p, state, _ = train(DEFERRED, 20)
    for read in (
        lambda: optzoo.get_slot(state, "m"),
        lambda: optzoo.set_slot(state, "m", params()),
        lambda: optzoo.save_tf1_state("unused.npz", p, state, optimizer_name="Adam"),
    ):
        with pytest.raises(ValueError, match="deferred rows"):
            read()
    current, flushed = optzoo.rows.catch_up(p, state)
    assert not np.array_equal(current["users"], p["users"])
    chex.assert_trees_all_equal(optzoo.eval_params(p, state), current)
    assert optzoo.slot_names(flushed) == ("m", "v")
    with pytest.raises(
        ValueError, match=r"no part made by optzoo\.caught_up, so no rows are deferred"
    ):
        optzoo.rows.catch_up(p, state.inner)


def test_a_tf1_checkpoint(tmp_path):
    p, state = optzoo.rows.catch_up(*train(DEFERRED, 20)[:2])
    optzoo.save_tf1_state(tmp_path / "model.npz", p, state, optimizer_name="Adam")
    loaded = optzoo.load_tf1_state(DEFERRED, p, tmp_path / "model.npz")
    chex.assert_trees_all_close(loaded[1].inner, state.inner)
    chex.assert_trees_all_equal(loaded[1].last, state.last)
    plain = optzoo.load_tf1_state(ADAM, p, tmp_path / "model.npz")
    chex.assert_trees_all_equal(plain, (loaded[0], loaded[1].inner))
    carries = (run(DEFERRED, *start, batches(20, 5))[:2] for start in ((p, state), loaded))
    chex.assert_trees_all_close(
        *(optzoo.rows.catch_up(*carry)[0] for carry in carries), rtol=1e-4, atol=1e-5
    )


def tied(p, ids):
    return jnp.mean(optzoo.lookup(p["users"], ids) @ p["users"].T) + jnp.sum(p["items"] ** 2)


def with_stopped_norm(p, ids):
    scale = jax.lax.stop_gradient(jnp.sum(p["users"] ** 2))
    return jnp.mean(optzoo.lookup(p["users"], ids) ** 2) / scale


@pytest.mark.parametrize("read_all", [tied, with_stopped_norm])
def test_a_loss_that_reads_whole_tables(read_all):
    """All rows are caught up in each step, and the result is that of dense Adam."""
    ends, some = [], [ids % ROWS for ids in batches(20)]
    for tx in (ADAM, DEFERRED):
        step, p = optzoo.minimize(read_all, tx, sparse="allow"), params()
        state = tx.init(p)
        for k, ids in enumerate(some):
            p, state, value = (step_of(tx, loss) if k % 4 else step)(p, state, ids)
        ends.append((optzoo.eval_params(p, state) if tx is DEFERRED else p, value))
    chex.assert_trees_all_close(*ends, rtol=1e-3, atol=1e-4)
    trace = lambda **options: jax.eval_shape(
        optzoo.minimize(read_all, DEFERRED, **options), p, state, some[0]
    )
    with pytest.warns(optzoo.DenseGradientWarning, match="'users'"):
        trace()
    with pytest.raises(ValueError, match="'users'"):
        trace(sparse="require")


def test_auxiliary_data_read_rows_that_are_current():
    p, state, _ = train_few(FEW_DEFERRED, 10)
    want, ids = optzoo.rows.catch_up(p, state)[0], batches(11)[10]
    with_aux = lambda p, ids: (few_loss(p, ids), p["users"])
    step = optzoo.minimize(with_aux, FEW_DEFERRED, has_aux=True, sparse="allow")
    *_, users = step(p, state, ids)
    np.testing.assert_array_equal(users, want["users"])


def test_ids_out_of_range_and_foreign():
    tx = optzoo.caught_up(optzoo.adam(0.1), mask=True)
    table = jnp.ones((5, 2))
    step = optzoo.minimize(lambda x, ids: jnp.sum(optzoo.lookup(x, ids)), tx)
    for bad in (-1, 7):
        x, state, value = step(+table, tx.init(table), jnp.array([0, bad]))
        assert np.isnan(value) and not np.isnan(x).any()
    x, state = optzoo.rows.catch_up(x, state, jnp.array([[0, -1], [9, 3]]))
    assert state.last.tolist() == [1, 0, 0, 1, 0]
    with pytest.raises(TypeError, match="must be integers"):
        optzoo.rows.catch_up(x, state, jnp.array([0.0]))
    with pytest.raises(ValueError, match=re.escape("no parameter matches ['table']")):
        optzoo.rows.catch_up(x, state, {"table": jnp.array([0])})


def test_rows_that_were_not_caught_up_become_nan():
    tx = optzoo.caught_up(optzoo.adam(0.1), mask=True)
    x, update = jnp.ones((5, 2)), jax.jit(tx.update)
    state = tx.init(x)
    for i in (0, 1):
        updates, state = update(SparseRows(jnp.array([i]), jnp.ones((1, 2)), 5), state, x)
        x = x + updates
    assert np.isfinite(x).tolist() == [[True] * 2, [False] * 2, *[[True] * 2] * 3]
    updates, _ = update(jnp.ones((5, 2)), state, x)  # a dense gradient, of deferred rows
    assert np.isfinite(updates).tolist() == [[False] * 2, [True] * 2, *[[False] * 2] * 3]


def test_a_state_put_together_by_hand_gives_nan():
    p, inner, _ = train(ADAM, 3)
    state = DEFERRED.init(p)._replace(inner=inner)  # not by take_over
    assert np.isnan(run(DEFERRED, p, state, batches(1))[2])
    tx, x = optzoo.caught_up(optzoo.moving_average(optzoo.adam(0.1)), mask=True), jnp.ones((5, 2))
    state = tx.init(x)
    [(rule, clock)] = state.clock.items()
    state = state._replace(clock={rule: clock._replace(count=jnp.int32(7))})
    assert np.isnan(optzoo.eval_params(x, state)).all()


def test_each_table_is_caught_up_at_its_own_ids():
    tx = optzoo.caught_up(optzoo.adam(0.1), mask=True)
    x = {"a": np.ones((5, 2), np.float32), "b": np.ones((3, 1), np.float32)}
    none = {n: SparseRows(jnp.zeros(0, int), a[:0], len(a)) for n, a in x.items()}

    @jax.jit
    def run(x):
        state = tx.update(none, tx.init(x), x)[1]
        return optzoo.rows.catch_up(x, state, {"a": jnp.array([3, 1]), "b": jnp.array([2])})[1]

    last = run(x).last
    assert last["a"].tolist() == [0, 1, 0, 1, 0] and last["b"].tolist() == [0, 0, 1]


def test_no_row_is_deferred_longer_than_the_horizon():
    tx = optzoo.caught_up(optzoo.adam(0.01), mask=True, horizon=1)
    [clock] = tx.init(jnp.ones((1, 1))).clock.values()
    horizon = len(clock.ring)

    def step(carry, _):
        x, state = carry
        none = SparseRows(jnp.zeros(0, jnp.int32), jnp.zeros((0, 1)), len(x))
        updates, state = tx.update(none, state, x)
        return (x + updates, state), (state.inner[0].count - state.last).max()

    # One row in each step would come too late for the last of the fewer rows.
    for rows in (horizon + 1, 700):
        x = jnp.ones((rows, 1))
        start = x, tx.init(x)
        ages = jax.jit(lambda c: jax.lax.scan(step, c, length=3 * horizon))(start)[1]
        assert horizon < 500 and horizon // 2 < ages.max() <= horizon


def through_pickle(state, target, folder):
    return pickle.loads(pickle.dumps(state))


@pytest.mark.parametrize("through", [through_pickle, through_flax, through_orbax])
def test_a_checkpoint_keeps_the_law(through, tmp_path):
    p, state, _ = train(DEFERRED, 3)
    restored = through(state, DEFERRED.init(p), tmp_path)
    chex.assert_trees_all_equal_structs(restored, state)
    chex.assert_trees_all_equal(optzoo.rows.catch_up(p, restored), optzoo.rows.catch_up(p, state))


@pytest.mark.parametrize("through", [through_pickle, through_flax])
def test_another_law_in_a_checkpoint_is_refused(through, tmp_path):
    p, state, _ = train(DEFERRED, 3)
    other = optzoo.caught_up(optzoo.adam(0.1, b2=0.99), mask=TABLES)
    with pytest.raises(ValueError, match="clock of this state has window and horizon"):
        restored = through(state, other.init(p), tmp_path)
        optzoo.minimize(loss, other)(p, restored, batches(1)[0])


def test_settings_that_change():
    p, ids = params(), batches(1)[0]
    state = DEFERRED.init(p)
    trace = lambda tx, state=state: jax.eval_shape(optzoo.minimize(loss, tx), p, state, ids)
    deferred = lambda inner, horizon=1: optzoo.caught_up(inner, mask=TABLES, horizon=horizon)
    trace(deferred(optzoo.adam(0.1)))  # the same rows
    for other, message in (
        (deferred(optzoo.adam(0.1, b2=0.99)), "the clock of this state has window and horizon"),
        (deferred(optzoo.nadam(0.1)), "deferred by the decay rule"),
        (
            deferred(optzoo.adam(0.1), horizon=1000),
            "the clock of this state has window and horizon",
        ),
    ):
        with pytest.raises(ValueError, match=rf"{message}.*catch_up.*take_over"):
            trace(other)
    with pytest.raises(ValueError, match="must be a CaughtUpState, got tuple"):
        trace(DEFERRED, ADAM.init(p))


OTHER = optzoo.adam(SCHEDULE, eps=1e-3)
OTHER_DEFERRED = optzoo.caught_up(OTHER, mask=TABLES, horizon=1)


def test_numbers_that_change_while_all_rows_are_current():
    """The tree is the same, and the rows then follow the new decay rule."""
    p, state = optzoo.rows.catch_up(*train(DEFERRED, 20)[:2])
    chex.assert_trees_all_equal_shapes(state, OTHER_DEFERRED.init(p))
    want, _, losses = run(OTHER, p, state.inner, batches(60))
    p, state, values = run(OTHER_DEFERRED, p, state, batches(60))
    np.testing.assert_allclose(values, losses, rtol=1e-4)
    chex.assert_trees_all_close(optzoo.eval_params(p, state), want, rtol=1e-4, atol=1e-5)


def test_numbers_that_change_while_rows_are_deferred():
    """These rows cannot be caught up any more, but for those of the first step."""
    p, state, _ = train(DEFERRED, 20)
    some = batches(60)[20:]
    values = run(OTHER_DEFERRED, p, state, some)[2]
    assert values[0] == run(DEFERRED, p, state, some[:1])[2][0] and np.isnan(values[-1])
    with pytest.raises(StateError, match=r"a decay rule with other numbers .*catch_up.*take_over"):
        OTHER_DEFERRED.update(jax.tree.map(jnp.zeros_like, p), state, p)


def test_what_may_be_deferred():
    for inner in (optax.adam(0.1), optzoo.adagrad(0.1)):
        with pytest.raises(TypeError, match=r"no decay rule .* Supported: adam, adamw, nadam"):
            optzoo.caught_up(inner)
    for inner in (optzoo.momentum(0.1, 0.9), optzoo.rmsprop(0.1), optzoo.lazy_adam(0.1)):
        with pytest.raises((TypeError, ValueError), match="dense=True"):
            optzoo.caught_up(inner)
    plain, decayed = optzoo.adam(0.1), optzoo.adamw(0.1, weight_decay_per_step=0.1)
    optzoo.caught_up(optzoo.moving_average(decayed))
    for inner, dense in (
        (optzoo.moving_average(optzoo.moving_average(plain)), False),
        (optzoo.moving_average(decayed), True),
    ):
        with pytest.raises(TypeError, match="only one average, and no weight decay"):
            optzoo.caught_up(inner, dense=dense)
    masked = optzoo.adamw(0.1, weight_decay_per_step=0.1, mask=("users",))
    optzoo.caught_up(masked)
    with pytest.raises(ValueError, match="no decay rule for dense"):
        optzoo.caught_up(masked, dense=True)
    for init in (lambda p: (), lambda p: (plain.init(p), plain.init(p))):
        with pytest.raises(TypeError, match="must be one optimizer of optzoo with slots"):
            optzoo.caught_up(Optimizer(init, plain.update, plain.about)).init({})
    with pytest.raises(TypeError, match="must be Python numbers, not traced as by optax"):
        jax.eval_shape(lambda b1: optzoo.caught_up(optzoo.adam(0.1, b1)).init({}), 0.9)
    with pytest.raises(TypeError, match="'large' has slots in bfloat16: with rounding to nearest"):
        short = optzoo.slots_dtype(optzoo.adam(0.1), "bfloat16")
        optzoo.caught_up(short).init({"large": jnp.ones((5000, 1), jnp.bfloat16)})
    with pytest.raises(TypeError, match=r"'layer/scale' has shape \(\), without an axis of rows"):
        optzoo.caught_up(optzoo.adam(0.1), mask=True).init(params())
    state = optzoo.caught_up(optzoo.adam(0.1)).init({"large": jnp.ones((5000, 1)), **params()})
    assert [a.shape for a in jax.tree.leaves(state.last)] == [(5000,)]


@pytest.mark.parametrize("rows", [4095, 4096, 4097])
def test_deferred_tables_without_a_mask(rows):
    """A gradient of rows moves no other row of a deferred table, and all of a smaller one."""
    tx, x = optzoo.caught_up(optzoo.adam(0.1)), {"x": jnp.ones((rows, 1)), "y": jnp.ones((5000, 1))}
    of = lambda i: {k: SparseRows(jnp.array([i]), jnp.ones((1, 1)), len(a)) for k, a in x.items()}
    _, state = tx.update(of(0), tx.init(x), x)
    updates, _ = tx.update(of(1), state, x)
    assert isinstance(updates["y"], SparseRows)
    assert isinstance(updates["x"], SparseRows) == (rows >= 4096)


def test_inside_of_other_transformations():
    """The rows are caught up in a pass of their own, and the gradients transformed before.

    A rate that is given is that of the clock.
    """
    adam = optzoo.adam(7.0)
    deferred = optzoo.caught_up(adam, mask=True)
    grouped = optzoo.param_groups({"users": deferred, "items|bias": deferred, ".*": adam})
    tx = optax.chain(optzoo.transforms.scale(2.0), optzoo.transforms.scale(0.5), grouped)
    step, p, values = optzoo.minimize(loss, tx), params(), []
    state = tx.init(p)
    for t, ids in enumerate(batches(60)):
        p, state, value = step(p, state, ids, learning_rate=0.1 - 0.0004 * t)  # as by SCHEDULE
        values.append(float(value))
    np.testing.assert_allclose(values, dense()[2], rtol=1e-4)
    chex.assert_trees_all_close(optzoo.eval_params(p, state), dense()[0], rtol=2e-4, atol=2e-5)
    with pytest.raises(ValueError, match="deferred rows"):
        optzoo.get_slot(state, "v")
    _, state = optzoo.rows.catch_up(p, state)
    got, want = (optzoo.get_slot(s, "v") for s in (state, dense()[1]))
    chex.assert_trees_all_close(got, want, rtol=1e-3, atol=1e-6)


FOLLOWED = {
    "chain": lambda tx: optax.chain(tx, optzoo.transforms.scale(0.5)),
    "named_chain": lambda tx: optax.named_chain(("a", tx), ("b", optzoo.transforms.scale(0.5))),
    "inside": lambda tx: optax.chain(
        optzoo.transforms.scale(1.0), optax.chain(tx, optzoo.transforms.scale(0.5))
    ),
    "groups": lambda tx: optzoo.param_groups({".*": optax.chain(tx, optzoo.transforms.scale(0.5))}),
    "twice": lambda tx: optax.chain(tx, tx),
    "counted": lambda tx: with_global_step(optax.chain)(tx, optzoo.transforms.scale(0.5)),
    "wrapper": lambda tx: optax.GradientTransformation(
        tx.init,
        lambda g, s, p: (
            optzoo.transforms.scale(0.5).update(*(done := tx.update(g, s, p)))[:1] + done[1:]
        ),
    ),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_nothing_may_change_the_update(name):
    tx, p, ids = optzoo.caught_up(optzoo.adam(0.1), mask=TABLES), params(), batches(1)[0]
    followed = FOLLOWED[name](tx)
    reason = "a transformation changes the update of table"
    if name == "wrapper":
        reason = "does not pass on the keyword arguments of update.* cannot be detected"
    with pytest.raises(ValueError, match=rf"{reason}.* the last of its optax"):
        optzoo.minimize(loss, followed)(p, followed.init(p), ids)
    if name not in ("named_chain", "wrapper"):
        with pytest.raises(ValueError, match=r"transformation 1 of 2 .* the last of its optax"):
            optzoo.rows.catch_up(p, followed.init(p), {"users": ids})


def test_what_follows_may_be_for_other_parameters():
    is_table = {"users": True, "bias": False}
    others = jax.tree.map(lambda x: not x, is_table)
    tx = optax.chain(
        optax.masked(optzoo.caught_up(ADAM, mask=True, horizon=1), is_table),
        optax.masked(ADAM, others),
    )
    both = []
    for each in (tx, FEW_DEFERRED):
        p, state, _ = train_few(each, 5)
        both.append(
            optzoo.rows.catch_up(*optzoo.rows.catch_up(p, state, {"users": jnp.arange(3)}))[0]
        )
    chex.assert_trees_all_close(*both, rtol=1e-5, atol=1e-6)


def wide_and_deep(names=()):
    """Parameters of a wide and deep model, or a TensorFlow 1 checkpoint of them."""
    rng = np.random.default_rng(7)
    shapes = {"wide/w": (ROWS, 1), "wide/b": (1,), "deep/table": (ROWS, 4), "deep/k": (4, 1)}
    return {
        f"{name}{slot}": rng.normal(size=shape).astype(np.float32) ** (2 if slot else 1)
        for name, shape in shapes.items()
        for slot in ("", *names)
    }


def test_strict_promotion_with_float64(x64):
    """Of a decay that varies, which is computed in float32."""
    averaged = optzoo.moving_average(optzoo.adam(0.1), 0.99, num_updates="count")
    tx = optzoo.caught_up(averaged, mask=True)
    step = optzoo.minimize(lambda x, ids: jnp.sum(optzoo.lookup(x, ids) ** 2), tx)
    with x64(True), jax.numpy_dtype_promotion("strict"):
        x = jnp.ones((5, 2), "float64")
        after, *_ = step.lower(x, tx.init(x), jnp.array([1, 3], "int32")).out_info
        assert after.dtype == "float64"


def test_wide_and_deep_with_the_averages_of_tensorflow():
    """Each group has its average, and one is deferred: as one average around dense Adam."""

    def loss(p, ids, y):
        logits = optzoo.lookup(p["wide"]["w"], ids) + p["wide"]["b"][None]
        logits += optzoo.lookup(p["deep"]["table"], ids) @ p["deep"]["k"]
        return jnp.mean(jnp.logaddexp(0, -y * logits[:, 0]))

    averaged = lambda tx: optzoo.moving_average(tx, 0.99, num_updates="count")
    ftrl, adam = optzoo.ftrl(0.05), optzoo.adam(0.01, eps=1e-3)
    deferred = optzoo.caught_up(averaged(adam), mask=True)
    tx = optzoo.param_groups({"wide/.*": averaged(ftrl), "table": deferred, "k": averaged(adam)})
    dense = averaged(optzoo.param_groups({"wide/.*": ftrl, "deep/.*": adam}))

    values = wide_and_deep()
    tree = lambda *path: jnp.asarray(values["/".join(path)])
    like = {
        "wide": {"w": tree("wide", "w"), "b": tree("wide", "b")},
        "deep": {"table": tree("deep", "table"), "k": tree("deep", "k")},
    }
    checkpoint = wide_and_deep(("/ExponentialMovingAverage",))
    for name, x in wide_and_deep(("/1", "/2")).items():
        of, _, slot = name.rpartition("/")
        if slot in "12":
            kind = "Ftrl" if of.startswith("wide") else "Adam"
            checkpoint[f"{of}/{kind}{'_1' * (slot == '2')}"] = x
    powers = {"beta1_power": 0.9**26, "beta2_power": 0.999**26}
    checkpoint |= {k: np.float32(v) for k, v in powers.items()}
    checkpoint["global_step"] = np.int64(25)

    ends = []
    for each in (tx, dense):
        p, state = optzoo.load_tf1_state(each, like, checkpoint)
        step = optzoo.minimize(loss, each)
        for ids in batches(20):
            p, state, _ = step(p, state, ids, jnp.array([1.0, -1, 1, -1, 1]))
        ends.append(
            (optzoo.rows.catch_up(p, state)[0] if each is tx else p, optzoo.eval_params(p, state))
        )
    chex.assert_trees_all_close(*ends, rtol=1e-5, atol=1e-6)
    far = jax.tree.map(lambda x, a: jnp.abs(x - a).max(), *ends[1])
    assert min(jax.tree.leaves(far)) > 1e-3  # the averages are not the parameters
    moved = jnp.abs(ends[1][0]["deep"]["table"] - checkpoint["deep/table"]).max(1)
    assert moved.min() > 1e-4  # rows without an id, too


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_steps_of_optax_that_add_up(jit):
    """``optax.MultiSteps`` takes no rows, and dense gradients as those of Adam itself."""
    p = {"table": jnp.ones((6, 2)), "w": jnp.ones(2)}
    tx, plain = (
        optax.MultiSteps(optax.chain(inner), 2)
        for inner in (optzoo.caught_up(optzoo.adam(0.1), mask="table"), optax.adam(0.1))
    )
    rows = jnp.zeros((6, 2)).at[jnp.array([1, 3])].set(1.0)
    grads = [{"table": i * rows, "w": jnp.ones(2)} for i in range(1, 6)]

    def train(tx):
        update, x, state = jit(tx.update), p, tx.init(p)
        for g in grads:
            updates, state = update(g, state, x)
            x = optax.apply_updates(x, updates)
        return x

    chex.assert_trees_all_close(train(tx), train(plain), rtol=1e-5)


def test_what_a_step_needs():
    tx = optzoo.caught_up(optzoo.adam(0.1), mask=TABLES)
    p, ids = params(), batches(1)[0]
    state = tx.init(p)
    averaged = optzoo.moving_average(tx)
    with pytest.raises(
        ValueError, match=r"as in caught_up\(moving_average\(adam\(rate\), decay\)\)"
    ):
        optzoo.minimize(loss, averaged)(p, averaged.init(p), ids)
    with pytest.raises(ValueError, match=r"got average_decay=, but .* omit it"):
        inside = optzoo.caught_up(optzoo.moving_average(optzoo.adam(0.1)), mask=TABLES)
        optzoo.minimize(loss, inside)(p, inside.init(p), ids, average_decay=0.5)
    guarded = optax.apply_if_finite(tx, 3)
    with pytest.raises(
        ValueError, match=r"optzoo.transforms.zero_if_norm_exceeds\(math.inf\) before"
    ):
        optzoo.minimize(loss, guarded)(p, guarded.init(p), ids)
    far = optzoo.model_average(tx)
    with pytest.raises(
        ValueError,
        match=r"an exchange of parameters does not support the deferred rows of optzoo\.caught_up",
    ):
        far.update(jax.tree.map(jnp.zeros_like, p), far.init(p), p)
    grads = jax.tree.map(jnp.zeros_like, p)
    with pytest.raises(ValueError, match="'items' has no gradient"):
        tx.update({**grads, "items": None}, state, p)
    of_rows = lambda p, ids: loss(p, optzoo.lookup(p["bias"], ids).astype(jnp.int32))
    with pytest.raises(ValueError, match="ids depend on looked-up rows"):
        optzoo.minimize(of_rows, tx)(p, state, ids)


@pytest.mark.optimized
def test_large_tables_and_slots_stay_where_they_are():
    tx = optzoo.caught_up(packed(optzoo.adam()))
    x = {"table": jnp.ones((60_000, 16)), "layer": jnp.ones(3)}
    of_table = lambda p, ids: jnp.sum(optzoo.lookup(p["table"], ids) ** 2) * jnp.sum(p["layer"])
    state, ids = tx.init(x), jnp.array([1, 3, 1])
    step = optzoo.minimize(of_table, tx)
    memory = step.lower(x, state, ids).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.1 * x["table"].nbytes
    where = lambda *trees: [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(trees)]
    large = lambda *trees: [t for t in jax.tree.leaves(trees) if t.size >= 60_000]
    before = where(large(x, state))
    for _ in range(2):
        x, state, _ = step(x, state, ids)
    assert len(before) == 4 and where(large(x, state)) == before
    flush = jax.jit(optzoo.rows.catch_up, donate_argnums=(0, 1)).lower(x, state).compile()
    assert flush.memory_analysis().temp_size_in_bytes < 0.4 * x["table"].nbytes


def test_rows_times_a_matrix_that_is_divided():
    """On explicit axes rows need the mesh in their type, or their gradient has none."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    spec = jax.sharding.PartitionSpec
    place = lambda x: jax.device_put(x, jax.sharding.NamedSharding(mesh, spec("d")))
    draw = np.random.default_rng(0).normal
    start = {
        k: draw(size=shape).astype("float32") for k, shape in {"t": (8, 2), "w": (4, 2)}.items()
    }
    loss = lambda p, ids: jnp.mean((optzoo.lookup(p["t"], ids) @ p["w"].T - 1) ** 2)
    tx, found = optzoo.caught_up(optzoo.adam(0.1), mask="t"), []
    step = jax.jit(optzoo.minimize(loss, tx))
    for put in (jnp.asarray, place):
        params = {k: put(x) for k, x in start.items()}
        state = tx.init(params)
        for ids in ([1, 3], [0, 3], [1, 7]):
            params, state, _ = step(params, state, jnp.array(ids))
        found.append(optzoo.rows.catch_up(params, state)[0])
    chex.assert_trees_all_close(found[1], found[0], rtol=1e-5)
