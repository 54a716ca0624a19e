"""The train step on sharded tables equals the one on one device."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optzoo
from optzoo.core.rows import is_rows
from optzoo.state.fit import StateError

from ..selection import chosen_first
from .cases import ROWS, WIDTH, ids_of, mesh_of, of_ids, shards, whole

pytestmark = pytest.mark.usefixtures("several_rounds")

KINDS = ["uniform", "zipf", "one_owner", "one_id", "padding", "only_padding"]
W = np.random.default_rng(1).normal(size=(WIDTH, WIDTH)).astype(np.float32)


def loss(params, ids, bags, y):
    """Reads a table twice, and a small one."""
    rows = optzoo.lookup(params["table"], ids) @ params["w"]
    pooled = optzoo.lookup_sparse(params["table"], bags) + optzoo.lookup(
        params["small"], bags[:, 0]
    )
    return jnp.mean((rows - y) ** 2) + jnp.mean(pooled**2)


def batches(kinds, number, mesh):
    """The kinds of ids take turns."""
    for seed, kind in zip(range(number), itertools.cycle(np.atleast_1d(kinds))):
        y = np.random.default_rng(seed).normal(size=(4 * mesh.size, WIDTH))
        shards = mesh.shape["shard"]
        ids = ids_of(kind, (4 * mesh.size,), shards, seed)
        bags = ids_of(kind, (4 * mesh.size, 3), shards, seed + 100)
        yield ids, bags, jnp.asarray(y, jnp.float32)


@functools.cache
def train_on_one(tx, kinds, mesh, steps=3):
    params = {"table": whole(), "w": W, "small": whole()}
    state, step, losses = tx.init(params), optzoo.minimize(loss, tx), []
    for batch in batches(kinds, steps, mesh):
        params, state, value = step(params, state, *batch)
        losses.append(value)
    return jax.device_get((params, state, np.stack(losses)))


def start(tx, mesh, s):
    place = lambda x: jax.device_put(x, NamedSharding(mesh, P()))
    params = {"table": shards(s, mesh), "w": place(W), "small": place(whole())}
    return params, jax.jit(tx.init, out_shardings=optzoo.state_sharding(tx, params))(params)


def shapes(tx, mesh, s):
    """Of what ``start`` gives: enough to trace a step."""
    params = {"table": tables(s, mesh), "w": W, "small": whole()}
    return params, jax.eval_shape(tx.init, params)


tables = functools.cache(shards)


def train(tx, kinds, mesh, s, steps=3, **options):
    params, state = start(tx, mesh, s)
    step, losses = optzoo.sharded_minimize(loss, tx, mesh, {"table": s}, **options), []
    for batch in batches(kinds, steps, mesh):
        params, state, value = step(params, state, *batch)
        losses.append(value)
    return params, state, np.stack(losses)


def check(trained, expected, s):
    (params, state, losses), (wanted, of_one, values) = trained, expected
    np.testing.assert_allclose(losses, values, rtol=2e-6)
    np.testing.assert_allclose(of_ids(params["table"], s), wanted["table"], atol=2e-6)
    for name in ("w", "small"):
        np.testing.assert_allclose(params[name], wanted[name], atol=2e-6)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(of_one), strict=True):
        a = of_ids(a, s) if a.shape[:1] == (s.stored_rows,) else np.asarray(a)
        np.testing.assert_allclose(a, b, atol=2e-6)


LAZY = {
    "lazy_adam": optzoo.lazy_adam(0.01),
    "row_wise_adagrad": optzoo.row_wise_adagrad(0.1),
    "on_rows": optzoo.on_rows(optax.adamw(0.01)),
    "groups": optzoo.param_groups({"table": optzoo.ftrl(0.1), ".*": optzoo.adam(0.01)}),
    "slots_dtype": optzoo.slots_dtype(optzoo.lazy_adam(0.01), jnp.bfloat16, packed=True),
}


@pytest.mark.parametrize("name", LAZY)
def test_equal_to_one_device_in_rounds(name):
    partition = "mod" if len(name) % 2 else "div"
    s, mesh = optzoo.sharded.RowSharding(ROWS, 4, partition, multiple=16), mesh_of(4)
    options = {"capacity_factor": 0.01}  # one row of each owner in a round, or two
    kinds = tuple(KINDS)
    trained = train(LAZY[name], kinds, mesh, s, 6, **options)
    check(trained, train_on_one(LAZY[name], kinds, mesh, 6), s)


MESHES = {
    "1": ((1,), ("shard",), "shard"),
    "8": ((8,), ("shard",), "shard"),
    "data-x-shard": ((2, 4), ("data", "shard"), "shard"),
    "two-axes": ((2, 4), ("shard", "other"), ("shard", "other")),
}


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("1", 0.1),
        ("data-x-shard", 0.1),
        ("two-axes", None),
        ("1", None),
        ("8", None),
        ("8", 0.1),
        ("data-x-shard", None),
        ("two-axes", 0.1),
    ],
)
def test_meshes(name, factor):
    sizes, names, axis_name = MESHES[name]
    mesh = mesh_of(*sizes, names=names)
    n = int(np.prod([mesh.shape[a] for a in np.atleast_1d(axis_name)]))
    s = optzoo.sharded.RowSharding(ROWS, n, axis_name=axis_name, multiple=64)
    tx = optzoo.lazy_adam(0.01)
    trained = train(tx, "zipf", mesh, s, capacity_factor=factor)
    check(trained, train_on_one(tx, "zipf", mesh), s)


@pytest.mark.parametrize(
    "name",
    chosen_first(["adam", "momentum", "nadam", "moving_average"], ["adam", "moving_average"]),
)
def test_all_optimizers_in_one_round(name):
    tx = {
        "adam": optzoo.adam(0.01, eps=1e-3),
        "momentum": optzoo.momentum(0.1, 0.9),
        "nadam": optzoo.nadam(0.01, eps=1e-3),
        "moving_average": optzoo.moving_average(optzoo.lazy_adam(0.01), 0.9),
    }[name]
    s, mesh = optzoo.sharded.RowSharding(ROWS, 4, multiple=16), mesh_of(4)
    trained = train(tx, "zipf", mesh, s, capacity_factor=None)
    expected = train_on_one(tx, "zipf", mesh)
    check(trained, expected, s)
    if name == "moving_average":
        averages = optzoo.eval_params(*trained[:2])["table"]
        wanted = optzoo.eval_params(*expected[:2])["table"]
        assert averages.sharding.is_equivalent_to(trained[0]["table"].sharding, 2)
        np.testing.assert_allclose(of_ids(averages, s), wanted, atol=2e-6)


def test_transport_in_16_bits():
    """Rows and gradients are rounded to 8 bits on the way, the table is not."""
    s, mesh, tx = (
        optzoo.sharded.RowSharding(ROWS, 4, multiple=16),
        mesh_of(4),
        optzoo.gradient_descent(0.1),
    )
    options = {"transport": jnp.bfloat16, "capacity_factor": 0.1}
    params, _, losses = train(tx, "uniform", mesh, s, **options)
    expected, _, values = train_on_one(tx, "uniform", mesh)
    moved = np.abs(expected["table"] - whole()).max()
    error = np.abs(of_ids(params["table"], s) - expected["table"]).max()
    assert 1e-5 * moved < error < 0.02 * moved
    np.testing.assert_allclose(losses, values, rtol=0.01)


@pytest.mark.parametrize(("dtype", "y"), [("float16", 6 * [3e4]), ("bfloat16", [256, *5 * [1]])])
def test_a_loss_in_16_bits_is_rounded_once(dtype, y):
    """The sum of the first is no float16; that of the second is 261, between two of bfloat16."""
    loss = lambda params, y: jnp.sum(y.astype(dtype)) + params["w"].astype(dtype)
    params, tx = {"w": jnp.zeros([])}, optzoo.gradient_descent(1.0)
    step = optzoo.sharded_minimize(loss, tx, mesh_of(2, 3), {})
    value = step(params, tx.init(params), np.float32(y))[2]
    assert value.dtype == dtype and value == np.mean(y)


@pytest.mark.unique
def test_means_are_rounded_once():
    """The part of a device when it is sent; that of all devices, in 16 bits, at the end."""
    mesh, s = mesh_of(2, 3), optzoo.sharded.RowSharding(ROWS, 3, multiple=16)
    rng, dtypes = np.random.default_rng(0), {"wide": jnp.float32, "half": jnp.bfloat16}
    draw = lambda most, n: rng.integers(1, most, (mesh.size, n, WIDTH)).astype(np.float32)
    # Their sums are exact in float32.
    given = {"wide": draw(2**12, 6), "half": draw(2**8, 6), "layer": draw(2**8, 1)}
    ids = np.tile([7, 7, 7, 9, 9, 11], (mesh.size, 1))
    params = {name: shards(s, mesh).astype(dtype) * 0 for name, dtype in dtypes.items()}
    params["layer"] = jnp.zeros(WIDTH, jnp.bfloat16)

    def loss(params, ids, given):
        rows = {name: optzoo.lookup(params[name], ids) for name in dtypes}
        rows["layer"] = params["layer"][None]
        return sum(jnp.sum(rows[name] * y) for name, y in given.items())

    tx, tables = optzoo.gradient_descent(1.0), dict.fromkeys(dtypes, s)
    step = optzoo.sharded_minimize(loss, tx, mesh, tables, transport=jnp.bfloat16)
    flat = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), (ids, given))
    params, _, _ = step(params, tx.init(params), *flat)
    rounded = lambda a: a.astype(np.float32).astype(jnp.bfloat16).astype(np.float64)
    want = {"layer": rounded(given["layer"].sum((0, 1), np.float64) / mesh.size)}
    for name in dtypes:
        sums = np.zeros((mesh.size, ROWS, WIDTH))
        np.add.at(sums, (np.arange(mesh.size)[:, None], ids), given[name])
        total = rounded(sums / mesh.size).sum(0)
        want[name] = rounded(total) if name == "half" else total
        params[name] = of_ids(params[name], s)
    for name, x in params.items():
        np.testing.assert_array_equal(-np.asarray(x, np.float64), want[name], name)


def test_all_rows_are_sent_in_the_dtype_of_transport():
    """There and back, the gradients too; ids are integers."""
    s, mesh, tx = optzoo.sharded.RowSharding(ROWS, 4, multiple=16), mesh_of(4), LAZY["lazy_adam"]
    step = optzoo.sharded_minimize(loss, tx, mesh, {"table": s}, transport=jnp.bfloat16)
    program = jax.make_jaxpr(step)(*shapes(tx, mesh, s), *next(batches("uniform", 1, mesh)))
    sent = re.findall(r":(\w+)\S* = all_to_all", str(program))
    in_first, in_others = ["bf16", "bf16", "i32"], ["bf16", "bf16", "i32", "i32"]
    assert sorted(sent) == sorted(in_first + in_others)


def test_ids_of_64_bits(x64):
    with x64(True):
        s, mesh, tx = (
            optzoo.sharded.RowSharding(ROWS, 4, multiple=16),
            mesh_of(4),
            optzoo.lazy_adam(0.01),
        )
        params, state = start(tx, mesh, s)
        of_one = {"table": whole(), "w": W, "small": whole()}
        one = tx.init(of_one)
        step = optzoo.sharded_minimize(loss, tx, mesh, {"table": s}, capacity_factor=0.1)
        ids, bags, y = next(batches("zipf", 1, mesh))
        batch = ids.astype(jnp.int64), bags.astype(jnp.int64), y
        params, state, value = step(params, state, *batch)
        of_one, one, wanted = optzoo.minimize(loss, tx)(of_one, one, *batch)
        np.testing.assert_allclose(value, wanted, rtol=2e-6)
        np.testing.assert_allclose(of_ids(params["table"], s), of_one["table"], atol=2e-6)


@pytest.mark.parametrize("factor", [None, 0.01])
def test_clipping_by_the_global_norm(factor):
    s, mesh, tx = optzoo.sharded.RowSharding(ROWS, 4, multiple=16), mesh_of(4), optzoo.adagrad(0.1)
    trained = train(tx, "zipf", mesh, s, capacity_factor=factor, max_norm=0.1)
    one = optax.chain(optzoo.clip_by_global_norm(0.1), tx)
    params, state, losses = train_on_one(one, "zipf", mesh)
    check(trained, (params, state[1], losses), s)


def test_the_number_of_devices_may_change():
    tx, steps = LAZY["lazy_adam"], 2
    old = optzoo.sharded.RowSharding(ROWS, 4, multiple=64)
    params, state, _ = train(tx, "zipf", mesh_of(4), old, steps)
    ordered = optzoo.sharded.in_order_of_ids((params, state), {"table": old}, params)
    saved = jax.tree.map(np.asarray, ordered)
    mesh, s = mesh_of(8), optzoo.sharded.RowSharding(ROWS, 8, multiple=64)
    like = start(tx, mesh, s)
    moved = jax.tree.map(lambda x, a: jax.device_put(x, a.sharding), saved, like)
    params, state = optzoo.sharded.from_order_of_ids(moved, {"table": s}, like[0])
    step = optzoo.sharded_minimize(loss, tx, mesh, {"table": s})
    one = train_on_one(tx, "zipf", mesh_of(4), steps)[:2]
    step_one = optzoo.minimize(loss, tx)
    for batch in batches("uniform", 2, mesh):
        params, state, value = step(params, state, *batch)
        *one, expected = step_one(*one, *batch)
        np.testing.assert_allclose(value, expected, rtol=2e-6)
    check((params, state, 0.0), (*one, 0.0), s)


def test_auxiliary_data_and_extra_arguments():
    s, mesh = optzoo.sharded.RowSharding(ROWS, 4, multiple=16), mesh_of(4)
    tx = optzoo.lazy_adam(0.01)
    params, state = start(tx, mesh, s)
    with_aux = lambda p, ids, bags, y: (loss(p, ids, bags, y), {"ids": ids})
    step = optzoo.sharded_minimize(with_aux, tx, mesh, {"table": s}, has_aux=True)
    (batch,) = batches("uniform", 1, mesh)
    before = np.asarray(params["w"])
    params, state, _, aux = step(params, state, *batch, learning_rate=0.0)
    np.testing.assert_array_equal(aux["ids"].reshape(-1), batch[0])
    np.testing.assert_array_equal(params["w"], before)


@pytest.mark.parametrize(
    "no_bags",
    [
        lambda p, ids: jnp.sum(jax.ops.segment_sum(optzoo.lookup(p["table"], ids), ids, 3)),
        lambda p, ids: jnp.sum(optzoo.lookup_sparse(p["table"], ids, ids, 3)),
    ],
    ids=["constant", "empty"],
)
def test_a_loss_of_empty_bags_alone(no_bags):
    """That it is the same on all devices does not mean that it is their sum."""
    s, mesh = optzoo.sharded.RowSharding(ROWS, 4, multiple=16), mesh_of(4)
    tx = optzoo.gradient_descent(0.1)
    params, state = start(tx, mesh, s)
    step = optzoo.sharded_minimize(no_bags, tx, mesh, {"table": s})
    params, state, value = step(params, state, jnp.zeros(0, jnp.int32))
    assert value == 0
    np.testing.assert_array_equal(of_ids(params["table"], s), whole())
    np.testing.assert_array_equal(params["w"], W)


def refused(words, tx=None, fn=loss, tables=None, error=ValueError, **options):
    s, mesh = optzoo.sharded.RowSharding(ROWS, 4, multiple=16), mesh_of(4)
    tx = LAZY["lazy_adam"] if tx is None else tx
    params, state = shapes(tx, mesh, s)
    (batch,) = batches("uniform", 1, mesh)
    with pytest.raises(error, match=words):
        step = optzoo.sharded_minimize(fn, tx, mesh, tables or {"table": s}, **options)
        jax.eval_shape(step, params, state, *batch)


@pytest.mark.parametrize(
    "tx",
    [
        optzoo.adam(0.01),
        optzoo.nadam(0.01),
        optax.chain(optzoo.rows.densify(), optzoo.adagrad(0.1)),
        optzoo.moving_average(optzoo.lazy_adam(0.01), 0.9),
    ],
    ids=["adam", "nadam", "densify", "moving_average"],
)
def test_optimizers_that_need_one_round_are_refused_in_several(tx):
    refused(r"capacity_factor=None.*caught_up\(optzoo.adam", tx, capacity_factor=0.01)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda rows: jax.lax.map(lambda row: 2 * row, rows),
            "`scan` reduces or iterates over the rows",
        ),
        (lambda rows: jax.lax.pmean(rows, "shard"), "`psum.*` mixes the rows of several shards"),
        (
            lambda rows: rows - jnp.mean(rows, 0, keepdims=True),
            "`sub` uses a value computed from the rows of one shard only",
        ),
    ],
    ids=["loop", "collective", "mean"],
)
def test_changes_of_rows_that_a_shard_cannot_make(change, words):
    on_tables = lambda g: g.with_values(change(g.values)) if is_rows(g) else g
    changed = optax.stateless(
        lambda updates, params: jax.tree.map(on_tables, updates, is_leaf=is_rows)
    )
    refused(words, optax.chain(changed, optzoo.lazy_adam(0.01)))


def test_bad_input():
    s, wrong = optzoo.sharded.RowSharding(ROWS, 4, multiple=16), optzoo.sharded.RowSharding(9999, 4)
    refused("no parameter matches", tables={"tabel": s})
    refused("all match parameter 'table'", tables={"table": s, "t.*": s})
    words = "must have the 12288 stored rows .* add rows to a whole table by optzoo.growing.resize"
    refused(words, tables={"table": wrong})
    refused("num_shards must be the size", tables={"table": optzoo.sharded.RowSharding(ROWS, 3)})
    refused(
        "mesh has no axis 'x'",
        tables={"table": optzoo.sharded.RowSharding(ROWS, 4, axis_name="x")},
    )
    refused("capacity_factor must be", capacity_factor=0.0)
    refused("max_norm must be", max_norm=-1.0)
    with pytest.raises(TypeError, match="tx must be"):
        optzoo.sharded_minimize(loss, "adam", mesh_of(4), {"table": s})
    l2 = lambda p, *batch: loss(p, *batch) + jnp.sum(p["table"] ** 2)
    refused("table 'table' is sharded by rows, so the loss can read it", fn=l2)
    whole = lambda p: jnp.sum(jax.lax.stop_gradient(p["table"]))  # needs no gradient
    hidden = lambda p, *batch: loss(p, *batch) + whole(p)
    refused("table 'table' is sharded by rows, so the loss can read it", fn=hidden)
    in_aux = lambda p, *batch: (loss(p, *batch), whole(p))
    refused("table 'table' is sharded by rows, so the", fn=in_aux, has_aux=True)
    twice = lambda p, ids, *_: jnp.sum(
        optzoo.lookup(p["table"], optzoo.lookup(p["table"], ids)[:, 0].astype(int))
    )
    refused("ids depend on looked-up rows, but", fn=twice)
    averaged = lambda p, *batch: jax.lax.pmean(loss(p, *batch), "shard")
    refused("the mean over the devices", fn=averaged)


def test_what_comes_with_a_step():
    s, mesh = optzoo.sharded.RowSharding(ROWS, 4, multiple=16), mesh_of(4)
    tx, tables = optzoo.lazy_adam(0.01), {"table": s}
    params, state = shapes(tx, mesh, s)
    (batch,) = batches("uniform", 1, mesh)
    run = lambda fn, params, state, *batch, **options: jax.eval_shape(
        optzoo.sharded_minimize(fn, tx, mesh, tables, **options), params, state, *batch
    )
    with pytest.raises(
        ValueError, match=r"batch\[1\] has 14 examples, which cannot be divided among the 4 devices"
    ):
        run(loss, params, state, batch[0], batch[1][:14], batch[2])
    _, other = shapes(optzoo.adagrad(0.1), mesh, s)
    with pytest.raises(StateError, match=r"AdamSlots\(m, v\).*AdagradSlots"):
        run(loss, params, other, *batch)
    with pytest.raises(StateError, match="are swapped"):
        run(loss, state, params, *batch)
    with pytest.raises(TypeError, match=r"got tuple of 2: if .* give has_aux=True"):
        run(lambda *args: (loss(*args), 1), params, state, *batch)
    with pytest.raises(TypeError, match="got the loss alone"):
        run(loss, params, state, *batch, has_aux=True)
    with pytest.raises(TypeError, match="'rng' has dtype uint32"):
        run(loss, params | {"rng": jnp.uint32(1)}, state, *batch)
