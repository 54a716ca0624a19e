"""Old rows stay bit by bit, new ones are those of a new table, and training goes on."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import optzoo
from optzoo.deferred.state import CaughtUpState
from optzoo.state.fit import StateError
from optzoo.state.types import map_nodes
from optzoo.testing import samples

from ..sharded.cases import mesh_of
from .cases import (
    DEFERRED,
    IN_LINES,
    LAZY,
    MORE,
    OF_OPTAX,
    REFUSED,
    ROWS,
    WIDTH,
    WRAPPED,
    arrays_of_the_table,
    bits,
    by_rows,
    check_resized,
    deferred,
    gradients,
    loss,
    params,
    placed,
    rows_of,
    same,
    trained,
)

with warnings.catch_warnings():  # of what Keras imports
    warnings.simplefilter("ignore")
    import keras

resize = functools.partial(optzoo.growing.resize_table, init=rows_of)


def check(tx, rows, dense=False):
    before = trained(tx, dense=dense)
    after = resize(*before, {"emb": rows}, tx=tx)
    kept = min(ROWS, rows)
    new = {**before[0], "emb": after[0]["emb"]}
    same(after[0]["emb"][kept:], rows_of(jnp.arange(kept, rows)))
    assert check_resized(before, after, (new, tx.init(new)), kept) == arrays_of_the_table(tx)
    x, _ = samples.step(tx, gradients(9, rows, (0, rows - 1), dense), *after)
    assert x["emb"].shape == (rows, WIDTH)
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(x))


@pytest.mark.usefixtures("eager")
@by_rows
def test_every_optimizer(name):
    tx = samples.make(optzoo.CATALOG[name])
    check(tx, MORE)
    check(tx, 3)


# Their norms have the rows that were not there, and Muon's factor their number.
OF_ALL_ROWS = {"adafactor", "lamb", "muon"}


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", sorted(optzoo.CATALOG.keys() - {*REFUSED, *OF_ALL_ROWS}))
def test_as_with_the_larger_table_from_the_start(name):
    tx = samples.make(optzoo.CATALOG[name])
    small, large = resize(*trained(tx), {"emb": MORE}, tx=tx), trained(tx, MORE)
    same(small, large)
    for seed in (7, 8):
        g = gradients(seed, MORE, (2, 6, 2))
        small, large = (samples.step(tx, g, *pair) for pair in (small, large))
    same(small, large)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", WRAPPED)
def test_every_wrapper(name):
    check(WRAPPED[name](), MORE)
    check(WRAPPED[name](), 3)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", OF_OPTAX)
def test_optimizers_of_optax(name):
    check(OF_OPTAX[name](), MORE, dense=True)
    check(OF_OPTAX[name](), 3, dense=True)


def test_optimizers_of_keras():
    check(optzoo.interop.keras.keras_optimizer(keras.optimizers.Adam(0.1)), MORE, dense=True)


@pytest.mark.parametrize("name", REFUSED)
def test_arrays_that_depend_on_all_rows_are_refused(name):
    tx = samples.make(optzoo.CATALOG[name])
    x = params()
    with pytest.raises(ValueError, match="depends on all rows of a table"):
        resize(x, tx.init(x), {"emb": MORE}, tx=tx)


@pytest.mark.parametrize("name", ["shampoo", "soap"])
def test_a_table_too_large_for_a_matrix_is_resized(name):
    tx = samples.make(optzoo.CATALOG[name])
    x = jnp.ones((20_000, 1))
    y, state = jax.eval_shape(lambda x: resize(x, tx.init(x), {"": 20_001}, tx=tx, init=None), x)
    assert samples.avals(state) == samples.avals(jax.eval_shape(tx.init, y))


def test_blocks_that_have_room_are_refused():
    """The shape of a block does not change here, but its rows would."""
    tx = optzoo.blocked_shampoo(0.1)
    x = jax.ShapeDtypeStruct((3001, 2), jnp.float32)
    state = jax.eval_shape(tx.init, x)
    assert [a.shape for a in jax.tree.leaves(state) if a.shape[-1:] == (501,)]
    with pytest.raises(ValueError, match="cannot be resized"):
        resize(x, state, {"": 3002}, tx=tx)


def test_stacks():
    tx = optzoo.stacked(optzoo.momentum(0.1, 0.9))
    draw = lambda seed: jax.random.normal(jax.random.key(seed), (ROWS, WIDTH))
    x = {name: draw(i) for i, name in enumerate("abc")}
    x, state = samples.step(tx, {name: draw(i + 3) for i, name in enumerate("abc")}, x)
    larger, new = resize(x, state, {"[abc]": MORE}, tx=tx)
    old, slots = (optzoo.get_slot(s, "momentum") for s in (state, new))
    for name in "abc":
        assert bits(larger[name][:ROWS]) == bits(x[name])
        assert bits(slots[name][:ROWS]) == bits(old[name])
        assert not slots[name][ROWS:].any() and len(slots[name]) == MORE
    for tables in {"a": MORE}, {"[ab]": MORE, "c": MORE + 1}:
        with pytest.raises(ValueError, match="keep them out of stacks"):
            resize(x, state, tables, tx=tx)


# What init gives


def test_functions_by_pattern_and_zeros():
    x = {"a": jnp.ones((2, 3), jnp.bfloat16), "b": jnp.ones((4, 1, 2)), "c": jnp.ones(2)}
    x["counts"] = jnp.ones(2, jnp.int32)
    asked = []

    def rows(ids):
        asked.append(ids.dtype)
        return jnp.broadcast_to(ids[:, None, None], (len(ids), 1, 2)).astype(jnp.float32)

    tables, init = {"a": 4, "[bc]|counts": 5}, {"b": rows, "counts": lambda ids: 2.0 * ids}
    tx = optax.identity()
    y, state = optzoo.growing.resize_table(x, tx.init(x), tables, tx=tx, init=init)
    np.testing.assert_array_equal(y["a"], np.array([[1] * 3] * 2 + [[0] * 3] * 2))
    np.testing.assert_array_equal(y["b"][:, 0, 0], [1, 1, 1, 1, 4])
    np.testing.assert_array_equal(y["c"], [1, 1, 0, 0, 0])
    np.testing.assert_array_equal(y["counts"], [1, 1, 4, 6, 8])
    assert (y["a"].dtype, y["counts"].dtype) == (jnp.bfloat16, jnp.int32)
    assert (asked[0], state) == (jnp.int32, tx.init(x))


def test_state_of_lower_precision_keeps_it():
    tx = optzoo.momentum(0.1, 0.9)
    x, state = trained(tx)
    state = jax.tree.map(lambda a: a.astype(jnp.bfloat16) if a.ndim else a, state)
    _, new = resize(x, state, {"emb": MORE}, tx=tx)
    slots = optzoo.get_slot(new, "momentum")
    assert slots["emb"].dtype == slots["mlp"]["w"].dtype == jnp.bfloat16
    assert bits(slots["emb"][:ROWS]) == bits(optzoo.get_slot(state, "momentum")["emb"])


def test_in_a_compiled_function():
    tx = LAZY()
    before = trained(tx)
    got = jax.jit(lambda pair: resize(*pair, {"emb": MORE}, tx=tx))(before)
    same(got, resize(*before, {"emb": MORE}, tx=tx))


@pytest.mark.parametrize("name", ["packed", "accumulate-rows"])
def test_boxes_of_flax(name):
    tx = WRAPPED[name]()
    boxed = lambda x: nnx.State({"emb": nnx.Param(x["emb"]), "mlp": nnx.Param(x["mlp"]["w"])})
    plain = lambda x: {"emb": x["emb"], "mlp": x["mlp"]["w"]}
    x = params()
    got, state = resize(boxed(x), tx.init(boxed(x)), {"emb": MORE}, tx=tx)
    want, _ = resize(plain(x), tx.init(plain(x)), {"emb": MORE}, tx=tx)
    same(nnx.to_pure_dict(got), want)
    assert samples.avals(state) == samples.avals(tx.init(got))


# Rows in other places


@pytest.mark.parametrize("name", IN_LINES)
def test_tables_in_lines(name):
    tx = IN_LINES[name]()
    before = trained(tx)
    wanted = resize(*before, {"emb": 200}, tx=tx)
    lines = lambda x: {**x, "emb": optzoo.rows.to_lines(x["emb"])}
    like = lambda x: (lines(x), jax.eval_shape(tx.init, lines(x)))
    in_lines = optzoo.rows.to_lines(before, like=like(before[0]))
    got = resize(*in_lines, {"emb": 200}, tx=tx)
    assert got[0]["emb"].value.shape == (4, 128)
    same(got, optzoo.rows.to_lines(wanted, like=like(wanted[0])))


@pytest.mark.parametrize("partition", ["mod", "div"])
@pytest.mark.parametrize(("rows", "more"), [(5, 9), (5, 7), (9, 3)])
def test_sharded_tables(partition, rows, more):
    old, new = (optzoo.sharded.RowSharding(n, 2, partition, multiple=1) for n in (rows, more))
    tx, before = placed(old)
    after = resize(*before, {"emb": more}, tx=tx, shardings={"emb": (old, new)})
    fresh = jax.tree.leaves((after[0], tx.init(after[0])))
    kept, all_ids = np.arange(min(rows, more)), np.arange(new.stored_rows)
    ids_of = np.asarray(new.ids_of(all_ids))
    is_new = ids_of >= len(kept)
    same(np.asarray(after[0]["emb"])[is_new], rows_of(jnp.asarray(ids_of[is_new])))
    paths = jax.tree_util.tree_leaves_with_path(before)
    resized = 0
    for (path, a), b, c in zip(paths, jax.tree.leaves(after), fresh, strict=True):
        assert b.sharding == a.sharding
        if "emb" not in jax.tree_util.keystr(path):
            assert bits(a) == bits(b)
            continue
        resized += 1
        assert b.shape == (new.stored_rows, WIDTH)
        a, b, c = map(np.asarray, (a, b, c))
        assert bits(b[new.places_of(kept)]) == bits(a[old.places_of(kept)])
        assert bits(b[is_new]) == bits(c[is_new])
    assert resized == 3


# Rows before and after, columns, dtype, and what the slot of new rows is.
UNLIKE = {
    "grows": (5, 9, 2, jnp.float32, optzoo.momentum(0.1, 0.9), "momentum", 0.0),
    "shrinks": (8, 3, 4, jnp.bfloat16, optzoo.adagrad(0.1), "accumulator", 0.1),
    "one row": (1, 6, 3, jnp.float32, optzoo.row_wise_adagrad(0.1), "accumulator", 0.0),
}


@pytest.mark.parametrize("sharded", [False, True])
def test_unlike_tables_in_one_call(sharded):
    """Each gets its own number of rows, its own new rows and what its optimizer begins with."""
    mesh, x, tables, pairs = mesh_of(2, 2), {}, {}, {}
    for k, (name, (old, new, width, dtype, *_)) in enumerate(UNLIKE.items()):
        axis, partition = ("data", "shard")[k % 2], ("mod", "div")[k % 2]
        pair = [
            optzoo.sharded.RowSharding(n, 2, partition, axis_name=axis, multiple=1)
            for n in (old, new)
        ]
        pairs[name] = tuple(pair)
        value = lambda ids, width=width, dtype=dtype: jnp.ones((len(ids), width), dtype)
        tables[name] = new
        x[name] = (
            optzoo.sharded.create_table(pair[0], mesh, value) if sharded else value(range(old))
        )
    tx = optzoo.param_groups({name: tx for name, (*_, tx, _, _) in UNLIKE.items()})
    state = jax.tree.map(lambda a: (a + 7).astype(a.dtype), tx.init(x))
    rows = lambda k, width: lambda ids: jnp.full((len(ids), width), k)
    init = {name: rows(3 + k, of[2]) for k, (name, of) in enumerate(UNLIKE.items())}
    given = {"shardings": pairs} if sharded else {}
    x, state = optzoo.growing.resize_table(x, state, tables, tx=tx, init=init, **given)
    for k, (name, (old, new, width, dtype, _, slot, start)) in enumerate(UNLIKE.items()):
        arrays = x[name], optzoo.get_slot(state, slot)[name]
        assert arrays[0].dtype == dtype
        if sharded:
            by_ids = functools.partial(optzoo.sharded.in_order_of_ids, tables=pairs[name][1])
            arrays = [np.asarray(by_ids(a))[:new] for a in arrays]
        kept = min(old, new)
        for a, before, after in zip(arrays, (1.0, start + 7), (3.0 + k, start), strict=True):
            assert len(a) == new and a.shape[1:] in ((width,), ())
            a = np.asarray(a, np.float32).reshape(new, -1)[:, 0]
            wanted = [*[before] * kept, *[after] * (new - kept)]
            np.testing.assert_allclose(a, wanted, rtol=2**-8)


def test_a_sharded_table_trains_on():
    mesh, tx = mesh_of(2, names=("shard",)), LAZY()
    loss = lambda p, ids: jnp.mean(jnp.cos(optzoo.lookup(p["emb"], ids) @ p["w"]))
    old, new = (optzoo.sharded.RowSharding(n, 2, multiple=1) for n in (5, 9))
    w = jax.device_put(jnp.ones(WIDTH), NamedSharding(mesh, PartitionSpec()))
    x = {"emb": optzoo.sharded.create_table(old, mesh, rows_of), "w": w}
    state = jax.jit(tx.init, out_shardings=optzoo.state_sharding(tx, x))(x)
    one = {"emb": rows_of(jnp.arange(9)), "w": jnp.ones(WIDTH)}
    of_one, step_of_one = tx.init(one), optzoo.minimize(loss, tx)
    step = optzoo.sharded_minimize(loss, tx, mesh, {"emb": old})
    for batch in [[0, 4], [3, 3]], [[8, 4], [6, 2]]:
        ids = jnp.array(batch).reshape(-1)
        if ids.max() > 4:
            pair = {"emb": (old, new)}
            x, state = resize(x, state, {"emb": 9}, tx=tx, shardings=pair)
            step = optzoo.sharded_minimize(loss, tx, mesh, {"emb": new})
        x, state, value = step(x, state, ids)
        one, of_one, of_loss = step_of_one(one, of_one, ids)
        np.testing.assert_allclose(value, of_loss, 1e-5)
    ordered = np.asarray(optzoo.sharded.in_order_of_ids(x["emb"], new))
    np.testing.assert_allclose(ordered[:9], one["emb"], 1e-5)


def test_sharded_tables_in_lines():
    mesh, tx = mesh_of(2, names=("shard",)), LAZY()
    old, new = (optzoo.sharded.RowSharding(n, 2, multiple=128) for n in (30, 200))
    x = {"emb": optzoo.sharded.create_table(old, mesh, rows_of, lines=True)}
    state = jax.jit(tx.init, out_shardings=optzoo.state_sharding(tx, x))(x)
    f = functools.partial(resize, x, state, {"emb": 200}, tx=tx)
    y, state = f(shardings={"emb": (old, new)})
    same(y["emb"], optzoo.sharded.create_table(new, mesh, rows_of, lines=True))
    for array in y["emb"].value, optzoo.get_slot(state, "m")["emb"].value:
        assert array.sharding.is_equivalent_to(NamedSharding(mesh, new.spec), array.ndim)
    with pytest.raises(
        ValueError, match="are not a multiple of the 64 rows of a line: give multiple=128"
    ):
        f(shardings={"emb": (old, optzoo.sharded.RowSharding(200, 2, multiple=1))})


def test_ages_of_sharded_tables():
    mesh, tx = mesh_of(2, names=("shard",)), optzoo.caught_up(optzoo.adam(0.1), mask="emb")
    old, new = (optzoo.sharded.RowSharding(n, 2, multiple=1) for n in (5, 9))
    x = {"emb": optzoo.sharded.create_table(old, mesh, rows_of)}
    state = jax.jit(tx.init, out_shardings=optzoo.state_sharding(tx, x))(x)
    _, state = resize(x, state, {"emb": 9}, tx=tx, shardings={"emb": (old, new)})
    assert state.last["emb"].sharding == NamedSharding(mesh, new.spec)
    assert state.last["emb"].shape == (new.stored_rows,)


# Deferred rows


@pytest.mark.parametrize("name", DEFERRED)
def test_rows_that_rest(name):
    tx, _, before = deferred(name)
    flushed = optzoo.rows.catch_up(*before)
    after = resize(*before, {"emb": MORE}, tx=tx)
    new = {**before[0], "emb": after[0]["emb"]}
    # Two updates were made.
    now = lambda node: node._replace(last=jax.tree.map(lambda a: a + 2, node.last))
    fresh = map_nodes(CaughtUpState, now, tx.init(new))
    check_resized(flushed, after, (new, fresh), ROWS)


def test_rows_that_rest_train_on():
    """For longer than the horizon, as if the table had been larger from the start."""
    tx, step, before = deferred("alone")
    x, state = resize(*before, {"emb": MORE}, tx=tx)
    dense = optzoo.adam(0.1)
    y = params(MORE)
    of_y, step_of_y = dense.init(y), optzoo.minimize(loss, dense)
    for ids in ([0, 1, 4], [2, 2, 0]):
        y, of_y, _ = step_of_y(y, of_y, jnp.array(ids))
    for i in range(10):
        ids = jnp.array([i % 2, 6, 1])
        x, state, _ = step(x, state, ids)
        y, of_y, _ = step_of_y(y, of_y, ids)
    np.testing.assert_allclose(optzoo.eval_params(x, state)["emb"], y["emb"], 1e-5, 1e-6)


@pytest.mark.parametrize(("rows", "more"), [(4000, 4100), (4100, 4000)])
def test_rows_begin_to_rest_as_tables_become_large(rows, more):
    tx = optzoo.caught_up(optzoo.adam(0.1), horizon=4)
    x = jnp.ones((rows, 1))
    y, state = optzoo.growing.resize_table(x, tx.init(x), {"": more}, tx=tx)
    assert samples.avals(state) == samples.avals(jax.eval_shape(tx.init, y))


def test_collected_rows_that_are_dropped_are_forgotten():
    """Of each table those beyond its own new size."""
    x = {"a": np.ones((5, 2), np.float32), "b": np.ones((7, 3), np.float32)}
    small, collected = {"a": 2, "b": 5}, {"a": [1, 4, 4], "b": [1, 4, 6]}
    tx = optzoo.accumulate(optzoo.gradient_descent(1.0), 2, max_rows=dict.fromkeys(x, 3))

    def rows(of, value):
        values = {name: jnp.full((len(of[name]), a.shape[1]), value) for name, a in x.items()}
        return {n: optzoo.SparseRows(jnp.array(of[n]), v, len(x[n])) for n, v in values.items()}

    @jax.jit
    def run(y):
        y, state = samples.step(tx, rows(collected, 3.0), y)
        for tables in small, {name: len(a) for name, a in x.items()}:
            y, state = optzoo.growing.resize_table(y, state, tables, tx=tx)
        return samples.step(tx, rows({name: [0] for name in x}, 0.0), y, state)[0]

    y = run(x)
    np.testing.assert_array_equal(y["a"][:, 0], [1, -2, 0, 0, 0])
    np.testing.assert_array_equal(y["b"][:, 0], [1, -2, 1, 1, -2, 0, 0])


# Errors


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tables": {"embs": 8}}, ValueError, "tables: no parameter matches ['embs']"),
        ({"tables": {"emb": 8, "e.*": 9}}, ValueError, "all match parameter 'emb'"),
        ({"tables": {"mlp/b": 8}}, ValueError, "'mlp/b' is a number and has no rows"),
        ({"tables": {"emb": 8.0}}, TypeError, "tables['emb'] must be an int, got 8.0"),
        ({"tables": {"emb": 0}}, ValueError, "tables['emb'] must be at least 1, got 0"),
        ({"tables": 8}, TypeError, "tables must be a dict from patterns"),
        ({"init": 0.0}, TypeError, "init must be a function of ids or a dict"),
        ({"init": {"x": rows_of}}, ValueError, "init: no parameter matches ['x']"),
        ({"init": lambda ids: jnp.ones((len(ids), 3))}, ValueError, "rows of shape (3, 2) for 3"),
        ({"tx": None}, TypeError, "tx must be an optax transformation"),
        ({"tx": optzoo.momentum(0.1, 0.9)}, StateError, "the state does not match"),
        ({"state": LAZY().init({"emb": jnp.ones(5)})}, StateError, "the state does not match"),
        ({"state": LAZY().init(params(MORE))}, StateError, "the state does not match"),
        (
            {"shardings": {"emb": 3}},
            TypeError,
            "a pair of the old and the new optzoo.sharded.RowSharding",
        ),
        ({"shardings": [3]}, TypeError, "shardings must be a dict from patterns"),
    ],
)
def test_bad_arguments(change, error, message):
    tx = LAZY()
    given = {"params": params(), "state": tx.init(params()), "tables": {"emb": 8}, "tx": tx}
    with pytest.raises(error, match=re.escape(message)):
        resize(**{**given, **change})


@pytest.mark.parametrize(
    ("tables", "pair", "message"),
    [
        ({"emb": 9}, None, "is sharded by rows: give shardings={'emb': (old, new)}"),
        ({"emb": 8}, (5, 9, 2), "has num_rows=9, but tables has 8"),
        ({"mlp": 9}, (5, 9, 2), "has num_rows=9, but tables has None"),
        ({"emb": 9}, (9, 9, 2), "has 8 rows, but its sharding stores 12"),
        ({"emb": 9}, (5, 9, 4), "has 2 shards before and 4 after"),
    ],
)
def test_bad_shardings(tables, pair, message):
    tx, before = placed(optzoo.sharded.RowSharding(5, 2, multiple=1))
    shardings = None
    if pair:
        old, new, shards = pair
        made = (
            optzoo.sharded.RowSharding(old, 2, multiple=1),
            optzoo.sharded.RowSharding(new, shards, multiple=1),
        )
        shardings = {"emb": made}
    with pytest.raises(ValueError, match=re.escape(message)):
        resize(*before, tables, tx=tx, shardings=shardings)


STAYING = {
    "row_wise_lamb": lambda: optzoo.row_wise_lamb(0.1),
    "partial_row_wise_lamb": lambda: optzoo.partial_row_wise_lamb(0.1),
    "row_wise_lars": lambda: optzoo.row_wise_lars(0.1),
    "FBGEMM": lambda: optzoo.create("LARS_SGD", learning_rate=0.1),
    "groups": lambda: optzoo.param_groups(
        {"emb": optzoo.row_wise_lamb(0.1), "w": optzoo.adam(0.1)}
    ),
    "chain": lambda: optax.chain(optax.clip(1.0), optzoo.row_wise_lars(0.1)),
    "8 bits": lambda: optzoo.slots_dtype(optzoo.row_wise_lamb(0.1), "int8"),
    "packed": lambda: optzoo.slots_dtype(optzoo.row_wise_lamb(0.1), "float32", packed=True),
    "accumulate": lambda: optzoo.accumulate(optzoo.row_wise_lamb(0.1), 2),
}


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", STAYING)
def test_rows_of_zeros_that_never_move_are_told(name):
    tx, x = STAYING[name](), {"emb": jnp.ones((2, 8)), "w": jnp.ones((3, 8))}
    told = lambda: pytest.warns(optzoo.InitialValueWarning, match="'emb' are zero without init")
    state, resize = tx.init(x), optzoo.growing.resize_table
    with told() as seen:
        resize(x, state, {"emb": 3}, tx=tx)
    assert [w.filename for w in seen] == [__file__]
    with told() as seen:
        optzoo.growing.reset_rows(x, state, {"emb": jnp.array([1])}, tx=tx)
    assert [w.filename for w in seen] == [__file__]
    for rows in (1, 2):  # none of them new
        resize(x, state, {"emb": rows}, tx=tx)
    resize(x, state, {"emb": 3}, tx=tx, init=lambda ids: jnp.ones((len(ids), 8)))
    if name == "groups":
        resize(x, state, {"w": 4}, tx=tx)  # of another group


@pytest.mark.usefixtures("eager")
@by_rows
def test_what_never_moves_is_told(name):
    """Every optimizer, by what it does to a row of zeros."""
    tx, x = samples.make(optzoo.CATALOG[name]), {"emb": jnp.zeros((2, WIDTH))}
    state = tx.init(x)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", optzoo.InitialValueWarning)
        optzoo.growing.resize_table(x, state, {"emb": 3}, tx=tx)
    for _ in range(2):
        g = {"emb": optzoo.SparseRows(jnp.array([1]), jnp.full((1, WIDTH), 0.5), 2)}
        x, state = samples.step(tx, g, x, state)
    assert len(seen) == (not np.any(x["emb"]))


def test_new_rows_in_the_padding_of_shards_are_told():
    """The stored rows stay as many."""
    tx, of = optzoo.row_wise_lars(0.1), {n: optzoo.sharded.RowSharding(n, 2) for n in range(4, 7)}
    [stored] = {s.stored_rows for s in of.values()}
    x = {"emb": jnp.ones((stored, WIDTH))}
    resized = lambda n: optzoo.growing.resize_table(
        x, tx.init(x), {"emb": n}, tx=tx, shardings={"emb": (of[5], of[n])}
    )
    with pytest.warns(optzoo.InitialValueWarning, match="parameter 'emb'"):
        resized(6)
    for n in (5, 4):  # no new row
        resized(n)
