"""Which arguments and results of a step are row-major: the arrays of which it changes rows."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.experimental.layout import Format, Layout, with_layout_constraint
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import optzoo
from optzoo.core import compat
from optzoo.core.compat import DEMANDS_LAYOUTS
from optzoo.jaxprs.changed_rows import changed_rows
from optzoo.jaxprs.graph import Graph
from optzoo.sparse.row_major import Needs
from optzoo.testing import samples
from optzoo.train.jitted import Jitted

ROWS, WIDTH = 11, 3
IDS = jnp.array([2, 5, 2])


@pytest.fixture(autouse=True)
def for_tpus(monkeypatch):
    monkeypatch.setattr(compat, "may_be_for_tpus", lambda: True)


def loss(params, ids):
    return jnp.sum((optzoo.lookup(params["table"], ids) @ params["w"]) ** 2)


def params():
    return {"table": jnp.ones((ROWS, WIDTH)), "w": jnp.ones((WIDTH, 2))}


def row_major_results(step, *args):
    """The shapes of the results that are row-major by demand, in their order.

    Before JAX 0.11.1 there are none: then it is the results of which rows are changed.
    """
    jaxpr = jax.make_jaxpr(step)(*args).jaxpr
    while jaxpr.eqns[-1].primitive.name == "jit":
        jaxpr = jaxpr.eqns[-1].params["jaxpr"].jaxpr
    if not DEMANDS_LAYOUTS:
        assert not any(eqn.primitive.name == "layout_constraint" for eqn in jaxpr.eqns)
        avals = [v.aval for v in jaxpr.outvars]
        is_table = lambda a: a.ndim > 1 and a.dtype.itemsize <= 4
        return [
            a.shape if of is not None and is_table(a) else None
            for a, of in zip(avals, changed_rows(Graph.of(jaxpr)), strict=True)
        ]
    made = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    demands = [made.get(v) for v in jaxpr.outvars]
    is_demand = lambda eqn: eqn is not None and eqn.primitive.name == "layout_constraint"
    for eqn in filter(is_demand, demands):
        assert eqn.params["layout"].major_to_minor == tuple(range(eqn.outvars[0].aval.ndim))
    return [eqn and eqn.outvars[0].aval.shape if is_demand(eqn) else None for eqn in demands]


def of_table(*trees):
    """For each leaf its shape if it has the shape of the table."""
    is_table = lambda x: jnp.shape(x) == (ROWS, WIDTH)
    return [jnp.shape(x) if is_table(x) else None for x in jax.tree.leaves(trees)]


@pytest.mark.parametrize("name", [n for n, entry in optzoo.CATALOG.items() if entry.rows])
def test_tables_and_slots_of_every_optimizer(name):
    tx, x = optzoo.CATALOG[name].make(), params()
    state = tx.init(x)
    extra = {"global_step": jnp.int32(1)} if name.endswith("_gs") else {}
    step = functools.partial(optzoo.minimize(loss, tx), **extra)
    found = row_major_results(step, x, state, IDS)
    by_rows = {"lazy": (x, state), "linear": (x, state), "touched": (x,), "dense": ()}
    want = of_table(*by_rows[optzoo.CATALOG[name].rows])
    assert found == want + [None] * (len(found) - len(want))


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(optzoo.clip_by_global_norm(1.0), optzoo.lazy_adam()),
        optzoo.param_groups({"table": optzoo.lazy_adam(), "w": optax.adam(1e-3)}),
        optax.apply_if_finite(optzoo.lazy_adam(), 3),
        optzoo.accumulate(optzoo.lazy_adam(), 2, max_rows={"table": 8}),
        optzoo.slots_dtype(optzoo.lazy_adam(), "bfloat16", stochastic=True),
        optzoo.caught_up(optzoo.adam(), mask="table"),
        optzoo.on_rows(optax.adamw(1e-3)),
    ],
    ids=["chain", "groups", "cond", "accumulate", "stochastic", "caught_up", "on_rows"],
)
def test_tables_and_slots_in_wrappers(tx):
    x = params()
    state = tx.init(x)
    found = row_major_results(optzoo.minimize(loss, tx), x, state, IDS)
    want = of_table(x, state)
    assert found[: len(want)] == want and sum(shape is not None for shape in want) == 3


def test_two_slots_side_by_side():
    x, tx = params(), optzoo.slots_dtype(optzoo.lazy_adam(), "float32", packed=True)
    found = row_major_results(optzoo.minimize(loss, tx), x, tx.init(x), IDS)
    assert [shape for shape in found if shape] == [(ROWS, WIDTH), (ROWS, 2 * WIDTH)]


def test_elements_of_64_bits_have_no_layout(x64):
    """The compiler for TPUs refuses it."""
    with x64(True):
        x = {"table": jnp.ones((ROWS, WIDTH), jnp.float64), "w": jnp.ones((WIDTH, 2), jnp.float64)}
        tx = optzoo.lazy_adam()
        assert not any(row_major_results(optzoo.minimize(loss, tx), x, tx.init(x), IDS))


def test_steps_of_sharded_tables():
    mesh = Mesh(np.array(jax.devices()[:2]), ("shard",))
    sharding = optzoo.sharded.RowSharding(ROWS, 2, multiple=1)
    table = optzoo.sharded.create_table(sharding, mesh, lambda ids: jnp.ones((len(ids), WIDTH)))
    w = jax.device_put(params()["w"], NamedSharding(mesh, PartitionSpec()))
    x, tx = {"table": table, "w": w}, optzoo.lazy_adam()
    state = jax.jit(tx.init, out_shardings=optzoo.state_sharding(tx, x))(x)
    step = optzoo.sharded_minimize(loss, tx, mesh, {"table": sharding})
    found = row_major_results(step, x, state, jnp.arange(4))
    is_large = [a.shape if a.shape == table.shape else None for a in jax.tree.leaves((x, state))]
    assert found == [*is_large, None] and is_large.count(table.shape) == 3


def replace_rows(table, ids):
    return table.at[ids].set(1.0)


TABLE = jnp.ones((ROWS, WIDTH))


@pytest.mark.parametrize(
    ("f", "want"),
    [
        (lambda a, b: (replace_rows(a, IDS), b), [0, None]),
        (lambda a, b: (b, a.at[IDS].add(1.0)), [None, 0]),
        (lambda a, b: (a.at[:, jnp.array([0, 1])].set(0.0), b.at[IDS].multiply(2.0)), [None] * 2),
        (lambda a, b: (replace_rows(a + 1, IDS), jnp.zeros_like(b).at[IDS].set(1.0)), [None] * 2),
        (lambda a, b: (replace_rows(a, IDS) + 1, jax.jit(replace_rows)(b, IDS)), [None, 1]),
        (
            lambda a, b: jax.lax.cond(
                jnp.sum(b) > 0, lambda: (replace_rows(a, IDS), b), lambda: (a, b * 2)
            ),
            [0, None],
        ),
        (
            lambda a, b: jax.lax.cond(
                jnp.sum(b) > 0, lambda: (replace_rows(a, IDS),), lambda: (replace_rows(b, IDS),)
            ),
            [None],
        ),
        (
            lambda a, b: jax.lax.fori_loop(
                0, 3, lambda i, x: (replace_rows(x[0], IDS + i), x[1] * 2), (a, b)
            ),
            [0, None],
        ),
        (
            lambda a, b: jax.lax.while_loop(
                lambda x: jnp.sum(x[0]) < 3, lambda x: (replace_rows(x[1], IDS), x[0]), (a, b)
            ),
            [None, None],
        ),
        (
            lambda a, b: jax.lax.scan(
                lambda x, i: ((x[0], replace_rows(x[1], IDS + i)), x[0]), (b, a), jnp.arange(2)
            ),
            [None, 0, None],
        ),
        (
            lambda a, b: jax.lax.scan(
                lambda x, _: ((x[1], replace_rows(x[0], IDS)), None), (a, b), length=2
            )[0],
            [None, None],
        ),
        (lambda a, b: jax.lax.optimization_barrier((b, replace_rows(a, IDS))), [None, 0]),
        (lambda a, b: jax.checkpoint(replace_rows)(a, IDS), [0]),
        (lambda a, b: (3.0, a), [None, None]),
        (lambda a, b: (a.at[IDS[0]].set(b[0]), b), [None, None]),
    ],
)
def test_which_results_are_arguments_with_other_rows(f, want):
    program = jax.make_jaxpr(f)(TABLE, TABLE)
    found = changed_rows(Graph.of(program.jaxpr, program.consts))
    assert [of and of.position for of in found] == want


@pytest.mark.parametrize("is_inside", [True, False])
def test_rows_that_a_loop_or_a_branch_changes(is_inside):
    put = lambda x: replace_rows(x, IDS)
    in_branch = lambda x: jax.lax.cond(
        x[0, 0] > 0, put if is_inside else lambda x: x, lambda x: x, x
    )
    in_loop = lambda x: jax.lax.fori_loop(0, 2, lambda _, x: put(x) if is_inside else x, x)
    for f in (in_branch, in_loop, jax.jit(in_loop)):
        program = jax.make_jaxpr(lambda x, f=f: put(f(x)))(TABLE)
        [found] = changed_rows(Graph.of(program.jaxpr, program.consts))
        assert found == (0, True, is_inside)


@pytest.mark.parametrize("of_rows", [True, False])
def test_native_code_changes_rows_alone_where_gradients_are_rows(of_rows):
    tx = optzoo.lazy_adam()
    state = tx.init(TABLE)
    g = optzoo.SparseRows(IDS, jnp.ones((len(IDS), WIDTH)), ROWS) if of_rows else TABLE
    step = optzoo.native_step(tx, required=True)
    program = Graph.of(jax.make_jaxpr(step)(TABLE, state, g).jaxpr)
    tables = [k for k, shape in enumerate(of_table(TABLE, state)) if shape]
    found = [of and of.position for of in changed_rows(program)]
    assert [k for k in found if k is not None] == (tables if of_rows else [])
    assert len(tables) == 3 and all(k in (None, i) for i, k in enumerate(found))


def test_steps_in_a_loop():
    """Of a function that runs steps of ``minimize``, too."""
    tx, x = optzoo.lazy_adam(), params()
    step, state = optzoo.minimize(loss, tx), tx.init(x)

    def steps(params, state, batches):
        body = lambda carry, ids: (step(*carry, ids)[:2], None)
        return jax.lax.scan(body, (params, state), batches)[0]

    found = row_major_results(jax.jit(optzoo.rows.row_major(steps)), x, state, IDS[None])
    assert found == of_table(x, state)


def test_a_step_by_hand():
    tx = optzoo.row_wise_adagrad(0.1)

    def step(params, state, ids):
        _, grads = optzoo.value_and_grad(loss)(params, ids)
        return samples.step(tx, grads, params, state)

    by_rows, x = jax.jit(optzoo.rows.row_major(step)), params()
    state = tx.init(x)
    assert row_major_results(by_rows, x, state, IDS).count((ROWS, WIDTH)) == 1
    plain = jax.jit(step)
    for _ in range(2):
        want = plain(x, state, IDS)
        x, state = by_rows(x, state, IDS)
        jax.tree.map(np.testing.assert_array_equal, (x, state), want)
    assert by_rows._cache_size() == 1
    with pytest.raises(TypeError, match="step must be a function, got 3"):
        optzoo.rows.row_major(3)


# Before the first step

COLUMNS = Layout((1, 0))
needs_demands = pytest.mark.skipif(not DEMANDS_LAYOUTS, reason="row_major needs JAX 0.11.1")


def in_columns(tree, sharding=None):
    """Tables and slots by columns, as a TPU has them; ``w`` has the layout of the device."""
    demand = lambda x: with_layout_constraint(x, COLUMNS) if x.shape[1:] == (WIDTH,) else x
    return jax.jit(lambda: jax.tree.map(demand, tree), out_shardings=sharding)()


def is_by_rows(*trees):
    """For each table and slot whether it is row-major."""
    leaves = [x for x in jax.tree.leaves(trees) if x.shape[1:] == (WIDTH,)]
    return [x.format.layout.major_to_minor == (0, 1) for x in leaves]


def by_hand(tx, constant=0.0):
    def step(params, state, ids):
        value, grads = optzoo.value_and_grad(loss)(params, ids)
        grads["w"] += constant
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


@needs_demands
def test_the_first_step_is_like_the_others():
    """It gets tables and slots by rows, and is compiled once."""
    tx, x = optzoo.lazy_adam(), params()
    want, want_state = x, tx.init(x)
    x, state = given = in_columns((x, tx.init(x)))
    assert not any(is_by_rows(given))
    step, plain = Jitted(lambda _: by_hand(tx)), jax.jit(by_hand(tx))
    for _ in range(3):
        x, state, value = step(x, state, IDS)
        want, want_state, of_plain = plain(want, want_state, IDS)
        jax.tree.map(np.testing.assert_array_equal, (x, state, value), (want, want_state, of_plain))
    assert step._cache_size() == 1 and not x["table"].committed
    assert is_by_rows(x, state) == [True] * 3
    tables = [a for a in jax.tree.leaves(given) if a.shape == (ROWS, WIDTH)]
    assert len(tables) == 3 and all(a.is_deleted() for a in tables)


@needs_demands
def test_an_array_of_numpy_and_a_deleted_one():
    tx, x = optzoo.gradient_descent(0.1), params()
    step, state = optzoo.minimize(loss, tx), tx.init(x)
    on_host = {**params(), "table": np.ones((ROWS, WIDTH), np.float32)}
    want, *_ = step(x, state, IDS)
    got, *_ = step(on_host, tx.init(on_host), IDS)
    np.testing.assert_array_equal(got["table"], want["table"])
    assert is_by_rows(got) == [True] and on_host["table"].sum() == ROWS * WIDTH
    got["table"].delete()
    with pytest.raises(RuntimeError, match="deleted"):
        step(got, state, IDS)


@needs_demands
def test_sharded_tables_are_converted_where_they_are():
    mesh = Mesh(np.array(jax.devices()[:2]), ("shard",))
    sharding = optzoo.sharded.RowSharding(ROWS, 2, multiple=1)
    table = optzoo.sharded.create_table(sharding, mesh, lambda ids: jnp.ones((len(ids), WIDTH)))
    w = jax.device_put(params()["w"], NamedSharding(mesh, PartitionSpec()))
    x, tx = {"table": table, "w": w}, optzoo.lazy_adam()
    shardings = optzoo.state_sharding(tx, x)
    state = jax.jit(tx.init, out_shardings=shardings)(x)
    step = optzoo.sharded_minimize(loss, tx, mesh, {"table": sharding})
    at = jax.tree.map(lambda a: a.sharding, (x, state))
    want = step(x, state, jnp.arange(4))
    w = jax.device_put(params()["w"], at[0]["w"])
    x = {"table": in_columns(jnp.ones((12, WIDTH)), at[0]["table"]), "w": w}
    state = in_columns(jax.jit(tx.init, out_shardings=shardings)(x), shardings)
    assert is_by_rows(x, state) == [False] * 3
    x, state, value = step(x, state, jnp.arange(4))
    jax.tree.map(np.testing.assert_array_equal, (x, state, value), want)
    assert jax.tree.map(lambda a: a.sharding, (x, state)) == at
    assert step._cache_size() == 1 and is_by_rows(x, state) == [True] * 3


@needs_demands
def test_tables_are_made_in_the_layout_that_is_demanded(monkeypatch):
    """On a CPU all is row-major, so the test demands columns."""
    module = sys.modules["optzoo.sharded.create_table"]
    monkeypatch.setattr(module, "in_row_major", lambda x: with_layout_constraint(x, COLUMNS))
    mesh, sharding = Mesh(np.array(jax.devices()[:2]), ("shard",)), optzoo.sharded.RowSharding(8, 2)
    rows = optzoo.sharded.uniform_rows(jax.random.key(0), WIDTH)
    assert is_by_rows(optzoo.sharded.create_table(sharding, mesh, rows)) == [False]


@needs_demands
@pytest.mark.parametrize("given", ["shapes", "shapes in columns", "shapes anywhere", "arrays"])
def test_programs_that_are_compiled_ahead(given):
    """Shapes are those of a call; arrays, and shapes with a layout, have the layout they have."""
    tx, x = optzoo.lazy_adam(), params()
    here = SingleDeviceSharding(jax.devices()[0])
    args = *in_columns((x, tx.init(x)), here), IDS
    at = {"shapes": here, "shapes in columns": Format(COLUMNS, here), "shapes anywhere": None}
    shape = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=at[given])
    if given != "arrays":
        is_table = lambda a: a.shape == (ROWS, WIDTH)
        args = jax.tree.map(
            lambda a: shape(a) if is_table(a) or given != "shapes in columns" else a, args
        )
    compiled = optzoo.minimize(loss, tx).lower(*args).compile()
    formats = jax.tree.leaves(compiled.input_formats[0])
    pairs = zip(formats, of_table(*args), strict=True)
    layouts = [f.layout.major_to_minor for f, is_table in pairs if is_table]
    assert layouts == [(1, 0) if given in ("shapes in columns", "arrays") else (0, 1)] * 3
    if given == "arrays":
        compiled(*args)


@needs_demands
def test_formats_say_where_rows_are_changed():
    """A constant of the step is no argument."""
    tx, ones = optzoo.lazy_adam(), jnp.ones((WIDTH, 2))
    x = in_columns(params())
    state = tx.init(x)
    by_rows = jax.jit(optzoo.rows.row_major(by_hand(tx, ones)), donate_argnums=(0, 1))
    for step in (by_rows, optzoo.minimize(loss, tx), by_hand(tx, ones)):
        found = optzoo.rows.formats(step, x, state, IDS)
        is_format = lambda f: isinstance(f, Format)
        leaves = jax.tree.leaves(found, is_leaf=is_format)
        want = [shape is not None for shape in of_table(x, state, IDS)]
        assert list(map(is_format, leaves)) == want and want.count(True) == 3
        assert found[0]["table"].layout.major_to_minor == (0, 1)
        assert found[0]["w"] == found[0]["table"].sharding == x["w"].sharding
    of_x, of_state, of_ids = found
    assert of_ids == IDS.sharding
    moved = jax.device_put(x, of_x)
    assert is_by_rows(moved["table"], x["table"]) == [True, False]
    np.testing.assert_array_equal(moved["table"], x["table"])
    made = jax.jit(tx.init, out_shardings=of_state)(x)
    jax.tree.map(np.testing.assert_array_equal, made, state)
    shapes = jax.eval_shape(lambda: (params(), tx.init(params())))
    assert optzoo.rows.formats(by_rows, *shapes, IDS) == found


def test_without_demands_formats_are_shardings(monkeypatch):
    monkeypatch.setattr(compat, "may_be_for_tpus", lambda: False)
    tx, x = optzoo.lazy_adam(), params()
    args = x, tx.init(x), IDS
    found = optzoo.rows.formats(optzoo.minimize(loss, tx), *args)
    assert found == jax.tree.map(lambda a: a.sharding, args)


@needs_demands
def test_a_table_is_restored_by_rows(tmp_path):
    """Orbax reads each array into its format."""
    tx, x = optzoo.lazy_adam(), in_columns(params())
    of_x, *_ = optzoo.rows.formats(optzoo.minimize(loss, tx), x, tx.init(x), IDS)
    of_x["w"] = Format(COLUMNS, of_x["w"])
    checkpointer = ocp.PyTreeCheckpointer()
    checkpointer.save(tmp_path / "x", x)
    args = jax.tree.map(
        lambda f: ocp.ArrayRestoreArgs(sharding=f), of_x, is_leaf=lambda f: isinstance(f, Format)
    )
    found = checkpointer.restore(tmp_path / "x", restore_args=args)
    jax.tree.map(np.testing.assert_array_equal, found, x)
    assert is_by_rows(found) == [True]
    assert found["w"].format.layout.major_to_minor == (1, 0)


def test_formats_refuse_what_is_not_known():
    mesh = Mesh(np.array(jax.devices()[:2]), ("shard",))
    tx, x = optzoo.lazy_adam(), params()
    state = tx.init(x)
    at = NamedSharding(mesh, PartitionSpec())
    shape = lambda a, **at: jax.ShapeDtypeStruct(a.shape, a.dtype, **at)
    x = {"table": shape(x["table"]), "w": shape(x["w"], sharding=at)}
    if DEMANDS_LAYOUTS:
        with pytest.raises(ValueError, match=r"args\[0\] 'table' has no sharding, but another"):
            optzoo.rows.formats(by_hand(tx), x, jax.tree.map(shape, state), IDS)
    with pytest.raises(TypeError, match="step must be a function, got 3"):
        optzoo.rows.formats(3, x)


@needs_demands
def test_options_of_the_compiler(monkeypatch):
    """A step has them by its tables; in another program it is called without."""
    seen = []

    def options(needs, leaves):
        seen.append([leaves[k].shape for k, is_inside in needs.by_rows.items() if is_inside])
        return {"xla_backend_optimization_level": len(seen) % 2}

    monkeypatch.setattr(Needs, "options", options)
    tx, x = optax.apply_if_finite(optzoo.lazy_adam(), 3), params()
    step, state = optzoo.minimize(loss, tx), tx.init(x)
    of_loop = lambda x, state: jax.lax.scan(
        lambda carry, ids: (step(*carry, ids)[:2], None), (x, state), jnp.stack([IDS] * 3)
    )[0]
    want = jax.jit(of_loop)(x, state)
    jax.jit(lambda: step(x, state, IDS))()  # no argument is traced
    assert seen == []
    step.clear_cache()
    for _ in range(3):
        x, state, _ = step(x, state, IDS)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6)
    jax.tree.map(close, (x, state), want)
    assert seen == [[(ROWS, WIDTH)] * 3] * 3 and step._cache_size() == 2
    step.clear_cache()
    assert step._cache_size() == 0


@needs_demands
def test_a_table_that_has_grown(monkeypatch):
    """With few rows its gradient is dense."""
    seen = []
    inside = lambda needs, leaves: seen.append(sum(needs.by_rows.values())) or {}
    monkeypatch.setattr(Needs, "options", inside)
    tx = optax.apply_if_finite(optzoo.lazy_adam(), 3)
    step = optzoo.minimize(lambda x, ids: jnp.sum(x[ids] ** 2), tx, min_rows=20)
    for rows in (11, 40, 11):
        x = jnp.ones((rows, WIDTH))
        step(x, tx.init(x), IDS)
    assert seen == [0, 3, 0]


def test_options_are_for_tpus_alone():
    tx, here = optzoo.lazy_adam(), SingleDeviceSharding(jax.devices()[0])
    shape = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=here)
    x = {"table": shape(4_000_000, WIDTH), "w": shape(WIDTH, 2)}
    args = x, jax.eval_shape(tx.init, x), IDS
    assert optzoo.rows.compiler_options(optzoo.minimize(loss, tx), *args) == {}
    with pytest.raises(TypeError, match="step must be a function, got 3"):
        optzoo.rows.compiler_options(3, *args)


def test_which_steps_exchange_arrays():
    """Those with an all-to-all, also in a loop: they need an option of the compiler."""
    mesh, at = jax.make_mesh((2,), ("shard",)), PartitionSpec("shard")
    sharding, ids = optzoo.sharded.RowSharding(10, 2, multiple=1), jnp.arange(4)

    def read(table, ids):
        body = lambda total, i: (total + optzoo.sharded.lookup(table, i, sharding).sum(), None)
        return jax.lax.scan(body, jnp.sum(table) * 0, ids[None])[0][None]

    mapped = jax.shard_map(read, mesh=mesh, in_specs=(at, at), out_specs=at)
    put = lambda x: jax.device_put(x, jax.sharding.NamedSharding(mesh, at))
    table = put(jnp.ones((sharding.stored_rows, 2)))
    assert Needs.of(jax.jit(mapped).trace(table, put(ids))).exchanges
    step, tx = (
        optzoo.minimize(lambda x, ids: jnp.sum(x[ids]), optzoo.lazy_adam()),
        optzoo.lazy_adam(),
    )
    x = jnp.ones((10, 2))
    assert not Needs.of(step.trace(x, tx.init(x), ids)).exchanges
