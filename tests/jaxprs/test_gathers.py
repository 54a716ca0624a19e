"""Gathers of whole rows are lookups: values and gradients against ``jax.value_and_grad``."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import optzoo
from optzoo import DenseGradientWarning, SparseRows, lookup
from optzoo.jaxprs.gathers import row_gather
from optzoo.jaxprs.graph import Graph
from tests.jaxprs.test_taps import doubled, tripled
from tests.sparse.test_lookup import OTHER, TABLE, by_numpy

IDS = {
    "in range": [0, 3, 3, 5],
    "negative": [-1, -6, 2, -3],
    "out of range": [6, 100, -7, 1],
    "extreme": [2**31 - 1, -(2**31), 5, -1],
}
CLIP, FILL, PROMISE = (
    lax.GatherScatterMode.CLIP,
    lax.GatherScatterMode.FILL_OR_DROP,
    lax.GatherScatterMode.PROMISE_IN_BOUNDS,
)


def gather(t, ids, mode, fill=None, axis=1, sizes=(1, 2)):
    """As a library would write it; negative ids are out of range."""
    axes = lax.GatherDimensionNumbers((axis,), (0,), (0,))
    return lax.gather(t, ids[:, None], axes, sizes, mode=mode, fill_value=fill)


def scanned(t, ids, read):
    step = lambda s, i: (s * 0.5 + read(t, i), s)
    last, each = lax.scan(step, jnp.ones(2), ids)
    return jnp.concatenate([each, last[None]])


def carried(t, ids):
    step = lambda c, i: ((c[0], c[1] + c[0][i]), None)
    (same, s), _ = lax.scan(step, (t, jnp.zeros(2)), ids)
    return s[None] + same[ids]


def looped(t, ids):
    return lax.fori_loop(0, 4, lambda k, s: s * 0.5 + t[ids[k]], jnp.ones(2))


def chosen(t, ids):
    of = [lambda t: t[ids], lambda t: jnp.ones((4, 2)), lambda t: jnp.take(t, ids[::-1], axis=0)]
    return sum(lax.switch(k, of, t) * (k + 1) for k in (ids[0] % 3, ids[1] % 3))


def nested_grads(t, ids):
    return jax.grad(lambda x: jnp.sum(t[ids] ** 2 * x))(jnp.ones((4, 2)))


take = functools.partial(jnp.take, axis=0)
row = lambda t, i: t[i]

# What is read, and how many rows the gradient has.
FORMS = {
    "t[ids]": (lambda t, i: t[i], 4),
    "t[ids, :]": (lambda t, i: t[i, :], 4),
    "t[ids, ..., None]": (lambda t, i: t[i, ..., None], 4),
    "ids of two axes": (lambda t, i: t[i.reshape(2, 1, 2)], 4),
    "one id": (lambda t, i: t[i[0]], 1),
    "one id, twice": (lambda t, i: t[i[0]] * t[i[1], :], 2),
    "no ids": (lambda t, i: gather(t, i[:0], PROMISE), 0),
    "take": (take, 4),
    "take, fill": (functools.partial(take, mode="fill", fill_value=0.5), 4),
    "take, clip": (functools.partial(take, mode="clip"), 4),
    "take, wrap": (functools.partial(take, mode="wrap"), 4),
    "take, one id": (lambda t, i: take(t, i[2]), 1),
    "take_along_axis": (lambda t, i: jnp.take_along_axis(t, i[:, None], axis=0), 4),
    "at get": (lambda t, i: t.at[i].get(), 4),
    "at get, fill": (lambda t, i: t.at[i].get(mode="fill"), 4),
    "at get, fill with 7": (lambda t, i: t.at[i].get(mode="fill", fill_value=7), 4),
    "at get, clip": (lambda t, i: t.at[i].get(mode="clip"), 4),
    "at get, promise": (lambda t, i: t.at[i].get(mode="promise_in_bounds"), 4),
    "at get, negative ids are none": (
        lambda t, i: t.at[i].get(mode="fill", wrap_negative_indices=False),
        4,
    ),
    "gather, clip": (functools.partial(gather, mode=CLIP), 4),
    "gather, fill": (functools.partial(gather, mode=FILL, fill=-2.0), 4),
    "gather, promise": (functools.partial(gather, mode=PROMISE), 4),
    "dynamic_index_in_dim": (lambda t, i: lax.dynamic_index_in_dim(t, i[0]), 1),
    "dynamic_slice": (lambda t, i: lax.dynamic_slice(t, (i[0], i[1]), (1, 2)), 1),
    "vmap of one row": (lambda t, i: jax.vmap(lambda i: t[i])(i), 4),
    "vmap of dynamic_index_in_dim": (
        lambda t, i: jax.vmap(lambda i: lax.dynamic_index_in_dim(t, i, keepdims=False))(i),
        4,
    ),
    "vmap of take": (lambda t, i: jax.vmap(lambda i: take(t, i))(i.reshape(2, 2)), 4),
    "vmap of both axes": (lambda t, i: jax.vmap(jax.vmap(lambda i: t[i]))(i.reshape(2, 2)), 4),
    "vmap of the last axis": (
        lambda t, i: jax.vmap(lambda i: t[i], in_axes=1, out_axes=1)(i.reshape(2, 2)),
        4,
    ),
    "vmap over something else": (
        lambda t, i: jax.vmap(lambda x: t[i] * x)(jnp.arange(3.0)),
        4,
    ),
    "jit": (jax.jit(lambda t, i: t[i]), 4),
    "jit in jit": (jax.jit(lambda t, i: jax.jit(take)(t, i) * t[i[:1]]), 5),
    "checkpoint": (jax.checkpoint(lambda t, i: jnp.sin(t[i])), 4),
    "scan": (functools.partial(scanned, read=row), 4),
    "scan of checkpoint of take": (functools.partial(scanned, read=jax.checkpoint(take)), 4),
    "carry": (carried, 8),
    "fori_loop": (looped, 4),
    "map": (lambda t, i: lax.map(lambda i: t[i], i), 4),
    "cond": (lambda t, i: lax.cond(i[0] < 1, lambda: t[i], lambda: 2 * t[i[::-1]]), 8),
    "switch": (chosen, 16),
    "custom_vjp of the rows": (lambda t, i: doubled(t[i]), 4),
    "custom_jvp of the rows": (lambda t, i: tripled(t[i]), 4),
    "inner grad": (nested_grads, 4),
    "two reads": (lambda t, i: t[i] * take(t, i[::-1], mode="clip"), 8),
    "beside stop_gradient": (lambda t, i: t[i] * jnp.sum(lax.stop_gradient(t)), 4),
    "int8": (lambda t, i: t[i.astype("int8")], 4),
    "uint8": (lambda t, i: take(t, i.astype("uint8"), mode="clip"), 4),
    "uint32": (lambda t, i: take(t, i.astype("uint32"), mode="clip"), 4),
    "uint32, fill": (lambda t, i: t.at[i.astype("uint32")].get(mode="fill"), 4),
}  # fmt: skip


def weigh(rows):
    """A loss that tells the elements apart, and whether they are NaN."""
    rows = jnp.where(jnp.isnan(rows), 1.5, rows)
    return jnp.sum(rows**3 * jnp.cos(jnp.arange(rows.size)).reshape(rows.shape))


def both(loss, **settings):
    """Our value and gradients, of tables of any size, and JAX's."""
    ours = optzoo.value_and_grad(loss, **({"sparse": "require", "min_rows": 1} | settings))
    return lambda *args: (ours(*args), jax.value_and_grad(loss)(*args))


def compare(got, want, rtol=1e-6):
    is_rows = lambda g: isinstance(g, SparseRows)
    got = jax.tree.map(by_numpy, got, is_leaf=is_rows)
    chex.assert_trees_all_close(got, want, rtol=rtol, atol=rtol)


@functools.cache
def run(ids):
    """All forms in one program."""
    losses = {name: both(lambda t, i, f=f: weigh(f(t, i))) for name, (f, _) in FORMS.items()}
    step = jax.jit(lambda t, i: {name: f(t, i) for name, f in losses.items()})
    return {key: step(TABLE, jnp.array(of)) for key, of in IDS.items()}[ids]


@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("form", FORMS)
def test_rows_with_the_values_and_gradients_of_jax(form, ids):
    (value, gradient), want = run(ids)[form]
    assert isinstance(gradient, SparseRows)
    assert gradient.values.shape == (FORMS[form][1], 2) and gradient.shape == TABLE.shape
    compare((value, gradient), want)


# Other tables, other ids


def check(loss, *args, rows=True, **settings):
    """Compares ours with JAX's; ``rows`` says which leaves get rows."""
    got, want = jax.jit(both(loss, **settings))(*args)
    of_leaves = jax.tree.leaves(got[1], is_leaf=lambda g: isinstance(g, SparseRows))
    assert [isinstance(g, SparseRows) for g in of_leaves] == (
        rows if type(rows) is list else [rows]
    )
    compare(got, want)
    return got[1]


@pytest.mark.parametrize("shape", [(6,), (6, 1), (1, 4), (6, 2, 3), (6, 0)], ids=str)
def test_tables_of_any_shape(shape):
    table = jnp.sin(jnp.arange(float(np.prod(shape)))).reshape(shape)
    ids = jnp.array([0, 3, -1, 9])
    check(lambda t, i: weigh(t[i]) * weigh(take(t, i, mode="clip")) + weigh(t[i[0]]), table, ids)


def test_ids_of_64_bits(x64):
    with x64(True):
        big = jnp.array([1, 2**33 + 1, -(2**33), 5], "int64")
        read = lambda t, i: weigh(t.at[i].get(mode="fill")) + weigh(take(t, i, mode="clip"))
        check(lambda t, i: read(t, i) + read(t, i.astype("uint64")), TABLE, big)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("to", [["bfloat16"], ["float16", "float32"]], ids=str)
def test_casts_of_the_table(dtype, to):
    def loss(t, ids):
        for other in to:
            t = t.astype(other)
        rows = take(t, ids, fill_value=0.1)
        assert rows.dtype == to[-1]
        return weigh(jax.jit(lambda t: t[ids] + rows)(t).astype("float32"))

    table = TABLE.astype(dtype)
    ids = jnp.array([0, 5, -2, 7])  # JAX would sum repeats in half precision
    gradient = check(loss, table, ids, rows=True)
    assert gradient.dtype == dtype


@pytest.mark.parametrize("to", ["complex64", "int32"])
def test_other_casts_are_no_casts_of_a_table(to):
    loss = lambda t, ids: weigh(t[ids]) + weigh(jnp.real(t.astype(to)[ids]).astype("float32"))
    check(loss, TABLE, jnp.arange(4), rows=False, sparse="allow")


def test_complex_tables():
    loss = lambda t, ids: jnp.sum(jnp.abs(take(t, ids, mode="clip")) ** 2)
    got, want = both(loss)(TABLE + 1j * TABLE[::-1], jnp.array([0, 3, 3, 9]))
    chex.assert_trees_all_close((got[0], got[1].to_dense()), want, rtol=1e-6)


def test_a_lookup_and_gathers_of_a_table():
    """A table of any size, since the lookup says that it is one; padding stays padding."""
    loss = lambda t, i: weigh(lookup(t, i) * t[i - 3] * jax.checkpoint(take)(t, i[::-1]))
    gradient = check(loss, TABLE, jnp.array([0, 3, 5, 6]), min_rows=7)
    assert gradient.values.shape == (12, 2)


def test_gathers_of_what_a_lookup_gave():
    loss = lambda t, i: weigh(lookup(t, i)[i % 2])
    assert check(loss, TABLE, jnp.array([0, 3, 5, 6])).values.shape == (4, 2)


def test_several_parameters():
    def loss(p, ids):
        rows = jnp.concatenate([p["a"][ids], take(p["b"], ids % 4, mode="clip")], 1)
        return weigh(rows @ p["w"]) * weigh(p["w"]) + weigh(p["tied"][ids] @ p["tied"].T)

    params = {"a": TABLE, "b": OTHER, "tied": TABLE, "w": jnp.ones((5, 2))}
    check(loss, params, jnp.array([0, 3, -3]), rows=[True, True, False, False], sparse="allow")


def test_auxiliary_data():
    loss = lambda t, ids: (weigh(t[ids]), {"rows": t[ids[:1]], "norm": jnp.linalg.norm(t)})
    ours = optzoo.value_and_grad(loss, has_aux=True, sparse="require", min_rows=1)
    (value, aux), gradient = jax.jit(ours)(TABLE, jnp.arange(3))
    want, dense = jax.value_and_grad(loss, has_aux=True)(TABLE, jnp.arange(3))
    compare(((value, aux), gradient), (want, dense))


def test_a_vmap_of_value_and_grad():
    tables, ids = jnp.stack([TABLE, -TABLE]), jnp.array([[0, 3], [-1, 9]])
    got, want = jax.jit(jax.vmap(both(lambda t, i: weigh(t[i]))))(tables, ids)
    for k in (0, 1):
        compare(*jax.tree.map(lambda a, k=k: a[k], (got, want)))


def test_outside_of_jit():
    loss = lambda t, i: weigh(t[i] * jax.jit(take)(t, i))
    compare(*both(loss)(TABLE, jnp.array([0, 3, -1, 9])))


# What is no gather of whole rows

OTHERS = {
    "columns": lambda t, i: t[:, i % 2],
    "columns, take": lambda t, i: take(t, i % 2, axis=1),
    "elements": lambda t, i: t[i, i % 2],
    "parts of rows": lambda t, i: gather(t, i, CLIP, sizes=(1, 1)),
    "two rows": lambda t, i: jax.vmap(lambda i: lax.dynamic_slice_in_dim(t, i, 2))(i),
    "two rows, once": lambda t, i: lax.dynamic_slice_in_dim(t, i[0], 2),
    "part of a row": lambda t, i: lax.dynamic_slice(t, (i[0], i[1]), (1, 1)),
    "row axis first": lambda t, i: gather(t, i, CLIP, axis=0),
    "along an axis": lambda t, i: jnp.take_along_axis(t, jnp.stack([i, -i], 1) % 6, axis=0),
    "a member each": lambda t, i: jax.vmap(lambda t, i: t[i % 2])(t, jnp.tile(i, 2)[:6]),
    "a member each, one axis": lambda t, i: jax.vmap(row)(t[:, :, None], jnp.tile(i, 2)[:6]),
    "a row of each member": lambda t, i: jax.vmap(row)(t[:, None], jnp.tile(i, 2)[:6] % 1),
    "starts of columns": lambda t, i: lax.gather(
        t,
        i[:, None] % 2,
        lax.GatherDimensionNumbers((1,), (0,), (1,)),
        (1, 2),
        mode=FILL,
    ),
    "starts swapped": lambda t, i: lax.gather(
        t,
        jnp.stack([i, i], 1),
        lax.GatherDimensionNumbers((1, 2), (), (1, 0)),
        (1, 2),
        mode=CLIP,
    ),
    "kept axis, not clipped": lambda t, i: lax.gather(
        t,
        jnp.stack([i, i], 1),
        lax.GatherDimensionNumbers((1, 2), (), (0, 1)),
        (1, 2),
        mode=FILL,
    ),
    "slice": lambda t, i: t[1:3],
    "transposed": lambda t, i: t.T[:, i],
    "computed": lambda t, i: jnp.tanh(t)[i],
    "one-hot": lambda t, i: jax.nn.one_hot(i, 6) @ t,
    "tied": lambda t, i: t[i] @ t.T,
    "tied in a body": lambda t, i: jax.jit(lambda t: t[i] @ t.T)(t),
    "scan over it": lambda t, i: lax.map(lambda row: row[i % 2], t),
}


@functools.cache
def run_others(ids):
    losses = {
        name: both(lambda t, i, f=f: weigh(f(t, i)), sparse="allow") for name, f in OTHERS.items()
    }
    return jax.jit(lambda t, i: {name: f(t, i) for name, f in losses.items()})(
        TABLE, jnp.array(IDS[ids])
    )


@pytest.mark.parametrize("ids", ["in range", "out of range"])
@pytest.mark.parametrize("case", OTHERS)
def test_other_reads_have_dense_gradients(case, ids):
    got, want = run_others(ids)[case]
    assert isinstance(got[1], jax.Array)
    compare(got, want)


def test_what_is_recognized():
    """By the operation alone: how it treats the axes, and ids out of range."""

    def found(f):
        graph = Graph.of(jax.make_jaxpr(f)(TABLE, jnp.arange(4)).jaxpr)
        ops = (visit.operation for visit in graph.walk())
        return [g for op in ops if op.name in ("gather", "dynamic_slice") for g in [row_gather(op)]]

    [index] = found(lambda t, i: t[i.reshape(2, 2)])
    assert index == ((2, 2), 6, PROMISE, None)
    assert found(lambda t, i: gather(t, i, FILL, fill=3.0)) == [((4,), 6, FILL, 3.0)]
    assert found(lambda t, i: t[i[0]]) == [((), 6, CLIP, None)]
    assert found(lambda t, i: jax.vmap(lambda i: t[i])(i)) == [((4,), 6, CLIP, None)]
    assert found(lambda t, i: gather(t, i, lax.GatherScatterMode.ONE_HOT)) == [None]
    for case in ("columns", "elements", "parts of rows", "two rows", "row axis first"):
        assert found(OTHERS[case]) == [None]
    for case in ("starts of columns", "starts swapped", "kept axis, not clipped"):
        assert found(OTHERS[case]) == [None]


# Memory

LARGE = {
    "index": lambda t, ids: t[ids],
    "take, bfloat16": lambda t, ids: take(t.astype("bfloat16"), ids).astype("float32"),
    "vmap": lambda t, ids: jax.vmap(jax.vmap(lambda i: t[i]))(ids),
    "scan": lambda t, ids: lax.map(lambda i: take(t, i, mode="clip"), ids),
    "checkpoint": jax.checkpoint(lambda t, ids: t.at[ids].get(mode="fill")),
    "with a lookup": lambda t, ids: t[ids] * lookup(t, ids),
}


@pytest.mark.optimized
@pytest.mark.parametrize("case", LARGE)
def test_no_array_as_large_as_the_table(case):
    table, ids = jnp.zeros((100_000, 16)), jnp.zeros((8, 8), int)
    loss = lambda t, ids: weigh(LARGE[case](t, ids))
    step = jax.jit(optzoo.value_and_grad(loss, sparse="require"))
    memory = step.lower(table, ids).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.01 * table.nbytes
    assert memory.output_size_in_bytes < 0.01 * table.nbytes


# Why a gradient is dense

HERE = r" \(\S*test_gathers\.py:\d+[^;]*\)"


def with_vjp(t, ids):
    f = jax.custom_vjp(lambda t, ids: t[ids])
    dense = lambda t, ids, g: jax.vjp(lambda t: t[ids], t)[1](g)[0]
    f.defvjp(lambda *x: (f(*x), x), lambda x, g: (dense(*x, g), np.zeros(x[1].shape, "V")))
    return f(t, ids)


REASONS = {
    "tied": (OTHERS["tied"], f"it is also used by transpose{HERE}"),
    "tied in a body": (OTHERS["tied in a body"], f"it is also used by transpose{HERE}"),
    "one-hot": (lambda t, i: t[i] + OTHERS["one-hot"](t, i), f"also used by dot_general{HERE}"),
    "slice": (lambda t, i: t[i][:2] + t[1:3], f"also used by slice{HERE}"),
    "columns": (lambda t, i: t[i] + t[0, i % 2][:, None], f"also used by gather{HERE}"),
    "computed": (OTHERS["computed"], f"a gather reads the result of tanh{HERE}: look up first"),
    "custom_vjp": (with_vjp, f"a gather is inside of jax.custom_vjp{HERE}: do the lookup outside"),
}


@pytest.mark.parametrize("case", REASONS)
def test_the_reason_for_a_dense_gradient(case):
    """By the path of the table, once in each trace; an error if asked for."""
    read, reason = REASONS[case]
    loss, params = lambda p: weigh(read(p["embed"]["t"], jnp.arange(4))), {"embed": {"t": TABLE}}
    trace = lambda **how: jax.eval_shape(optzoo.value_and_grad(loss, min_rows=6, **how), params)
    with pytest.warns(DenseGradientWarning, match=f"of 'embed/t' is dense.*{reason}") as seen:
        trace()
    assert len(seen) == 1
    trace(sparse="allow")
    with pytest.raises(ValueError, match=f"of 'embed/t' is dense.*{reason}"):
        trace(sparse="require")
    with pytest.raises(ValueError, match=f"of 'embed/t' is dense.*{reason}"):
        trace(sparse={"embed/.*": "require"})


@pytest.mark.parametrize("case", ["one-hot", "slice", "transposed", "columns"])
def test_a_table_of_which_no_rows_are_read(case):
    """It may be any parameter, such as a kernel; but not if a pattern requires rows of it."""
    loss = lambda p: weigh(OTHERS[case](p["embed"], jnp.arange(4)))
    trace = lambda **how: jax.eval_shape(optzoo.value_and_grad(loss, **how), {"embed": TABLE})
    trace(sparse="require", min_rows=1)
    message = (
        rf"of 'embed' is dense, but sparse requires rows: the loss reads it by \w+{HERE}, not by "
        "lookups or gathers of whole rows"
    )
    with pytest.raises(ValueError, match=message):
        trace(sparse={"embed": "require"})


# Which tables

TWO = {"a": {"t": TABLE}, "b": {"t": OTHER}}


def of_two(p, ids=IDS["in range"]):
    return weigh(p["a"]["t"][jnp.array(ids)]) * weigh(p["b"]["t"][jnp.array(ids) % 4])


def rows_of(loss, params, **settings):
    grads = jax.eval_shape(optzoo.value_and_grad(loss, **settings), params)[1]
    leaves = jax.tree.leaves(grads, is_leaf=lambda g: isinstance(g, SparseRows))
    return [isinstance(g, SparseRows) for g in leaves]


def test_small_tables_stay_dense_without_a_word():
    assert rows_of(of_two, TWO, sparse="require") == [False, False]
    assert rows_of(of_two, TWO, sparse="require", min_rows=7) == [False, False]
    assert rows_of(of_two, TWO, sparse="require", min_rows=6) == [True, False]
    assert rows_of(of_two, TWO, sparse="require", min_rows=4) == [True, True]
    large = jnp.zeros((optzoo.sparse.wanted.MIN_ROWS, 1))
    assert rows_of(lambda t: weigh(t[jnp.arange(3)]), large) == [True]
    assert rows_of(lambda t: weigh(t[jnp.arange(3)]), large[1:]) == [False]
    assert rows_of(lambda t: weigh(t[jnp.arange(3)]), large.T) == [False]


def test_patterns():
    sparse = {"a/.*": "require"}
    assert rows_of(of_two, TWO, sparse=sparse) == [True, False]
    assert rows_of(of_two, TWO, sparse=sparse, min_rows=4) == [True, True]
    assert rows_of(of_two, TWO, sparse={".*/t": "require"}) == [True, True]
    assert rows_of(of_two, TWO, sparse={"a/t": "warn", "b/t": "allow"}) == [False, False]
    tied = lambda p: of_two(p) * jnp.sum(p["b"]["t"])
    with pytest.warns(DenseGradientWarning, match="of 'b/t' is dense") as seen:
        rows_of(tied, TWO, sparse=sparse, min_rows=4)
    assert len(seen) == 1
    assert rows_of(tied, TWO, sparse={**sparse, "b/.*": "allow"}, min_rows=4) == [True, False]
    with pytest.raises(ValueError, match="of 'b/t' is dense"):
        rows_of(tied, TWO, sparse={"b/.*": "require"})
    # Of a bare array, and of several arguments.
    assert rows_of(lambda t: weigh(t[jnp.arange(3)]), TABLE, sparse={"": "require"}) == [True]
    of = optzoo.value_and_grad(
        lambda x, p, t: of_two(p) * weigh(t[jnp.arange(3)]), (1, 2), sparse={"0/a/t|1": "require"}
    )
    _, (p, t) = jax.eval_shape(of, 1.0, TWO, TABLE)
    found = [p["a"]["t"], p["b"]["t"], t]
    assert [isinstance(g, SparseRows) for g in found] == [True, False, True]


def test_bad_settings():
    def refused(error, message, **settings):
        with pytest.raises(error, match=message):
            optzoo.value_and_grad(of_two, **settings)
        with pytest.raises(error, match=message):
            optzoo.minimize(of_two, optzoo.lazy_adam(), **settings)

    refused(ValueError, r"sparse\['a'\] must be one of warn, .*, got 'no'", sparse={"a": "no"})
    refused(TypeError, "sparse: a pattern must be a string, got 3", sparse={3: "warn"})
    refused(ValueError, r"sparse: '\(' is not a regular expression", sparse={"(": "warn"})
    refused(ValueError, "min_rows must be at least 1, got 0", min_rows=0)
    refused(TypeError, "min_rows must be an int, got 2.5", min_rows=2.5)
    with pytest.raises(ValueError, match=r"sparse: no parameter matches \['c'\]"):
        rows_of(of_two, TWO, sparse={"c": "require"})
    with pytest.raises(ValueError, match=r"sparse: \['a/.*', '.*t'\] all match parameter 'a/t'"):
        rows_of(of_two, TWO, sparse={"a/.*": "require", ".*t": "allow"})
