"""Rows that start anew are those of a new table; nothing else changes."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo.deferred.state import CaughtUpState
from optzoo.state.fit import StateError
from optzoo.state.types import nodes_of
from optzoo.testing import samples

from .cases import (
    DEFERRED,
    IN_LINES,
    LAZY,
    OF_OPTAX,
    REFUSED,
    ROWS,
    WIDTH,
    WRAPPED,
    arrays_of_the_table,
    bits,
    by_rows,
    deferred,
    gradients,
    params,
    placed,
    rows_of,
    same,
    trained,
)

reset = functools.partial(optzoo.growing.reset_rows, init=rows_of)
IDS = jnp.array([2, 0, 2, ROWS, -1, 99])  # one twice, and three that are no rows
IS_NEW = np.array([True, False, True, False, False])


def check_reset(before, after, fresh, is_new=IS_NEW):
    """Asserts that these rows are fresh, and the others as before; returns how many arrays."""
    assert samples.avals(after) == samples.avals(before)
    paths = jax.tree_util.tree_leaves_with_path(before)
    columns = jax.tree.leaves(after), jax.tree.leaves(fresh)
    found = 0
    for (path, old), new, start in zip(paths, *columns, strict=True):
        name = jax.tree_util.keystr(path)
        old, new, start = map(np.asarray, (old, new, start))
        if "emb" not in name or old.shape[:1] != is_new.shape:
            assert bits(new) == bits(old), name
            continue
        found += 1
        assert bits(new[~is_new]) == bits(old[~is_new]), name
        assert bits(new[is_new]) == bits(start[is_new]), name
    return found


def check(tx, dense=False):
    before = trained(tx, dense=dense)
    after = reset(*before, {"emb": IDS}, tx=tx)
    same(after[0]["emb"][IS_NEW], rows_of(jnp.array([0, 2])))
    assert check_reset(before, after, (after[0], tx.init(after[0]))) == arrays_of_the_table(tx)


@pytest.mark.usefixtures("eager")
@by_rows
def test_every_optimizer(name):
    check(samples.make(optzoo.CATALOG[name]))


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", sorted(WRAPPED.keys() - {"accumulate-rows"}))
def test_every_wrapper(name):
    check(WRAPPED[name]())


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", OF_OPTAX)
def test_optimizers_of_optax(name):
    check(OF_OPTAX[name](), dense=True)


@pytest.mark.parametrize("name", REFUSED)
def test_arrays_that_depend_on_all_rows_are_refused(name):
    tx = samples.make(optzoo.CATALOG[name])
    x = params()
    with pytest.raises(ValueError, match="depends on all rows of a table"):
        reset(x, tx.init(x), {"emb": IDS}, tx=tx)


def test_rows_that_are_collected_are_forgotten():
    tx = optzoo.accumulate(optzoo.gradient_descent(1.0), 2, max_rows={"emb": 3})
    x = params()
    x, state = samples.step(tx, gradients(0, ids=(1, 2, 2)), x, tx.init(x))
    y, state = reset(x, state, {"emb": jnp.array([2])}, tx=tx)
    z, _ = samples.step(tx, gradients(1, ids=(0,)), y, state)
    same(z["emb"][2:], y["emb"][2:])
    expected = x["emb"][1] - gradients(0, ids=(1, 2, 2))["emb"].values[0]
    np.testing.assert_allclose(z["emb"][1], expected, 1e-6)


def test_it_costs_what_the_rows_cost():
    """Compiled with donated arguments it makes nothing of the size of the table."""
    tx, rows = optzoo.moving_average(LAZY(), 0.9), 10_000
    x = {"emb": jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)}
    state = jax.eval_shape(tx.init, x)
    f = jax.jit(functools.partial(reset, tx=tx), donate_argnums=(0, 1))
    program = f.lower(x, state, {"emb": jax.ShapeDtypeStruct((4,), jnp.int32)}).compile()
    memory = program.memory_analysis()
    assert memory.output_size_in_bytes > 4 * rows * WIDTH * 4
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 1000
    assert memory.temp_size_in_bytes < rows


@pytest.mark.parametrize("name", IN_LINES)
def test_tables_in_lines(name):
    tx = IN_LINES[name]()
    before = trained(tx)
    wanted = reset(*before, {"emb": IDS}, tx=tx)
    lines = {**before[0], "emb": optzoo.rows.to_lines(before[0]["emb"])}
    like = lines, jax.eval_shape(tx.init, lines)
    got = reset(*optzoo.rows.to_lines(before, like=like), {"emb": IDS}, tx=tx)
    same(got, optzoo.rows.to_lines(wanted, like=like))


@pytest.mark.parametrize("partition", ["mod", "div"])
def test_sharded_tables(partition):
    sharding = optzoo.sharded.RowSharding(5, 2, partition, multiple=1)
    tx, before = placed(sharding)
    f = functools.partial(reset, tx=tx, shardings={"emb": sharding})
    after = f(*before, {"emb": IDS})
    is_new = np.isin(np.asarray(sharding.ids_of(np.arange(sharding.stored_rows))), [0, 2])
    same(np.asarray(after[0]["emb"])[is_new], rows_of(jnp.array([0, 2])))
    assert check_reset(before, after, (after[0], tx.init(after[0])), is_new) == 3
    assert after[0]["emb"].sharding.is_equivalent_to(before[0]["emb"].sharding, 2)
    assert not after[0]["emb"].sharding.is_fully_replicated
    with pytest.raises(ValueError, match=re.escape("give shardings={'emb': sharding}")):
        reset(*before, {"emb": IDS}, tx=tx)


@pytest.mark.parametrize("name", DEFERRED)
def test_rows_that_rest(name):
    tx, _, before = deferred(name)
    ids = jnp.array([3, 0])
    is_new = np.isin(np.arange(ROWS), ids)
    after = reset(*before, {"emb": ids}, tx=tx)
    [old], [new] = (nodes_of(CaughtUpState, state) for _, state in (before, after))
    assert old.last["emb"].tolist() != [2] * ROWS  # some rest
    expected = np.where(is_new, 2, old.last["emb"])
    np.testing.assert_array_equal(new.last["emb"], expected)
    current, others = optzoo.rows.catch_up(*after), optzoo.rows.catch_up(*before)
    fresh = {**before[0], "emb": after[0]["emb"]}
    fresh_state = optzoo.rows.catch_up(fresh, tx.init(fresh))[1]
    plain = lambda pair: (pair[0], [node.inner for node in nodes_of(CaughtUpState, pair[1])])
    check_reset(plain(others), plain(current), plain((fresh, fresh_state)), is_new)
    same(current[0]["emb"][is_new], rows_of(jnp.array([0, 3])))


def test_which_ids_the_function_gets():
    asked = []

    def rows(ids):
        asked.extend(ids.tolist())
        return rows_of(ids)

    x, tx = params(), optax.identity()
    optzoo.growing.reset_rows(x, tx.init(x), {"emb": IDS}, tx=tx, init=rows)
    assert sorted(asked) == [0, 2, ROWS, ROWS, ROWS, ROWS]


def test_ids_of_few_bits():
    """The number of rows is no number of these bits."""
    x, tx = jnp.ones((300, 1)), optax.identity()
    y, _ = optzoo.growing.reset_rows(x, tx.init(x), {"": np.array([7, 255], np.uint8)}, tx=tx)
    assert np.flatnonzero(y[:, 0] == 0).tolist() == [7, 255]


# Rows, columns, dtype, the sharding, and the ids that start anew.
UNLIKE = {
    "a": (7, 2, jnp.float32, (2, "mod"), [0, 6]),
    "b": (8, 3, jnp.bfloat16, (4, "div"), [3]),
    "one": (1, 1, jnp.float32, (2, "mod"), [0]),
}


@pytest.mark.parametrize("sharded", [True, False])
def test_several_tables(sharded):
    """Each has its own ids, sharding, rows and first slots."""
    x, tables, shardings, init, wanted = {}, {}, {}, {}, {}
    for k, (name, (rows, width, dtype, (shards, partition), ids)) in enumerate(UNLIKE.items()):
        s = optzoo.sharded.RowSharding(rows, shards, partition, multiple=1)
        x[name] = np.ones((s.stored_rows if sharded else rows, width), dtype)
        tables[name], shardings[name] = np.array(ids), s
        init[name] = lambda ids, width=width, k=k: jnp.full((len(ids), width), 3 + k)
        places = np.asarray(s.places_of(ids)) if sharded else ids
        wanted[name] = np.isin(np.arange(len(x[name])), places)
    tx = optzoo.momentum(0.1, 0.9)
    given = {"tx": tx, "init": init, "shardings": shardings if sharded else None}

    @jax.jit
    def run(x):
        state = jax.tree.map(lambda a: a + 1, tx.init(x))
        return optzoo.growing.reset_rows(x, state, tables, **given)

    y, state = run(x)
    for k, (name, is_new) in enumerate(wanted.items()):
        assert y[name].dtype == x[name].dtype
        for got, new in (y[name], 3 + k), (optzoo.get_slot(state, "momentum")[name], 0):
            want = np.where(is_new[:, None], new, np.ones(x[name].shape))
            np.testing.assert_array_equal(np.float32(got), want)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tables": {"embs": IDS}}, ValueError, "tables: no parameter matches ['embs']"),
        ({"tables": {"mlp/b": IDS}}, ValueError, "'mlp/b' is a number and has no rows"),
        ({"tables": {"emb": [1.0]}}, TypeError, "ids must be integers, got dtype float32"),
        ({"tables": {"emb": [[1]]}}, ValueError, "ids must have shape (n,), got (1, 1)"),
        ({"tables": IDS}, TypeError, "tables must be a dict from patterns"),
        ({"init": 0.0}, TypeError, "init must be a function of ids or a dict"),
        ({"init": lambda ids: jnp.ones((len(ids), 3))}, ValueError, "rows of shape (6, 2) for 6"),
        ({"tx": None}, TypeError, "tx must be an optax transformation"),
        ({"tx": optzoo.momentum(0.1, 0.9)}, StateError, "the state does not match"),
        ({"shardings": 3}, TypeError, "shardings must be a dict from patterns"),
        (
            {"shardings": {"emb": 3}},
            TypeError,
            "shardings must have an optzoo.sharded.RowSharding each",
        ),
        (
            {"shardings": {"emb": optzoo.sharded.RowSharding(9, 2, multiple=1)}},
            ValueError,
            "has 5 rows, but its sharding stores 12",
        ),
    ],
)
def test_bad_arguments(change, error, message):
    tx = LAZY()
    given = {"params": params(), "state": tx.init(params()), "tables": {"emb": IDS}, "tx": tx}
    with pytest.raises(error, match=re.escape(message)):
        reset(**{**given, **change})
