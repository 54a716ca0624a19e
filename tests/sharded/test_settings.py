"""Sharded tables in the settings of users: 16 bits, many ids of one owner, none, several axes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optzoo
from optzoo.core.rows import is_rows
from optzoo.sharded import RowSharding

from .cases import ROWS, mesh_of, of_ids, shards, whole

N = 4
SHARDING = RowSharding(ROWS, N, multiple=16)
POOLS = ["here", "owner", "auto"]


def on_devices(f, *args, kind="Auto"):
    """``f`` of a shard and a part of each argument."""
    mesh = mesh_of(N, kind=kind)
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("shard"), out_specs=P("shard")))(*args)


def ones(sharding, mesh, dtype):
    return optzoo.sharded.create_table(sharding, mesh, lambda ids: jnp.ones((len(ids), 3), dtype))


# 4,000 ones in 16 bits, added one after the other, are 256 or 2,048 (tests/core).
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("pool", [None, *POOLS[:2]])
def test_gradients_in_16_bits(pool, dtype):
    table, ids = ones(SHARDING, mesh_of(N, kind="Auto"), dtype), jnp.full(4000, 7)

    def loss(table, ids):
        if pool is None:
            rows = optzoo.sharded.lookup(table, ids, SHARDING)
        else:
            options = {"combiner": "sum", "sharding": SHARDING, "pool": pool}
            rows = optzoo.lookup_sparse(table, ids[None], **options)
        return jnp.sum(rows.astype(jnp.float32))

    def both(table, ids):
        value, rows = optzoo.value_and_grad(loss)(table, ids)
        return value[None], jax.grad(loss)(table, ids), rows.to_dense()

    values, *gradients = on_devices(both, table, ids)
    np.testing.assert_array_equal(values, np.full(N, 3 * 1000.0))
    for gradient in gradients:
        assert gradient.dtype == dtype
        of_rows = of_ids(gradient, SHARDING).astype(np.float64)
        np.testing.assert_array_equal(
            of_rows, np.where(np.arange(ROWS) == 7, 4000.0, 0)[:, None] * np.ones(3)
        )


@pytest.mark.parametrize("is_sharded", [True, False])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_steps_in_16_bits(kind, dtype, is_sharded):
    mesh, ids = mesh_of(N, kind=kind), jnp.full(4000, 7)
    loss = lambda p, ids: 1e-4 * N * jnp.sum(optzoo.lookup(p["table"], ids).astype(jnp.float32))
    tx = optzoo.gradient_descent(1.0)
    params = {"table": ones(SHARDING, mesh, dtype) if is_sharded else jnp.ones((ROWS, 3), dtype)}
    tables = {"table": SHARDING} if is_sharded else {}
    step = optzoo.sharded_minimize(loss, tx, mesh, tables)
    params, _, _ = step(params, tx.init(params), ids)
    got = of_ids(params["table"], SHARDING) if is_sharded else params["table"]
    want = np.where(np.arange(ROWS) == 7, 1 - 1e-4 * 4000, 1.0)
    error = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(got, np.float64)[:, 0], want, rtol=error)


@pytest.mark.parametrize("combiner", ["mean", "sum", "sqrtn"])
@pytest.mark.parametrize("pool", POOLS)
def test_more_ids_of_an_owner_than_it_has_rows(pool, combiner):
    ids = np.random.default_rng(0).integers(0, ROWS, (8, 100))
    bags = lambda t, i: optzoo.lookup_sparse(t, i, combiner=combiner, sharding=SHARDING, pool=pool)
    got = on_devices(bags, shards(SHARDING, mesh_of(N, kind="Auto")), jnp.asarray(ids, jnp.int32))
    size = {"mean": 100, "sum": 1, "sqrtn": 10}[combiner]
    np.testing.assert_allclose(
        got, whole().astype(np.float64)[ids].sum(1) / size, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("shape", [(0,), (4, 0), (0, 4)])
def test_lookups_of_no_ids(shape):
    ids = jnp.zeros(shape, jnp.int32)
    table = shards(SHARDING, mesh_of(N, kind="Auto"))

    def read(table):
        rows = optzoo.sharded.lookup(table, ids, SHARDING)
        gradient = jax.grad(lambda t: jnp.sum(optzoo.sharded.lookup(t, ids, SHARDING)))(table)
        return rows[None], gradient

    rows, gradient = on_devices(read, table)
    assert rows.shape == (N, *shape, 3)
    np.testing.assert_array_equal(gradient, np.zeros(table.shape))


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("weighted", [False, True])
def test_bags_of_no_ids(weighted, pool):
    """They give zeros, as other empty bags do."""
    none = jnp.zeros(0, jnp.int32)
    weights = jnp.zeros(0) if weighted else None
    options = {"sharding": SHARDING, "pool": pool, "weights": weights}
    ragged = lambda t: optzoo.lookup_sparse(t, none, none, 2, **options)
    table = shards(SHARDING, mesh_of(N, kind="Auto"))
    np.testing.assert_array_equal(on_devices(ragged, table), np.zeros((2 * N, 3)))
    here = optzoo.lookup_sparse(whole(), none, none, 2, weights=weights)
    np.testing.assert_array_equal(here, np.zeros((2, 3)))


READS = {
    "lookup": lambda table, ids: optzoo.lookup(table, ids),
    "gather": lambda table, ids: table[ids],
    "bags": lambda table, ids: optzoo.lookup_sparse(table, ids, jnp.zeros_like(ids), 3),
}


@pytest.mark.parametrize("factor", [0.01, None])
@pytest.mark.parametrize("name", READS)
def test_a_step_without_ids_of_a_table(name, factor):
    """The rest of the model, and lookups that have ids, are trained as ever."""
    mesh, tx = mesh_of(N), optzoo.lazy_adam(0.1)
    ids, none = jnp.arange(8, dtype=jnp.int32), jnp.zeros(0, jnp.int32)

    def loss(read):
        some = lambda t, ids: jnp.sum(read(t, ids) * 1.5)
        return lambda p, ids, none: some(p["a"], none) + some(p["b"], none) + some(p["b"], ids)

    params = {"a": shards(SHARDING, mesh), "b": shards(SHARDING, mesh)}
    tables = dict.fromkeys(params, SHARDING)
    step = optzoo.sharded_minimize(loss(READS[name]), tx, mesh, tables, capacity_factor=factor)
    params, _, _ = step(params, tx.init(params), ids, none)
    np.testing.assert_array_equal(of_ids(params["a"], SHARDING), whole())
    # The first step of Adam is the rate, whatever the gradient.
    moved = np.arange(ROWS)[:, None] < 8
    np.testing.assert_allclose(
        of_ids(params["b"], SHARDING), whole() - np.where(moved, 0.1, 0), rtol=1e-5, atol=1e-6
    )


@pytest.mark.unique
@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
@pytest.mark.parametrize("factor", [0.05, None])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_tables_over_different_axes(dtype, factor, kind):
    """Unlike in rows, in width and in axes, with a layer and a clip, in one step."""
    mesh = mesh_of(2, N, kind=kind)
    tables = {
        "a": RowSharding(ROWS, 2, axis_name="data", multiple=16),
        "b": RowSharding(ROWS, N, "mod", multiple=16),
        "c": RowSharding(ROWS, 2 * N, axis_name=("data", "shard"), multiple=16),
    }
    widths = {"a": 3, "b": 5, "c": 3}
    rng = np.random.default_rng(0)
    ids = {name: rng.integers(0, ROWS + 1, (3, 48)).astype(np.int32) for name in tables}
    layer = rng.normal(size=(5, 3)).astype(np.float32)

    def loss(p, ids):
        a, b, c = (optzoo.lookup(p[name], ids[name]) for name in tables)
        wide = lambda x: x.astype(jnp.float32)
        return jnp.mean((wide(a) + wide(b) @ p["layer"] - wide(c)) ** 2)

    tx = optax.chain(optzoo.clip_by_global_norm(0.1), optzoo.lazy_adam(0.01))
    one = {name: jnp.asarray(whole(width), dtype) for name, width in widths.items()}
    many = {name: shards(tables[name], mesh, width).astype(dtype) for name, width in widths.items()}
    one, many = one | {"layer": layer}, many | {"layer": jnp.asarray(layer)}
    here, step = (
        optzoo.minimize(loss, tx),
        optzoo.sharded_minimize(loss, tx, mesh, tables, capacity_factor=factor),
    )
    of_one, state = tx.init(one), tx.init(many)
    for k in range(3):
        batch = {name: i[k] for name, i in ids.items()}
        one, of_one, want = here(one, of_one, batch)
        many, state, got = step(many, state, batch)
        np.testing.assert_allclose(got, want, rtol=1e-5 if dtype == jnp.float32 else 1e-2)
    error = 2e-6 if dtype == jnp.float32 else 0.02
    for name in widths:
        found = np.asarray(of_ids(many[name], tables[name]), np.float64)
        np.testing.assert_allclose(found, np.asarray(one[name], np.float64), atol=error)
        assert np.abs(found - whole(widths[name])).max() > error
    np.testing.assert_allclose(many["layer"], one["layer"], atol=error)


def returnn(**options):
    options = {"optimizer": {"class": "sgd"}, "learning_rate": 1.0, **options}
    return optzoo.interop.returnn.returnn_updater(options)


def fbgemm(name, **options):
    options = {"learning_rate": 1.0, "gradient_clipping": True, "max_gradient": 0.5, **options}
    return optzoo.create(name, **options)


def of_user(f):
    """A step of a user, of gradients as they come, before one of the library."""
    step = lambda updates, _: jax.tree.map(f, updates, is_leaf=is_rows)
    return optax.chain(optax.stateless(step), optzoo.lazy_adam(0.1))


def per_id(g):
    """Each row divided by how often its id is listed."""
    counts = jax.ops.segment_sum(jnp.ones_like(g.values[:, 0]), g.indices, g.num_rows)
    return g.with_values(g.values / counts[g.indices][:, None])


AS_LISTED = {
    "gradient_clip": returnn(gradient_clip=0.5),
    "gradient_clip_norm": returnn(gradient_clip_norm=1.0),
    "gradient_clip_global_norm": returnn(gradient_clip_global_norm=1.0),
    "gradient_nan_inf_filter": returnn(gradient_nan_inf_filter=True),
    "grad_norm_to_clip_to_zero": returnn(grad_norm_to_clip_to_zero=9.0),
    "log_grad_norm": returnn(log_grad_norm=True),
    "EXACT_SGD": fbgemm("EXACT_SGD"),
    "EXACT_ROWWISE_ADAGRAD": fbgemm("EXACT_ROWWISE_ADAGRAD", eps=1.0),
    "nan_inf_filter": optax.chain(
        optzoo.transforms.gradient_nan_inf_filter(), optzoo.lazy_adam(0.1)
    ),
    "values": of_user(lambda g: g.with_values(jnp.tanh(g.values))),
    "a threshold": of_user(lambda g: g.with_values(jnp.where(g.values > 1, 0, g.values))),
    "a constant": of_user(
        lambda g: g.with_values(jnp.where(g.values[:, :1] * 0 == 0, g.values, 1))
    ),
    "a sum": of_user(lambda g: g.with_values(g.values + 1.0)),
    "a product": of_user(lambda g: g.with_values(g.values * g.values)),
    "counts": of_user(per_id),
}
IN_ANY_WAY = {
    "scale": optax.chain(optzoo.transforms.scale(-0.5), optzoo.lazy_adam(0.1)),
    "by hand": of_user(lambda g: g.with_values(-(g.values + g.values) / 3)),
    "some columns": of_user(lambda g: g.with_values(jnp.where(jnp.arange(3) == 0, g.values, 0))),
    "clip_by_norm": optax.chain(optzoo.transforms.clip_by_norm(1.0), optzoo.gradient_descent(1.0)),
    "on_values": optax.chain(optzoo.rows.on_values(optax.clip(0.5)), optzoo.lazy_adam(0.1)),
    "two": optax.chain(optzoo.transforms.scale(2.0), optzoo.gradient_descent(1.0)),
}


def trained(tx, num_shards, factor):
    """Row 3 is listed thrice, row 5 once; on each of four devices."""
    ids = jnp.array([3, 3, 3, 5] * N)
    loss = lambda p, ids: 16 * jnp.mean(jnp.sum(optzoo.lookup(p["table"], ids), -1))
    if num_shards is None:
        params = {"table": whole()}
        return optzoo.minimize(loss, tx)(params, tx.init(params), ids)[0]["table"]
    s, mesh = RowSharding(ROWS, num_shards, multiple=16), mesh_of(num_shards)
    params = {"table": shards(s, mesh)}
    step = optzoo.sharded_minimize(loss, tx, mesh, {"table": s}, capacity_factor=factor)
    params, _, _ = step(params, tx.init(params), ids)
    return of_ids(params["table"], s)


@pytest.mark.parametrize("factor", [0.01, None])
@pytest.mark.parametrize("name", AS_LISTED)
def test_what_sees_rows_as_they_are_listed_is_refused(name, factor):
    """A device merges rows of equal ids: their sum would be clipped, and not each of them."""
    tx = AS_LISTED[name]
    with pytest.raises(ValueError, match=r"unmerged rows.*optzoo\.rows\.coalesce\(\) before"):
        trained(tx, N, factor)
    if not name.startswith("log"):
        merged = optax.chain(optzoo.rows.coalesce(), tx)
        want = trained(merged, None, factor)
        np.testing.assert_allclose(trained(merged, 1, factor), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["gradient_clip", "EXACT_SGD", "values", "counts"])
def test_one_shard_merges_nothing(name):
    want = trained(AS_LISTED[name], None, None)
    np.testing.assert_allclose(trained(AS_LISTED[name], 1, None), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("factor", [0.01, None])
@pytest.mark.parametrize("name", IN_ANY_WAY)
def test_what_is_linear_in_listed_rows_is_equal(name, factor):
    want = trained(IN_ANY_WAY[name], None, None)
    got = trained(IN_ANY_WAY[name], N, factor)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("factor", [0.01, None])
@pytest.mark.parametrize("number", [1, N])
def test_a_norm_of_a_whole_shard_is_refused(number, factor):
    """Its number of elements is not that of the table: the last rows of a shard fill it up."""
    with pytest.raises(
        ValueError, match=r"`mul` uses a value computed from the rows of one shard only"
    ):
        trained(returnn(gradient_clip_avg_norm=1e-2), number, factor)
