"""Row-sparse gradients of lookups against ``jax.value_and_grad`` of the same loss."""

import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo import SparseRows, lookup
from optzoo.sparse.wanted import DenseGradientWarning
from optzoo.testing.samples import to_dense

TABLE = jnp.sin(jnp.arange(12.0)).reshape(6, 2)
OTHER = jnp.cos(jnp.arange(12.0)).reshape(4, 3)
IDS = jnp.array([0, 3, 3, 5])


def by_numpy(g):
    """Rows as a whole array."""
    if not isinstance(g, SparseRows):
        return g
    ids, values = np.asarray(g.indices), np.asarray(g.values, np.float32)
    total, real = np.zeros(g.shape, np.float32), (ids >= 0) & (ids < g.num_rows)
    np.add.at(total, ids[real], values[real])
    return total.astype(g.dtype)


def both(loss, sparse=True, argnums=0, has_aux=False):
    """Our value and gradients and JAX's, as functions; ``sparse`` is that of ``check``."""
    dense = "allow" if sparse in (False, None) else "require"
    ours = optzoo.value_and_grad(loss, argnums, has_aux, sparse=dense)
    return ours, jax.value_and_grad(loss, argnums, has_aux)


def compare(got, want, sparse=True):
    of_leaves = jax.tree.leaves(got[1], is_leaf=lambda g: isinstance(g, SparseRows))
    are_rows = [isinstance(g, SparseRows) for g in of_leaves]
    if sparse is not None:
        assert are_rows == ([sparse] * len(are_rows) if isinstance(sparse, bool) else sparse)
    got = jax.tree.map(by_numpy, got, is_leaf=lambda g: isinstance(g, SparseRows))
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-6)


def check(loss, *args, sparse=True, eager=False, argnums=0, has_aux=False, **kwargs):
    """Compares ours with JAX's; ``sparse`` says which leaves get rows, None that any may."""
    ours, theirs = both(loss, sparse, argnums, has_aux)
    if eager:
        got, want = ours(*args, **kwargs), jax.jit(theirs)(*args, **kwargs)
    else:
        run = lambda *args, **kwargs: (ours(*args, **kwargs), theirs(*args, **kwargs))
        got, want = jax.jit(run)(*args, **kwargs)
    compare(got, want, sparse)
    return got


HERE = r" \(\S*test_lookup\.py:\d+[^;]*\)"
COSINES = jnp.cos(jnp.arange(8)).reshape(4, 2)  # the weights of `weigh` for the rows at IDS


def weigh(rows):
    """A loss that tells the rows apart."""
    return jnp.sum(rows**3 * jnp.cos(jnp.arange(rows.size)).reshape(rows.shape))


@pytest.mark.parametrize(
    "ids", [jnp.int32(2), IDS, jnp.arange(6).reshape(1, 2, 3) % 4, jnp.zeros(0, int)], ids=jnp.shape
)
def test_ids_of_any_shape(ids):
    _, grads = check(lambda table: weigh(lookup(table, ids)), TABLE)
    assert grads.indices.shape == (ids.size,) and grads.values.shape == (ids.size, 2)


@pytest.mark.parametrize("ids", [np.array([0, 3]), 3, jnp.array([1, 2], "int8")])
def test_ids_of_any_kind(ids):
    check(lambda table: weigh(lookup(table, ids)), TABLE)


@pytest.mark.parametrize("ids", [[0, 3, 3], [[1, 6], [2, 2]], (5,)], ids=str)
def test_lists_of_ids(ids):
    check(lambda table: weigh(lookup(table, ids)), TABLE)
    np.testing.assert_array_equal(lookup(TABLE, ids), lookup(TABLE, jnp.array(ids)))
    with pytest.raises(IndexError, match="got 7"):
        jax.eval_shape(lambda table: lookup(table, [1, 7]), TABLE)


def test_lists_with_traced_ids():
    check(lambda table, ids: weigh(lookup(table, [ids[0], 2, ids[1]])), TABLE, IDS)


class Indexed:
    """A variable as those of nnx: the array inside is at ``[...]``."""

    def __init__(self, array):
        self.array = array

    def __getitem__(self, key):
        return self.array if key is ... else self.array[key]


class Boxed:
    """A variable as those of linen."""

    def __init__(self, array):
        self.value = array


@pytest.mark.parametrize("variable", [Indexed, Boxed])
def test_variables(variable):
    check(lambda table, ids: weigh(lookup(variable(table), ids)), TABLE, IDS)
    np.testing.assert_array_equal(lookup(variable(np.asarray(TABLE)), IDS), TABLE[IDS])


def test_a_cast_of_the_table_is_one_of_the_rows():
    """Mixed precision: the gradient is that of the float32 table, in float32."""

    def loss(p, ids):
        half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), p)
        rows = [lookup(half["a"], ids), lookup(half["b"], ids % 4), lookup(half["a"], ids[:2])]
        assert all(r.dtype == jnp.bfloat16 for r in rows)
        return sum(jnp.sum(r.astype(jnp.float32) ** 2) for r in rows) + jnp.sum(half["w"])

    params = {"a": TABLE, "b": OTHER, "w": jnp.ones(2)}
    _, grads = check(loss, params, jnp.array([0, 3, 5]), sparse=[True, True, False])
    assert grads["a"].dtype == jnp.float32 and grads["a"].values.shape == (5, 2)


def test_a_cast_table_that_is_tied():
    def loss(table, ids):
        rows = lookup(table.astype("float16"), ids).astype("float32")
        return weigh(rows @ table.T)

    check(loss, TABLE, jnp.array([0, 3, 5]), sparse=False)  # JAX would sum repeats in float16
    with pytest.warns(
        DenseGradientWarning,
        match=r"also used by transpose \(.*test_lookup\.py:\d+[^;]*\)\. sparse=",
    ):
        jax.eval_shape(optzoo.value_and_grad(loss), TABLE, IDS)


@pytest.mark.optimized
def test_no_dense_array_of_a_cast_table():
    loss = lambda table, ids: weigh(lookup(table.astype("bfloat16"), ids).astype("float32"))
    table, ids = jnp.zeros((100_000, 16)), jnp.zeros((8, 8), int)
    compiled = jax.jit(optzoo.value_and_grad(loss)).lower(table, ids).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.01 * table.nbytes


def test_several_tables_and_dense_parameters():
    params = {"a": TABLE, "b": OTHER, "dense": jnp.ones(2)}

    def loss(p, ids):
        return weigh(lookup(p["a"], ids) @ p["dense"]) + weigh(lookup(p["b"], ids[:2]))

    check(loss, params, IDS, sparse=[True, True, False])


def test_several_lookups_of_a_table():
    def loss(table, ids):
        return weigh(lookup(table, ids)) * weigh(lookup(table, ids[::-1]) + lookup(table, ids))

    _, grads = check(loss, TABLE, IDS)
    assert grads.indices.shape == (12,)


def test_table_of_scalars():
    check(lambda table, ids: weigh(lookup(table, ids)), TABLE[:, 0], IDS)


def test_table_of_cubes():
    cubes = jnp.arange(24.0).reshape(3, 2, 2, 2) / 24
    check(lambda table, ids: weigh(lookup(table, ids)), cubes, jnp.array([[0, 2], [2, 2]]))


def test_padding_reads_zeros_and_has_no_gradient():
    ids = jnp.array([6, 1, 6])
    np.testing.assert_array_equal(lookup(TABLE, ids), jnp.array([[0.0, 0], TABLE[1], [0, 0]]))
    loss = lambda table, ids: jnp.sum((lookup(table, ids) + 1) ** 2)
    _, grads = check(loss, TABLE, ids)
    np.testing.assert_array_equal(jnp.any(grads.to_dense() != 0, 1), jnp.arange(6) == 1)


def test_aux_argnums_and_kwargs():
    def loss(x, table, ids, *, power):
        rows = lookup(table, ids)
        return weigh(rows**power) + jnp.sum(x) * jnp.sum(rows), {"rows": rows}

    args = jnp.ones(3), TABLE, IDS
    check(loss, *args, argnums=1, has_aux=True, power=2)
    check(loss, *args, argnums=0, has_aux=True, power=2, sparse=False)
    check(loss, *args, argnums=(0, 1), has_aux=True, power=2, sparse=[False, True])
    check(loss, *args, argnums=(1,), has_aux=True, power=2)


def test_tied_table_gets_a_dense_gradient():
    def tied(table, ids):
        return weigh(lookup(table, ids) @ table.T)

    check(tied, TABLE, IDS, sparse=False)


@pytest.mark.parametrize(
    "tie",
    [
        lambda table: jax.jit(lambda t: jnp.sum(t**2))(table),
        lambda table: jax.lax.fori_loop(0, 2, lambda i, s: s * jnp.sum(table), 1.0),
        lambda table: jax.lax.cond(table[0, 0] > 9, lambda: 1.0, lambda: table[1, 1]),
        lambda table: table[3, 0],
    ],
    ids=["jit", "loop", "cond", "index"],
)
def test_ties_are_found_wherever_they_are(tie):
    check(lambda table: weigh(lookup(table, IDS)) * tie(table), TABLE, sparse=False)


def test_a_table_that_only_aux_returns_is_not_tied():
    loss = lambda table: (weigh(lookup(table, IDS)), table)
    check(loss, TABLE, has_aux=True, sparse=True)


def test_parameters_without_any_use():
    check(lambda p: weigh(lookup(p["a"], IDS)), {"a": TABLE, "b": OTHER}, sparse=[True, False])


def test_lookups_that_do_not_count():
    def loss(p):
        lookup(p["a"], IDS)
        return jnp.sum(p["b"] ** 2)

    _, grads = check(loss, {"a": TABLE, "b": OTHER}, sparse=[True, False])
    assert not np.any(grads["a"].to_dense())


def test_one_array_in_two_places():
    """Each argument is a leaf of its own, although it is the same array."""

    def loss(p, frozen):
        rows = [lookup(table, IDS) for table in (p["a"], p["b"], frozen)]
        return weigh(rows[0] + 2 * rows[1] + rows[2]) + jnp.sum(frozen**2)

    check(loss, {"a": TABLE, "b": TABLE}, TABLE)
    check(lambda p, q: weigh(lookup(p, IDS) * lookup(q, IDS)), TABLE, TABLE, argnums=(0, 1))


# Inside other transformations


def test_under_vmap():
    loss = lambda table, ids: jnp.sum(jax.vmap(lambda i: weigh(lookup(table, i)))(ids))
    _, grads = check(loss, TABLE, jnp.array([[0, 3], [3, 5], [1, 6]]))
    assert grads.indices.shape == (6,)


def test_under_nested_vmap():
    def loss(table, ids, x):
        inner = lambda i, x: weigh(lookup(table, i) * x)
        return jnp.sum(jax.vmap(jax.vmap(inner))(ids, x))

    check(loss, TABLE, jnp.arange(6).reshape(2, 3), jnp.arange(6.0).reshape(2, 3))


@pytest.mark.parametrize(
    "known",
    [2, np.array([1, 2]), IDS, lambda: IDS + 1 - 1],
    ids=["int", "numpy", "jax", "computed"],
)
def test_known_ids_in_a_body(known):
    """The abstract trace does not know all ids that the run knows; both must find the same."""

    def loss(table, xs):
        ids = known() if callable(known) else known
        within = jax.vmap(lambda x: weigh(lookup(table, ids) * x))(xs)
        scanned, _ = jax.lax.scan(lambda s, x: (s + x * weigh(lookup(table, ids)), None), 0.0, xs)
        return jnp.sum(within) + scanned

    check(loss, TABLE, jnp.arange(3.0), eager=True, sparse=None)


def test_ids_not_batched_under_vmap():
    def loss(table, ids, xs):
        return jnp.sum(jax.vmap(lambda x: weigh(lookup(table, ids) * x))(xs))

    check(loss, TABLE, IDS, jnp.arange(3.0))


def test_vmap_over_another_axis():
    loss = lambda table, ids: jnp.sum(
        jax.vmap(lambda i: weigh(lookup(table, i)), in_axes=1)(ids) ** 2
    )
    check(loss, TABLE, jnp.array([[0, 3, 1], [3, 5, 2]]))


def test_a_lookup_before_the_loop_is_sparse():
    def loss(table, ids):
        rows = lookup(table, ids)
        return jax.lax.scan(lambda s, row: (s * 0.5 + weigh(row), None), 0.0, rows)[0]

    check(loss, TABLE, IDS)


def test_vmap_of_value_and_grad():
    """Batched parameters, as in an ensemble."""
    loss = lambda table, ids: weigh(lookup(table, ids))
    tables, ids = jnp.stack([TABLE, -TABLE]), jnp.stack([IDS, IDS[::-1]])
    for axes, batch in (((0, 0), ids), ((0, None), IDS)):

        @jax.jit
        def both(tables, batch, axes=axes):
            value, grads = jax.vmap(optzoo.value_and_grad(loss), axes)(tables, batch)
            want = jax.vmap(jax.value_and_grad(loss), axes)(tables, batch)
            return (value, jax.vmap(SparseRows.to_dense)(grads)), want

        chex.assert_trees_all_close(*both(tables, batch), rtol=1e-5, atol=1e-6)


def test_value_and_grad_within_value_and_grad():
    """An inner loop of its own, as in meta-learning: only the outer tables count outside."""

    def outer(p, ids):
        inner = lambda table: weigh(lookup(table, ids) * jnp.mean(lookup(p["a"], ids)))
        value, grads = optzoo.value_and_grad(inner)(TABLE)
        return value + jnp.sum(to_dense(grads) ** 2)

    check(outer, {"a": TABLE}, IDS)


def test_a_gradient_step_within_a_loss():
    """The same table inside and outside, as in MAML: rows of the first and of the second order."""

    def outer(table, ids):
        inner = lambda table: weigh(lookup(table, ids))
        _, grads = optzoo.value_and_grad(inner)(table)
        return weigh(lookup(table, ids) - 0.1 * grads.values)

    want = jax.value_and_grad(lambda t: weigh(t[IDS] - 0.3 * t[IDS] ** 2 * COSINES))(TABLE)
    value, grads = jax.jit(optzoo.value_and_grad(outer, sparse="require"))(TABLE, IDS)
    assert isinstance(grads, SparseRows) and grads.values.shape == (8, 2)
    chex.assert_trees_all_close((value, grads.to_dense()), want, rtol=1e-5)


def test_meta_gradient_through_a_train_step():
    params, loss = {"t": TABLE}, lambda p, scale: weigh(lookup(p["t"], IDS) * scale)

    def after_a_step(scale, value_and_grad, tx):
        _, grads = value_and_grad(loss)(params, scale)
        updates, _ = tx.update(grads, tx.init(params), params)
        return loss(optax.apply_updates(params, updates), 1.0)

    slopes = jax.jit(lambda s: [jax.grad(after_a_step)(s, each, tx) for tx, each in runs])
    runs = [
        (tx, each)
        for tx in (optzoo.lazy_adam(0.1), optzoo.gradient_descent(0.1))
        for each in (optzoo.value_and_grad, jax.value_and_grad)
    ]
    of_adam, want_adam, got, want = slopes(1.5)
    # Adam is nearly blind to the scale of a first gradient; gradient descent is not.
    np.testing.assert_allclose(of_adam, want_adam, rtol=1e-3, atol=1e-5)
    assert abs(want) > 0.1
    np.testing.assert_allclose(got, want, rtol=1e-5)


# Why a gradient is dense


def with_jvp(table, ids):
    f = jax.custom_jvp(lambda table, ids: weigh(lookup(table, ids)))
    f.defjvp(lambda x, t: jax.jvp(lambda table: weigh(table[x[1]]), x[:1], t[:1]))
    return f(table, ids)


def with_vjp(table, ids):
    f = jax.custom_vjp(lambda table, ids: weigh(lookup(table, ids)))
    dense = jax.grad(lambda table, ids: weigh(table[ids]))
    f.defvjp(lambda *x: (f(*x), x), lambda x, g: (g * dense(*x), np.zeros(x[1].shape, "V")))
    return f(table, ids)


def scanned(table, ids):
    return jax.lax.scan(lambda s, i: (s + weigh(lookup(table, i)), None), 0.0, ids)[0]


def on_one_device(table, ids):
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    look = lambda table, ids: weigh(lookup(table, ids))
    return jax.jit(look, in_shardings=(device, device))(table, ids)


def mapped_over_shards(table, ids):
    mesh = jax.make_mesh((1,), ("r",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": jax.P(), "out_specs": jax.P()}
    look = lambda table, ids: weigh(lookup(table, ids))
    return jax.shard_map(look, mesh=mesh, **specs)(table, ids)


DENSE = {
    "scaled": lambda table, ids: weigh(lookup(2 * table, ids)),
    "tied": lambda table, ids: weigh(lookup(table, ids) @ table.T),
    "tied twice": lambda table, ids: weigh(lookup(table, ids) @ table.T) + jnp.linalg.norm(table),
    "tied, in a body": lambda table, ids: scanned(table, ids) * jnp.sum(table),
    "tied by a body": lambda table, ids: jax.jit(lambda t: weigh(lookup(t, ids) @ t.T))(table),
    "batch of it": lambda table, ids: jnp.sum(
        jax.vmap(lambda t, i: weigh(lookup(t, i)))(jnp.stack([table] * 4), ids % 6)
    ),
    "vmap": lambda table, ids: jnp.sum(jax.vmap(lambda t: weigh(lookup(t, ids % 2)))(table)),
    "custom_jvp": with_jvp,
    "custom_vjp": with_vjp,
    "carried": lambda table, ids: jax.lax.scan(
        lambda t, i: (t * 0.5, weigh(lookup(t, i))), table, ids
    )[1].sum(),
    "of layers": lambda table, ids: jax.lax.map(lambda t: weigh(lookup(t, ids % 2)), table).sum(),
    "cond in vmap": lambda table, ids: jnp.sum(
        jax.vmap(lambda i: jax.lax.cond(i > 2, weigh, jnp.sum, lookup(table, i)))(ids)
        + jax.vmap(lambda i: jax.lax.cond(i > 2, lambda: weigh(lookup(table, i)), lambda: 0.0))(ids)
    ),
    "shardings": on_one_device,
    "shard_map": mapped_over_shards,
}
FIRST = f"{HERE}: look up first, then compute"
OUTSIDE = f"{HERE}: do the lookup outside and pass the rows in"
REASONS = {
    "scaled": "a lookup reads the result of mul" + FIRST,
    "tied": "it is also used by transpose" + HERE,
    "tied twice": f"it is also used by transpose{HERE}, norm{HERE}",
    "tied, in a body": "it is also used by reduce_sum" + HERE,
    "tied by a body": "it is also used by transpose" + HERE,
    # Before JAX 0.10 `jnp.stack` first gives each array another axis.
    "batch of it": "a lookup reads the result of (stack|broadcast_in_dim)" + FIRST,
    "vmap": f"a lookup is inside of a jax.vmap that maps over the table{HERE}",
    "custom_jvp": "a lookup is inside of jax.custom_jvp" + OUTSIDE,
    "custom_vjp": "a lookup is inside of jax.custom_vjp" + OUTSIDE,
    "carried": "a lookup is inside of jax.lax.scan" + OUTSIDE,
    "of layers": "a lookup is inside of jax.lax.scan" + OUTSIDE,
    # A `cond` whose condition differs among the members becomes a `where`, of whole tables.
    "cond in vmap": "a lookup reads the result of broadcast_in_dim" + FIRST,
    "shardings": "a lookup is inside of jax.jit" + OUTSIDE,
    "shard_map": "a lookup is inside of jax.shard_map" + OUTSIDE,
}


@pytest.mark.parametrize("case", REASONS)
def test_the_reason_for_a_dense_gradient(case):
    """By the path of the table, once in each trace; an error if asked for."""
    loss, reason = lambda p, ids: DENSE[case](p["embed"]["table"], ids), REASONS[case]
    params = {"embed": {"table": TABLE}, "other": jnp.ones(3)}
    ours = {how: optzoo.value_and_grad(loss, sparse=how) for how in ("warn", "allow", "require")}
    step = jax.jit(lambda *args: (ours["warn"](*args), jax.value_and_grad(loss)(*args)))
    with pytest.warns(DenseGradientWarning, match=f"of 'embed/table' is dense.*{reason}") as seen:
        got, want = step(params, IDS)
    assert len(seen) == 1
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-6)
    step(params, IDS)  # which traces nothing
    jax.eval_shape(ours["allow"], params, IDS)
    with pytest.raises(ValueError, match=f"of 'embed/table' is dense.*{reason}"):
        jax.eval_shape(ours["require"], params, IDS)


# What a loss returns, and what has a gradient


def test_auxiliary_data_that_was_not_announced():
    pair = lambda p: (weigh(lookup(p, IDS)), {"ids": IDS})
    with pytest.raises(TypeError, match=r"got tuple of 2: if .* give has_aux=True"):
        optzoo.value_and_grad(pair)(TABLE)
    with pytest.raises(TypeError, match=r"has_aux=True: .* got the loss alone"):
        optzoo.value_and_grad(lambda p: pair(p)[0], has_aux=True)(TABLE)


def test_what_has_no_gradient_is_named():
    loss = lambda p: weigh(lookup(p["table"], IDS))
    params = {"table": TABLE, "rngs": {"count": jnp.uint32(0)}}
    for call in (
        lambda: optzoo.value_and_grad(loss)(params),
        lambda: optzoo.minimize(loss, optax.sgd(0.1))(params, optax.sgd(0.1).init(params)),
    ):
        with pytest.raises(TypeError, match=r"'rngs/count' has dtype uint32.*nnx\.split"):
            call()


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool"])
def test_integers_among_the_parameters(dtype):
    """JAX's value and gradients, and rows of the table, where a table of integers is read too."""

    def loss(p):
        signs = jnp.where(lookup(p["hashes"], IDS) > 0, 2.0, -1.0)
        return weigh(lookup(p["table"], IDS) * signs) * p["count"], p["hashes"].sum()

    hashes = (jnp.arange(12).reshape(6, 2) % 3).astype(dtype)
    params = {"table": TABLE, "hashes": hashes, "count": jnp.ones((), dtype), "w": jnp.ones(2)}
    ours = optzoo.value_and_grad(loss, has_aux=True, sparse="require", allow_int=True)
    theirs = jax.value_and_grad(loss, has_aux=True, allow_int=True)
    for run in (ours, jax.jit(ours)):
        (value, total), grads = run(params)
        (wanted, wanted_total), wanted_grads = theirs(params)
        np.testing.assert_allclose(value, wanted, rtol=1e-6)
        assert total == wanted_total and isinstance(grads["table"], SparseRows)
        np.testing.assert_allclose(by_numpy(grads["table"]), wanted_grads["table"], rtol=1e-6)
        np.testing.assert_array_equal(grads["w"], jnp.zeros(2))
        for name in ("hashes", "count"):
            assert grads[name].dtype == wanted_grads[name].dtype == jax.dtypes.float0
            assert grads[name].shape == params[name].shape


def test_a_gather_of_integers_and_random_keys():
    table = jnp.ones((20_000, 2))
    params = {"table": table, "ids": jnp.arange(20_000), "key": jax.random.key(0)}

    def loss(p):
        noise = jax.random.normal(p["key"], (4, 2))
        return jnp.sum(p["table"][p["ids"][IDS]] * noise)

    value, grads = optzoo.value_and_grad(loss, sparse="require", allow_int=True)(params)
    wanted, dense = jax.value_and_grad(loss, allow_int=True)(params)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    np.testing.assert_allclose(by_numpy(grads["table"]), dense["table"], rtol=1e-6)
    assert {grads[name].dtype for name in ("ids", "key")} == {jax.dtypes.float0}
    with pytest.raises(TypeError, match="allow_int must be True or False, got 2"):
        optzoo.value_and_grad(loss, allow_int=2)


def test_the_reason_names_the_argument():
    tied = lambda table, other, ids: (
        weigh(lookup(table, ids) @ table.T) + weigh(lookup(other["t"], ids) * jnp.sum(other["t"]))
    )
    of_both = optzoo.value_and_grad(tied, argnums=(0, 1))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        jax.eval_shape(of_both, TABLE, {"t": TABLE}, IDS)
    assert [str(w.message).split(" is dense")[0] for w in seen] == [
        "the gradient of argument 0",
        "the gradient of 't' of argument 1",
    ]


def test_no_warning_for_what_is_not_looked_up():
    loss = lambda p: jnp.sum(p["dense"] ** 2) + weigh(lookup(p["a"], IDS))
    check(loss, {"a": TABLE, "dense": TABLE}, sparse=[True, False])
    dense = lambda p: jnp.sum(p @ p.T) + weigh(lookup(OTHER, IDS % 4))
    jax.eval_shape(optzoo.value_and_grad(dense, sparse="require"), TABLE)


def test_stop_gradient_is_not_another_use():
    def loss(table, ids):
        still = jax.lax.stop_gradient
        return weigh(lookup(table, ids)) * jnp.sum(still(table)) * still(jnp.linalg.norm(table))

    check(loss, TABLE, IDS)


def test_a_penalty_on_the_rows_looked_up_is_sparse():
    def loss(table, ids):
        rows = lookup(table, ids)
        return weigh(rows) + 0.1 * jnp.sum(rows**2)

    _, grads = check(loss, TABLE, IDS)
    assert grads.values.shape == (4, 2)


def test_bad_sparse():
    with pytest.raises(ValueError, match=r"sparse must be one of warn, .*, got 'never'"):
        optzoo.value_and_grad(lambda x: x, sparse="never")


def test_the_loss_is_called_once():
    """What it does besides its value happens once for each trace."""
    calls = []

    def loss(table):
        calls.append(1)
        return weigh(lookup(table.astype("float16"), IDS).astype("float32")) * len(calls)

    value, grads = optzoo.value_and_grad(loss)(TABLE)
    assert calls == [1] and isinstance(grads, SparseRows)
    np.testing.assert_allclose(value, loss(TABLE) / 2, rtol=1e-3)


def test_an_argument_by_keyword():
    loss = lambda table, ids: weigh(lookup(table, ids))
    with pytest.raises(ValueError, match=r"argument 0, but .* got 0 .*\['ids', 'table'\]: pass"):
        optzoo.value_and_grad(loss)(table=TABLE, ids=IDS)
    with pytest.raises(ValueError, match=r"argnums=\(0, 2\) .* argument 2, but .* got 1"):
        optzoo.value_and_grad(loss, argnums=(0, 2))(TABLE, ids=IDS)
    value, _ = optzoo.value_and_grad(loss)(TABLE, ids=IDS)
    np.testing.assert_allclose(value, loss(TABLE, IDS), rtol=1e-6)


# Alone


@pytest.mark.parametrize("compile", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_elsewhere_it_is_indexing(compile):
    np.testing.assert_array_equal(compile(lookup)(TABLE, IDS), TABLE[IDS])
    of_ours = jax.grad(lambda table: weigh(compile(lookup)(table, IDS)))(TABLE)
    assert isinstance(of_ours, jax.Array)
    want = jax.grad(lambda table: weigh(table[IDS]))(TABLE)
    np.testing.assert_allclose(of_ours, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [-1, 7, 100])
def test_ids_out_of_range(bad):
    ids, loss = jnp.array([0, bad]), lambda table, ids: jnp.sum(lookup(table, ids))
    for look in (lookup, optzoo.value_and_grad(loss)):
        with pytest.raises(IndexError, match=rf"\[0, 6\), or 6 for padding, got {bad}"):
            look(TABLE, ids)
    rows = jax.jit(lookup)(TABLE, ids)
    np.testing.assert_array_equal(rows[0], TABLE[0])
    assert np.all(np.isnan(rows[1]))
    value, _ = jax.jit(optzoo.value_and_grad(loss))(TABLE, ids)
    assert np.isnan(value)


@pytest.mark.parametrize("num_rows", [127, 128, 300])
def test_small_integers_reach_no_further_than_they_can(num_rows):
    table = jnp.arange(float(num_rows))
    rows = jax.jit(lookup)(table, jnp.array([-1, 5, 127], "int8"))
    last = 127.0 if num_rows > 127 else 0.0  # padding
    np.testing.assert_array_equal(rows, [np.nan, 5, last])


def test_bad_arguments():
    with pytest.raises(TypeError, match="ids must be integers, got dtype float32"):
        lookup(TABLE, jnp.ones(2))
    with pytest.raises(TypeError, match="ids must be integers, got dtype bool"):
        lookup(TABLE, jnp.ones(2, bool))
    with pytest.raises(ValueError, match="table must have at least one dimension"):
        lookup(jnp.ones(()), IDS)
    with pytest.raises(TypeError):
        optzoo.value_and_grad(lambda table: lookup(table, IDS))(TABLE)
    for bad in ([[1.0, 2.0]], {"table": TABLE}, None, Boxed(None), "table"):
        with pytest.raises(TypeError, match="table must be an array or a variable that holds one"):
            lookup(bad, IDS)
    with pytest.raises(TypeError, match="ids must be integers, got dtype float"):
        lookup(TABLE, [])


def test_a_failed_loss_leaves_no_trace():
    def failing(table):
        lookup(table, IDS)
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        optzoo.value_and_grad(failing)(TABLE)
    check(lambda table: weigh(lookup(table, IDS)), TABLE, eager=True)


@pytest.mark.optimized
@pytest.mark.parametrize("mapped", [False, True], ids=["plain", "vmap"])
def test_no_array_as_large_as_the_table(mapped):
    def loss(table, ids):
        look = lambda i: weigh(lookup(table, i))
        return jnp.sum(jax.vmap(look)(ids)) if mapped else look(ids)

    table, ids = jnp.zeros((100_000, 16)), jnp.zeros((8, 8), int)
    compiled = jax.jit(optzoo.value_and_grad(loss)).lower(table, ids).compile()
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 0.01 * table.nbytes
    assert memory.output_size_in_bytes < 0.01 * table.nbytes


def test_a_table_that_only_aux_reads_densely_still_gets_rows():
    """Logging a norm beside the loss costs no dense gradient."""
    table = jnp.arange(12.0).reshape(6, 2)

    def loss(t, ids):
        return jnp.sum(optzoo.lookup(t, ids) ** 2), {"norm": jnp.linalg.norm(t), "name": "table"}

    (_, aux), grad = optzoo.value_and_grad(loss, has_aux=True)(table, jnp.array([1, 4]))
    assert isinstance(grad, optzoo.SparseRows)
    np.testing.assert_allclose(aux["norm"], jnp.linalg.norm(table), rtol=1e-6)
    want, _ = jax.grad(loss, has_aux=True)(table, jnp.array([1, 4]))
    np.testing.assert_allclose(grad.to_dense(), want, rtol=1e-6)
