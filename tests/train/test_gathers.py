"""Train steps of losses that read rows by gathers: which gradients are rows, and what they do."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo import DenseGradientWarning
from optzoo.core.rows import is_rows
from optzoo.testing import samples
from tests.sharded.cases import ROWS, WIDTH, ids_of, mesh_of, of_ids, shards, whole

IDS = [jnp.array(ids) for ids in ([1, 3, 1, -2], [0, -8, 3, 3], [2, 1, -1, 20], [3, 5, 3, 1])]
TOUCHED = [0, 1, 2, 3, 5, 6, 7]  # 4 is not, and 20 is no row
report = functools.partial(optzoo.compile_report, device="cpu")


def params():
    """Two tables of 8 rows, of which gathers count below, and a bias of fewer."""
    table = jnp.sin(jnp.arange(24.0)).reshape(8, 3)
    return {"a": table, "b": table[::-1] + 0, "bias": jnp.arange(4.0), "w": jnp.ones(3)}


def by_gathers(p, ids):
    rows = p["a"][ids] + jnp.take(p["b"], ids, axis=0, mode="clip")
    return jnp.mean((rows @ p["w"] + 0.1 * p["bias"][ids % 4]) ** 2)


def by_lookups(p, ids, read_b=optzoo.lookup):
    """The same: ``a[20]`` is the last row, without a gradient, and ``b`` clips negative ids too."""
    from_end = jnp.where(ids < 0, ids + 8, ids)
    is_row = (from_end < 8)[:, None]
    a = optzoo.lookup(p["a"], jnp.where(is_row[:, 0], from_end, 8))
    last = jax.lax.stop_gradient(p["a"])[7][None]
    rows = jnp.where(is_row, a, last) + read_b(p["b"], jnp.clip(ids, 0, 7))
    return jnp.mean((rows @ p["w"] + 0.1 * p["bias"][ids % 4]) ** 2)


def train(tx, loss=by_gathers, min_rows=8, **settings):
    step, p = optzoo.minimize(loss, tx, min_rows=min_rows, **settings), params()
    state, values = tx.init(p), []
    for ids in IDS:
        p, state, value = step(p, state, ids)
        values.append(value)
    return p, state, jnp.stack(values)


def dense_loop(tx):
    @jax.jit
    def step(p, state, ids):
        value, grads = jax.value_and_grad(by_gathers)(p, ids)
        return *samples.step(tx, grads, p, state), value

    p = params()
    state, values = tx.init(p), []
    for ids in IDS:
        p, state, value = step(p, state, ids)
        values.append(value)
    return p, state, jnp.stack(values)


def trace(tx, loss=by_gathers, min_rows=8, **settings):
    step = optzoo.minimize(loss, tx, min_rows=min_rows, **settings)
    return jax.eval_shape(step, params(), tx.init(params()), IDS[0])


TAKE_ROWS = {
    "lazy_adam": optzoo.lazy_adam(0.1),
    "momentum": optzoo.momentum(0.1, 0.9),
    "adam, dense": optzoo.adam(0.1),
    "chain of optax": optax.chain(optzoo.clip_by_global_norm(0.1), optzoo.lazy_adam(0.1)),
    "on_rows": optzoo.on_rows(optax.adamw(0.1)),
    "densify": optax.chain(optzoo.rows.densify(), optax.adam(0.1)),
    "wrappers": optzoo.moving_average(optzoo.slots_dtype(optzoo.lazy_adam(0.1), "bfloat16"), 0.9),
    "accumulate": optzoo.accumulate(optzoo.lazy_adam(0.1), 2, max_rows={"a|b": 4}),
    "groups": optzoo.param_groups(
        {"a": optzoo.ftrl(0.1), "b": optzoo.lazy_adam(0.1), ".*": optax.adam(0.1)}
    ),
}


@pytest.mark.parametrize("name", TAKE_ROWS)
def test_equal_to_lookups(name):
    tx = TAKE_ROWS[name]
    got, want = train(tx, sparse="require"), train(tx, by_lookups, sparse="require")
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-6)


def test_touched_rows_equal_those_of_a_dense_run():
    """Adagrad moves a row by its own gradients alone, so lazy and dense runs agree."""
    tx = optzoo.adagrad(0.1)
    chex.assert_trees_all_close(train(tx, sparse="require"), dense_loop(tx), rtol=1e-5, atol=1e-6)
    lazy, _, _ = train(optzoo.lazy_adam(0.1), sparse="require")
    assert jnp.flatnonzero((lazy["a"] != params()["a"]).any(1)).tolist() == TOUCHED
    first = dense_loop(optzoo.adam(0.1))[0]  # in its first step Adam is lazy
    assert (first["a"] != params()["a"]).any(1).sum() == len(TOUCHED)


def signs(update):
    return optax.GradientTransformation(lambda params: (), update)


def signs_by_name():
    def update(updates, state, params=None):
        return jax.tree.map(jnp.sign, updates), state

    return signs(update)


REFUSE_ROWS = {
    "adam": optax.adam(0.1),
    "sgd": optax.sgd(0.1),
    "a part of a chain": optax.chain(optax.clip_by_global_norm(0.1), optzoo.lazy_adam(0.1)),
    "MultiSteps": optax.MultiSteps(optzoo.lazy_adam(0.1), 2).gradient_transformation(),
    "a group": optzoo.param_groups({"a": optzoo.lazy_adam(0.1), ".*": optax.adam(0.1)}),
}


REFUSING = {
    "adam": ("optax.scale_by_adam", optax.adam(0.1)),
    "clip": ("optax.clip", optax.chain(optax.clip(0.1), optzoo.lazy_adam(0.1))),
    "last": ("optax.ema", optax.named_chain(("first", optax.identity()), ("last", optax.ema(0.9)))),
    "a group": ("optax.scale", optzoo.param_groups({".*": optax.sgd(0.1)})),
    "a user's": ("tests.signs_by_name", optax.chain(signs_by_name(), optzoo.lazy_adam(0.1))),
    "no name": (
        "a transformation",
        optax.chain(signs(lambda us, s, p=None: (jax.tree.map(jnp.sign, us), s)), optax.sgd(0.1)),
    ),
    "MultiSteps": ("a transformation", REFUSE_ROWS["MultiSteps"]),
    "a function as mask, with a keyword": (
        "optax.masked",
        optax.masked(optzoo.skip_spikes(optzoo.adam(0.1)), lambda p: jax.tree.map(jnp.ndim, p)),
    ),
}


@pytest.mark.parametrize("name", REFUSING)
def test_what_refuses_rows_is_named(name):
    """Not the whole, of which it may be a small part."""
    refusing, tx = REFUSING[name]
    with pytest.raises(
        ValueError, match=f"are read: {refusing} in tx does not support row-sparse grad"
    ):
        trace(tx, sparse="require")


@pytest.mark.parametrize(
    "given", [{"loss": by_lookups}, {"sparse": {"a": "require", "b": "allow"}}]
)
@pytest.mark.parametrize("name", REFUSING)
def test_what_refuses_rows_of_lookups_is_named(name, given):
    """They cannot be dense."""
    refusing, tx = REFUSING[name]
    what = (
        rf"^{refusing} in tx does not support row-sparse gradients, but optzoo.lookup or "
        "sparse='require' gives one to parameter 'a'.*masks and labels must be trees, not funct"
    )
    with pytest.raises(ValueError, match=what):
        trace(tx, **given)


def test_an_error_of_the_transformation_itself_stays():
    def refuse(updates, params):
        if any(map(is_rows, jax.tree.leaves(updates, is_leaf=is_rows))):
            raise ValueError("no rows: take another one")
        return updates

    with pytest.raises(ValueError, match=r"^no rows: take another one$"):
        trace(optax.chain(optax.stateless(refuse), optax.sgd(0.1)), loss=by_lookups)


def test_each_table_has_what_refuses_its_rows():
    clipped = optax.chain(optax.clip(0.1), optzoo.lazy_adam(0.1))
    with pytest.warns(DenseGradientWarning) as seen:
        trace(optzoo.param_groups({"a": clipped, ".*": optax.sgd(0.1)}))
    named = {str(w.message).split("'")[1]: str(w.message) for w in seen}
    assert named.keys() == {"a", "b"}
    assert "optax.clip in tx" in named["a"] and "optax.scale in tx" in named["b"]


@pytest.mark.parametrize("name", REFUSE_ROWS)
def test_an_optimizer_that_takes_no_rows_gets_dense_gradients(name):
    tx, some = REFUSE_ROWS[name], ["b"] if name == "a group" else ["a", "b"]
    message = (
        "of '{}' is dense, although .*: (optax.\\w+|a transformation) in tx does not support "
        "row-sparse gradients"
    )
    with pytest.warns(DenseGradientWarning) as seen:
        trace(tx)
    assert [str(w.message).split("'")[1] for w in seen] == some
    with pytest.raises(ValueError, match=message.format(some[0])):
        trace(tx, sparse="require")
    got, want = train(tx, sparse="allow"), dense_loop(tx)
    if name == "a group":
        a_alone = functools.partial(by_lookups, read_b=lambda b, ids: b[ids])
        want = train(tx, a_alone, min_rows=9)
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-6)


def test_without_a_word():
    """Of small tables, and of optimizers that get dense gradients in any case."""
    for tx in (optax.adam(0.1), optzoo.lazy_adam(0.1)):
        trace(tx, min_rows=9, sparse="require")
    tied = lambda p, ids: jnp.sum(p["a"][ids] @ p["a"].T) + jnp.sum(p["b"] ** 2)
    trace(optax.adam(0.1), tied)
    with pytest.warns(DenseGradientWarning, match=r"'a' is dense.*also used by transpose \("):
        trace(optzoo.lazy_adam(0.1), tied)


def test_required_rows_that_an_optimizer_does_not_take():
    """It is as with lookups: its own error says what to do."""
    for loss, settings in ((by_gathers, {"sparse": {"a|b": "require"}}), (by_lookups, {})):
        with pytest.raises((TypeError, ValueError), match=r"optzoo\.rows\.densify"):
            trace(optax.adam(0.1), loss, **settings)


def test_other_errors_of_an_update_are_not_about_rows():
    tx = optzoo.lazy_adam(0.1)
    step = optzoo.minimize(by_gathers, tx, sparse="require", min_rows=8)
    with pytest.raises(ValueError, match="'m' of parameter"):
        state = tx.init({**params(), "w": jnp.ones(4)})
        jax.eval_shape(step, params(), state, IDS[0])
    with pytest.raises(TypeError, match="does not use 'foo'"):
        jax.eval_shape(step, params(), tx.init(params()), IDS[0], foo=1.0)


def test_the_update_is_asked_only_if_there_are_gathers():
    calls = []

    def update(updates, state, params=None):
        calls.append(updates)
        return updates, state

    tx = optax.GradientTransformation(lambda p: optax.EmptyState(), update)
    trace(tx, lambda p, ids: jnp.sum(p["a"] @ p["w"]))
    assert len(calls) == 1
    trace(tx, min_rows=8)
    assert len(calls) == 3


@pytest.mark.optimized
@pytest.mark.parametrize("native", [False, "require"])
def test_nothing_as_large_as_the_table_but_table_and_slots(native):
    p = {"a": jnp.zeros((100_000, 16)), "w": jnp.ones(16)}
    loss = lambda p, ids: jnp.mean(
        (p["a"].astype("bfloat16")[ids] @ p["w"].astype("bfloat16")) ** 2
    )
    tx = optzoo.param_groups({"a": optzoo.lazy_adam(0.1), ".*": optzoo.adam(0.1)})
    step = optzoo.minimize(loss, tx, sparse="require", native=native)
    found = report(step, p, tx.init(p), jnp.zeros(64, int))
    assert found.temporaries < 0.01 * p["a"].nbytes and not found.large
    dense = optzoo.minimize(loss, tx, min_rows=100_001)
    assert report(dense, p, tx.init(p), jnp.zeros(64, int)).temporaries > p["a"].nbytes / 3


def test_native():
    tx = optzoo.lazy_adam(0.1)
    got, want = train(tx, sparse="require", native="require"), train(tx, sparse="require")
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-6)


# Deferred rows


@pytest.mark.parametrize("inside", [True, False], ids=["alone", "in a chain"])
def test_rows_that_rest(inside):
    """Only the rows that are read are caught up, and the result is that of dense Adam."""
    tx = optzoo.caught_up(optzoo.adam(0.1), mask=("a", "b"))
    tx = tx if inside else optax.chain(optzoo.clip_by_global_norm(1e6), tx)
    p, state, values = train(tx, sparse="require")
    last = optax.tree.get(state, "last")
    assert last["a"].tolist() == [2, 4, 3, 4, 0, 4, 1, 3]  # the last step that read each row
    want, _, of_dense = dense_loop(optzoo.adam(0.1))
    chex.assert_trees_all_close(optzoo.eval_params(p, state), want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(values, of_dense, rtol=1e-5)


def test_a_table_beside_one_whose_rows_rest():
    """Its optimizer is the one inside, which takes rows."""
    p, state, _ = train(optzoo.caught_up(optzoo.adam(0.1), mask="a"), sparse="require")
    want, _, _ = dense_loop(optzoo.adam(0.1))
    chex.assert_trees_all_close(optzoo.eval_params(p, state), want, rtol=1e-4, atol=1e-5)


def test_small_tables_whose_rows_rest_are_caught_up_as_a_whole():
    tx = optzoo.caught_up(optzoo.adam(0.1), mask=("a", "b"))
    p, state, _ = train(tx, min_rows=9)
    assert set(state.last["a"].tolist()) == {4}
    want, _, _ = dense_loop(optzoo.adam(0.1))
    chex.assert_trees_all_close(optzoo.eval_params(p, state), want, rtol=1e-4, atol=1e-5)


# Sharded tables

W = np.random.default_rng(1).normal(size=(WIDTH, WIDTH)).astype(np.float32)


def of_tables(p, ids, bags, y):
    """Reads a sharded table by gathers in all modes, and by lookups; and a replicated one."""
    t, around = p["table"], ids - ROWS // 2
    rows = t[around] + jnp.take(t, 3 * around, axis=0, mode="clip")
    filled = t.at[3 * around].get(mode="fill", fill_value=0.5) + jax.vmap(lambda i: t[i])(ids)
    bag = optzoo.lookup_sparse(t, bags) + optzoo.lookup(t, ids) + p["small"][around]
    beyond = t[jnp.where(ids < 5, ids + 2 * ROWS, ids)]
    return jnp.mean((rows @ p["w"] + filled - y) ** 2) + jnp.mean((bag * beyond) ** 2)


def batches(mesh):
    for seed in range(3):
        n = 4 * mesh.size
        y = np.random.default_rng(seed).normal(size=(n, WIDTH)).astype(np.float32)
        yield ids_of("zipf", (n,), 4, seed), ids_of("padding", (n, 3), 4, seed + 9), y


SHARDED = {
    "lazy": (optzoo.row_wise_adagrad(0.1), 1e-5),
    "deferred": (optzoo.caught_up(optzoo.adam(0.01), mask="table"), 1e-4),
}


@pytest.mark.parametrize("name", SHARDED)
def test_sharded_tables(name):
    tx, tolerance = SHARDED[name]
    mesh, s = mesh_of(4), optzoo.sharded.RowSharding(ROWS, 4, multiple=16)
    everywhere = jax.NamedSharding(mesh, jax.P())
    put = functools.partial(jax.device_put, device=everywhere)
    sharded = {"table": shards(s, mesh), "w": put(W), "small": put(whole())}
    one = {"table": whole(), "w": W, "small": whole()}
    of_one, state = (
        tx.init(one),
        jax.jit(tx.init, out_shardings=optzoo.state_sharding(tx, sharded))(sharded),
    )
    settings = {"sparse": "require", "min_rows": ROWS}
    step = optzoo.sharded_minimize(
        of_tables, tx, mesh, {"table": s}, capacity_factor=0.1, **settings
    )
    alone = optzoo.minimize(of_tables, tx, **settings)
    for batch in batches(mesh):
        sharded, state, value = step(sharded, state, *batch)
        one, of_one, want = alone(one, of_one, *batch)
        np.testing.assert_allclose(value, want, rtol=tolerance)
    if name == "deferred":
        one, sharded = optzoo.rows.catch_up(one, of_one)[0], optzoo.rows.catch_up(sharded, state)[0]
    table = of_ids(sharded["table"], s)
    np.testing.assert_allclose(table, one["table"], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(sharded["small"], one["small"], rtol=tolerance, atol=tolerance)


def test_other_uses_of_sharded_tables_are_refused():
    mesh, s = mesh_of(4), optzoo.sharded.RowSharding(ROWS, 4, multiple=16)
    tx, params = optzoo.row_wise_adagrad(0.1), {"t": shards(s, mesh)}
    state = jax.eval_shape(tx.init, params)
    ids = ids_of("uniform", (8,), 4)
    for loss, reason in (
        (lambda p, i: jnp.sum(p["t"][i] @ p["t"].T), "also used by transpose"),
        (lambda p, i: jnp.sum(jnp.tanh(p["t"])[i]), "a gather reads the result of tanh"),
        (lambda p, i: jnp.sum(p["t"][:2] * p["t"][i[:2]]), "also used by slice"),
    ):
        step = optzoo.sharded_minimize(loss, tx, mesh, {"t": s})
        with pytest.raises(ValueError, match=f"'t' is sharded .* gathers of whole .*{reason}"):
            jax.eval_shape(step, params, state, ids)
    dependent = lambda p, i: jnp.sum(p["t"][jnp.argmax(p["t"][i], 1)])
    step = optzoo.sharded_minimize(dependent, tx, mesh, {"t": s})
    with pytest.raises(ValueError, match="ids depend on looked-up rows"):
        jax.eval_shape(step, params, state, ids)
