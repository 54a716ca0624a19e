"""What looks over all rows of a sharded table: right across shards and rounds, or refused."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optzoo
from optzoo.core.norms import sums_of_squares
from optzoo.core.rows import Shard
from optzoo.jaxprs.graph import Graph
from optzoo.jaxprs.lookup import bind_lookup, is_lookup
from optzoo.state.deferred import has_deferred

from ..selection import chosen_first
from .cases import ROWS, mesh_of, of_ids, shards, whole
from .test_minimize import batches, check, loss, shapes, train, train_on_one

pytestmark = pytest.mark.usefixtures("several_rounds")

MESH, SHARDING = mesh_of(4, kind="Auto"), optzoo.sharded.RowSharding(ROWS, 4, multiple=16)
SGD, LAZY, ADAM = optzoo.gradient_descent(1.0), optzoo.lazy_adam(0.01), optzoo.adam(0.01, eps=1e-3)
ROUNDS, ONE_ROUND = 0.01, None


def clipped(*clips):
    return optax.chain(*clips, SGD)


IN_ROUNDS = {
    "clip_by_global_norm": clipped(optzoo.clip_by_global_norm(0.01)),
    "clip_by_norm": clipped(optzoo.transforms.clip_by_norm(0.01)),
    "skip_spikes": optzoo.skip_spikes(LAZY, window=2, min_values=2, deviations=1e-3),
    "clip_by_average_norm": clipped(optzoo.transforms.clip_by_average_norm(1e-4)),
    "two": clipped(
        optzoo.transforms.scale(2.0),
        optzoo.transforms.clip_by_norm(0.1),
        optzoo.clip_by_global_norm(0.02),
    ),
    "zero_if_norm_exceeds": clipped(
        optzoo.transforms.clip_by_norm(0.1), optzoo.transforms.zero_if_norm_exceeds(0.2)
    ),
    "normalized_sgd": optzoo.normalized_sgd(0.1),
    "groups": optzoo.param_groups({"table": clipped(optzoo.clip_by_global_norm(0.01)), ".*": LAZY}),
    "before caught_up": optax.chain(
        optzoo.clip_by_global_norm(0.01), optzoo.caught_up(ADAM, mask="table")
    ),
}
CLIP = "clip_by_global_norm"
IN_ONE_ROUND = {
    "after clip": clipped(
        optzoo.rows.on_values(optax.clip(0.01)), optzoo.clip_by_global_norm(0.02)
    ),
    "variable_clipping": optzoo.variable_clipping(SGD, {"table": (0,), "small": (0, 1)}, 1.0),
    "around dense": optzoo.variable_clipping(ADAM, {"table": (0, 1)}, 1.0),
    "hyperball": optzoo.hyperball(SGD, 0.1, {"table": (0,), "small": (0, 1)}),
    "hyperball around dense": optzoo.hyperball(ADAM, 0.1, {"table": (0, 1)}),
    "accumulate": optzoo.accumulate(LAZY, 2),
    "gradient_summaries": optax.chain(optzoo.transforms.gradient_summaries(), LAZY),
}


def compare(tx, factor):
    params, state, losses = train(tx, "zipf", MESH, SHARDING, capacity_factor=factor)
    wanted, of_one, values = train_on_one(tx, "zipf", MESH)
    if has_deferred(state):
        params, wanted = (optzoo.eval_params(*each) for each in ((params, state), (wanted, of_one)))
        state = of_one = ()  # other rows are deferred in a shard than in the whole table
    check((params, state, losses), (wanted, of_one, values), SHARDING)


# Rows, columns and the axes of the mesh of tables that have nothing in common.
UNLIKE = {"a": (50, 4, "data"), "b": (61, 3, "shard"), "one row": (1, 2, ("data", "shard"))}
OF_UNLIKE = {
    "clip_by_global_norm": clipped(optzoo.clip_by_global_norm(0.5)),
    "clip_by_norm": clipped(optzoo.transforms.clip_by_norm(0.5)),
    "max_norm": SGD,
}


def of_unlike(p, ids):
    rows = [optzoo.lookup(p[name], ids % n) for name, (n, *_) in UNLIKE.items()]
    return sum((k + 1) * jnp.sum(jnp.tanh(x), 1).mean() for k, x in enumerate(rows))


@pytest.mark.unique
@pytest.mark.parametrize("factor", [ONE_ROUND, ROUNDS])
@pytest.mark.parametrize("name", OF_UNLIKE)
def test_norms_of_tables_over_other_axes(name, factor):
    mesh, tables, params, one = mesh_of(2, 2), {}, {}, {}
    for table, (n, width, axes) in UNLIKE.items():
        number = 4 if isinstance(axes, tuple) else 2
        tables[table] = optzoo.sharded.RowSharding(n, number, axis_name=axes, multiple=1)
        rows = lambda ids, width=width: jnp.cos(ids[:, None] + jnp.arange(1.0, 1 + width)[None])
        params[table] = optzoo.sharded.create_table(tables[table], mesh, rows)
        one[table] = rows(jnp.arange(n))
    tx, ids = OF_UNLIKE[name], jnp.asarray(np.random.default_rng(0).integers(0, 61, 32))
    given = {"max_norm": 0.5} if name == "max_norm" else {}
    step = optzoo.sharded_minimize(of_unlike, tx, mesh, tables, capacity_factor=factor, **given)
    params, *_ = step(params, tx.init(params), ids)
    tx = OF_UNLIKE["clip_by_global_norm"] if given else tx
    one, *_ = optzoo.minimize(of_unlike, tx)(one, tx.init(one), ids)
    for table, (n, *_) in UNLIKE.items():
        got = np.asarray(optzoo.sharded.in_order_of_ids(params[table], tables[table]))[:n]
        np.testing.assert_allclose(got, one[table], atol=2e-6)


# "two" has this clip as well.
@pytest.mark.parametrize("name", chosen_first(IN_ROUNDS, IN_ROUNDS.keys() - {"clip_by_norm"}))
def test_norms_of_gradients_in_rounds(name):
    compare(IN_ROUNDS[name], ROUNDS)


@pytest.mark.parametrize(
    "name",
    chosen_first(["normalized_sgd", *IN_ONE_ROUND, CLIP], [*IN_ONE_ROUND, CLIP]),
)
def test_norms_in_one_round(name):
    compare((IN_ROUNDS | IN_ONE_ROUND)[name], ONE_ROUND)


@pytest.mark.parametrize("name", IN_ONE_ROUND)
def test_what_is_not_known_in_one_of_several_rounds(name):
    refused(IN_ONE_ROUND[name], "capacity_factor=None", ROUNDS)


def refused(tx, words, factor):
    params, state = shapes(tx, MESH, SHARDING)
    step = optzoo.sharded_minimize(
        loss, tx, MESH, {"table": SHARDING}, capacity_factor=factor, sparse="allow"
    )
    with pytest.raises((ValueError, TypeError), match=words) as error:
        jax.eval_shape(step, params, state, *next(batches("zipf", 1, MESH)))
    return str(error.value)


def dense(*foreign):
    return optax.chain(optzoo.rows.densify(), *foreign)


def by_cond(updates, _):
    g = updates["table"]
    values = jax.lax.cond(jnp.sum(g.values) > 0, lambda v: v, lambda v: 2 * v, g.values)
    return updates | {"table": g.with_values(values)}


def by_while(updates, _):
    g = updates["table"]
    values = jax.lax.while_loop(lambda v: jnp.sum(v**2) > 1, lambda v: v / 2, g.values)
    return updates | {"table": g.with_values(values)}


FOREIGN = {
    "on_values": clipped(optzoo.rows.on_values(optax.clip_by_global_norm(0.01))),
    "before caught_up": optax.chain(
        optzoo.rows.on_values(optax.clip_by_global_norm(0.01)),
        optzoo.caught_up(ADAM, mask="table"),
    ),
    "apply_if_finite": optax.apply_if_finite(SGD, 3),
    "densify, lars": dense(optzoo.lars(0.1)),
    "lamb": optzoo.lamb(0.1),
    "factored": optzoo.adafactor(0.1),
    "factored, no clipping": optzoo.adafactor(
        0.1, clipping_threshold=None, multiply_by_parameter_scale=False
    ),
    "densify, clip": dense(optzoo.clip_by_global_norm(0.01), SGD),
    "optax.lamb": dense(optax.lamb(0.1)),
    "optax.lars": dense(optax.lars(0.1)),
    "muon": dense(optax.contrib.muon(0.1)),
    "adaptive_grad_clip": dense(optax.adaptive_grad_clip(0.01), SGD),
    "clip_by_block_rms": dense(optax.clip_by_block_rms(0.01), SGD),
    "scale_by_trust_ratio": dense(optax.scale_by_trust_ratio(), SGD),
    "adafactor": dense(optax.adafactor(0.1, min_dim_size_to_factor=2)),
    "sm3": dense(optax.sm3(0.1)),
    "prodigy": dense(optax.contrib.prodigy(0.1)),
    "cond": clipped(optax.stateless(by_cond)),
    "while": clipped(optax.stateless(by_while)),
    "soap": optzoo.soap(0.1),
    "blocked_shampoo": optzoo.blocked_shampoo(0.1),
    "shampoo": optzoo.shampoo(0.1),
    "ggt": optzoo.ggt(0.1),
}


# The check comes before any other of rounds.
@pytest.mark.parametrize(
    ("name", "factor"),
    [("optax.lamb", ONE_ROUND), *zip(FOREIGN, itertools.cycle([ROUNDS, ONE_ROUND]))],
)
def test_what_sees_one_shard_is_refused_whatever_the_rounds(name, factor):
    message = refused(FOREIGN[name], "cannot update a table that is sharded by rows", factor)
    assert "capacity_factor" not in message  # no remedy
    assert "clip_by_global_norm" in message


def test_a_small_batch_always_fits_and_is_checked_all_the_same():
    assert SHARDING.capacity(16, 4.0) == SHARDING.capacity(16, None)
    refused(FOREIGN["optax.lamb"], "cannot update a table that is sharded by rows", 4.0)


def test_one_shard_is_the_whole_table():
    mesh, s = mesh_of(1), optzoo.sharded.RowSharding(ROWS, 1, multiple=1)
    tx = optax.chain(optzoo.rows.densify(), optax.lamb(0.1))
    params, state = shapes(tx, mesh, s)
    step = optzoo.sharded_minimize(loss, tx, mesh, {"table": s}, sparse="allow")
    jax.eval_shape(step, params, state, *next(batches("zipf", 1, mesh)))


def test_rows_of_one_device_are_not_kept_for_all():
    tx = optzoo.accumulate(LAZY, 2, max_rows={"table": 64})
    refused(tx, "'table' is sharded by rows.*leave it out of max_rows", ONE_ROUND)


def test_numerics_are_checked_on_all_shards(monkeypatch):
    """Each device hears of a NaN in the rows of one."""
    heard, callback = [], jax.debug.callback
    record = lambda kinds, step: heard.append(kinds.tolist())  # an error would stay for other tests
    monkeypatch.setattr(jax.debug, "callback", lambda report, *args: callback(record, *args))
    tx = optax.chain(optzoo.transforms.check_numerics(axis_name=None), SGD)
    params = {"table": shards(SHARDING, MESH)}
    of = lambda p, ids, y: jnp.sum(optzoo.lookup(p["table"], ids) * y[:, None])
    step = optzoo.sharded_minimize(of, tx, MESH, {"table": SHARDING}, capacity_factor=None)
    ids, y = jnp.arange(8), jnp.where(jnp.arange(8) == 5, jnp.nan, 1.0)
    jax.block_until_ready(step(params, tx.init(params), ids, y))
    jax.effects_barrier()
    assert heard == [[2]] * 4


def test_random_bits_differ_between_shards():
    """Rows with equal slots and gradients are rounded each in its own way."""
    tx = optzoo.slots_dtype(optzoo.momentum(1.0, 0.9), jnp.bfloat16, stochastic=True)
    s = optzoo.sharded.RowSharding(64, 4, multiple=64)
    table = optzoo.sharded.create_table(s, MESH, lambda ids: jnp.zeros((len(ids), 8)))
    state = jax.jit(tx.init, out_shardings=optzoo.state_sharding(tx, table))(table)
    of = lambda p, ids: 1.01 * jnp.mean(jnp.sum(optzoo.lookup(p, ids), (-2, -1)))
    step = optzoo.sharded_minimize(of, tx, MESH, {"": s}, capacity_factor=None)
    ids = jnp.tile(jnp.arange(64), 4).reshape(4, 64)
    _, state, _ = step(table, state, ids)
    slot = np.asarray(optzoo.get_slot(state, "momentum"), np.float32).reshape(4, 16, 8)
    each = [tuple(shard.ravel()) for shard in slot]
    assert len(set(np.unique(slot))) == 2 and len(set(each)) == 4


@pytest.mark.parametrize(
    ("tx", "pooled"),
    [(IN_ROUNDS["clip_by_global_norm"], True), (IN_ROUNDS["normalized_sgd"], False)],
)
def test_a_step_by_hand(tx, pooled):
    def of_shard(table, bags):
        if pooled:
            return optzoo.lookup_sparse(table, bags, sharding=SHARDING, pool="owner")
        return optzoo.sharded.lookup(table, bags, SHARDING)

    def of_table(table, bags):
        return optzoo.lookup_sparse(table, bags) if pooled else optzoo.lookup(table, bags)

    def step(look_up, mean):
        def run(table, bags):
            loss = lambda table: mean(jnp.mean(look_up(table, bags) ** 2))
            rows = optzoo.value_and_grad(loss)(table)[1]
            return table + tx.update(rows, tx.init(table), table)[0]

        return run

    bags = jnp.asarray(np.random.default_rng(3).integers(0, ROWS, (8, 3)))
    spec, each = P("shard"), step(of_shard, lambda value: jax.lax.pmean(value, "shard"))
    each = jax.shard_map(each, mesh=MESH, in_specs=(spec, spec), out_specs=spec)
    got = of_ids(jax.jit(each)(shards(SHARDING, MESH), bags), SHARDING)
    want = jax.jit(step(of_table, lambda value: value))(jnp.asarray(whole()), bags)
    np.testing.assert_allclose(got, want, atol=1e-6)
    assert np.abs(got - whole()).max() > 1e-3


# Rows that know of their shard


def test_the_shard_stays_with_the_rows():
    shard = Shard(("shard",), 100, False)
    rows = optzoo.SparseRows(
        jnp.array([2, 2, 5]), jnp.ones((3, 2)), 5, shard=shard, squares=jnp.float32(7.0)
    )
    through = jax.tree.map(lambda a: a, rows)
    assert (through.shard, float(through.squares), through.size) == (shard, 7.0, 200)
    for same in (rows.coalesce(), -rows, rows.drop_padding(), rows.astype(jnp.bfloat16)):
        assert same.shard == shard and float(same.squares) == 7.0
    assert float((rows * 3.0).squares) == 63.0 and float((rows / 2.0).squares) == 1.75
    for other in (rows.with_values(rows.values), rows.with_rows([1], jnp.ones((1, 2)))):
        assert other.shard == shard and other.squares is None
    plain = optzoo.SparseRows(jnp.array([1]), jnp.ones((1, 2)), 5)
    assert (rows + plain).shard == (plain + rows).shard == shard
    assert plain.size == 10 and plain.shard is None


def test_the_shard_of_a_lookup_stays_under_vmap():
    shard = Shard(("shard",), 100, False)
    look_up = lambda table: jax.vmap(lambda i: bind_lookup(table, i, shard=shard))(jnp.arange(3))
    graph = Graph.of(jax.make_jaxpr(look_up)(jnp.ones((4, 2))).jaxpr)
    [found] = [op for op in graph.operations if is_lookup(op)]
    assert found.params["shard"] == shard


def test_an_unknown_sum_is_an_error_in_a_round():
    rows = optzoo.SparseRows(
        jnp.array([2]), jnp.ones((1, 2)), 5, shard=Shard(("shard",), 100, True)
    )
    with pytest.raises(ValueError, match=r"one of several rounds.*capacity_factor=None"):
        sums_of_squares([rows])
    [known] = sums_of_squares([rows.with_squares(jnp.float32(4.0))])
    assert float(known) == 4.0
