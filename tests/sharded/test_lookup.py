"""Lookups in sharded tables equal those in one table, with their gradients."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import optzoo
from optzoo.sharded.exchange import to_transport

from .cases import ROWS, WIDTH, ids_of, mesh_of, of_ids, shards, whole


def sharded_gradients(loss, mesh, tables, *batch):
    """The mean loss of all devices, and the dense gradients of the tables."""

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("shard"), out_specs=(P(), P("shard")))
    def run(tables, *batch):
        mean = lambda tables: jax.lax.pmean(loss(tables, *batch), "shard")
        value, grads = optzoo.value_and_grad(mean, sparse="require")(tables)
        return value, jax.tree.map(
            lambda g: g.to_dense(), grads, is_leaf=lambda g: isinstance(g, optzoo.SparseRows)
        )

    return run(tables, *batch)


def gradients(loss, tables, *batch):
    value, grads = jax.jit(jax.value_and_grad(loss))(tables, *batch)
    return value, grads


@pytest.mark.parametrize(("n", "partition"), [(1, "mod"), (4, "mod"), (4, "div")])
def test_equal_to_one_table(n, partition):
    s = optzoo.sharded.RowSharding(ROWS, n, partition, multiple=16)
    mesh = mesh_of(n, kind="Auto")
    kinds = ["uniform", "zipf", "one_owner", "one_id", "padding", "only_padding"]
    ids = [ids_of(kind, (4 * n, 2), n) for kind in kinds]  # of all kinds in one program
    y = jnp.asarray(np.random.default_rng(1).normal(size=(4 * n, 2, 3)), jnp.float32)
    read = lambda look: (
        lambda t, y, *ids: sum((k + 1) * jnp.mean((look(t, i) - y) ** 2) for k, i in enumerate(ids))
    )
    look = lambda t, i: optzoo.sharded.lookup(t, i, s)
    value, grad = sharded_gradients(read(look), mesh, shards(s, mesh), y, *ids)
    expected, dense = gradients(read(optzoo.lookup), jnp.asarray(whole()), y, *ids)
    np.testing.assert_allclose(value, expected, rtol=2e-6)
    np.testing.assert_allclose(of_ids(grad, s), dense, atol=2e-6)


def tables_of_two_widths(mesh, s):
    tables = {"a": shards(s, mesh), "b": shards(s, mesh, 5), "c": shards(s, mesh)}
    return tables, {"a": whole(), "b": whole(5), "c": whole()}


def test_several_tables_share_messages():
    s, mesh = optzoo.sharded.RowSharding(ROWS, 4, multiple=16), mesh_of(4, kind="Auto")
    tables, wholes = tables_of_two_widths(mesh, s)
    ids = {k: ids_of("zipf", (8,), 4, seed) for seed, k in enumerate("abc")}
    together = lambda t, ids: sum(
        jnp.mean(rows**2) for rows in optzoo.sharded.lookup(t, ids, s).values()
    )
    value, grads = sharded_gradients(together, mesh, tables, ids)
    one_by_one = lambda t, ids: sum(jnp.mean(optzoo.lookup(t[k], ids[k]) ** 2) for k in t)
    expected, dense = gradients(one_by_one, jax.tree.map(jnp.asarray, wholes), ids)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for k, grad in grads.items():
        np.testing.assert_allclose(of_ids(grad, s), dense[k], atol=1e-6)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("shard"), out_specs=(P("shard")))
    def step(tables, ids):
        loss = lambda t: jax.lax.pmean(together(t, ids), "shard")
        return [g.values for g in optzoo.value_and_grad(loss)(tables)[1].values()]

    text = str(jax.make_jaxpr(step)(tables, ids))
    assert len(re.findall(r"= all_to_all\[", text)) == 3  # ids, rows, gradients


# The sums are divided in the same way wherever they are made.
@pytest.mark.unique
@pytest.mark.parametrize(
    ("combiner", "pool"), [("sqrtn", "owner"), ("mean", "here"), ("sum", "owner"), ("sum", "auto")]
)
def test_bags_equal_those_of_one_table(combiner, pool):
    s, mesh = optzoo.sharded.RowSharding(ROWS, 4, multiple=16), mesh_of(4, kind="Auto")
    ids = ids_of("padding", (8, 5), 4)
    weights = jnp.asarray(np.random.default_rng(3).uniform(0.5, 1.5, (8, 5)), jnp.float32)
    y = jnp.asarray(np.random.default_rng(1).normal(size=(8, 3)), jnp.float32)
    bags = functools.partial(optzoo.lookup_sparse, combiner=combiner)
    loss = lambda look: (
        lambda t, ids, w, y: (
            jnp.mean((look(t["t"], ids, weights=w) - y) ** 2)
            + (jnp.mean((look(t["t"], ids) - y) ** 2))
        )
    )
    here = functools.partial(bags, sharding=s, pool=pool)
    value, grad = sharded_gradients(loss(here), mesh, {"t": shards(s, mesh)}, ids, weights, y)
    expected, dense = gradients(loss(bags), {"t": jnp.asarray(whole())}, ids, weights, y)
    np.testing.assert_allclose(value, expected, rtol=2e-6)
    np.testing.assert_allclose(of_ids(grad["t"], s), dense["t"], atol=1e-6)


def pooled(ids, weights, combiner):
    """By NumPy."""
    out = []
    for bag, w in zip(np.asarray(ids), np.asarray(weights), strict=True):
        real = bag < ROWS
        w = w[real].astype(np.float64)
        size = {"sum": 1, "mean": w.sum(), "sqrtn": np.sqrt((w * w).sum())}[combiner]
        total = (whole()[bag[real]] * w[:, None]).sum(0)
        out.append(total / size if real.any() else 0 * total)
    return np.stack(out)


def test_bags_of_one_table():
    ids = np.array(ids_of("padding", (6, 4), 1))
    ids[2] = ROWS  # an empty bag
    weights = np.random.default_rng(3).uniform(0.5, 1.5, (6, 4)).astype(np.float32)

    @jax.jit
    def run(table, ids, weights):
        bags = functools.partial(optzoo.lookup_sparse, table)
        ragged = ids.reshape(-1), np.repeat(np.arange(6), 4), 6
        return {
            combiner: (
                bags(ids, weights=weights, combiner=combiner),
                bags(*ragged, weights=weights.reshape(-1), combiner=combiner),
            )
            for combiner in ("sum", "mean", "sqrtn")
        }

    for combiner, (got, ragged) in run(whole(), ids, weights).items():
        np.testing.assert_allclose(got, pooled(ids, weights, combiner), rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(ragged, got)


def test_bags_of_integers_and_weights_of_another_dtype():
    table, ids = jnp.arange(6).reshape(3, 2), jnp.array([[0, 2], [1, 3]])
    with jax.numpy_dtype_promotion("strict"):
        got = optzoo.lookup_sparse(table, ids, combiner="sum")
        assert got.dtype == table.dtype and got.tolist() == [[4, 6], [2, 3]]
        weights = jnp.array([[1, 3], [2, 0]], jnp.bfloat16)
        got = optzoo.lookup_sparse(table.astype(jnp.float32), ids, weights=weights)
        assert got.dtype == jnp.float32 and got.tolist() == [[3, 4], [2, 3]]


def run(f, mesh, *args, check_vma=True):
    spec = P("shard")
    mapped = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
    return jax.jit(mapped)(*args)


def test_what_cannot_be_read_is_nan():
    s, mesh = optzoo.sharded.RowSharding(ROWS, 4, multiple=16), mesh_of(4, kind="Auto")
    ids = np.tile([[4, 8], [ROWS, ROWS], [-1, 3], [ROWS + 1, 3]], (4, 1))
    many = np.tile(np.arange(9) * 4, 4)  # nine ids of one owner
    bags = functools.partial(optzoo.lookup_sparse, combiner="sum", sharding=s)
    pools = "here", "owner"
    few = {"capacity_factor": 0.1}
    read = lambda t, i, many: (
        optzoo.sharded.lookup(t, i, s),
        {pool: bags(t, i, pool=pool) for pool in pools},
        optzoo.sharded.lookup(t, many, s, **few),
        {pool: bags(t, many[None], pool=pool, **few) for pool in pools},
    )
    rows, totals, found, lost_bags = jax.device_get(run(read, mesh, shards(s, mesh), ids, many))
    expected = np.full((4, 2, 3), np.nan)
    expected[0], expected[1], expected[2:, 1] = whole()[[4, 8]], 0, whole()[3]
    np.testing.assert_array_equal(rows, np.tile(expected, (4, 1, 1)))
    for pool in pools:
        sums = [whole()[4] + whole()[8], np.zeros(3)]
        np.testing.assert_allclose(totals[pool][:2], sums, rtol=1e-6)
        assert np.isnan(totals[pool][2:4]).all()
        assert np.isnan(lost_bags[pool]).all()
    lost = np.isnan(found).any(-1)  # some find no room
    assert 0 < lost.sum() < len(many)
    np.testing.assert_array_equal(found[~lost], whole()[many[~lost]])


@pytest.mark.unique
def test_transport_in_16_bits():
    """Rows are rounded once, and so is the gradient of each device, which is a sum."""
    s, mesh = optzoo.sharded.RowSharding(ROWS, 4, multiple=16), mesh_of(4, kind="Auto")
    ids = ids_of("one_owner", (16,), 4)
    y = np.random.default_rng(0).integers(1, 2**12, (16, WIDTH)).astype(np.float32)

    def read(table, ids, y):
        of = lambda table: optzoo.sharded.lookup(table, ids, s, transport=jnp.bfloat16)
        rows, back = jax.vjp(of, table)
        return rows, *back(y)

    rows, gradient = run(read, mesh, shards(s, mesh), ids, y)
    assert rows.dtype == gradient.dtype == jnp.float32
    rounded = lambda a: a.astype(np.float32).astype(jnp.bfloat16).astype(np.float64)
    np.testing.assert_array_equal(rows, rounded(whole()[np.asarray(ids)]))
    sums = np.zeros((4, ROWS, WIDTH))
    np.add.at(sums, (np.repeat(np.arange(4), 4), ids), y)
    np.testing.assert_array_equal(of_ids(gradient, s), rounded(sums).sum(0))


def bits_of_all_exponents():
    """float32 with each sign and exponent, and mantissas around all kinds of ties."""
    high = np.array([0, 1, 2, 0x3F, 0x40, 0x7E, 0x7F], np.uint32)[:, None] << 16
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    exponents = np.arange(512, dtype=np.uint32)[:, None] << 23
    return (exponents | (high | low).reshape(-1)).reshape(-1)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_transport_is_a_cast(dtype):
    """Bit by bit, with subnormals, signed zeros, infinities and NaN; so is its derivative."""
    x = bits_of_all_exponents().view(np.float32)
    words = lambda a: np.asarray(a).view(np.uint16)

    def both(x):
        cast, back = jax.vjp(lambda a: to_transport(a, dtype), x)
        return cast, back(cast)[0]

    cast, cotangent = jax.jit(both)(x)
    expected = jax.jit(lambda a: a.astype(dtype))(x)
    assert len(np.unique(words(expected))) > 1000
    np.testing.assert_array_equal(words(cast), words(expected))
    wide = jax.jit(lambda a: a.astype(jnp.float32))(expected)
    np.testing.assert_array_equal(np.asarray(cotangent), np.asarray(wide))
    numbers = ~np.isnan(x)
    with np.errstate(over="ignore", invalid="ignore"):
        by_numpy = x.astype(dtype)
    np.testing.assert_array_equal(words(cast)[numbers], words(by_numpy)[numbers])
    np.testing.assert_array_equal(np.isnan(np.asarray(cast, np.float32)), ~numbers)


def test_ids_of_64_bits_are_sent_as_32(x64):
    s, mesh = optzoo.sharded.RowSharding(ROWS, 2), mesh_of(2, kind="Auto")
    look = lambda t, i: optzoo.sharded.lookup(t, i, s)
    with x64(True):
        ids, table = np.zeros(8, np.int64), np.zeros((s.stored_rows, WIDTH), np.float32)
        specs = s.spec, P("shard")
        mapped = jax.shard_map(look, mesh=mesh, in_specs=specs, out_specs=specs[1])
        lines = str(jax.make_jaxpr(mapped)(table, ids)).splitlines()
    sent = [line for line in lines if "all_to_all" in line]
    assert any("i32[" in line for line in sent) and not any("i64[" in line for line in sent)


def test_bad_input():
    s, mesh = optzoo.sharded.RowSharding(ROWS, 4, multiple=16), mesh_of(4, kind="Auto")
    table, ids = shards(s, mesh), ids_of("uniform", (8,), 4)
    read = lambda **options: lambda t, i: optzoo.sharded.lookup(t, i, s, **options)
    with pytest.raises(ValueError, match="check_vma=True"):
        run(read(), mesh, table, ids, check_vma=False)
    with pytest.raises(ValueError, match=r"inside jax\.shard_map"):
        optzoo.sharded.lookup(table[: s.rows_per_shard], ids, s)
    with pytest.raises(ValueError, match="must have 12 rows, got shape"):
        run(lambda t, i: optzoo.sharded.lookup(t[:5], i, s), mesh, table, ids)
    with pytest.raises(TypeError, match="ids must be integers"):
        run(read(), mesh, table, ids * 1.0)
    with pytest.raises(ValueError, match="capacity_factor must be"):
        run(read(capacity_factor=0), mesh, table, ids)
    with pytest.raises(TypeError, match=r"optzoo\.sharded\.RowSharding, got 'rows'"):
        run(lambda t, i: optzoo.sharded.lookup(t, i, "rows"), mesh, table, ids)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"combiner": "max"}, "combiner must be one of"),
        ({"pool": "there"}, "pool must be one of"),
        ({"ids": [1, 2]}, r"shape \(num_bags, length\), got \(2,\)"),
        ({"segment_ids": [0, 1]}, "must be given together"),
        ({"ids": [1, 2], "segment_ids": [0, 1, 1], "num_segments": 2}, "vectors of one length"),
        ({"ids": [1, 2], "segment_ids": [0, 1], "num_segments": 0}, "num_segments must be"),
        ({"weights": [1.0, 2.0]}, r"weights must have the shape of the ids"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_bad_bags(arguments, words):
    with pytest.raises(ValueError, match=words):
        optzoo.lookup_sparse(whole(), **{"ids": [[1, 2]], **arguments})


def test_bags_are_numbered():
    with pytest.raises(TypeError, match="segment_ids must be integers, got dtype float32"):
        optzoo.lookup_sparse(whole(), [1, 2], segment_ids=[0.0, 1.0], num_segments=2)
