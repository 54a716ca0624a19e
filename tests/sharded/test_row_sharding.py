"""Which device owns which row; tables made shard by shard; the order for checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import optzoo


def mesh_of(n):
    return Mesh(np.array(jax.devices()[:n]), ("shard",))


@pytest.mark.parametrize("partition", ["mod", "div"])
@pytest.mark.parametrize(("num_rows", "n", "multiple"), [(13, 5, 1), (203, 4, 64), (8, 8, 1)])
def test_places_and_ids(partition, num_rows, n, multiple):
    s = optzoo.sharded.RowSharding(num_rows, n, partition, multiple=multiple)
    ids = np.arange(num_rows)
    places = s.places_of(ids)
    assert len(set(places.tolist())) == num_rows
    assert places.max() < s.stored_rows
    np.testing.assert_array_equal(s.ids_of(places), ids)
    owners = places // s.rows_per_shard
    np.testing.assert_array_equal(
        owners, ids % n if partition == "mod" else ids // s.rows_per_shard
    )
    others = s.places_of(np.array([num_rows, num_rows + 1, -1]))
    assert others.tolist() == [s.stored_rows, s.stored_rows + 1, s.stored_rows + 1]


@pytest.mark.parametrize("partition", ["mod", "div"])
def test_the_stored_rows_do_not_depend_on_the_number_of_shards(partition):
    rows = {optzoo.sharded.RowSharding(100_000, 2**k, partition).stored_rows for k in range(7)}
    assert len(rows) == 1


def test_tensorflow_deals_rows_out_in_the_same_order():
    # tf.nn.embedding_lookup, partition_strategy="mod": id i is row i // n of variable i % n.
    s = optzoo.sharded.RowSharding(10, 3, multiple=1)
    place = s.places_of(np.array(7))
    assert divmod(int(place), s.rows_per_shard) == (7 % 3, 7 // 3)


@pytest.mark.parametrize("partition", ["mod", "div"])
def test_a_table_does_not_depend_on_the_number_of_shards(partition):
    rows_of = optzoo.sharded.uniform_rows(jax.random.key(1), 3)
    tables = []
    for n in (1, 4):
        s = optzoo.sharded.RowSharding(50, n, partition, multiple=16)
        table = optzoo.sharded.create_table(s, mesh_of(n), rows_of, chunk=7)
        assert table.sharding.spec == PartitionSpec("shard")
        ordered = optzoo.sharded.in_order_of_ids(table, s)
        assert ordered.sharding == table.sharding
        np.testing.assert_array_equal(optzoo.sharded.from_order_of_ids(ordered, s), table)
        tables.append(np.asarray(ordered)[:50])
    np.testing.assert_array_equal(*tables)
    np.testing.assert_array_equal(tables[0], jax.jit(rows_of)(jnp.arange(50)))
    assert np.abs(tables[0]).max() <= 0.05
    assert len(np.unique(tables[0])) > 100


def test_required_capacity():
    s = optzoo.sharded.RowSharding(100, 4, multiple=1)
    assert s.required_capacity(np.array([0, 4, 8, 8, 1, 100, 101])) == 3
    assert s.required_capacity(np.array([100])) == 0


def test_capacity():
    s = optzoo.sharded.RowSharding(1000, 4, multiple=1)
    assert s.capacity(64, None) == 64
    assert s.capacity(5000, None) == s.rows_per_shard
    assert 100 <= s.capacity(400, 1.0) < 200
    assert s.capacity(600, 1.0) % 8 == 0  # as a TPU stores rows
    assert s.capacity(4, 100.0) == 4


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"num_rows": 0, "num_shards": 2}, ValueError, "num_rows"),
        ({"num_rows": 2.5, "num_shards": 2}, TypeError, "num_rows"),
        ({"num_rows": 8, "num_shards": 0}, ValueError, "num_shards"),
        ({"num_rows": 8, "num_shards": 2, "partition": "row"}, ValueError, "partition.*'row'"),
        ({"num_rows": 8, "num_shards": 2, "axis_name": ()}, ValueError, "axis_name"),
        ({"num_rows": 8, "num_shards": 2, "multiple": 0}, ValueError, "multiple"),
        ({"num_rows": 2**31, "num_shards": 2}, ValueError, "jax_enable_x64"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else None,
)
def test_bad_shardings(arguments, error, words):
    with pytest.raises(error, match=words):
        optzoo.sharded.RowSharding(**arguments)


def test_ids_beyond_32_bits_under_x64(x64):
    with x64(True):
        s = optzoo.sharded.RowSharding(2**40, 8)
        place = s.places_of(jnp.array(2**40 - 1))
        assert int(s.ids_of(place)) == 2**40 - 1


def test_bad_tables():
    s = optzoo.sharded.RowSharding(8, 2, multiple=1)
    rows = lambda ids: jnp.zeros((len(ids), 1))
    with pytest.raises(ValueError, match="num_shards must be the size of the mesh axes"):
        optzoo.sharded.create_table(s, mesh_of(4), rows)
    with pytest.raises(ValueError, match="mesh has no axis 'shard'"):
        optzoo.sharded.create_table(s, Mesh(np.array(jax.devices()[:2]), ("data",)), rows)
    with pytest.raises(ValueError, match="chunk"):
        optzoo.sharded.create_table(s, mesh_of(2), rows, chunk=0)
    with pytest.raises(TypeError, match="ids must be integers"):
        s.places_of(jnp.ones(3))


@pytest.mark.parametrize("axis", ["shard", ("data", "shard")])
def test_parameters_go_where_a_step_has_them(axis):
    """Tables by patterns; a step puts nothing elsewhere, so it is compiled once."""
    mesh = jax.make_mesh((2, 4), ("data", "shard"))
    n = 4 if axis == "shard" else 8
    tables = {".*/table": optzoo.sharded.RowSharding(64, n, axis_name=axis, multiple=1)}
    params = {"a": {"table": jnp.ones((64, 2))}, "kernel": jnp.ones((64, 2)), "b": jnp.ones([])}
    places = optzoo.sharded.params_sharding(params, mesh, tables)
    assert places["a"]["table"].spec == PartitionSpec(axis, None)
    assert places["kernel"].is_fully_replicated and places["b"].is_fully_replicated
    abstract = jax.eval_shape(lambda: params)
    assert optzoo.sharded.params_sharding(abstract, mesh, tables) == places
    params, tx = jax.device_put(params, places), optzoo.lazy_adam(0.1)
    state = jax.device_put(tx.init(params), optzoo.state_sharding(tx, params))
    loss = lambda p, ids: jnp.mean(p["a"]["table"][ids] + jnp.mean(p["kernel"]) + p["b"])
    step = optzoo.minimize(loss, tx, mesh=mesh, tables=tables)
    for _ in range(2):
        params, state, _ = step(params, state, jnp.arange(16))
    assert step._cache_size() == 1


def test_places_of_what_is_no_table():
    mesh, table = jax.make_mesh((4,), ("shard",)), jnp.ones((16, 2))
    sharding = optzoo.sharded.RowSharding(16, 4, multiple=1)
    params_sharding = optzoo.sharded.params_sharding
    assert params_sharding(table, mesh, sharding).spec == PartitionSpec("shard", None)
    with pytest.raises(TypeError, match=r"tables must be a dict from patterns to shardings"):
        params_sharding({"table": table}, mesh, sharding)
    with pytest.raises(ValueError, match=r"num_shards must be the size of the mesh axes"):
        params_sharding(table, jax.make_mesh((2,), ("shard",), devices=jax.devices()[:2]), sharding)
    with pytest.raises(ValueError, match=r"'table' must have the 16 stored rows"):
        params_sharding({"table": table[:8]}, mesh, {"table": sharding})
    with pytest.raises(
        TypeError, match=r"mesh must be a jax.sharding.Mesh, such as of jax.make_mesh, got None"
    ):
        params_sharding(table, None, sharding)
