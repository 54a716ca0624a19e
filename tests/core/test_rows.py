"""Row-sparse gradients against numpy and against dense gradients."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import optzoo
from optzoo import SparseRows
from optzoo.core import merge
from optzoo.core.rows import Shard
from optzoo.testing.samples import dense_grads, params, plain, row_grads, step, to_dense
from tests.platforms import HERE, OTHER, on_platform


def rows(indices, values, num_rows=5, **kwargs):
    return SparseRows(jnp.array(indices, jnp.int32), jnp.array(values), num_rows, **kwargs)


SOME = rows([1, 3, 1, 5], [[1.0, 2], [3, 4], [5, 6], [7, 8]])
DENSE = jnp.zeros((5, 2)).at[1].set(jnp.array([6.0, 8])).at[3].set(jnp.array([3.0, 4]))


# The type


@pytest.mark.parametrize(
    ("indices", "values", "num_rows", "error", "message"),
    [
        (jnp.zeros(2), jnp.zeros((2, 3)), 5, TypeError, "must be integers, got float32"),
        (jnp.zeros(2, int), jnp.zeros((2, 3)), jnp.array(5), TypeError, "a Python int"),
        (jnp.zeros(2, int), jnp.zeros((2, 3)), 5.0, TypeError, "a Python int"),
        (jnp.zeros(2, int), jnp.zeros((3, 3)), 5, ValueError, "one row of values for each index"),
        (jnp.zeros(2, int), jnp.zeros(()), 5, ValueError, "one row of values for each index"),
    ],
)
def test_bad_rows(indices, values, num_rows, error, message):
    with pytest.raises(error, match=message):
        SparseRows(indices, values, num_rows)


def test_tree_operations_forget_that_rows_are_coalesced():
    merged = SOME.coalesce()
    leaves, treedef = jax.tree.flatten(merged)
    assert merged.coalesced and not treedef.unflatten(leaves).coalesced
    assert treedef == jax.tree.structure(SOME)
    assert [leaf.shape for leaf in leaves] == [(4, 2), (4,)]
    for other in (merged.with_rows(SOME.indices, SOME.values), merged + SOME, SOME + merged):
        assert not other.coalesced  # it may have an index twice
    of_shard = SparseRows(SOME.indices, SOME.values, 5, shard=Shard(("x",), 9, False), squares=3.0)
    same = jax.tree.map(lambda a: a, of_shard)
    assert (same.shard, same.squares) == (of_shard.shard, 3.0)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(SOME)]
    assert paths == [".values", ".ids"]


def test_shape_dtype_and_casts():
    assert SOME.shape == (5, 2) and SOME.dtype == jnp.float32
    half = SOME.astype("bfloat16")
    assert half.dtype == jnp.bfloat16 and half.indices.dtype == jnp.int32


@pytest.mark.parametrize("array", [jnp.asarray, np.asarray], ids=["jax", "numpy"])
def test_adds_to_arrays_from_both_sides(array):
    x = array(np.arange(10, dtype="float32").reshape(5, 2))
    for total in (x + SOME, SOME + x, optax.apply_updates(x, SOME)):
        assert isinstance(total, jax.Array)
        np.testing.assert_array_equal(total, x + np.asarray(DENSE))


@pytest.mark.parametrize("coalesced", [True, False])
def test_strict_promotion_of_rows_of_another_dtype(coalesced):
    """The sum has the dtype of the array."""
    g = rows([1, 3], [[1.0, 2], [3, 4]], coalesced=coalesced)
    want = [[0, 0], [1, 2], [0, 0], [3, 4], [0, 0]]
    with jax.numpy_dtype_promotion("strict"):
        for of_array, of_rows in (("float32", "bfloat16"), ("bfloat16", "float32")):
            total = jnp.zeros((5, 2), of_array) + g.astype(of_rows)
            assert total.dtype == of_array
            np.testing.assert_array_equal(total.astype("float32"), want)


def test_does_not_add_to_another_shape():
    with pytest.raises(ValueError, match=r"\(5, 2\) do not match an array of shape \(6, 2\)"):
        jnp.zeros((6, 2)) + SOME


def test_numbers_times_rows_and_differences():
    x = jnp.arange(10.0).reshape(5, 2)
    for scaled in (2 * SOME, SOME * 2, jnp.float32(2) * SOME, np.float32(2) * SOME):
        np.testing.assert_array_equal(scaled.to_dense(), 2 * DENSE)
        np.testing.assert_array_equal(scaled.indices, SOME.indices)
    np.testing.assert_array_equal((SOME / 4).to_dense(), DENSE / 4)
    np.testing.assert_array_equal((-SOME).to_dense(), -DENSE)
    np.testing.assert_array_equal(x - SOME, x - DENSE)
    np.testing.assert_array_equal(SOME - x, DENSE - x)
    assert not np.any((SOME - SOME).to_dense())
    assert (0.5 * SOME.astype("bfloat16")).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "f",
    [
        lambda g: g * g,
        lambda g: g * jnp.ones((5, 2)),
        lambda g: g**2,
        lambda g: g / jnp.ones((5, 2)),
        lambda g: 1 / g,
        abs,
        lambda g: g @ g,
        lambda g: g > 0,
    ],
)
def test_other_arithmetic_is_refused(f):
    with pytest.raises(TypeError, match=r"optzoo\.rows\.densify"):
        f(SOME)


def test_to_dense():
    np.testing.assert_array_equal(SOME.to_dense(), DENSE)
    vector = rows([-1, 4, 4, 9, 2], [1.0, 2, 3, 4, 5])
    np.testing.assert_array_equal(vector.to_dense(), [0, 0, 5, 0, 5])


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32"])
def test_indices_of_any_integer_type(dtype):
    """Also where ``num_rows``, the padding, is beyond the type."""
    given = SparseRows(jnp.array([1, 100, 1], dtype), jnp.array([1.0, 2, 3]), 300)
    want = np.zeros(300)
    want[[1, 100]] = 4, 2
    for prepare in (lambda g: g, lambda g: g.coalesce()):
        np.testing.assert_array_equal(prepare(given).to_dense(), want)


def test_gather_and_scatter():
    x = jnp.arange(10.0).reshape(5, 2)
    few = rows([3, 5, 0], jnp.zeros((3, 2)))
    np.testing.assert_array_equal(few.gather(x)[jnp.array([0, 2])], x[jnp.array([3, 0])])
    got = few.scatter(x, -few.gather(x))
    np.testing.assert_array_equal(got, x * jnp.array([[-1.0], [1], [1], [-1], [1]]))
    np.testing.assert_array_equal(few.scatter(np.asarray(x), -few.gather(np.asarray(x))), got)


def test_drop_padding_drops_even_nan():
    spoilt = rows([2, 5, -1], [1.0, jnp.nan, jnp.inf])
    np.testing.assert_array_equal(spoilt.drop_padding().values, [1, 0, 0])


# Coalescing

MERGES = {
    "hash": lambda g: g.coalesce(),
    "fixed order": lambda g: g.coalesce(deterministic=True),
    # What an accelerator runs.
    "sort": on_platform(lambda g: g.coalesce(), OTHER),
}
merge_all = jax.jit(
    lambda ids, values: plain({k: f(SparseRows(ids, values, 5)) for k, f in MERGES.items()})
)
ids = st.integers(-2, 7)
lists_of_ids = st.sampled_from([0, 9]).flatmap(lambda n: st.lists(ids, min_size=n, max_size=n))


@settings(deadline=None, max_examples=40, database=None)
@given(lists_of_ids, st.sampled_from([(), (2,)]))
def test_coalesce_agrees_with_numpy(indices, row_shape):
    # Powers of two: every subset has a sum of its own, and it is exact.
    values = np.broadcast_to(2.0 ** np.arange(len(indices)), (*row_shape, len(indices))).T
    want = np.zeros((8, *row_shape))
    np.add.at(want, indices, values)  # -1 and -2 land on 7 and 6
    want = want[:5]
    all_merged = merge_all(np.array(indices, np.int32), values.astype(np.float32))
    for name, (merged, summed) in jax.device_get(all_merged).items():
        real = merged != 5
        assert len(set(merged[real])) == real.sum() == len(set(indices) & set(range(5))), name
        got = np.zeros((5, *row_shape))
        got[merged[real]] = summed[real]
        np.testing.assert_array_equal(got, want, err_msg=name)
        assert not np.any(summed[~real]), name


@pytest.mark.parametrize("platform", [HERE, OTHER])
def test_one_position_is_elected_for_each_id(platform):
    elect = on_platform(merge.elect, platform)
    ids = np.random.default_rng(0).integers(-3, 50, 300).astype(np.int32)
    elected = np.asarray(jax.jit(elect)(ids))
    np.testing.assert_array_equal(ids[elected], ids)
    assert len(set(elected)) == len(set(ids))
    assert jax.eval_shape(elect, jnp.zeros(0, jnp.int32)).shape == (0,)


FACTOR = 2654435761  # of the first round
CROWD = np.arange(1, 4000, dtype=np.uint64) * pow(FACTOR, -1, 2**32) % 2**32
HARD = {
    "equal": np.full(1000, 7),
    "consecutive": np.arange(1000),
    "multiples": np.arange(1000) << 16,
    "multiples, twice": np.repeat(np.arange(500) << 21, 2),
    "one bucket": CROWD[CROWD < 2**31 - 1][:1000],
}


@pytest.mark.parametrize("indices", HARD.values(), ids=list(HARD))
def test_hash_survives_hard_indices(indices):
    assert len(indices) == 1000
    num_rows = 2**31 - 1
    merged = merge_many(rows(indices, np.arange(1.0, 1001, dtype="float32"), num_rows))
    ids, values = np.asarray(merged.indices), np.asarray(merged.values)
    real = ids < num_rows
    want, slot = np.unique(indices, return_inverse=True)
    order = np.argsort(ids[real])
    np.testing.assert_array_equal(ids[real][order], want)
    np.testing.assert_array_equal(values[real][order], np.bincount(slot, np.arange(1.0, 1001)))


merge_many = jax.jit(lambda g: g.coalesce())


@pytest.mark.parametrize("merge", MERGES.values(), ids=list(MERGES))
def test_coalesce_under_vmap(merge):
    lanes = [SOME, rows([4, 4, 4, 0], [[1.0, 2], [3, 4], [5, 6], [7, 8]])]
    both = jax.jit(jax.vmap(merge))(jax.tree.map(lambda *a: jnp.stack(a), *lanes))
    for i, lane in enumerate(lanes):
        got = jax.tree.map(lambda a, i=i: a[i], both)
        np.testing.assert_array_equal(got.to_dense(), lane.to_dense())


@pytest.mark.parametrize(
    "total",
    [
        lambda g: jnp.max(g.coalesce().values),
        lambda g: jnp.max(g.coalesce(deterministic=True).values),
        lambda g: jnp.max(g.to_dense()),
    ],
    ids=["hash", "fixed order", "to_dense"],
)
def test_half_precision_sums_in_float32(total):
    """In bfloat16 itself the sum stops growing at 256."""
    ones = SparseRows(jnp.zeros(512, int), jnp.ones(512, jnp.bfloat16), 2)
    summed = jax.jit(total)(ones)
    assert summed == 512 and summed.dtype == jnp.bfloat16


def test_fixed_order_adds_by_no_scatter():
    jaxpr = str(jax.make_jaxpr(lambda g: jax.tree.leaves(g.coalesce(deterministic=True)))(SOME))
    assert "sort" in jaxpr and "scatter" not in jaxpr


def test_coalesce_as_a_transformation():
    for deterministic in (False, True):
        tx = optzoo.rows.coalesce(deterministic=deterministic)
        updates, _ = tx.update({"t": SOME, "x": jnp.ones(2)}, tx.init(None))
        assert updates["t"].coalesced and updates["x"].shape == (2,)
        np.testing.assert_array_equal(updates["t"].to_dense(), DENSE)


def test_a_chain_coalesces_once():
    """That is by one loop for each of the two tables."""
    adam, clip = optzoo.lazy_adam(), optzoo.clip_by_global_norm(1.0)
    chain = optax.chain(clip, optzoo.rows.on_values(optax.clip(1.0)), adam)

    def loops(tx):
        update = lambda g: jax.tree.leaves(tx.update(g, tx.init(params()), params()))
        return str(jax.make_jaxpr(update)(row_grads(params()))).count("while[")

    assert loops(chain) == loops(adam) == 2


# Among foreign transformations


@pytest.mark.parametrize(
    "foreign",
    [
        optax.adam(0.1),
        optax.trace(0.9),
        optax.scale(0.5),
        optax.add_decayed_weights(0.1),
        optax.apply_if_finite(optzoo.adam(), 1),
        optax.MultiSteps(optzoo.lazy_adam(), 2).gradient_transformation(),
    ],
    ids=["adam", "trace", "scale", "decay", "apply_if_finite(dense)", "MultiSteps"],
)
@pytest.mark.parametrize("alone", [False, True])
def test_foreign_transformations_give_the_hint(foreign, alone):
    x, grads = params(), row_grads(params())
    x, grads = (x["table"], grads["table"]) if alone else (x, grads)
    with pytest.raises((TypeError, ValueError), match=r"optzoo\.rows\.(densify|on_values)"):
        step(foreign, grads, x)


def test_foreign_norm_clipping_gives_the_hint():
    clip = lambda g: step(optax.clip_by_global_norm(1.0), g, params())
    with pytest.raises(TypeError, match=r"`optzoo\.clip_by_global_norm` that of optax"):
        jax.jit(clip)(row_grads(params()))


def test_functions_for_masks_and_labels_are_named():
    """Optax calls them on the gradients, too, in which rows are no leaf."""
    is_large = lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)
    labels = lambda tree: jax.tree.map(lambda x: "b", tree)
    for tx in (
        optax.masked(optzoo.lazy_adam(0.1), is_large),
        optax.multi_transform({"a": optax.sgd(0.1), "b": optzoo.lazy_adam(0.1)}, labels),
    ):
        with pytest.raises(ValueError, match="trees that were made from the parameters, not func"):
            step(tx, row_grads(params()), params())


@pytest.mark.parametrize("foreign", [optax.adam(0.1), optax.trace(0.9), optax.scale(0.5)])
def test_densify(foreign):
    x, grads = params(), row_grads(params())
    got, _ = step(optax.chain(optzoo.rows.densify(), foreign), grads, x)
    chex.assert_trees_all_close(got, step(foreign, to_dense(grads), x)[0], rtol=1e-6)


def test_on_values_is_the_dense_clip_on_touched_rows():
    grads = {**dense_grads(params()), "table": rows([1, 3, 1, 5], jnp.full((4, 2), 0.7))}
    tx = optzoo.rows.on_values(optax.clip(1.0))
    updates, _ = tx.update(grads, tx.init(params()), params())
    dense = {**grads, "table": grads["table"].to_dense()}
    want, _ = optax.clip(1.0).update(dense, optax.EmptyState())
    np.testing.assert_array_equal(updates["table"].to_dense(), want["table"])
    np.testing.assert_array_equal(want["table"][1], 1)  # the sum was clipped, not each repeat
    for name in ("layer", "one_row"):
        chex.assert_trees_all_equal(updates[name], want[name])
