"""How large messages are, when they are sent, and batches in several parts."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optzoo
from optzoo.jaxprs.equations import closed_jaxprs
from optzoo.sharded.row_sharding import measured_capacity
from optzoo.train import sharded as train_module

from .cases import ROWS, WIDTH, ids_of, mesh_of, of_ids, shards, whole

WIDE = 5
W = np.random.default_rng(1).normal(size=(WIDTH, WIDE)).astype(np.float32)


def loss(params, ids, y):
    """Two unlike tables, one of them in bags, a replicated table and a layer."""
    rows = optzoo.lookup(params["users"], ids["users"]) @ params["w"]
    pooled = optzoo.lookup_sparse(params["items"], ids["items"]).astype(jnp.float32)
    small = optzoo.lookup(params["small"], ids["users"] % ROWS)
    of_all = jnp.mean((rows - y) ** 2) + jnp.mean(pooled**2) + jnp.mean(jnp.tanh(small))
    return of_all, {"error": jnp.max(jnp.abs(rows - y)), "ids": ids["users"]}


def batch(seed, mesh, kind="zipf", each=8):
    rng, n = np.random.default_rng(seed), each * mesh.size
    ids = {"users": ids_of(kind, (n,), 4, seed), "items": ids_of(kind, (n, 3), 4, seed + 50)}
    return ids, jnp.asarray(rng.normal(size=(n, WIDE)), jnp.float32)


def params_of(mesh=None, s=None, dtype=jnp.float32):
    of = {"users": whole(), "items": whole(WIDE), "w": W, "small": whole(2)}
    if mesh is None:
        of["items"] = jnp.asarray(of["items"], dtype)
        return of
    place = lambda x: jax.device_put(x, NamedSharding(mesh, P()))
    tables = {"users": shards(s, mesh), "items": shards(s, mesh, WIDE).astype(dtype)}
    return tables | {name: place(of[name]) for name in ("w", "small")}


def train(tx, steps, mesh=None, s=None, dtype=jnp.float32, **options):
    params = params_of(mesh, s, dtype)
    if mesh is None:
        state, step = tx.init(params), optzoo.minimize(loss, tx, has_aux=True)
    else:
        options = {"has_aux": True, **options}
        state = jax.jit(tx.init, out_shardings=optzoo.state_sharding(tx, params))(params)
        step = optzoo.sharded_minimize(
            loss, tx, mesh, dict.fromkeys(("users", "items"), s), **options
        )
    for i in steps:
        params, state, value, aux = step(params, state, *batch(i, mesh or mesh_of(2, 4)))
    return params, state, value, aux


class Slots(NamedTuple):
    m: Any


def of_a_user(g, x, s, t):
    """A rule that no optimizer here has."""
    m = 0.9 * s.m + 0.1 * g
    return m / (1 + jnp.abs(m)), Slots(m)


OPTIMIZERS = {
    "of a user": optax.chain(
        optzoo.rules.leafwise(of_a_user, slots=Slots(m=optzoo.rules.zeros)),
        optzoo.transforms.scale_by_learning_rate(0.1),
    ),
    "mixed": optax.chain(
        optzoo.clip_by_global_norm(0.1),
        optzoo.param_groups(
            {
                "users": optzoo.lazy_adam(0.01),
                "items|small": optzoo.caught_up(optzoo.adam(0.01, eps=1e-3), mask=".*"),
                ".*": optzoo.adam(0.01, eps=1e-3),
            }
        ),
    ),
    "lazy_adam": optax.chain(optzoo.clip_by_global_norm(0.1), optzoo.lazy_adam(0.01)),
    "groups": optzoo.param_groups(
        {
            "users": optzoo.ftrl(0.1),
            "items": optzoo.row_wise_adagrad(0.1),
            ".*": optzoo.moving_average(optzoo.adam(0.01, eps=1e-3), 0.9),
        }
    ),
    "caught_up": optzoo.caught_up(optzoo.adam(0.01, eps=1e-3), mask="users|items|small"),
}


@pytest.mark.unique
@pytest.mark.parametrize(
    ("name", "parts", "factor", "kind", "axes"),
    [
        ("mixed", 2, 0.01, "Explicit", ("data", "shard")),
        ("lazy_adam", 2, 0.01, "Explicit", ("data", "shard")),
        ("caught_up", 2, 0.01, "Auto", "shard"),
        ("of a user", 2, 0.01, "Explicit", ("data", "shard")),
        ("groups", 4, None, "Auto", "shard"),
        ("lazy_adam", 8, 0.3, "Auto", "shard"),
        ("groups", 2, 0.01, "Explicit", "shard"),
        ("caught_up", 4, None, "Explicit", ("data", "shard")),
    ],
)
@pytest.mark.usefixtures("several_rounds")
def test_parts_equal_the_whole_batch(name, parts, factor, kind, axes):
    mesh, tx = mesh_of(2, 4, kind=kind), OPTIMIZERS[name]
    n = 4 if axes == "shard" else 8
    s = optzoo.sharded.RowSharding(ROWS, n, axis_name=axes, multiple=64)
    params, state, value, aux = train(tx, range(3), mesh, s, parts=parts, capacity_factor=factor)
    wanted, one, expected, _ = train(tx, range(3))
    if name in ("caught_up", "mixed"):
        params, state = optzoo.rows.catch_up(params, state)
        wanted, one = optzoo.rows.catch_up(wanted, one)
    np.testing.assert_allclose(value, expected, rtol=2e-6)
    for table in ("users", "items"):
        np.testing.assert_allclose(of_ids(params[table], s), wanted[table], atol=2e-6)
    for other in ("w", "small"):
        np.testing.assert_allclose(params[other], wanted[other], atol=2e-6)
    # Each part of each device, in the order of the batch.
    assert aux["error"].shape == (8 * parts,)
    ids, _ = batch(2, mesh)
    np.testing.assert_array_equal(aux["ids"].reshape(-1), ids["users"])


@pytest.mark.unique
@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
@pytest.mark.parametrize("name", ["mixed", "groups", "lazy_adam"])
@pytest.mark.usefixtures("several_rounds")
def test_other_parts_after_a_checkpoint(name, kind):
    """With None among the parameters, and ids of 64 bits from NumPy."""
    mesh, tx = mesh_of(2, 4, kind=kind), OPTIMIZERS[name]
    s = optzoo.sharded.RowSharding(ROWS, 8, axis_name=("data", "shard"), multiple=64)

    def run(parts, none):
        params, values = params_of(mesh, s) | none, []
        state = jax.jit(tx.init, out_shardings=optzoo.state_sharding(tx, params))(params)
        for first, number in zip((0, 2), parts, strict=True):
            options = {"has_aux": True, "parts": number, "capacity_factor": 0.05}
            tables = dict.fromkeys(("users", "items"), s)
            step = optzoo.sharded_minimize(loss, tx, mesh, tables, **options)
            for i in (first, first + 1):
                ids, y = batch(i, mesh)
                ids = {k: np.asarray(x, np.int64) for k, x in ids.items()}
                params, state, value, _ = step(params, state, ids, y)
                values.append(value)
            saved, places = jax.device_get((params, state)), (params, state)
            place = lambda x, old: jax.device_put(x, old.sharding)
            params, state = jax.tree.map(place, saved, places)
        if name == "mixed":
            params, state = optzoo.rows.catch_up(params, state)
        return params, np.stack(values)

    wanted, expected = run((1, 1), {})
    params, values = run((2, 4), {"none": None})
    assert params.pop("none") is None
    np.testing.assert_allclose(values, expected, rtol=3e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-6), params, wanted)


@pytest.mark.unique
# XLA leaves out a rounding to bfloat16 between two sums in one program.
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_a_sum_over_parts_is_rounded_once(dtype):
    """Of a layer, of replicated and of sharded rows: sums of parts that are no 16-bit numbers."""
    mesh, s = mesh_of(4), optzoo.sharded.RowSharding(ROWS, 4, multiple=16)
    params = {name: jnp.zeros((ROWS, 1), dtype) for name in ("layer", "rows")}
    params["table"] = shards(s, mesh, 1).astype(dtype) * 0

    def loss(params, ids, y):
        read = [optzoo.lookup(params[name], ids)[:, 0] for name in ("rows", "table")]
        dense = jax.nn.one_hot(ids, ROWS, dtype=dtype) @ params["layer"][:, 0]
        return jnp.sum((sum(read) + dense).astype(jnp.float32) * y)

    wide = 256.0 if dtype == jnp.bfloat16 else 2048.0
    tx, y = optzoo.gradient_descent(1.0), jnp.array(3 * [wide, 1.0] + [wide + 4, 1.0])
    options = {"parts": 2, "sparse": "allow", "min_rows": 100}
    step = optzoo.sharded_minimize(loss, tx, mesh, {"table": s}, **options)
    params, _, value = step(params, tx.init(params), jnp.full(8, 7), y)
    want = -np.asarray(wide / 2 + 1, dtype)
    found = [params["layer"][7, 0], params["rows"][7, 0], of_ids(params["table"], s)[7, 0]]
    np.testing.assert_array_equal(np.stack([*map(np.asarray, found)]), np.stack(3 * [want]))
    assert value == 0


def sent(step, *args):
    """For each all-to-all of rows or gradients its rows for all owners, and the loops around it."""
    program = jax.make_jaxpr(lambda *args: step(*args))(*args)
    return [(rows, loops) for rows, loops, dtype in _sent(program.jaxpr, 0) if dtype == "float32"]


def _sent(jaxpr, loops):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "all_to_all":
            aval = eqn.outvars[0].aval
            yield aval.shape[0] * aval.shape[1], loops, aval.dtype
        for inner, _ in closed_jaxprs(eqn):
            yield from _sent(inner, loops + (eqn.primitive.name == "while"))


N = 8
SHARDING = optzoo.sharded.RowSharding(20_000, N)


def draw(exponent, seed=0, each=4_000):
    """Ids of which those of small numbers are frequent, by Zipf's law."""
    total = np.cumsum(np.arange(1, SHARDING.num_rows + 1) ** -float(exponent))
    ranks = np.searchsorted(total, np.random.default_rng(seed).random(N * each) * total[-1])
    return jnp.asarray(ranks, jnp.int32)


def large():
    mesh, tx = mesh_of(N, kind="Auto"), optzoo.adagrad(0.1)
    params = {"table": optzoo.sharded.create_table(SHARDING, mesh, lambda i: jnp.ones((len(i), 1)))}
    state = jax.jit(tx.init, out_shardings=optzoo.state_sharding(tx, params))(params)
    of_rows = lambda p, ids: jnp.mean(optzoo.lookup(p["table"], ids) ** 2)
    return lambda **options: (
        optzoo.sharded_minimize(of_rows, tx, mesh, {"table": SHARDING}, **options),
        *jax.tree.map(jnp.copy, (params, state)),
    )


@pytest.mark.unique
@pytest.mark.parametrize("exponent", [1.05, "one id", 0.0, 0.8, 1.2])
def test_messages_have_room_for_the_first_batch(exponent):
    """A little more than it needs; at most as ids at random need, at least a quarter of that.

    The first round is outside of loops.
    """
    ids = jnp.zeros(N * 4_000, jnp.int32) if exponent == "one id" else draw(exponent)
    most = max(SHARDING.required_capacity(part) for part in np.split(np.asarray(ids), N))
    step, params, state = large()()
    at_random, least = (SHARDING.capacity(4_000, factor) for factor in (1.0, 0.25))
    assert sent(step, params, state, ids)[0] == (N * at_random, 0)
    step(params, state, ids)
    _, params, state = large()()
    messages = sent(step, params, state, ids)
    assert sorted(loops for _, loops in messages) == [0, 0, 1, 1]
    [found] = {rows / N for rows, _ in messages}
    assert least <= found <= at_random and (found >= most or found == at_random)
    assert found - most <= 8 + 2 * most**0.5 or found == least
    assert (found == least) == (exponent in ("one id", 1.2))


def test_further_rounds_send_what_has_not_been_sent():
    """The small table, whose rows all find room, is in the first round alone."""
    mesh, tx = mesh_of(N, kind="Auto"), optzoo.adagrad(0.1)
    tables = {"small": optzoo.sharded.RowSharding(N, N, multiple=N), "large": SHARDING}
    rows = lambda width: lambda i: jnp.ones((len(i), width))
    params = {
        name: optzoo.sharded.create_table(s, mesh, rows(width))
        for (name, s), width in zip(tables.items(), (2, 3), strict=True)
    }
    state = jax.jit(tx.init, out_shardings=optzoo.state_sharding(tx, params))(params)
    loss = lambda p, ids: sum(jnp.mean(optzoo.lookup(p[k], ids % N) ** 2) for k in tables)
    step = optzoo.sharded_minimize(loss, tx, mesh, tables, capacity_factor=0.1)
    messages = sent(step, params, state, jnp.arange(N * 400))
    capacity = SHARDING.capacity(400, 0.1)
    # In elements, as the widths differ; then in rows.
    first, further = 2 * tables["small"].rows_per_shard + 3 * capacity, capacity
    assert messages == 2 * [(N * first, 0), (N * further, 1)]  # rows, then gradients


@pytest.mark.unique
def test_later_batches_may_need_more():
    """They are sent in further rounds; nothing is measured or compiled again."""
    make, all_ids = large(), [draw(1.2, 0), draw(0.0, 1), draw(0.8, 2)]
    runs = []
    for options in ({}, {"capacity_factor": None}):
        step, params, state = make(**options)
        for ids in all_ids:
            params, state, value = step(params, state, ids)
        runs.append((params, state, value))
        assert step._cache_size() == 1
        # With other shapes it is measured anew.
        step(*make()[1:], all_ids[0][: N * 1000])
        assert step._cache_size() == 2
    for a, b in zip(*map(jax.tree.leaves, runs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_what_is_measured_is_of_the_parts_of_a_batch():
    """A device of which one part has many ids, and another one a single one."""
    ids = np.zeros((N, 2, 2_000), np.int32)
    ids[3, 1] = draw(0.0)[:2_000]
    ids = jnp.asarray(ids.reshape(-1))
    step, params, state = large()(parts=2)
    step(params, state, ids)
    _, params, state = large()()
    most = SHARDING.required_capacity(ids[7 * 2_000 : 8 * 2_000])
    assert most > 200
    assert sent(step, params, state, ids)[0] == (N * measured_capacity(SHARDING, 2_000, most), 0)


def test_small_messages_are_not_measured(monkeypatch):
    make, ids = large(), jnp.zeros(N * 500, jnp.int32)
    for small, rows in ((SHARDING.capacity(500, 1.0), 1.0), (10, 0.25)):
        monkeypatch.setattr(train_module, "SMALL", small)
        step, params, state = make()
        params, state, _ = step(params, state, ids)
        assert sent(step, params, state, ids)[0] == (N * SHARDING.capacity(500, rows), 0)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"parts": 0}, ValueError, "parts must be at least 1, got 0"),
        ({"parts": 1.5}, TypeError, "parts must be an int, got 1.5"),
        ({"capacity_factor": "all"}, ValueError, "must be a number, 'auto' or None, got 'all'"),
    ],
)
def test_arguments(options, error, match):
    s = optzoo.sharded.RowSharding(ROWS, 4, multiple=16)
    with pytest.raises(error, match=match):
        optzoo.sharded_minimize(loss, optzoo.lazy_adam(), mesh_of(4), {"users": s}, **options)
    with pytest.raises(ValueError, match="needs a mesh: give mesh="):
        optzoo.minimize(loss, optzoo.lazy_adam(), **options)


def test_a_batch_that_the_parts_do_not_divide():
    mesh, tx = mesh_of(4), optzoo.gradient_descent(0.1)
    step = optzoo.minimize(lambda p, x: jnp.sum(p * x), tx, mesh=mesh, parts=3)
    p = jnp.ones([])
    match = (
        r"batch\[0\] has 8 examples, which cannot be divided among 3 parts on each of the 4 "
        "devices .* multiple of 12"
    )
    with pytest.raises(ValueError, match=match):
        step(p, tx.init(p), jnp.ones(8))
    p, _, value = step(p, tx.init(p), jnp.arange(12.0))
    assert value == np.arange(12).sum() / 12 and p == 1 - 0.1 * np.float32(66 / 12)
