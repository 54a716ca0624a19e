"""Deferred rows in sharded tables: as on one device, and as the dense optimizer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optzoo
from optzoo.deferred.state import CaughtUpState
from optzoo.testing import samples

from .cases import ROWS, WIDTH, mesh_of, of_ids, shards, whole
from .test_minimize import W, loss, shapes, start

pytestmark = pytest.mark.usefixtures("several_rounds")

RATE, STEPS = optax.linear_schedule(0.1, 0.02, 40), 24
ADAM = optzoo.adam(RATE)


def deferred(tables=("table", "small"), inner=ADAM):
    return optzoo.caught_up(inner, mask=tables, horizon=1)


def batches(mesh, number=STEPS):
    """Most ids are few, so that most rows are deferred; some are padding."""
    for seed in range(number):
        rng = np.random.default_rng(seed)
        n = 2 * mesh.size
        ids, bags = (
            rng.integers(0, ROWS + 1, shape) // rng.integers(1, 9, shape) for shape in (n, (n, 3))
        )
        y = rng.normal(size=(n, WIDTH))
        yield jnp.asarray(ids), jnp.asarray(bags), jnp.asarray(y, W.dtype)


@functools.cache
def dense(size):
    """Adam on all rows, on one device."""
    params = {"table": whole(), "w": W, "small": whole()}
    state, step, losses = ADAM.init(params), optzoo.minimize(loss, ADAM), []
    for batch in batches(mesh_of(size)):
        params, state, value = step(params, state, *batch)
        losses.append(value)
    return params, state, np.stack(losses)


@functools.cache
def step_of(tx, mesh, s):
    return optzoo.sharded_minimize(loss, tx, mesh, {"table": s})


def train(tx, mesh, s, **options):
    params, state = start(tx, mesh, s)
    step, losses = optzoo.sharded_minimize(loss, tx, mesh, {"table": s}, **options), []
    for batch in batches(mesh):
        params, state, value = step(params, state, *batch)
        losses.append(value)
    return params, state, np.stack(losses)


def check(params, expected, s, rtol=2e-4, atol=2e-5):
    np.testing.assert_allclose(of_ids(params["table"], s), expected["table"], rtol, atol)
    for name in ("w", "small"):
        np.testing.assert_allclose(params[name], expected[name], rtol, atol)


@pytest.mark.parametrize(
    ("sizes", "names", "axis_name", "factor"),
    [
        pytest.param((2, 4), ("data", "shard"), "shard", 0.1, id="data-x-shard"),
        pytest.param((2, 4), ("shard", "b"), ("shard", "b"), None, id="two-axes-in-one-round"),
        pytest.param((8,), ("shard",), "shard", None, id="8-in-one-round"),
        pytest.param((8,), ("shard",), "shard", 0.1, id="8"),
        pytest.param((2, 4), ("data", "shard"), "shard", None, id="one-round"),
        pytest.param((2, 4), ("shard", "b"), ("shard", "b"), 0.1, id="two-axes"),
    ],
)
def test_equal_to_dense_adam(sizes, names, axis_name, factor):
    mesh = mesh_of(*sizes, names=names)
    n = int(np.prod([mesh.shape[a] for a in np.atleast_1d(axis_name)]))
    s = optzoo.sharded.RowSharding(ROWS, n, axis_name=axis_name, multiple=64)
    params, state, losses = train(deferred(), mesh, s, capacity_factor=factor)
    last = of_ids(state.last["table"], s)
    assert (last < STEPS).any() and (np.asarray(state.last["small"]) < STEPS).any()
    wanted, _, values = dense(mesh.size)
    np.testing.assert_allclose(losses, values, rtol=1e-4)
    check(optzoo.eval_params(params, state), wanted, s)


@pytest.mark.unique
def test_rows_that_rest_for_longer_than_the_horizon():
    """Each shard brings its rows up to now in turn. Adam on all rows, in NumPy."""
    b1, b2, eps, steps = 0.05, 0.9, 1e-3, 40
    rate = optax.linear_schedule(0.1, 0.01, steps)
    tx = optzoo.caught_up(optzoo.adam(rate, b1=b1, b2=b2, eps=eps), mask=True, horizon=1)
    mesh, s = mesh_of(2), optzoo.sharded.RowSharding(ROWS, 2)
    params = {"table": shards(s, mesh)}
    state = jax.jit(tx.init, out_shardings=optzoo.state_sharding(tx, params))(params)
    assert all(2 * len(clock.ring) < steps for clock in state.clock.values())
    loss = lambda p, ids: jnp.mean(jnp.sum(optzoo.lookup(p["table"], ids), axis=1))
    step = optzoo.sharded_minimize(loss, tx, mesh, {"table": s})
    x, m, v = whole().astype(float), np.zeros((ROWS, WIDTH)), np.zeros((ROWS, WIDTH))
    ids = np.zeros(8, np.int32)
    for t in range(1, steps + 1):
        ids[1:] = 6 * np.arange(1, 8) * (t == 1)
        params, state, _ = step(params, state, ids)
        g = np.bincount(ids, minlength=ROWS)[:, None] / len(ids)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        size = float(rate(t - 1)) * np.sqrt(1 - b2**t) / (1 - b1**t)
        x -= size * m / (np.sqrt(v) + eps)
    got = optzoo.eval_params(params, state)
    np.testing.assert_allclose(of_ids(got["table"], s), x, rtol=1e-5, atol=1e-6)


DEFERRED = deferred()
MESH, SHARDING = mesh_of(4, kind="Auto"), optzoo.sharded.RowSharding(ROWS, 4, multiple=16)


@functools.cache
def trained():
    """The parameters and the state before and after the last steps."""
    carry = start(DEFERRED, MESH, SHARDING)
    for k, batch in enumerate(batches(MESH)):
        if k == STEPS // 2:
            middle = jax.tree.map(jnp.copy, tuple(carry))
        *carry, _ = step_of(DEFERRED, MESH, SHARDING)(*carry, *batch)
    return middle, tuple(carry)


def flushed(params, state):
    """In place, inside of jit."""
    specs = jax.tree.map(lambda x: x.sharding.spec, (params, state))
    flush = jax.shard_map(optzoo.rows.catch_up, mesh=MESH, in_specs=specs, out_specs=specs)
    return jax.jit(flush, donate_argnums=(0, 1))


def test_flush_and_the_state_inside():
    _, (params, state) = trained()
    current, after = optzoo.rows.catch_up(params, state)
    wanted, of_dense, _ = dense(4)
    check(current, wanted, SHARDING)
    for name in ("m", "v"):
        got, want = (optzoo.get_slot(x, name)["table"] for x in (after, of_dense))
        np.testing.assert_allclose(of_ids(got, SHARDING), want, rtol=1e-3, atol=1e-6)
    like = lambda x, y: x.sharding.is_equivalent_to(y.sharding, x.ndim)
    assert all(jax.tree.leaves(jax.tree.map(like, (current, after), (params, state))))
    again = flushed(params, state)(*jax.tree.map(jnp.copy, (params, state)))
    np.testing.assert_array_equal(again[0]["table"], current["table"])
    with pytest.raises(ValueError, match="deferred rows"):
        optzoo.get_slot(state, "m")


def finish(carry, mesh, s):
    """The last steps, on any mesh; all rows current."""
    for batch in list(batches(MESH))[STEPS // 2 :]:
        *carry, _ = step_of(DEFERRED, mesh, s)(*carry, *batch)
    return optzoo.eval_params(*carry)


def test_another_number_of_shards():
    middle, end = trained()
    mesh, s = mesh_of(2), optzoo.sharded.RowSharding(ROWS, 2, multiple=16)
    saved = jax.tree.map(
        np.asarray, optzoo.sharded.in_order_of_ids(middle, {"table": SHARDING}, middle[0])
    )
    put = lambda x, a: jax.device_put(x, a.sharding)
    moved = jax.tree.map(put, saved, tuple(start(DEFERRED, mesh, s)))
    after = finish(optzoo.sharded.from_order_of_ids(moved, {"table": s}, moved[0]), mesh, s)
    wanted = optzoo.eval_params(*end)
    got = of_ids(after["table"], s)
    np.testing.assert_allclose(got, of_ids(wanted["table"], SHARDING), rtol=1e-4, atol=1e-5)


def test_the_clock_keeps_its_order():
    """Its entries are steps; there may be as many as stored rows."""
    _, (_, state) = trained()
    [clock] = state.clock.values()
    s, n = optzoo.sharded.RowSharding(432, 2, multiple=1), 432
    assert s.stored_rows == n
    clock = clock._replace(ring=jnp.arange(n), young=jnp.arange(n))
    last = {"table": jnp.arange(n), "w": optax.MaskedNode()}
    state = CaughtUpState((), {"rule": clock}, last)
    shapes = {"table": jax.ShapeDtypeStruct((n, 2), "float32"), "w": jnp.ones(n)}
    moved = optzoo.sharded.in_order_of_ids(state, {"table": s}, shapes)
    jax.tree.map(np.testing.assert_array_equal, moved.clock, state.clock)
    assert moved.last["table"][:2].tolist() == [0, 216]


def test_taking_over_from_adam():
    """The state of Adam after a flush gives the same training, also on the shards."""
    middle, end = trained()
    current, state = optzoo.rows.catch_up(*middle)
    take = functools.partial(optzoo.rows.take_over, deferred())
    placed = optzoo.state_sharding(deferred(), current)
    taken = jax.jit(take, out_shardings=placed)(current, state.inner)
    jax.tree.map(np.testing.assert_array_equal, taken.last, state.last)
    after, wanted = finish((current, taken), MESH, SHARDING), optzoo.eval_params(*end)
    np.testing.assert_allclose(after["table"], wanted["table"], rtol=1e-4, atol=1e-5)


def test_inside_of_other_transformations():
    """In rounds too: the rows are caught up when they are read, and before they are updated."""
    groups = {"table": deferred(True), "small": deferred(True, optzoo.adam(RATE)), ".*": ADAM}
    grouped = optzoo.param_groups(groups)
    tx = optax.chain(optzoo.transforms.scale(2.0), optzoo.transforms.scale(0.5), grouped)
    wanted, _, values = dense(4)
    params, state, losses = train(tx, MESH, SHARDING, capacity_factor=0.1)
    np.testing.assert_allclose(losses, values, rtol=1e-4)
    check(optzoo.eval_params(params, state), wanted, SHARDING)


def refused(words, tx, fn=loss, **options):
    params, state = shapes(tx, MESH, SHARDING)
    step = optzoo.sharded_minimize(fn, tx, MESH, {"table": SHARDING}, **options)
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(step, params, state, *next(batches(MESH)))


def test_what_is_refused():
    few = {"capacity_factor": 0.01}
    refused("moves all rows of table 'table'", optzoo.accumulate(deferred(), 2), **few)
    refused("moves all rows of table 'table'", optax.chain(deferred(("small",))), **few)
    followed = optax.chain(deferred(), optzoo.transforms.scale(0.5))
    refused("a transformation changes the update of table", followed, capacity_factor=None)
    l2 = lambda p, *batch: loss(p, *batch) + jnp.sum(p["table"] ** 2)
    refused("table 'table' is sharded by rows, so the loss can read it", deferred(), fn=l2)
    chosen = lambda p, ids, bags, y: loss(
        p, optzoo.lookup(p["small"], ids)[:, 0].astype(int), bags, y
    )
    refused("ids depend on looked-up rows", deferred(), fn=chosen)
    params, state = shapes(ADAM, MESH, SHARDING)
    with pytest.raises(ValueError, match="CaughtUpState"):
        jax.eval_shape(step_of(DEFERRED, MESH, SHARDING), params, state, *next(batches(MESH)))


def test_a_replicated_table_read_as_a_whole():
    """All its rows are caught up in each step, and the result is that of dense Adam."""
    tied = lambda p, *batch: loss(p, *batch) + 0.01 * jnp.sum(p["small"] ** 2)
    some = list(batches(MESH, 6))
    one = {"table": whole(), "w": W, "small": whole()}
    step, state = optzoo.minimize(tied, ADAM, sparse="allow"), ADAM.init(one)
    for batch in some:
        one, state, _ = step(one, state, *batch)
    tx, options = deferred(), {"sparse": "allow", "capacity_factor": None}
    carry = start(tx, MESH, SHARDING)
    step = optzoo.sharded_minimize(tied, tx, MESH, {"table": SHARDING}, **options)
    for batch in some:
        *carry, _ = step(*carry, *batch)
    check(optzoo.eval_params(*carry), one, SHARDING)


@pytest.mark.optimized
def test_no_pass_over_a_shard():
    """The step, in rounds too, and a flush need little memory besides the tables, in place."""
    s, rows = (
        optzoo.sharded.RowSharding(80_000, 4, multiple=1),
        lambda ids: jnp.ones((len(ids), 16)),
    )
    tx = deferred(("table",), optzoo.slots_dtype(ADAM, "float32", packed=True))
    place = lambda x: jax.device_put(x, NamedSharding(MESH, P()))
    params = {"table": optzoo.sharded.create_table(s, MESH, rows), "w": place(jnp.ones((16, 16)))}
    state = jax.jit(tx.init, out_shardings=optzoo.state_sharding(tx, params))(params)
    of_table = lambda p, ids: jnp.mean((optzoo.lookup(p["table"], ids) @ p["w"]) ** 2)
    ids, shard = jnp.arange(32), params["table"].nbytes // 4
    for factor in (0.1, None):
        step = optzoo.sharded_minimize(of_table, tx, MESH, {"table": s}, capacity_factor=factor)
        memory = step.lower(params, state, ids).compile().memory_analysis()
        assert memory.temp_size_in_bytes < 0.2 * shard
        assert memory.alias_size_in_bytes > 2.9 * shard
    memory = flushed(params, state).lower(params, state).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 1.2 * shard


@pytest.mark.parametrize("inner", ["adam", "momentum"])
def test_long_deferrals_in_float64(inner, x64):
    """Sweeps, several rounds and long deferrals: as the dense loop on one device."""
    steps, rows = 900, 3000
    with x64(True):
        # Rates that are exact in float32, in which a loop may round a schedule in another way.
        rate = optax.piecewise_constant_schedule(0.125, {20: 0.5, 40: 0.5})
        plain = optzoo.adam(rate) if inner == "adam" else optzoo.momentum(rate, 0.9)
        dense = inner == "momentum"
        tx = optzoo.caught_up(plain, mask="table", dense=dense, horizon=1)
        s = optzoo.sharded.RowSharding(rows, 4, multiple=1)
        table = np.random.default_rng(0).normal(size=(s.stored_rows, 2))
        params = {
            "table": optzoo.sharded.create_table(s, MESH, lambda ids: jnp.asarray(table)[ids])
        }
        state = jax.jit(tx.init, out_shardings=optzoo.state_sharding(tx, params))(params)
        rng = np.random.default_rng(1)
        ids = jnp.asarray(rng.integers(0, rows, (steps, 8)) // rng.integers(1, 99, (steps, 8)))
        y = jnp.asarray(
            rng.normal(size=(steps, 8, 2)) * 10 ** rng.uniform(-6, 1, rows)[ids][..., None]
        )
        # Its gradients do not depend on the rows, so that no rounding is fed back.
        of = lambda p, ids, y: jnp.mean(optzoo.lookup(p["table"], ids) * y)
        step = optzoo.sharded_minimize(of, tx, MESH, {"table": s}, capacity_factor=0.01)

        def one(carry, batch):
            params, state, _ = step(*carry, *batch)
            return (params, state), state.inner[0].count - state.last["table"].min()

        run = jax.jit(lambda *carry: jax.lax.scan(one, carry, (ids, y)))
        (params, state), ages = run(params, state)
        whole = optax.chain(optzoo.rows.densify(), plain) if dense else plain
        one_step = optzoo.minimize(of, whole)
        each = lambda carry, batch: (one_step(*carry, *batch)[:2], None)
        start = {"table": jnp.asarray(table[:rows])}, whole.init({"table": table[:rows]})
        (wanted, _), _ = jax.jit(lambda carry: jax.lax.scan(each, carry, (ids, y)))(start)
        got = optzoo.sharded.in_order_of_ids(optzoo.eval_params(params, state), {"table": s})[
            "table"
        ]
        got, wanted = np.asarray(got)[:rows], np.asarray(wanted["table"])
    [clock] = state.clock.values()
    assert len(clock.ring) // 2 < ages.max() <= len(clock.ring)
    assert np.abs(wanted - table[:rows]).max() > 1
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-12)


def test_a_loop_by_hand():
    """The owners catch up the rows that all devices will read."""
    tx, axis = deferred(), "shard"
    params, state = start(tx, MESH, SHARDING)
    specs = jax.tree.map(lambda x: x.sharding.spec, (params, state))

    def of_device(params, state, ids, bags, y):
        every = [ids, *bags.T]
        every = jax.lax.all_gather(jnp.concatenate(every), axis, tiled=True)
        first = jax.lax.axis_index(axis) * SHARDING.rows_per_shard
        mine = {"table": SHARDING.places_of(every) - first}
        params, state = optzoo.rows.catch_up(params, state, mine)

        def mean(params):
            rows = optzoo.sharded.lookup(params["table"], ids, SHARDING) @ params["w"]
            bag = optzoo.sharded.lookup(params["table"], bags, SHARDING)
            return jax.lax.pmean(jnp.mean((rows - y) ** 2) + jnp.mean(bag**2), axis)

        value, grads = optzoo.value_and_grad(mean)(params)
        return *samples.step(tx, grads, params, state), value

    step = jax.jit(
        jax.shard_map(
            of_device, mesh=MESH, in_specs=(*specs, *[P(axis)] * 3), out_specs=(*specs, P())
        )
    )

    def of_one(params, ids, bags, y):
        rows = optzoo.lookup(params["table"], ids) @ params["w"]
        return jnp.mean((rows - y) ** 2) + jnp.mean(optzoo.lookup(params["table"], bags) ** 2)

    one = {"table": jnp.array(whole()), "w": jnp.array(W)}
    dense_step, of_dense = optzoo.minimize(of_one, ADAM), ADAM.init(one)
    for batch in batches(MESH):
        params, state, value = step(params, state, *batch)
        one, of_dense, wanted = dense_step(one, of_dense, *batch)
        np.testing.assert_allclose(value, wanted, rtol=1e-4)
    table = optzoo.eval_params(params, state)["table"]
    np.testing.assert_allclose(of_ids(table, SHARDING), one["table"], rtol=2e-4, atol=2e-5)


def dense_momentum(listed, gs, decay, rate=0.1):
    """A table of ones before each step and at the end; listed rows have the step's gradient."""
    x, m, found = np.ones((ROWS, WIDTH)), np.zeros((ROWS, WIDTH)), []
    for ids, g in zip(listed, gs, strict=True):
        found.append(x)
        m = decay * m + g * np.isin(np.arange(ROWS), ids)[:, None]
        x = x - rate * m
    return [*found, x]


@pytest.mark.unique
def test_deferred_groups_over_different_axes():
    """Rows are read as of now. Slots in 16 bits, so far exact, are rounded unlike by each shard."""
    momentum, mesh = optzoo.momentum(0.1, decay := 13 / 16), mesh_of(2, 2)
    slots = optzoo.slots_dtype(momentum, "bfloat16", stochastic=True)
    defer = lambda tx: optzoo.caught_up(tx, mask=True, dense=True)
    tx = optzoo.param_groups({"a": defer(momentum), "b|c": defer(slots)})
    of_axis = lambda axis: optzoo.sharded.RowSharding(ROWS, 2, axis_name=axis, multiple=16)
    tables = {"a": of_axis("data"), "b": of_axis("shard")}
    ones = lambda ids: jnp.ones((len(ids), WIDTH))
    params = {name: optzoo.sharded.create_table(s, mesh, ones) for name, s in tables.items()}
    params["c"] = jax.device_put(jnp.ones((ROWS, WIDTH)), NamedSharding(mesh, P()))
    state = jax.jit(tx.init, out_shardings=optzoo.state_sharding(tx, params))(params)

    def of(params, ids, g):
        rows = {name: optzoo.lookup(x, ids[name]) for name, x in params.items()}
        return mesh.size * g * sum(map(jnp.sum, rows.values())), rows

    step = optzoo.sharded_minimize(of, tx, mesh, tables, capacity_factor=None, has_aux=True)
    some, every, none, gs = np.arange(8), np.arange(ROWS), np.arange(0), [1.0, 1.0, 1.0, 1.0, 0.0]
    ids = {"a": [some, some + 8, none, none, some], "b": [every, none, none, none, some]}
    ids["c"] = ids["b"]
    want = {name: dense_momentum(listed, gs, decay) for name, listed in ids.items()}
    for t, g in enumerate(gs):
        now = {name: listed[t] for name, listed in ids.items()}
        padded = {k: np.pad(i, (0, 44 - len(i)), constant_values=ROWS) for k, i in now.items()}
        params, state, _, rows = step(params, state, padded, g)
        for name, i in now.items():
            read = np.asarray(rows[name]).reshape(-1, WIDTH)[: len(i)]
            np.testing.assert_allclose(read, want[name][t][i], rtol=1e-6)
    current, state = optzoo.rows.catch_up(params, state)
    for name, table in current.items():
        table = of_ids(table, tables[name]) if name in tables else table
        # The last step of the others was by slots that it rounded.
        np.testing.assert_allclose(table[8:], want[name][5][8:], rtol=1e-6)
    m = 256 * np.asarray(optzoo.get_slot(state, "momentum")["b"], np.float64).reshape(2, -1, WIDTH)
    # The first were rounded to 137 or 138 after three deferred steps; 13 / 16 of it is the next.
    caught_up, others = m[:, :4], m[:, 8:16]
    assert {*np.unique(caught_up)} <= {111, 111.5, 112, 112.5}
    assert not np.array_equal(*(caught_up > 111.75))
    assert {*np.unique(others)} == {111.5, 112}  # 256 * (13 / 16)**4 is 111.57
    assert not np.array_equal(*others)


@pytest.mark.full
def test_tables_and_slots_of_16_bits():
    """In rounds, with words of two slots: as in float32, up to the roundings of 16 bits."""
    slots = optzoo.slots_dtype(ADAM, "bfloat16", stochastic=True, packed=True)
    some, ends = list(batches(MESH, 12)), []
    for tx, dtype in ((deferred(inner=slots), jnp.float16), (deferred(), jnp.float32)):
        params, _ = start(ADAM, MESH, SHARDING)
        params["table"] = params["table"].astype(dtype)
        state = jax.jit(tx.init, out_shardings=optzoo.state_sharding(tx, params))(params)
        wide = lambda p, *batch: loss({**p, "table": p["table"].astype(jnp.float32)}, *batch)
        step = optzoo.sharded_minimize(wide, tx, MESH, {"table": SHARDING}, capacity_factor=0.1)
        for batch in some:
            params, state, value = step(params, state, *batch)
        ends.append((optzoo.eval_params(params, state)["table"], value))
    (got, value), (want, wanted) = ends
    assert got.dtype == jnp.float16
    np.testing.assert_allclose(value, wanted, rtol=0.05)
    np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=0, atol=0.05)


@pytest.mark.full
def test_averages_of_rows():
    """As the averages of dense Adam on one device."""
    plain = optzoo.moving_average(ADAM, 0.9)
    params, state, _ = train(deferred(inner=plain), MESH, SHARDING, capacity_factor=0.1)
    one = {"table": jnp.array(whole()), "w": jnp.array(W), "small": jnp.array(whole())}
    step, of_one = optzoo.minimize(loss, plain), plain.init(one)
    for batch in batches(MESH):
        one, of_one, _ = step(one, of_one, *batch)
    check(optzoo.eval_params(params, state), optzoo.eval_params(one, of_one), SHARDING)
    check(optzoo.rows.catch_up(params, state)[0], one, SHARDING)
