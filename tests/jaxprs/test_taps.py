"""Lookups in the bodies of other transformations inside of the loss stay row-sparse."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import optzoo
from optzoo import SparseRows, lookup
from tests.selection import chosen_first
from tests.sparse.test_lookup import IDS, OTHER, TABLE, both, check, compare, weigh

SAVE_DOTS = jax.checkpoint_policies.dots_saveable


def look(table, ids):
    return weigh(lookup(table, ids))


def scan(table, ids, **settings):
    step = lambda s, i: (s * 0.5 + weigh(lookup(table, i)), jnp.sum(s))
    last, each = lax.scan(step, 0.0, ids, **settings)
    return last + jnp.sum(each**2)


def walk(table, ids):
    """Each lookup depends on the rows before it."""

    def step(s, i):
        row = lookup(table, i)
        return s * 0.5 + row**2, jnp.sum(s * row)

    last, each = lax.scan(step, jnp.ones(2), ids)
    return jnp.sum(last) + jnp.sum(each)


def carried(table, ids):
    """The table is in the carry, which the body returns as it is."""
    step = lambda c, i: ((c[0], c[1] + look(c[0], i)), None)
    (same, s), _ = lax.scan(step, (table, 0.0), ids)
    return s + look(same, ids)


def switched(table, ids):
    branches = [
        lambda t: look(t, ids),
        lambda t: 0.0,
        lambda t: look(t, ids[1:]) + look(t, ids[:1]),
    ]
    return sum(lax.switch(k, branches, table) * (k + 1) for k in ids)


@jax.custom_vjp
def doubled(rows):
    return rows


doubled.defvjp(lambda rows: (rows, None), lambda _, g: (2 * g,))


@jax.custom_jvp
def tripled(rows):
    return rows


tripled.defjvp(lambda x, t: (x[0], 3 * t[0]))


def nested_grads(table, ids):
    """A derivative by something else inside of the loss."""
    return jax.grad(lambda x: weigh(lookup(table, ids) * x))(0.5)


def half(table, ids):
    return weigh(lookup(table.astype("bfloat16"), ids).astype("float32"))


class Model(nnx.Module):
    def __init__(self, table):
        self.table, self.seen = nnx.Param(table), nnx.BatchStat(jnp.zeros(()))

    def __call__(self, ids):
        self.seen[...] += 1
        return weigh(lookup(self.table, ids))


def of_model(f):
    def loss(table, ids):
        model = Model(table)
        value = f(model, ids)
        # The table that a transformation of nnx returns is looked up, too.
        return value + model(ids[:2]) * model.seen[...]

    return loss


# The losses, and how many rows the gradient has for four ids. All pairs of branches, loops and
# calls are in test_touched_rows.py.
SPARSE = {
    "jit of both": (jax.jit(look), 4),
    "jit, inline": (jax.jit(look, inline=True), 4),
    "jit in jit": (jax.jit(lambda t, i: jax.jit(look)(t, i) * look(t, i[:1])), 5),
    "checkpoint of both": (jax.checkpoint(look), 4),
    "checkpoint, policy": (jax.checkpoint(look, policy=SAVE_DOTS, prevent_cse=False), 4),
    "scan": (scan, 4),
    "scan, reverse": (functools.partial(scan, reverse=True, unroll=2), 4),
    "scan, dependent": (walk, 4),
    "scan of nothing": (lambda table, ids: scan(table, ids[:0]) + look(table, ids), 4),
    "checkpoint in scan": (jax.jit(lambda t, i: scan(jax.checkpoint(lambda t: t)(t), i)), 4),
    "carry": (carried, 8),
    "map in batches": (
        lambda table, ids: jnp.sum(lax.map(lambda i: look(table, i), ids, batch_size=3)),
        4,
    ),
    "cond": (lambda t, i: lax.cond(i[0] == 0, lambda: look(t, i), lambda: 0.0), 4),
    "switch": (switched, 32),
    "computed ids in vmap": (
        lambda t, i: jnp.sum(jax.vmap(lambda x: weigh(lookup(t, i + 1 - 1) * x))(jnp.arange(3.0))),
        4,
    ),
    "custom_vjp of the rows": (lambda table, ids: weigh(doubled(lookup(table, ids))), 4),
    "custom_jvp of the rows": (lambda table, ids: weigh(tripled(lookup(table, ids))), 4),
    "grad": (nested_grads, 4),
    "grad of checkpoint": (jax.checkpoint(nested_grads), 4),
    "stop_gradient in jit": (
        jax.jit(lambda t, i: look(t, i) * jnp.sum(lax.stop_gradient(t) ** 2)),
        4,
    ),
    "at many depths": (
        lambda t, i: look(t, i) * jax.jit(look)(t, i[1:]) + jax.checkpoint(scan)(t, i[2:]),
        9,
    ),
    "nnx.jit": (of_model(nnx.jit(lambda model, ids: model(ids))), 6),
    "nnx.remat": (of_model(nnx.remat(lambda model, ids: model(ids))), 6),
    "nnx.jit of another part": (of_model(nnx.jit(lambda model, ids: jnp.sum(ids * 0.1))), 2),
}  # fmt: skip


@functools.cache
def gradients():
    """Ours and JAX's for all losses, in one program."""
    functions = {case: both(loss) for case, (loss, _) in SPARSE.items()}
    return jax.jit(lambda *args: {k: [f(*args) for f in fs] for k, fs in functions.items()})(
        TABLE, IDS
    )


@pytest.mark.parametrize("case", SPARSE)
def test_sparse_in_the_body_of_another_transformation(case):
    got, want = gradients()[case]
    compare(got, want)
    num_rows = SPARSE[case][1]
    assert got[1].values.shape == (num_rows, 2) and got[1].indices.shape == (num_rows,)


@pytest.mark.parametrize(
    "case", ["jit in jit", "checkpoint, policy", "scan, dependent", "cond", "nnx.jit"]
)
def test_sparse_outside_of_jit(case):
    check(SPARSE[case][0], TABLE, IDS, eager=True)


CASTS = {
    "in jit": jax.jit(half),
    "in checkpoint": jax.checkpoint(half),
    "in scan": lambda t, i: lax.scan(lambda s, i: (s + half(t, i), None), 0.0, i)[0],
    "outside of jit": lambda t, i: jax.jit(lambda t: weigh(lookup(t, i).astype("float32")))(
        t.astype("float16")
    ),
    "by jit": lambda t, i: weigh(
        lookup(jax.jit(lambda t: t.astype("float16"))(t), i).astype("float32")
    ),
    "twice": lambda t, i: weigh(lookup(t.astype("bfloat16").astype("float32"), i)),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASTS)
def test_a_cast_of_the_table_in_a_body(case, dtype):
    """The gradient has the dtype of the table; JAX would sum repeated ids in half precision."""
    table = TABLE.astype(dtype)
    _, grads = check(CASTS[case], table, jnp.array([0, 3, 5]))
    assert grads.dtype == dtype and grads.values.shape == (3, 2)


def test_a_cond_with_another_use():
    loss = lambda t, i: lax.cond(i[0] == 0, look, lambda t, i: t[0, 0] * 3, t, i)
    for ids in (IDS, IDS + 1):
        check(loss, TABLE, ids, sparse=False)
    loss = lambda t, i: lax.cond(i[0] == 0, look, lambda t, i: t[0, 0] * 3, 2 * t, i)
    with pytest.warns(optzoo.DenseGradientWarning, match="a lookup reads the result of mul"):
        jax.eval_shape(optzoo.value_and_grad(loss), TABLE, IDS)


def test_tables_that_come_out_of_a_cond():
    """Of two the gradient of each is dense; the same one from both branches stays a table."""

    def loss(p, ids):
        is_first = ids[0] == 0
        either = lax.cond(is_first, lambda p: p["a"], lambda p: p["b"], p)
        same, x = lax.cond(is_first, lambda p: (p["c"], 1.0), lambda p: (p["c"], 2.0), p)
        return look(either, ids) * look(same, ids) * x

    params = {"a": TABLE, "b": TABLE + 1, "c": TABLE + 2}
    _, grads = check(loss, params, IDS[::-1], sparse=None)
    assert [isinstance(g, SparseRows) for g in grads.values()] == [False, False, True]


LARGE = {
    "jit": jax.jit(look),
    "checkpoint": jax.checkpoint(look),
    "scan": lambda t, ids: lax.scan(lambda s, i: (s + look(t, i), None), 0.0, ids)[0],
    "checkpointed scan": lambda t, ids: lax.scan(
        jax.checkpoint(lambda s, i: (s + look(t, i), None)), 0.0, ids
    )[0],
    "map": lambda t, ids: jnp.sum(lax.map(lambda i: look(t, i), ids)),
    "cond": lambda t, ids: lax.cond(ids[0, 0] == 0, look, lambda t, i: 0.0, t, ids),
    "jit in vmap": lambda t, ids: jnp.sum(jax.vmap(jax.jit(lambda i: look(t, i)))(ids)),
    "inner grad": nested_grads,
    "cast in jit": jax.jit(half),
}


@pytest.mark.optimized
@pytest.mark.parametrize("case", chosen_first(LARGE, {"cond"}))
def test_no_array_as_large_as_the_table(case):
    table, ids = jnp.zeros((100_000, 16)), jnp.zeros((8, 8), int)
    step = jax.jit(optzoo.value_and_grad(LARGE[case], sparse="require"))
    memory = step.lower(table, ids).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.01 * table.nbytes
    assert memory.output_size_in_bytes < 0.01 * table.nbytes


def test_one_compiled_function_for_two_tables():
    """JAX traces the function once: one call reads a leaf, the other one what was computed."""
    f = jax.jit(look)
    loss = lambda p, ids: f(p["a"], ids) * f(p["b"], ids) + f(2 * p["c"], ids) + f(p["a"], ids[:1])
    params = {"a": TABLE, "b": TABLE[::-1], "c": TABLE + 1}
    f(TABLE, IDS)  # compiled before there is any value_and_grad
    _, grads = check(loss, params, IDS, sparse=None)
    assert isinstance(grads["a"], SparseRows) and isinstance(grads["b"], SparseRows)
    assert isinstance(grads["c"], jax.Array)


def test_nothing_is_compiled_again():
    """Outside of jit, the compiled body of a loss is used again."""
    f, seen = jax.jit(look), []
    value_and_grad = optzoo.value_and_grad(lambda table, ids: f(table, ids))
    other, three = TABLE + 1, jnp.ones(3)
    value_and_grad(TABLE, IDS)
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: seen.append(event) if "backend_compile" in event else None
    )
    value_and_grad(other, IDS)
    jax.jit(lambda x: x + 17.5)(three)  # the listener works
    assert len(seen) == 1


def test_the_settings_of_a_checkpoint_are_kept():
    saved = []

    def policy(primitive, *_, **__):
        saved.append(primitive.name)
        return False

    loss = jax.checkpoint(lambda t, i: jnp.sum(jnp.sin(lookup(t, i)) ** 2), policy=policy)
    step = optzoo.value_and_grad(loss, sparse="require")
    text = str(jax.make_jaxpr(step)(TABLE, IDS))
    assert "prevent_cse=True" in text and "sin" in saved
    # The sine is computed again for its derivative.
    assert text.count("= sin ") + text.count(":= sin ") == 2


@pytest.mark.optimized
def test_name_scopes_are_kept():
    def loss(table, ids):
        with jax.named_scope("embed"):
            rows = jax.jit(lookup)(table, ids)
        with jax.named_scope("head"):
            return jnp.sum(jnp.sin(rows))

    text = jax.jit(optzoo.value_and_grad(loss)).lower(TABLE, IDS).compile().as_text()
    assert "embed" in text and "head" in text


def test_effects_happen_once():
    seen = []

    def loss(table, ids):
        rows = lookup(table, ids)
        jax.debug.callback(lambda x: seen.append(np.asarray(x)), rows[0])
        return weigh(rows)

    jax.block_until_ready(jax.jit(optzoo.value_and_grad(loss))(TABLE, IDS))
    jax.effects_barrier()
    np.testing.assert_allclose(seen, [TABLE[0]])


def test_auxiliary_data_of_a_compiled_loss():
    @jax.jit
    def inner(p, ids):
        rows = lookup(p["a"], ids)
        return weigh(rows), {"rows": rows, "norm": jnp.linalg.norm(p["a"]), "ids": ids}

    def loss(p, ids, *, name):
        value, aux = inner(p, ids)
        return value + jnp.sum(p["w"] ** 2), aux | {"name": name, "number": 3, "none": None}

    params = {"a": TABLE, "w": jnp.ones(3)}
    run = functools.partial(optzoo.value_and_grad(loss, has_aux=True, sparse="require"))
    (value, aux), grads = run(params, IDS, name="x")
    (want, want_aux), dense = jax.value_and_grad(loss, has_aux=True)(params, IDS, name="x")
    assert aux.pop("name") == want_aux.pop("name") == "x" and type(aux["number"]) is int
    grads["a"] = grads["a"].to_dense()
    chex.assert_trees_all_close((value, aux, grads), (want, want_aux, dense), rtol=1e-5)


def test_a_vmap_of_a_loss_with_bodies():
    """Batched parameters, as in an ensemble."""
    tables, ids = jnp.stack([TABLE, -TABLE]), jnp.stack([IDS, IDS[::-1]])
    functions = [both(loss) for loss in (jax.jit(look), scan, jax.checkpoint(look), switched)]
    run = jax.jit(lambda *args: [[jax.vmap(f)(*args) for f in fs] for fs in functions])
    for got, want in run(tables, ids):
        for i in (0, 1):
            compare(*jax.tree.map(lambda a, i=i: a[i], (got, want)))


def test_a_while_loop_without_a_gradient():
    """It has no reverse mode, so that nothing in the loss may depend on it."""
    loop = lambda t, i: lax.while_loop(lambda s: s < 3.0, lambda s: s + look(t, i) ** 2, 0.0)
    check(lambda t, i: look(t, i) * loop(lax.stop_gradient(t), i), TABLE, IDS)
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work for"):
        jax.eval_shape(optzoo.value_and_grad(loop, sparse="allow"), TABLE, IDS)
    with pytest.raises(ValueError, match=r"a lookup is inside of jax\.lax\.while_loop"):
        jax.eval_shape(optzoo.value_and_grad(loop, sparse="require"), TABLE, IDS)


def test_two_tables_in_one_body():
    def loss(p, ids):
        step = lambda s, i: (s + look(p["a"], i) * look(p["b"], i % 4), None)
        return lax.scan(step, 0.0, ids)[0] + jnp.sum(p["w"] ** 2)

    params = {"a": TABLE, "b": OTHER, "w": jnp.ones(3)}
    check(loss, params, IDS, sparse=[True, True, False])


def test_padding_and_wrong_ids_in_a_body():
    ids = jnp.array([6, 1, 6])
    _, grads = check(jax.jit(lambda t, i: jnp.sum((lookup(t, i) + 1) ** 2)), TABLE, ids)
    np.testing.assert_array_equal(jnp.any(grads.to_dense() != 0, 1), jnp.arange(6) == 1)
    value, _ = jax.jit(optzoo.value_and_grad(scan))(TABLE, jnp.array([0, 7]))
    assert np.isnan(value)


CASTS_OF_ROWS = {
    "of the rows": lambda table, ids: lookup(table, ids).astype(jnp.bfloat16),
    "of the table": lambda table, ids: lookup(table.astype(jnp.bfloat16), ids),
    "of a call": lambda table, ids: jax.jit(lookup)(table, ids).astype(jnp.bfloat16),
    "to float16": lambda table, ids: lookup(table, ids).astype(jnp.float16),
}


@pytest.mark.parametrize("read", CASTS_OF_ROWS.values(), ids=list(CASTS_OF_ROWS))
def test_casts_of_rows_in_a_loop(read):
    """Rows are rounded to bfloat16 before the cast, so that XLA does not cast the whole table."""

    def loss(table, ids):
        turn = lambda total, i: (total + jnp.sum(read(table, i).astype(jnp.float32) ** 2), None)
        return jax.lax.scan(turn, 0.0, ids)[0]

    ids = jnp.stack([IDS, IDS[::-1]])
    table = TABLE + 1e-3 * jnp.arange(TABLE.size, dtype=TABLE.dtype).reshape(TABLE.shape)
    value, grad = optzoo.value_and_grad(loss, sparse="require")(table, ids)
    want, dense = jax.value_and_grad(loss)(table, ids)
    np.testing.assert_array_equal(value, want)
    np.testing.assert_allclose(grad.to_dense(), dense, rtol=1e-6)
    text = str(jax.make_jaxpr(optzoo.value_and_grad(loss))(table, ids))
    assert ("reduce_precision" in text) == (read is not CASTS_OF_ROWS["to float16"])
