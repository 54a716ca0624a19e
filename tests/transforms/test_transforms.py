"""Gradient transformations: properties of all of them, and of each."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo import SparseRows
from optzoo.testing.samples import avals, dense_grads, params, plain, row_grads
from optzoo.testing.samples import to_dense as dense
from optzoo.transforms.check_numerics import check_numerics
from optzoo.transforms.clip_by_average_norm import clip_by_average_norm
from optzoo.transforms.clip_by_norm import clip_by_norm
from optzoo.transforms.nan_inf_filter import gradient_nan_inf_filter
from optzoo.transforms.summaries import gradient_summaries, read_summaries
from optzoo.transforms.zero_if_norm_exceeds import zero_if_norm_exceeds

STEPS = {
    "gradient_nan_inf_filter": gradient_nan_inf_filter,
    "clip_by_norm": lambda: clip_by_norm(0.7),
    "clip_by_average_norm": lambda: clip_by_average_norm(0.1),
    "zero_if_norm_exceeds": lambda: zero_if_norm_exceeds(0.5),
    "gradient_summaries": gradient_summaries,
    "check_numerics": check_numerics,
}
PASSES = ("gradient_summaries", "check_numerics")
NAN, INF = math.nan, math.inf

every_transformation = pytest.mark.parametrize("make", STEPS.values(), ids=list(STEPS))


def once(tx, grads):
    return jax.jit(tx.update)(grads, tx.init(params()))[0]


# All transformations


@every_transformation
def test_rows_equal_the_dense_gradient(make):
    grads = row_grads(params())
    got, want = dense(once(make(), grads)), once(make(), dense(grads))
    chex.assert_trees_all_close(got, want, rtol=1e-6)
    updates = once(make(), grads)
    assert all(isinstance(updates[name], SparseRows) for name in ("table", "one_row"))


@every_transformation
def test_compiled_is_eager(make):
    """Under jit, scan and vmap."""
    tx, grads = make(), row_grads(params())
    state = tx.init(params())
    want, _ = tx.update(grads, state)

    def body(state, grads):
        updates, state = tx.update(grads, state)
        return state, updates

    twice = lambda tree: jax.tree.map(lambda a: jnp.stack([a, a]), tree)
    _, path = jax.jit(lambda s, g: jax.lax.scan(body, s, g))(state, twice(grads))
    many, _ = jax.jit(jax.vmap(tx.update))(twice(grads), twice(state))
    for got in (path, many):
        last = jax.tree.map(lambda a: a[1], got)
        chex.assert_trees_all_close(plain(last), plain(want), rtol=1e-6)


@every_transformation
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_types_stay(make, dtype):
    tx, state = make(), make().init(params())
    as_dtype = lambda a: a.astype(dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a
    grads = jax.tree.map(as_dtype, row_grads(params()))
    assert avals(jax.eval_shape(tx.init, params())) == avals(state)
    updates, after = jax.eval_shape(tx.update, grads, state)
    assert avals(after) == avals(state)
    assert [u.dtype for u in jax.tree.leaves(updates)] == [g.dtype for g in jax.tree.leaves(grads)]


@every_transformation
def test_missing_and_masked_gradients_pass(make):
    grads = {"table": None, "layer": (optax.MaskedNode(), jnp.float32(0.25))}
    tx = make()
    like = {"table": jnp.zeros((5, 2)), "layer": (optax.MaskedNode(), jnp.float32(0))}
    got, _ = tx.update(grads, tx.init(like))
    assert got["table"] is None and isinstance(got["layer"][0], optax.MaskedNode)
    masked = optax.masked(tx, {"table": True, "layer": (False, False), "one_row": False})
    grads = dense_grads(params())
    got, _ = masked.update(grads, masked.init(params()))
    for name in ("layer", "one_row"):
        chex.assert_trees_all_equal(got[name], grads[name])
    assert make().update({}, make().init({}))[0] == {}


@pytest.mark.parametrize("name", PASSES)
def test_checks_and_summaries_change_nothing(name):
    grads = row_grads(params())
    got = once(STEPS[name](), grads)
    chex.assert_trees_all_equal(plain(got), plain(grads))


@pytest.mark.parametrize("clip", [clip_by_norm, clip_by_average_norm, zero_if_norm_exceeds])
def test_limits_are_positive_and_can_be_injected(clip):
    for bad in (0.0, -1.0, NAN):
        with pytest.raises(ValueError, match="max_norm must be positive"):
            clip(bad)
    injected = optax.inject_hyperparams(clip)(0.3)
    grads = dense_grads(params())
    chex.assert_trees_all_close(once(injected, grads), once(clip(0.3), grads), rtol=1e-6)
    chex.assert_trees_all_equal(once(clip(INF), grads), grads)


# Each transformation


def test_filter():
    grads = {
        "a": jnp.array([1.0, NAN, -2, INF, -INF]),
        # The two entries of row 1 are filtered separately; NaN in the padding has no effect.
        "rows": SparseRows(jnp.array([1, 1, 3]), jnp.array([2.0, NAN, INF]), 3),
    }
    got, _ = gradient_nan_inf_filter().update(grads, optax.EmptyState())
    np.testing.assert_array_equal(got["a"], [1, 0, -2, 0, 0])
    np.testing.assert_array_equal(got["rows"].to_dense(), [0, 2, 0])


def test_clip_by_norm():
    grads = {"long": jnp.array([3.0, 4]), "short": jnp.array([0.3, 0.4]), "no": jnp.zeros(2)}
    got, _ = clip_by_norm(1.0).update(grads, optax.EmptyState())
    np.testing.assert_allclose(got["long"], [0.6, 0.8], rtol=1e-6)
    np.testing.assert_array_equal(got["short"], grads["short"])
    np.testing.assert_array_equal(got["no"], [0, 0])


def test_clip_by_average_norm_counts_all_elements():
    """The norm of 5 by 2 elements is above the limit; for a table of 100 rows it is not."""
    g = jnp.array([[3.0, 4]])
    small, large = (SparseRows(jnp.array([0]), g, n) for n in (1, 100))
    got, _ = clip_by_average_norm(2.0).update({"s": small, "l": large}, optax.EmptyState())
    np.testing.assert_allclose(got["s"].values, 0.8 * g, rtol=1e-6)
    np.testing.assert_array_equal(got["l"].values, g)
    rms = optax.clip_by_block_rms(2.0).update(g, optax.EmptyState())[0]
    assert not np.allclose(rms, 0.8 * g)


@pytest.mark.parametrize("bad", [NAN, INF, -INF, 100.0])
def test_a_bad_step_becomes_zero(bad):
    tx = zero_if_norm_exceeds(10.0)
    good = {"a": jnp.array([3.0, 4]), "rows": SparseRows(jnp.array([1]), jnp.ones(1), 3)}
    chex.assert_trees_all_equal(plain(tx.update(good, optax.EmptyState())[0]), plain(good))
    spoilt = {**good, "a": jnp.array([3.0, bad])}
    got = dense(tx.update(spoilt, optax.EmptyState())[0])
    chex.assert_trees_all_equal(got, jax.tree.map(jnp.zeros_like, got))
    only_finite, _ = zero_if_norm_exceeds(INF).update(spoilt, optax.EmptyState())
    assert jnp.any(only_finite["rows"].values != 0) == (bad == 100.0)


def test_summaries():
    tx = optax.chain(gradient_summaries(), optzoo.adam(0.1))
    x = {"layer": {"w": jnp.zeros(3), "no": jnp.ones(2)}, "table": jnp.zeros((4, 2))}
    state = tx.init(x)
    assert read_summaries(state).leaves["layer/w"] == {"norm": 0, "largest": 0, "nonfinite": 0}
    grads = {
        "layer": {"w": jnp.array([2.0, -6, 3]), "no": None},
        # Rows that share an index are summed: norm 5, not 3.5.
        "table": SparseRows(jnp.array([2, 2]), jnp.array([[1.5, 2], [1.5, 2]]), 4),
    }
    _, state = jax.jit(tx.update)(grads, state, x)
    leaves, norm = read_summaries(state)
    assert leaves["layer/w"] == {"norm": 7, "largest": 6, "nonfinite": 0}
    assert leaves["layer/no"] == {"norm": 0, "largest": 0, "nonfinite": 0}
    assert leaves["table"] == {"norm": 5, "largest": 4, "nonfinite": 0}
    np.testing.assert_allclose(norm, math.sqrt(49 + 25), rtol=1e-6)
    grads["layer"]["w"] = jnp.array([NAN, INF, 1])
    leaves, norm = read_summaries(tx.update(grads, state, x)[1])
    assert leaves["layer/w"]["nonfinite"] == 2 and jnp.isnan(norm)


def test_summaries_of_a_partition_are_merged():
    parts = {"a": optax.chain(gradient_summaries(), optax.sgd(1.0)), "b": gradient_summaries()}
    tx = optax.partition(parts, {"table": "a", "layer": ("a", "b"), "one_row": "b"})
    _, state = tx.update(dense_grads(params()), tx.init(params()))
    assert set(read_summaries(state).leaves) == {"table", "layer/0", "layer/1", "one_row"}
    want = optax.tree.norm(dense_grads(params()))
    np.testing.assert_allclose(read_summaries(state).global_norm, want, rtol=1e-6)


def test_no_summaries():
    with pytest.raises(
        ValueError, match=r"add optzoo.transforms.gradient_summaries\(\) to the chain"
    ):
        read_summaries(optzoo.adam(0.1).init(params()))


# check_numerics


def with_value(value):
    grads = dense_grads(params())
    return {**grads, "layer": (grads["layer"][0].at[1].set(value), grads["layer"][1])}


RUNS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "vmap": lambda f: lambda g, s: jax.jit(jax.vmap(f, in_axes=(0, None)))(
        jax.tree.map(lambda a: jnp.stack([jnp.ones_like(a), a]), g), s
    ),
    "scan": lambda f: jax.jit(
        lambda g, s: jax.lax.scan(lambda s, _: f(g, s)[::-1], s, None, 3)[::-1]
    ),
    "grad": lambda f: jax.jit(lambda g, s: jax.value_and_grad(
        lambda g: sum(jnp.sum(a) for a in jax.tree.leaves(f(g, s)[0])))(g)),
}  # fmt: skip


@pytest.mark.parametrize("how", RUNS)
@pytest.mark.parametrize(("value", "kind"), [(NAN, "NaN"), (INF, "infinite"), (-INF, "infinite")])
def test_check_names_leaf_kind_and_step(how, value, kind):
    tx = check_numerics()
    state = tx.init(params())
    run = RUNS[how](tx.update)
    jax.block_until_ready(run(dense_grads(params()), state))
    _, state = tx.update(dense_grads(params()), state)
    message = rf"the gradient of parameter 'layer/0' is {kind} at step 1; 1 of 4 leaves"
    with pytest.raises((FloatingPointError, jax.errors.JaxRuntimeError), match=message):
        jax.block_until_ready(run(with_value(value), state))


def test_check_works_after_an_error_and_takes_a_step_and_a_word():
    tx = check_numerics("update")
    update = jax.jit(tx.update)
    state = tx.init(params())
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"the update of .* at step 7;"):
            jax.block_until_ready(update(with_value(NAN), state, global_step=7))
        updates, state = update(dense_grads(params()), state)
        chex.assert_trees_all_equal(updates, dense_grads(params()))
    assert state.count == 2


@pytest.mark.parametrize(("inside", "jit"), [(False, lambda f: f), (True, jax.jit)])
def test_check_names_the_replica(inside, jit):
    check, x = check_numerics(), params()
    average = lambda tx: optzoo.elastic_average(tx, 8)
    sgd = optzoo.gradient_descent(0.1)
    tx = average(optax.chain(check, sgd)) if inside else optax.chain(check, average(sgd))
    step = jit(optzoo.replicas.map_over_replicas(lambda x, state, g: tx.update(g, state, x)))
    replicated = optzoo.replicas.replicate(x, tx.init(x), 8)
    grads = jax.tree.map(lambda a: np.stack([a] * 8), dense_grads(x))
    jax.block_until_ready(step(*replicated, grads))
    grads["layer"][0][5, 1] = NAN
    message = r"gradient of parameter 'layer/0' is NaN at step 0 on replica 5; 1 of 4 leaves"
    with pytest.raises((FloatingPointError, jax.errors.JaxRuntimeError), match=message):
        jax.block_until_ready(step(*replicated, grads))


@pytest.mark.parametrize(("axis", "where"), [("replica", " on replica 1"), ("members", "")])
def test_check_names_the_replica_along_its_axis_alone(axis, where):
    tx = check_numerics()
    update = jax.jit(jax.vmap(lambda g: tx.update(g, tx.init(params())), axis_name=axis))
    grads = jax.tree.map(lambda a: np.stack([np.ones_like(a), a]), with_value(NAN))
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"is NaN at step 0{where}; 1 of 4"):
        jax.block_until_ready(update(grads))
    other = check_numerics(axis_name="members")
    update = jax.jit(jax.vmap(lambda g: other.update(g, other.init(params())), axis_name=axis))
    where = {"replica": "", "members": " on replica 1"}[axis]
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"is NaN at step 0{where}; 1 of 4"):
        jax.block_until_ready(update(grads))


def test_check_of_rows():
    tx = check_numerics()
    rows = lambda values: {"table": SparseRows(jnp.array([0, 2]), jnp.array(values), 2)}
    state = tx.init({"table": jnp.zeros(2)})
    tx.update(rows([1.0, NAN]), state)  # in the padding
    with pytest.raises(FloatingPointError, match="parameter 'table' is infinite at step 0"):
        tx.update(rows([INF, 1.0]), state)


@pytest.mark.parametrize(
    "tx",
    [
        optzoo.clip_by_global_norm(1.0),
        optzoo.transforms.clip_by_norm(1.0),
        optzoo.transforms.clip_by_average_norm(0.1),  # of 10 elements
    ],
)
def test_clips_of_rows_with_the_same_id(tx):
    """They are summed first. TensorFlow's first two are not, and RETURNN's: docs/differences.md."""
    rows = SparseRows(jnp.array([1, 1, 1, 2]), jnp.ones((4, 2)), 5)
    got, _ = tx.update({"t": rows}, tx.init({"t": jnp.ones((5, 2))}))
    dense = np.array([[0, 0], [3, 3], [1, 1], [0, 0], [0, 0]])
    np.testing.assert_allclose(got["t"].to_dense(), dense / np.linalg.norm(dense), rtol=1e-6)


def test_norms_of_returnn_are_those_of_rows_as_they_are_listed():
    config = {"optimizer": {"class": "sgd"}, "learning_rate": 1.0, "gradient_clip_global_norm": 1.0}
    tx = optzoo.interop.returnn.returnn_updater(config)
    x = {"t": jnp.zeros((5, 2))}
    rows = SparseRows(jnp.array([1, 1, 1, 2]), jnp.ones((4, 2)), 5)
    got, _ = tx.update({"t": rows}, tx.init(x), x)
    want = np.array([[0, 0], [3, 3], [1, 1], [0, 0], [0, 0]]) / np.sqrt(8)
    np.testing.assert_allclose(got["t"].to_dense(), -want, rtol=1e-6)
