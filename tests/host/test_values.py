"""A table on the host has the values of an ordinary table, bit by bit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo.host import arrays, exchange
from optzoo.host import cached as host_cached
from optzoo.host.row_arrays import find_rows
from optzoo.testing import samples

from .cases import (
    CACHE,
    ROWS,
    STEPS,
    WIDTH,
    adam,
    batches,
    cached,
    loss,
    near,
    ordinary,
    others,
    same,
    table,
    train,
)

BY_ROWS = [name for name, entry in optzoo.CATALOG.items() if entry.rows in ("lazy", "linear")]
UNLIKE = ["row_wise_adagrad", "ftrl", "gradient_descent"]
pytestmark = pytest.mark.optimized


def check(tx, **options):
    """Asserts that all values are the same."""
    *want, losses = ordinary(tx, options.get("start"), options.get("data"))
    *got, values, store = cached(tx, **options)
    same(tuple(got), tuple(want))
    assert values == losses
    return store


@pytest.mark.every_value
@pytest.mark.parametrize("name", UNLIKE)
def test_unlike_optimizers(name):
    check(samples.make(optzoo.CATALOG[name]))


@pytest.mark.parametrize("name", BY_ROWS)
def test_every_optimizer_of_touched_rows(name):
    tx = samples.make(optzoo.CATALOG[name])
    if name == "normalized_sgd":  # by the norm of the gradient, a sum in another order
        *got, _, store = cached(tx)
        near(tuple(got), ordinary(tx)[:2])
    else:
        store = check(tx)
    stats = store.stats()
    assert stats.rows_out > 0 and 0 < stats.hits < stats.distinct


STORED = {
    "int8": lambda: optzoo.slots_dtype(adam(), "int8"),
    "packed bfloat16": lambda: optzoo.slots_dtype(adam(), "bfloat16", packed=True),
    "bfloat16": lambda: optzoo.slots_dtype(adam(), "bfloat16"),
    "packed float32": lambda: optzoo.slots_dtype(adam(), "float32", packed=True),
    "groups": lambda: optzoo.param_groups({"table": adam(), "w": optzoo.adam(0.1)}),
    "on_rows": lambda: optzoo.on_rows(optax.adam(0.05)),
    "inject": lambda: optax.inject_hyperparams(optzoo.lazy_adam)(0.05),
    "decay": lambda: optzoo.decoupled_weight_decay(adam(), weight_decay_per_step=0.1),
    "cautious": lambda: optzoo.cautious_weight_decay(adam(), weight_decay_per_step=0.1),
    "clipped by rows": lambda: optzoo.variable_clipping(adam(), {"table": (1,)}, 0.5),
    "hyperball": lambda: optzoo.hyperball(adam(), 0.1, {"table": (1,)}),
    "multitask": lambda: optzoo.multitask(adam()),
    "chain": lambda: optax.chain(optzoo.rows.on_values(optax.clip(0.01)), adam()),
}


@pytest.mark.unique
@pytest.mark.parametrize("name", STORED)
def test_storages_and_wrappers(name):
    check(STORED[name]())


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_policies(policy):
    check(adam(), policy=policy)


def test_master_weights_and_tables_in_16_bits():
    start = table(dtype=jnp.bfloat16)
    check(optzoo.master_weights(adam()), start=start)
    check(adam(), start=start)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
def test_a_cache_has_the_dtype_of_its_table(dtype):
    store = optzoo.host.HostTable(jax.ShapeDtypeStruct((9, 2), dtype), adam(), 4)
    params, state = store.init()
    assert params["table"].dtype == dtype
    assert store.read(params, state, np.array([0, 8])).dtype == dtype


@pytest.mark.parametrize("row", [(), (1,), (2, 3)])
def test_rows_of_other_ranks(row):
    check(adam(), start=table(row=row))


NORMS = {
    "clip_by_global_norm": lambda: optzoo.clip_by_global_norm(0.1),
    "clip_by_norm": lambda: optzoo.transforms.clip_by_norm(0.1),
    "zero_if_norm_exceeds": lambda: optzoo.transforms.zero_if_norm_exceeds(1.0),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_are_sums_in_another_order(name):
    """The only values that may differ, by rounding."""
    tx = optax.chain(NORMS[name](), adam())
    *want, losses = ordinary(tx)
    *got, values, _ = cached(tx)
    near(tuple(got), tuple(want))
    np.testing.assert_allclose(values, losses, 1e-5)


def of_ids(*ids):
    return [(np.array(i, np.int32), np.ones(len(i), np.float32)) for i in ids]


CASES = {
    "no ids": of_ids([], [3], []),
    "all equal": of_ids([5] * 9, [5] * 9, [7] * 9),
    "only padding": of_ids([ROWS] * 3, [1, 2, 3]),
    "exactly the cache": of_ids(range(CACHE), range(CACHE, 2 * CACHE), range(CACHE), [0, 0, 1]),
    "first and last": of_ids([0, ROWS - 1], [ROWS - 1, 0, ROWS]),
}


@pytest.mark.parametrize("case", CASES)
def test_ids_at_the_ends(case):
    check(adam(), data=CASES[case])


def test_a_cache_that_is_larger_than_the_table():
    store = check(adam(), cache=ROWS + 9)
    assert store.stats().rows_out == 0


def test_ids_of_other_dtypes_and_forms():
    """Of any integers, in a dict of arrays; places have their form."""
    ids = {"a": np.arange(6, dtype=np.uint8).reshape(2, 3), "b": (np.array([7, 1]), [2, 2])}
    store = optzoo.host.HostTable(table(), adam(), CACHE)
    params, state = store.init(others())
    for places, batch in store.ahead([ids], ids=lambda batch: batch):
        assert batch is ids
        params, state = store.swap(params, state)
        wanted = {"a": ids["a"], "b": (ids["b"][0], np.array(ids["b"][1]))}
        assert jax.tree.structure(places) == jax.tree.structure(wanted)
        for at, of in zip(*map(jax.tree.leaves, (places, wanted)), strict=True):
            np.testing.assert_array_equal(params["table"][at], table()[of])


# Several tables


def two():
    """Two unlike tables in dicts, beside a layer."""
    users, items = table(30, (4,), seed=3), table(40, (WIDTH,), np.float32, seed=4)
    params = {"emb": {"users": users, "b": np.ones(2, np.float32)}, "items": items, "w": np.ones(8)}
    return jax.tree.map(lambda x: x.astype(np.float32), params)


def of_two(p, users, items, y):
    u, i = p["emb"]["users"][users], p["items"][items]
    return jnp.mean((jnp.sum(u, 1) * (i @ p["w"]) + jnp.sum(p["emb"]["b"]) - y) ** 2)


@pytest.mark.unique
def test_several_tables_beside_layers():
    """One swap for both; with groups and a clip. Gathers are lookups, in small caches, too."""
    tx = optax.chain(
        optzoo.rows.on_values(optax.clip(0.5)),
        optzoo.param_groups(
            {"users": optzoo.adagrad(0.1), "items": adam(), "b|w": optzoo.momentum(0.1, 0.9)}
        ),
    )
    rng, full = np.random.default_rng(5), two()
    data = [
        (rng.integers(0, 30, 6), rng.integers(0, 40, 6), rng.normal(size=6).astype(np.float32))
        for _ in range(5)
    ]
    want = jax.tree.map(jnp.array, full)
    want_state = tx.init(want)
    step = optzoo.minimize(of_two, tx, sparse={"users|items": "require"})
    for batch in data:
        want, want_state, expected = step(want, want_state, *batch)
    tables = {"emb/users": full["emb"].pop("users"), "items": full.pop("items")}
    store = optzoo.host.HostTable(tables, tx, {"emb/users": 7, "items": 9})
    params, state = store.init(full)
    assert params["emb"]["users"].shape == (7, 4) and params["items"].shape == (9, WIDTH)
    step, ids = store.minimize(of_two), lambda batch: {"emb/users": batch[0], "items": batch[1]}
    for places, (_, _, y) in store.ahead(data, ids=ids):
        params, state = store.swap(params, state)
        params, state, value = step(params, state, places["emb/users"], places["items"], y)
    assert value == expected
    users = store.read(params, state, {"emb/users": np.arange(30), "items": np.arange(2)})
    same(users["emb/users"], want["emb"]["users"])
    same(store.flush(params, state), (want, want_state))
    assert store.stats().ids == 60 and 0 < store.stats().hits < store.stats().distinct
    assert repr(store) == "HostTable('emb/users': 7 of 30 rows, 'items': 9 of 40 rows)"


# Checkpoints, in both directions


def test_two_unlike_tables_are_loaded_into_a_folder(tmp_path):
    """And restored from it."""
    want = two(), jax.tree.map(lambda a: a + 1, adam().init(two()))
    tables = {
        "emb/users": jax.ShapeDtypeStruct((30, 4), jnp.float32),
        "items": jax.ShapeDtypeStruct((40, WIDTH), jnp.float32),
    }
    made = lambda: optzoo.host.HostTable(tables, adam(), 9, folder=tmp_path)
    store = made()
    same(store.flush(*store.load(*want)), want)
    store.close()
    store, others = made(), {"emb": {"b": np.zeros(2, np.float32)}, "w": np.zeros(8, np.float32)}
    same(store.flush(*store.init(others)), want)


def test_an_ordinary_run_continues_from_a_flush_and_the_other_way():
    tx, data = optzoo.slots_dtype(adam(), "bfloat16", packed=True), batches(2 * STEPS)
    *want, losses = ordinary(tx, data=data)
    *half, _, _ = cached(tx, data=data[:STEPS])
    *got, values = ordinary(tx, half[0], data[STEPS:], state=half[1])
    same(tuple(got), tuple(want))
    assert values == losses[STEPS:]
    *half, _ = ordinary(tx, data=data[:STEPS])
    store = optzoo.host.HostTable(table(), tx, CACHE)
    params, state, values = train(store, *store.load(*half), data[STEPS:])
    same(store.flush(params, state), tuple(want))
    assert values == losses[STEPS:]


def test_a_store_is_loaded_again():
    """What it had is forgotten, in the cache, too."""
    *want, losses = ordinary(adam())
    store = cached(adam())[-1]
    params = {"table": table(), **others()}
    params, state, values = train(store, *store.load(params, adam().init(params)))
    same(store.flush(params, state), tuple(want))
    assert values == losses


def test_what_a_flush_returns_is_for_reading():
    params, state, *_ = cached(adam())
    with pytest.raises(ValueError, match="read-only"):
        params["table"][0] = 0
    slots = jax.tree.leaves(optzoo.get_slot(state, "m"))
    assert not any(a.flags.writeable for a in slots if a.shape == (ROWS, WIDTH))


def test_the_array_that_was_given_is_the_host():
    start = table()
    store = optzoo.host.HostTable(start, adam(), CACHE)
    params, state, _ = train(store, *store.init(others()))
    assert np.shares_memory(store.flush(params, state)[0]["table"], start)


@pytest.mark.parametrize("chunk", [ROWS - 1, ROWS, ROWS + 1, 7])
def test_tables_in_chunks(chunk, monkeypatch, tmp_path):
    """Rows and slots are made, taken and brought up in parts."""
    for module in (arrays, host_cached):
        monkeypatch.setattr(module, "CHUNK", chunk)
    tx = optzoo.caught_up(optzoo.adam(0.05), mask="table")
    want = optzoo.rows.catch_up(*ordinary(tx)[:2])
    *got, _, store = cached(tx, folder=tmp_path)
    near(tuple(got), want, 1e-5)
    before = jax.tree.map(np.array, tuple(got))
    near(store.flush(*store.load(*before)), before, 0)


def test_rows_made_by_an_initializer():
    rows = optzoo.sharded.uniform_rows(jax.random.key(0), WIDTH)
    shape = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    *want, losses = ordinary(adam(), rows(jnp.arange(ROWS)))
    store = optzoo.host.HostTable(shape, adam(), CACHE, init=rows)
    params, state, values = train(store, *store.init(others()))
    same(store.flush(params, state), tuple(want))
    assert values == losses


def test_slots_that_depend_on_rows_begin_by_them():
    """Hyperball keeps the norms that the rows had at first."""
    start = table()
    tx = optzoo.hyperball(adam(), 0.1, {"table": (1,)})
    want = tx.init({"table": start, **others()})
    store = optzoo.host.HostTable(start, tx, CACHE)
    same(store.flush(*store.init(others()))[1], want)


def test_a_flush_changes_nothing():
    """In a loop, after each step, with a plan that is then made again."""
    *want, losses = ordinary(adam())
    store = optzoo.host.HostTable(table(), adam(), CACHE)
    params, state = store.init(others())
    step, values = store.minimize(loss), []
    for places, (_, y) in store.ahead(batches(), ids=lambda batch: batch[0]):
        params, state, value = step(*store.swap(params, state), places, y)
        store.flush(params, state)
        values.append(float(value))
    same(store.flush(params, state), tuple(want))
    assert values == losses


def test_a_flush_stays_what_it_was_but_for_rows():
    """Steps donate the arrays that it has read."""
    store = optzoo.host.HostTable(table(), adam(), CACHE)
    params, state, _ = train(store, *store.init(others()))
    flushed = store.flush(params, state)
    want = jax.tree.map(np.copy, flushed)
    train(store, params, state)
    assert flushed[0]["w"].tobytes() == want[0]["w"].tobytes()
    moments = lambda state: optzoo.get_slot(state, "m")["w"].tobytes()
    assert moments(flushed[1]) == moments(want[1])
    assert flushed[0]["table"].tobytes() != want[0]["table"].tobytes()


def test_rows_are_read_as_of_now():
    want = ordinary(adam())[0]["table"]
    store = optzoo.host.HostTable(table(), adam(), CACHE)
    step = store.minimize(loss)
    params, state, _ = train(store, *store.init(others()), step=step)
    assert step._cache_size() == 1  # compiled once
    ids = np.arange(ROWS + 1).reshape(1, -1)
    read = store.read(params, state, ids)
    same(read[0, :ROWS], want)
    assert not read[0, ROWS].any()
    assert store.read(params, state, np.zeros((0, 2), int)).shape == (0, 2, WIDTH)


@pytest.mark.unique
def test_exchanges_cost_what_their_rows_cost():
    """No program makes an array of the size of the cache, or copies one."""
    rows, size = 200_000, 256
    deferred = optzoo.caught_up(optzoo.adam(0.1), mask="table")
    params = {"table": jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)}
    places = jax.ShapeDtypeStruct((size,), jnp.int32)
    short = optzoo.slots_dtype(adam(), "int8")
    for tx in (adam(), short, deferred):
        state, where = jax.eval_shape(tx.init, params), find_rows(tx, params, {"table": 10 * rows})
        cache = where.of("table", params, state)
        new = [jax.ShapeDtypeStruct((size, *a.shape[1:]), a.dtype) for a in cache]
        anew = exchange.Reset("table", tx, None, None).reset
        programs = [
            (exchange.rows_at, (cache, places)),
            (exchange.with_rows, (cache, places, new)),
        ]
        if tx is not short:  # JAX 0.9 makes the first codes of all rows
            programs.append((anew, (params, state, places, places)))
        if tx is deferred:
            of = exchange.DeferredExchange("table", where)
            programs += [
                (of._brought_up, (params, state, places)),
                (of._with_rows, (params, state, places, new)),
                (of.current, (params, state, new)),
            ]
        for program, of_it in programs:
            memory = program.lower(*of_it).compile().memory_analysis()
            made = memory.output_size_in_bytes - memory.alias_size_in_bytes
            assert made < 4 * size * 4 * (4 * WIDTH + 2)
            assert memory.temp_size_in_bytes < rows * WIDTH


def test_few_programs():
    """Sizes of exchanges are powers of two, or three halves of one."""
    sizes = [exchange.size_of(n) for n in range(1, 5000)]
    assert sorted(set(sizes)) == [256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144]
    assert all(n <= size for n, size in enumerate(sizes, 1))
    assert all(2 * n > size or size == 256 for n, size in enumerate(sizes, 1))


def test_global_steps_are_given():
    extra = lambda i: {"global_step": jnp.int32(i)}
    tx = optzoo.lazy_adam_gs(0.05)
    *want, _ = ordinary(tx, extra=extra)
    *got, _, _ = cached(tx, extra=extra)
    same(tuple(got), tuple(want))
