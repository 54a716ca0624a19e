"""Tables in lines: the same numbers as in an array of rows."""

from contextlib import nullcontext
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import optzoo
from optzoo.core.lines import add_rows, put_rows, shape_of_lines, take_rows
from optzoo.testing import samples

ROWS, WIDTH = 45, 16  # 8 rows in a line, and the last line has 3 of them free
# Repeated ids, rows of one line, padding, and of the last line.
IDS = jnp.array([2, 3, 2, 44, ROWS, 17, 0, 16])


def table(shape=(ROWS, WIDTH), dtype=jnp.float32):
    return jax.random.normal(jax.random.key(0), shape).astype(dtype)


def both(dtype=jnp.float32):
    """Parameters with a plain table, and with lines."""
    x, w = table(dtype=dtype), jnp.arange(1.0, WIDTH + 1) / WIDTH
    return {"table": x, "w": w}, {"table": optzoo.rows.to_lines(x), "w": w + 0}


def loss(params, ids):
    return jnp.mean((optzoo.lookup(params["table"], ids) @ params["w"] - 1) ** 2)


@pytest.mark.parametrize("width", [1, 3, 8, 16, 24, 32, 48, 64, 96, 100, 127, 128, 200, 256])
def test_shapes(width):
    lines, lanes = shape_of_lines((3000, width))
    assert lanes % 128 == 0
    assert 3000 * width <= lines * lanes <= 1.15 * 3000 * width + lanes
    x = table((31, width))
    kept = optzoo.rows.to_lines(x)
    assert kept.value.shape == shape_of_lines(x.shape) and kept.shape == x.shape and len(kept) == 31
    np.testing.assert_array_equal(optzoo.rows.from_lines(kept), x)


# An array with the shape of the lines of a table is no table in lines.
SHAPES = [(1000, 16), (500, 15), (64, 16)]
TAKERS = {
    "params + rows": lambda x, g: x + g,
    "params - rows": lambda x, g: x - g,
    "apply_updates": lambda x, g: optax.apply_updates({"x": x}, {"x": g})["x"],
    "gather": lambda x, g: g.gather(x),
    "scatter": lambda x, g: g.scatter(x, g.values),
    **{
        name: lambda x, g, tx=tx: tx.update(g, tx.init(x), x)[0]
        for name, tx in {
            "lazy rows": optzoo.lazy_adam(0.1),
            "dense rows": optzoo.momentum(0.1, 0.9),
            "touched rows": optzoo.add_sign(0.1),
            "linear rows": optzoo.gradient_descent(0.1),
            "on_rows": optzoo.on_rows(optax.adam(0.1)),
            "matrices": optzoo.shampoo(0.1),
            "slots in 8 bits": optzoo.slots_dtype(optzoo.lazy_adam(0.1), "int8"),
            "accumulated rows": optzoo.accumulate(optzoo.lazy_adam(0.1), 2, max_rows={".*": 1}),
        }.items()
    },
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", TAKERS)
def test_a_plain_array_is_never_lines(name, shape):
    take, row = TAKERS[name], jnp.ones((1, shape[1]))
    g = optzoo.SparseRows(jnp.array([9]), row, shape[0])
    with pytest.raises(ValueError, match=str(shape[0])):
        take(jnp.zeros(shape_of_lines(shape)), g)


class Factors(NamedTuple):
    factors: optzoo.rules.Signed


def test_a_slot_that_could_be_lines_is_refused():
    """Of a table of 1000 rows of 16 it would be read as lines."""
    rule = lambda g, x, s, t: (-g, s)
    for shape, refused in (((125, 128), True), ((125, 256), True), ((124, 128), False)):
        slots = Factors(lambda x, shape=shape: jnp.zeros(shape))
        tx = optzoo.rules.leafwise(rule, slots=slots)
        assert tx.init(jnp.zeros((1000, 16))).slots.factors.shape == shape
        with pytest.raises(ValueError, match="so it is ambiguous") if refused else nullcontext():
            tx.init(optzoo.rows.to_lines(jnp.zeros((1000, 16))))


def test_a_state_for_a_plain_array_is_not_one_for_lines():
    """Slots of a parameter that has the shape of lines are not those of the table."""
    tx = optzoo.lazy_adam(0.1)
    for shape in SHAPES:
        x = jnp.zeros(shape)
        g = optzoo.SparseRows(jnp.array([9]), jnp.ones((1, shape[1])), shape[0])
        with pytest.raises(ValueError, match="the slot"):
            tx.update(g, tx.init(jnp.zeros(shape_of_lines(shape))), x)


@pytest.mark.unique
def test_rows_know_that_they_are_of_lines():
    """Through all that makes rows of rows, and through trees."""
    plain, lines = both()
    g = jax.grad(lambda p: loss(p, IDS))(plain)["table"]
    rows = optzoo.value_and_grad(loss)(lines, IDS)[1]["table"].value
    assert rows.lines
    made = [
        rows + rows,
        -rows,
        rows / 2,
        rows.coalesce(),
        rows.astype(jnp.bfloat16),
        rows.drop_padding(),
        rows.rows_if(jnp.array(True)),
        rows.with_rows(rows.indices, rows.values),
        jax.tree.map(lambda x: x, rows),
        optzoo.SparseRows(rows.indices, rows.values, ROWS) + rows,
    ]
    assert all(each.lines for each in made)
    by_hand = optzoo.SparseRows(rows.indices, rows.values, ROWS)
    assert not by_hand.lines and optzoo.rows.Lines(by_hand, (ROWS, WIDTH)).value.lines
    sums = optzoo.rows.Lines(lines["table"].value + rows, (ROWS, WIDTH))
    np.testing.assert_allclose(
        optzoo.rows.from_lines(sums), plain["table"] + g, rtol=1e-6, atol=1e-7
    )


def test_rows_of_a_cycle_whose_last_step_has_no_gradient():
    """The rows of the whole table are there, not those of as many as there are lines."""
    tx = optzoo.accumulate(optzoo.gradient_descent(1.0), 2, max_rows={"table": 1})
    results = []
    for params in both():
        rows = optzoo.SparseRows(jnp.array([ROWS - 1]), jnp.ones((1, WIDTH)), ROWS)
        of = lambda g, x=params["table"]: (
            optzoo.rows.Lines(g, x.shape) if isinstance(x, optzoo.rows.Lines) else g
        )
        state = tx.init(params)
        for g in (rows, None):
            updates, state = tx.update({"table": of(g), "w": None}, state, params)
            params = {**params, "table": optax.apply_updates(params["table"], updates["table"])}
        results.append(optzoo.rows.from_lines(params["table"]))
    np.testing.assert_array_equal(results[0], table().at[ROWS - 1].add(-1.0))
    np.testing.assert_array_equal(results[1], results[0])


@pytest.mark.parametrize("shape", [(ROWS, WIDTH), (7, 100), (9, 2, 12), (5, 200), (300, 1)])
def test_rows_of_all_kinds(shape):
    """Those out of range are ignored; no row but those of the ids changes."""
    x = table(shape)
    lines = optzoo.rows.to_lines(x).value
    ids = jnp.array([3, 0, -1, shape[0], 4, shape[0] + 130, -200, 1])
    is_in = (ids >= 0) & (ids < shape[0])
    found = take_rows(lines, ids, shape)
    np.testing.assert_array_equal(found[is_in], x[ids[is_in]])
    rows = jax.random.normal(jax.random.key(1), found.shape)
    back = lambda value: optzoo.rows.from_lines(optzoo.rows.Lines(value, shape))
    ignored = jnp.where(is_in, ids, shape[0])
    want = x.at[ignored].set(rows, mode="drop")
    np.testing.assert_array_equal(back(put_rows(lines, ids, rows, shape)), want)
    repeated = ids.at[-1].set(3)
    want = x.at[jnp.where(is_in, repeated, shape[0])].add(rows, mode="drop")
    np.testing.assert_allclose(back(add_rows(lines, repeated, rows, shape)), want, rtol=1e-6)


def test_nan_stays_in_its_row():
    x = table().at[3].set(jnp.nan)
    lines = optzoo.rows.to_lines(x).value
    found = take_rows(lines, jnp.arange(ROWS), x.shape)
    np.testing.assert_array_equal(found, x)
    rows = jnp.full((1, WIDTH), jnp.nan)
    new = optzoo.rows.Lines(put_rows(lines, jnp.array([5]), rows, x.shape), x.shape)
    np.testing.assert_array_equal(optzoo.rows.from_lines(new), x.at[5].set(jnp.nan))


def test_lookups():
    plain, lines = both()
    for ids in (IDS, IDS.reshape(2, 4), jnp.int32(3)):
        read = jax.jit(lambda p, ids: optzoo.lookup(p["table"], ids))
        np.testing.assert_array_equal(read(lines, ids), read(plain, ids))
    wrong = jnp.array([-1, ROWS + 1, ROWS])
    found = jax.jit(optzoo.lookup)(lines["table"], wrong)
    assert np.isnan(found[:2]).all() and not found[2].any()
    with pytest.raises(IndexError, match="got 46"):
        optzoo.lookup(lines["table"], [46])
    mapped = jax.vmap(lambda ids: optzoo.lookup(lines["table"], ids))(IDS.reshape(2, 4))
    np.testing.assert_array_equal(mapped.reshape(-1, WIDTH), optzoo.lookup(plain["table"], IDS))
    half = optzoo.lookup(lines["table"].astype(jnp.bfloat16), IDS)
    want = optzoo.lookup(plain["table"].astype(jnp.bfloat16), IDS)
    np.testing.assert_array_equal(half, want)


@pytest.mark.parametrize("tied", [False, True])
def test_gradients(tied):
    def of(params, ids):
        more = jnp.sum(optzoo.rows.from_lines(params)["table"] ** 2) if tied else 0.0
        return loss(params, ids) + jnp.sum(optzoo.lookup(params["table"], ids[:2]) ** 3) + more

    plain, lines = both()
    value_and_grad = optzoo.value_and_grad(of, sparse="allow" if tied else "require")
    want_value, want = value_and_grad(plain, IDS)
    value, found = value_and_grad(lines, IDS)
    assert value == want_value
    assert isinstance(found["table"].value, optzoo.SparseRows) != tied
    found = optzoo.rows.from_lines(found)["table"]
    dense = lambda g: g.to_dense() if isinstance(g, optzoo.SparseRows) else g
    np.testing.assert_allclose(dense(found), dense(want["table"]), rtol=1e-5, atol=1e-7)


def trained(tx, params, steps=3, dtype=None, **extra):
    step = optzoo.minimize(loss, tx, sparse="require")
    state = tx.init(params)
    for k in range(steps):
        ids = IDS if k != 1 else (IDS * 7 + 1) % ROWS
        params, state, value = step(params, state, ids, **extra)
    return optzoo.rows.from_lines((params, state, value))


def assert_equal(found, want):
    assert jax.tree.structure(found) == jax.tree.structure(want)
    wide = lambda x: np.asarray(x).astype(np.complex128)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(wide(a), wide(b), rtol=2e-5, atol=1e-7)


SECOND_ORDER = ("shampoo", "blocked_shampoo", "soap", "ggt", "muon")


# Each policy, slots with one number for each row, norms of rows, and what needs the number of rows.
FEW = [
    "adam",
    "counter_row_wise_adagrad",
    "gradient_descent",
    "grad_variance_scaled",
    "row_wise_lamb",
]
FEW += ["lazy_adam", "nadam", "partial_row_wise_adam", "row_wise_adagrad", "row_wise_lars"]
OTHERS = [n for n in optzoo.CATALOG if n not in (*FEW, *SECOND_ORDER)]


@pytest.mark.parametrize("name", [*FEW, *OTHERS])
def test_every_optimizer(name):
    plain, lines = both()
    tx = optzoo.CATALOG[name].make()
    extra = {"global_step": jnp.int32(5)} if name.endswith("_gs") else {}
    assert_equal(trained(tx, lines, **extra), trained(tx, plain, **extra))


adam = lambda: optzoo.lazy_adam(0.1)
WRAPPED = {
    "chain": lambda: optax.chain(optzoo.clip_by_global_norm(1e-3), adam()),
    "groups": lambda: optzoo.param_groups({"table": adam(), "w": optzoo.adam(1e-3)}),
    "on_rows": lambda: optzoo.on_rows(optax.adamw(1e-3)),
    "accumulate": lambda: optzoo.accumulate(adam(), 2),
    "accumulate_rows": lambda: optzoo.accumulate(adam(), 2, max_rows={"table": 8}),
    "moving_average": lambda: optzoo.moving_average(adam(), 0.9),
    "bfloat16": lambda: optzoo.slots_dtype(adam(), "bfloat16"),
    "packed": lambda: optzoo.slots_dtype(adam(), "float32", packed=True),
    "random": lambda: optzoo.slots_dtype(adam(), "bfloat16", stochastic=True),
    "random_packed": lambda: optzoo.slots_dtype(adam(), "bfloat16", stochastic=True, packed=True),
    "apply_if_finite": lambda: optax.apply_if_finite(adam(), 3),
    "weight_decay": lambda: optzoo.decoupled_weight_decay(adam(), weight_decay_per_step=0.01),
    "densify": lambda: optax.chain(optzoo.rows.densify(), optax.adam(0.1)),
    "on_values": lambda: optax.chain(optzoo.rows.on_values(optax.scale(2.0)), adam()),
    "partition": lambda: optax.partition(
        {"a": adam(), "b": optax.sgd(0.1)}, {"table": "a", "w": "b"}
    ),
    "inject": lambda: optax.inject_hyperparams(optzoo.lazy_adam)(learning_rate=0.1),
    "max_norm": lambda: optax.chain(optzoo.transforms.zero_if_norm_exceeds(1e3), adam()),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_wrappers(name):
    """Rows are rounded by the same random bits, too."""
    plain, lines = both()
    assert_equal(trained(WRAPPED[name](), lines, 4), trained(WRAPPED[name](), plain, 4))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float64])
def test_other_dtypes(dtype):
    with jax.enable_x64(dtype == jnp.float64):
        plain, lines = both(dtype)
        found, want = (trained(optzoo.row_wise_adagrad(0.1), p) for p in (lines, plain))
        assert found[0]["table"].dtype == dtype
        assert_equal(found, want)


def test_a_loop_by_hand():
    tx = optzoo.ftrl(0.1)

    @jax.jit
    def step(params, state, ids):
        _, grads = optzoo.value_and_grad(loss)(params, ids)
        return samples.step(tx, grads, params, state)

    results = [step(p, tx.init(p), IDS) for p in both()]
    assert_equal(optzoo.rows.from_lines(results[1]), results[0])


def test_a_state_of_rows_goes_on_in_lines():
    plain, lines = both()
    tx = optzoo.partial_row_wise_adam(0.1)
    step = optzoo.minimize(loss, tx)
    plain, state, _ = step(plain, tx.init(plain), IDS)
    like = lines, tx.init(lines)
    copies = jax.tree.map(jnp.copy, (plain, state))
    lines, in_lines = optzoo.rows.to_lines(copies, like=like)
    assert jax.tree.structure((lines, in_lines)) == jax.tree.structure(like)
    want = step(plain, state, IDS[:4])
    assert_equal(optzoo.rows.from_lines(step(lines, in_lines, IDS[:4])), want)


def test_checkpoints_of_tensorflow_and_fbgemm(tmp_path):
    """Files hold rows; so a file of a plain table is read into lines, and written from them."""
    plain, lines = both()
    tx = optzoo.lazy_adam(0.1)
    step = optzoo.minimize(loss, tx)
    plain, state, _ = step(plain, tx.init(plain), IDS)
    like = lines, tx.init(lines)
    names = dict(optimizer_name="Adam")
    optzoo.save_tf1_state(str(tmp_path / "rows.npz"), plain, state, **names)
    read = optzoo.load_tf1_state(tx, lines, str(tmp_path / "rows.npz"), **names)
    assert jax.tree.structure(read) == jax.tree.structure(like)
    assert_equal(optzoo.rows.from_lines(read), (plain, state))
    optzoo.save_tf1_state(str(tmp_path / "lines.npz"), *read, **names)
    again = optzoo.load_tf1_state(tx, plain, str(tmp_path / "lines.npz"), **names)
    assert_equal(again, (plain, state))
    tx = optzoo.interop.fbgemm.fbgemm_optimizer("EXACT_ROWWISE_ADAGRAD")
    state = tx.init(plain)
    plain, state, _ = optzoo.minimize(loss, tx)(plain, state, IDS)
    like = lines, tx.init(lines)
    of_rows = optzoo.interop.fbgemm.fbgemm_state_dict(plain, state)
    read = optzoo.interop.fbgemm.load_fbgemm_state(tx, lines, of_rows)
    assert jax.tree.structure(read) == jax.tree.structure(like)
    for name, a in optzoo.interop.fbgemm.fbgemm_state_dict(*read).items():
        np.testing.assert_array_equal(a, of_rows[name])


@pytest.mark.parametrize("name", SECOND_ORDER)
def test_matrices_are_refused(name):
    _, lines = both()
    with pytest.raises(ValueError, match=r"a table of shape \(45, 16\) is in lines"):
        trained(optzoo.CATALOG[name].make(), lines)


def test_errors():
    _, lines = both()
    with pytest.raises(ValueError, match=r"optzoo\.caught_up"):
        optzoo.caught_up(optzoo.adam(), mask="table").init(lines)
    with pytest.raises(ValueError, match="table must have at least one axis"):
        optzoo.rows.to_lines(1.0)
    with pytest.raises(ValueError, match=r"shapes \[\(3, 16\)\] do not match .*\(45, 16\)"):
        optzoo.rows.to_lines({**lines, "table": jnp.ones((3, WIDTH))}, like=lines)
    mesh = Mesh(np.array(jax.devices()[:2]), ("shard",))
    rows = optzoo.sharded.uniform_rows(jax.random.key(0), WIDTH)
    with pytest.raises(
        ValueError, match=r"the 20 rows of a shard .* the 8 rows of a line.*multiple=16"
    ):
        optzoo.sharded.create_table(
            optzoo.sharded.RowSharding(40, 2, multiple=1), mesh, rows, lines=True
        )


@pytest.mark.parametrize("options", [{}, {"max_norm": 1e-3, "transport": jnp.bfloat16}])
@pytest.mark.parametrize("name", ["lazy_adam", "row_wise_adagrad", "gradient_descent"])
def test_sharded_tables(name, options):
    mesh = Mesh(np.array(jax.devices()[:2]), ("shard",))
    sharding = optzoo.sharded.RowSharding(ROWS, 2, multiple=32)
    rows = optzoo.sharded.uniform_rows(jax.random.key(0), WIDTH)
    tx = optzoo.CATALOG[name].make()
    step = optzoo.sharded_minimize(loss, tx, mesh, {"table": sharding}, **options)

    def run(lines):
        x = optzoo.sharded.create_table(sharding, mesh, rows, chunk=11, lines=lines)
        everywhere = NamedSharding(mesh, PartitionSpec())
        params = {"table": x, "w": jax.device_put(jnp.ones(WIDTH), everywhere)}
        placed = optzoo.state_sharding(tx, params)
        state = jax.jit(tx.init, out_shardings=placed)(params)
        for k in range(2):
            params, state, value = step(params, state, jnp.tile(IDS + k, 2).clip(max=ROWS))
        large = [a for a in jax.tree.leaves((params, state)) if a.size > WIDTH]
        assert all(a.sharding.spec == PartitionSpec("shard") for a in large) and large
        return optzoo.rows.from_lines((params, state, value))

    assert_equal(run(True), run(False))


def test_replicated_tables_in_lines_beside_sharded_ones():
    mesh = Mesh(np.array(jax.devices()[:2]), ("shard",))
    sharding, tx = optzoo.sharded.RowSharding(ROWS, 2, multiple=32), optzoo.lazy_adam(0.1)
    rows = optzoo.sharded.uniform_rows(jax.random.key(0), WIDTH)
    small = jax.random.normal(jax.random.key(1), (45, WIDTH))

    def both_tables(p, ids):
        return loss({"table": p["table"], "w": optzoo.lookup(p["small"], ids).sum(0)}, ids)

    step = optzoo.sharded_minimize(both_tables, tx, mesh, {"table": sharding})

    def run(lines):
        x = optzoo.sharded.create_table(sharding, mesh, rows, lines=lines)
        everywhere = NamedSharding(mesh, PartitionSpec())
        other = optzoo.rows.to_lines(small) if lines else small
        params = {"table": x, "small": jax.device_put(other, everywhere)}
        placed = optzoo.state_sharding(tx, params)
        state = jax.jit(tx.init, out_shardings=placed)(params)
        for k in range(2):
            params, state, value = step(params, state, jnp.tile(IDS + k, 2).clip(max=40))
        return optzoo.rows.from_lines((params, state, value))

    assert_equal(run(True), run(False))


def test_groups_with_deferred_rows_beside_tables_in_lines():
    _, lines = both()
    deferred = {"deferred": jnp.ones((9, WIDTH))}
    tx = optzoo.param_groups(
        {
            "deferred": optzoo.caught_up(optzoo.adam(), mask=True),
            ".*": optzoo.lazy_adam(),
        }
    )
    state = tx.init({**lines, **deferred})
    assert optzoo.rows.catch_up({**lines, **deferred}, state)[0]["table"].shape == (45, WIDTH)
