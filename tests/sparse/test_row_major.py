"""Which results of a step are row-major: the arrays of which it changes rows alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import optzoo
from optzoo.core import compat
from optzoo.core.compat import DEMANDS_LAYOUTS
from optzoo.jaxprs.changed_rows import changed_rows
from optzoo.jaxprs.graph import Graph
from optzoo.testing import samples

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
            a.shape if is_by_rows and is_table(a) else None
            for a, is_by_rows in zip(avals, changed_rows(Graph.of(jaxpr)), strict=True)
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
        (lambda a, b: (replace_rows(a, IDS), b), [True, False]),
        (lambda a, b: (b, a.at[IDS].add(1.0)), [False, True]),
        (lambda a, b: (a.at[:, jnp.array([0, 1])].set(0.0), b.at[IDS].multiply(2.0)), [False] * 2),
        (lambda a, b: (replace_rows(a + 1, IDS), jnp.zeros_like(b).at[IDS].set(1.0)), [False] * 2),
        (lambda a, b: (replace_rows(a, IDS) + 1, jax.jit(replace_rows)(b, IDS)), [False, True]),
        (
            lambda a, b: jax.lax.cond(
                jnp.sum(b) > 0, lambda: (replace_rows(a, IDS), b), lambda: (a, b * 2)
            ),
            [True, False],
        ),
        (
            lambda a, b: jax.lax.cond(
                jnp.sum(b) > 0, lambda: (replace_rows(a, IDS),), lambda: (replace_rows(b, IDS),)
            ),
            [False],
        ),
        (
            lambda a, b: jax.lax.fori_loop(
                0, 3, lambda i, x: (replace_rows(x[0], IDS + i), x[1] * 2), (a, b)
            ),
            [True, False],
        ),
        (
            lambda a, b: jax.lax.while_loop(
                lambda x: jnp.sum(x[0]) < 3, lambda x: (replace_rows(x[1], IDS), x[0]), (a, b)
            ),
            [False, False],
        ),
        (
            lambda a, b: jax.lax.scan(
                lambda x, i: ((x[0], replace_rows(x[1], IDS + i)), x[0]), (b, a), jnp.arange(2)
            ),
            [False, True, False],
        ),
        (
            lambda a, b: jax.lax.scan(
                lambda x, _: ((x[1], replace_rows(x[0], IDS)), None), (a, b), length=2
            )[0],
            [False, False],
        ),
        (lambda a, b: jax.lax.optimization_barrier((b, replace_rows(a, IDS))), [False, True]),
        (lambda a, b: jax.checkpoint(replace_rows)(a, IDS), [True]),
        (lambda a, b: (3.0, a), [False, False]),
        (lambda a, b: (a.at[IDS[0]].set(b[0]), b), [False, False]),
    ],
)
def test_which_results_are_arguments_with_other_rows(f, want):
    assert changed_rows(Graph.of(jax.make_jaxpr(f)(TABLE, TABLE).jaxpr)) == want


@pytest.mark.parametrize("of_rows", [True, False])
def test_native_code_changes_rows_alone_where_gradients_are_rows(of_rows):
    tx = optzoo.lazy_adam()
    state = tx.init(TABLE)
    g = optzoo.SparseRows(IDS, jnp.ones((len(IDS), WIDTH)), ROWS) if of_rows else TABLE
    step = optzoo.native_step(tx, required=True)
    program = Graph.of(jax.make_jaxpr(step)(TABLE, state, g).jaxpr)
    is_table = [shape is not None for shape in of_table(TABLE, state)]
    assert sum(is_table) == 3
    assert changed_rows(program) == (is_table if of_rows else [False] * len(is_table))


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
