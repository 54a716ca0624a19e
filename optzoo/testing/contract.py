"""The conformance tests for optimizers.

Import them into a test module with a fixture ``entry`` that returns an :class:`optzoo.Entry`::

    from optzoo.testing.contract import *
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import optzoo
from optzoo import SparseRows

from ..testing import samples
from .samples import avals, dense_grads, row_grads, step

GRADS = {"dense": dense_grads, "rows": row_grads}
REST = jnp.array([0, 2, 4])  # the rows of the table without a gradient


@pytest.fixture(params=GRADS)
def grads(request):
    return GRADS[request.param](samples.params())


def cast(tree, dtype):
    floating = lambda a: jnp.issubdtype(a.dtype, jnp.floating)
    return jax.tree.map(lambda a: a.astype(dtype) if floating(a) else a, tree)


def weak(tree):
    return jax.tree.map(lambda a: jnp.broadcast_to(jnp.asarray(0.5), a.shape), tree)


def with_rows(indices, values):
    """Gradients with the given rows for the table."""
    rows = SparseRows(jnp.array(indices, int), jnp.array(values).reshape(-1, 2), 5)
    return {**row_grads(samples.params()), "table": rows}


def compiled(tx):
    """The step, compiled; equal programs come from JAX's compilation cache where it is on."""
    return jax.jit(functools.partial(step, tx), donate_argnums=(1, 2))


def warm(entry):
    """An optimizer, parameters and the state after one dense update."""
    tx, params = entry.make(), samples.params()
    return tx, *step(tx, dense_grads(params), params)


# Types


def test_compiles_once_and_takes_donated_buffers(entry, grads):
    params, tx = samples.params(), entry.make()
    train, state = compiled(tx), tx.init(params)
    first = avals(state)
    for _ in range(3):
        params, state = train(grads, params, state)
    assert train._cache_size() == 1
    assert avals(state) == first
    chex.assert_tree_all_finite(params)


@pytest.mark.parametrize(
    ("of_params", "of_grads"),
    [
        (lambda x: cast(x, "bfloat16"), lambda g: g),
        (lambda x: x, lambda g: cast(g, "bfloat16")),
        (lambda x: cast(x, "float16"), lambda g: cast(g, "float16")),
        (weak, lambda g: g),
        (weak, lambda g: cast(g, "bfloat16")),
    ],
    ids=["bf16-f32", "f32-bf16", "f16-f16", "weak-f32", "weak-bf16"],
)
def test_state_keeps_its_type_and_updates_take_that_of_the_gradient(
    entry, grads, of_params, of_grads
):
    params, grads, tx = of_params(samples.params()), of_grads(grads), entry.make()
    state = jax.eval_shape(tx.init, params)
    updates, after = jax.eval_shape(tx.update, grads, state, params)
    assert avals(after) == avals(state)
    assert not any(jax.tree.leaves(jax.tree.map(lambda s: s.weak_type, after)))
    dtypes = lambda tree: [a.dtype for a in jax.tree.leaves(tree)]
    if isinstance(updates["table"], SparseRows) or not isinstance(grads["table"], SparseRows):
        assert dtypes(updates) == dtypes(grads)
    else:
        assert set(dtypes(updates)) == {grads["table"].dtype}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_slots_of_16_bit_parameters_are_in_float32(entry, grads, dtype):
    params, tx = cast(samples.params(), dtype), entry.make()
    state = jax.eval_shape(tx.init, params)
    floats = lambda tree: {
        a.dtype for a in jax.tree.leaves(tree) if jnp.issubdtype(a.dtype, jnp.floating)
    }
    assert all(jnp.finfo(found).bits >= 32 for found in floats(samples.slots(state)))
    updates, after = jax.eval_shape(tx.update, cast(grads, dtype), state, params)
    assert avals(after) == avals(state)
    assert floats(updates) == {jnp.dtype(dtype)}


@pytest.mark.parametrize(
    ("dtype", "large"), [("float16", 6e4), ("bfloat16", 1e15), ("float32", 1e15)]
)
def test_extreme_gradients_give_finite_updates(entry, dtype, large):
    info, tx = jnp.finfo(dtype), entry.make()
    values = [0, info.tiny, -info.smallest_subnormal, large, -large, info.eps]
    params = {"x": jnp.ones(6, dtype), "zero": jnp.zeros(2, dtype)}
    grads = {"x": jnp.array(values, dtype), "zero": jnp.zeros(2, dtype)}
    state = tx.init(params)
    for _ in range(3):
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        chex.assert_tree_all_finite((updates, state, params))


def test_abstract_init_is_init(entry):
    params, tx = samples.params(), entry.make()
    abstract = jax.eval_shape(lambda: params)
    want = avals(tx.init(params))
    assert avals(jax.eval_shape(tx.init, abstract)) == want
    assert avals(tx.init(abstract)) == want


def test_no_two_buffers_are_the_same(entry):
    params = samples.params()
    leaves = jax.tree.leaves((params, entry.make().init(params)))
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


# Rows


def test_untouched_rows(entry):
    tx, params, state = warm(entry)
    moved, aged = step(tx, row_grads(params), params, state)
    stay = lambda new, old: np.array_equal(new["table"][REST], old["table"][REST])
    old_slots, new_slots = samples.slots(state), samples.slots(aged)
    rests = [stay(new, old) for new, old in zip(new_slots, old_slots, strict=True)]
    assert stay(moved, params) == (entry.rows != "dense")
    assert any(not still for still in rests) == (entry.rows in ("touched", "dense"))
    assert jnp.all(moved["table"][jnp.array([1, 3])] != params["table"][jnp.array([1, 3])])
    for new, old in zip(new_slots, old_slots, strict=True):
        assert jnp.all(new["table"][jnp.array([1, 3])] != old["table"][jnp.array([1, 3])])


def test_rows_sum_in_any_order_and_padding_is_ignored(entry):
    tx, nan = entry.make(), np.nan
    train = compiled(tx)

    def two_steps(grads):
        return train(grads, *train(grads, samples.params(), tx.init(samples.params())))

    want = two_steps(with_rows([1, 3, 5, 5], [[6.0, 8], [3, 4], [0, 0], [0, 0]]))
    for same in (
        with_rows([1, 3, 1, 5], [[1.0, 2], [3, 4], [5, 6], [7, 8]]),
        with_rows([5, 1, 1, 3], [[7.0, 8], [5, 6], [1, 2], [3, 4]]),
        with_rows([-1, 3, 1, 9], [[nan, nan], [3, 4], [6, 8], [np.inf, nan]]),
    ):
        chex.assert_trees_all_close(two_steps(same), want, rtol=1e-6)


def test_rows_equal_the_dense_gradient_where_they_touch(entry):
    tx, params, state = warm(entry)
    grads = row_grads(params)
    dense = {**grads, "table": grads["table"].to_dense()}
    (got, state), (want, wanted) = (step(tx, g, params, state) for g in (grads, dense))
    here = jnp.array([1, 3])
    pairs = [(got, want), *zip(samples.slots(state), samples.slots(wanted), strict=True)]
    for actual, expected in pairs:
        chex.assert_trees_all_close(actual["table"][here], expected["table"][here], rtol=1e-6)
        chex.assert_trees_all_equal(actual["layer"], expected["layer"])


def test_no_rows_are_as_good_as_padding(entry):
    tx, params, state = warm(entry)
    got, want = (
        step(tx, with_rows(ids, values), params, state)
        for ids, values in (([], []), ([5, -1], [[1.0, 1], [1, 1]]))
    )
    chex.assert_trees_all_equal(got, want)


def test_rows_of_other_ranks(entry):
    """Rows of a vector, of an array of rank 3, and of a table without rows."""
    tx, ids = entry.make(), jnp.array([1, 1, 0])
    params = {"cube": jnp.ones((2, 2, 3)), "none": jnp.ones((0, 2)), "vector": jnp.ones(2)}
    rows = {k: SparseRows(ids, jnp.ones((3, *x.shape[1:])), len(x)) for k, x in params.items()}
    dense = {k: g.to_dense() for k, g in rows.items()}
    chex.assert_trees_all_close(step(tx, rows, params)[0], step(tx, dense, params)[0], rtol=1e-6)


# Unusual trees


def test_empty_tree(entry):
    tx = entry.make()
    assert step(tx, {}, {})[0] == {}


def test_no_gradient_no_change(entry):
    tx, params, state = warm(entry)
    some = {"table": None, "layer": (None, jnp.ones(()))}
    updates, after = tx.update(some, state, params)
    assert updates["table"] is None and updates["layer"][0] is None and updates["layer"][1] != 0
    kept = lambda slot: (slot["table"], slot["layer"][0])
    for new, old in zip(samples.slots(after), samples.slots(state), strict=True):
        chex.assert_trees_all_equal(kept(new), kept(old))
        assert new["layer"][1] != old["layer"][1]


def test_leaves_without_elements_or_axes(entry):
    tx, params = entry.make(), {"none": jnp.ones((0, 3)), "scalar": jnp.ones(())}
    moved, state = step(tx, params, params)
    assert avals(moved) == avals(params) and avals(state) == avals(tx.init(params))
    assert moved["scalar"] < 1


def test_masked_leaves_pass(entry):
    params, grads = samples.params(), dense_grads(samples.params())
    tx = optax.masked(entry.make(), {"table": True, "layer": False})
    updates, state = tx.update(grads, tx.init(params), params)
    want, _ = entry.make().update(grads, entry.make().init(params), params)
    chex.assert_trees_all_equal(updates, {**want, "layer": grads["layer"]})
    layers = [slot["layer"] for slot in samples.slots(state)]
    assert all(layer == optax.MaskedNode() for layer in layers)


def test_numpy_in_place_of_jax(entry, grads):
    tx, params = entry.make(), samples.params()
    of_rows = lambda g: SparseRows(np.asarray(g.indices), np.asarray(g.values), g.num_rows)
    is_rows = lambda g: isinstance(g, SparseRows)
    numpy = lambda a: of_rows(a) if is_rows(a) else np.asarray(a)
    got = step(tx, *(jax.tree.map(numpy, tree, is_leaf=is_rows) for tree in (grads, params)))
    chex.assert_trees_all_equal(got, step(tx, grads, params))


def test_nan_stays_in_its_leaf(entry, grads):
    tx, params = entry.make(), samples.params()
    with_nan = {**grads, "layer": (jnp.full(3, jnp.nan), grads["layer"][1])}
    (got, state), (want, wanted) = (step(tx, g, params) for g in (with_nan, grads))
    assert jnp.all(jnp.isnan(got["layer"][0]))
    clean = lambda tree: (tree["table"], tree["layer"][1])
    chex.assert_trees_all_equal(clean(got), clean(want))
    for actual, expected in zip(samples.slots(state), samples.slots(wanted), strict=True):
        chex.assert_trees_all_equal(clean(actual), clean(expected))


# Transformations of JAX


def test_vmap(entry):
    tx, params = entry.make(), samples.params()["table"]
    other = with_rows([4, 4, 0, 1], [[3.0, 1], [2, 1], [1, 1], [0, 1]])["table"]
    lanes = [(row_grads(samples.params())["table"], params), (other, params + 1)]
    stack = lambda *trees: jax.tree.map(lambda *a: jnp.stack(a), *trees)
    grads, xs = stack(*lanes)
    got = jax.vmap(functools.partial(step, tx))(grads, xs, jax.vmap(tx.init)(xs))
    chex.assert_trees_all_close(got, stack(*(step(tx, *lane) for lane in lanes)), rtol=1e-6)


def test_cond_and_scan_accept_the_old_state(entry, grads):
    params, tx = samples.params(), entry.make()

    def maybe(state, keep):
        new = lambda: step(tx, grads, params, state)[1]
        return jax.lax.cond(keep, lambda: state, new), None

    both = lambda: jax.lax.scan(maybe, tx.init(params), jnp.array([True, False]))[0]
    assert avals(jax.eval_shape(both)) == avals(tx.init(params))


def test_goes_downhill(entry):
    loss = lambda x: sum(jnp.sum((leaf - 2) ** 2) for leaf in jax.tree.leaves(x))
    tx, x = entry.make(), samples.params()
    train, downhill, state = compiled(tx), jax.jit(jax.grad(loss)), tx.init(x)
    for _ in range(200):
        x, state = train(downhill(x), x, state)
    assert loss(x) < 0.5 * loss(samples.params())


# Compositions

LABELS = {"table": "a", "layer": ("b", "a")}


def inject(entry, rate):
    injected = optax.inject_hyperparams(entry.factory, static_args=entry.static)
    return injected(rate, **entry.required)


COMPOSITIONS = {
    "chain": lambda entry: optax.chain(optax.clip(1e9), entry.make()),
    "masked": lambda entry: optax.masked(entry.make(), jax.tree.map(lambda _: True, LABELS)),
    "partition": lambda entry: optax.partition({"a": entry.make(), "b": entry.make()}, LABELS),
    "inject number": lambda entry: inject(entry, entry.rate),
    "inject schedule": lambda entry: inject(entry, lambda k: entry.rate),
    "multi_steps": lambda entry: optax.MultiSteps(entry.make(), 1).gradient_transformation(),
    "apply_if_finite": lambda entry: optax.apply_if_finite(entry.make(), 3),
}


def test_hyperparameters_injected_into_16_bits(entry):
    params = cast(samples.params(), "bfloat16")
    grads = dense_grads(params)
    rounded = inject(entry, entry.rate)
    state = rounded.init(params)
    moved, after = step(rounded, grads, params, state)
    assert avals(after) == avals(state)
    chex.assert_tree_all_finite((moved, after))
    exact = optax.inject_hyperparams(entry.factory, entry.static, hyperparam_dtype=jnp.float32)
    moved, _ = step(exact(entry.rate, **entry.required), grads, params)
    chex.assert_trees_all_close(moved, step(entry.make(), grads, params)[0], rtol=1e-2)


@pytest.mark.parametrize("compose", COMPOSITIONS.values(), ids=list(COMPOSITIONS))
def test_composes_with_optax(entry, compose):
    params, tx = samples.params(), compose(entry)
    grads = dense_grads(params)
    state = tx.init(params)
    jax.eval_shape(tx.update, grads, state, params)  # injected values are traced here
    moved, after = step(tx, grads, params, state)
    assert avals(after) == avals(state)
    # An injected rate is a float32 array; a Python number is not rounded.
    chex.assert_trees_all_close(moved, step(entry.make(), grads, params)[0], rtol=1e-5)


def test_flatten(entry):
    params, tx = samples.params(), optax.flatten(entry.make())
    grads = dense_grads(params)
    moved, after = step(tx, grads, params)
    assert avals(after) == avals(tx.init(params))
    chex.assert_trees_all_close(moved, step(entry.make(), grads, params)[0], rtol=1e-6)


def test_composes_with_optax_on_rows(entry):
    params = samples.params()
    everything = jax.tree.map(lambda _: True, LABELS)
    tx = optax.masked(optax.partition({"a": entry.make(), "b": entry.make()}, LABELS), everything)
    tx = optax.apply_if_finite(optax.chain(optzoo.on_values(optax.clip(1e9)), tx), 3)
    # apply_if_finite does not accept an update that is dense if the gradient is row-sparse.
    front = optzoo.densify() if entry.rows == "dense" else optax.identity()
    tx = optax.chain(front, tx, optax.inject_hyperparams(optzoo.gradient_descent)(-1.0))
    grads, state = row_grads(params), tx.init(params)
    moved, after = step(tx, grads, params, state)
    assert avals(after) == avals(state)
    want, _ = step(optax.chain(front, entry.make()), grads, params)
    chex.assert_trees_all_close(moved, want, rtol=1e-5)


def test_map_params_finds_all_slots(entry):
    params, tx = (
        samples.params(),
        optax.masked(entry.make(), {"table": True, "layer": (True, True)}),
    )
    state = tx.init(params)
    marked = optax.tree.map_params(tx, lambda _: "slot", state)
    found = [leaf for leaf in jax.tree.leaves(marked) if isinstance(leaf, str)]
    assert len(found) == len(jax.tree.leaves(samples.slots(state)))
    assert jax.tree.structure(marked) == jax.tree.structure(state)


# Rates


def test_constant_and_schedule_are_the_same(entry):
    params = samples.params()
    grads = dense_grads(params)
    number, schedule = entry.make(), entry.make(lambda k: entry.rate)
    states = number.init(params), schedule.init(params)
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
    # The state of one is valid for the other.
    want = step(number, grads, *step(number, grads, params))
    chex.assert_trees_all_equal(step(schedule, grads, *step(number, grads, params)), want)
    chex.assert_trees_all_equal(step(number, grads, *step(schedule, grads, params)), want)


def test_schedule_counts_from_zero_or_follows_the_global_step(entry):
    _, params, state = warm(entry)
    grads, rate = dense_grads(params), entry.rate
    falling = entry.make(lambda k: rate / (1 + k))
    want = lambda k, **at: step(entry.make(rate / (1 + k)), grads, params, state, **at)
    chex.assert_trees_all_close(step(falling, grads, params, state), want(1), rtol=1e-6)
    late = {"global_step": jnp.int32(4)}
    chex.assert_trees_all_close(
        step(falling, grads, params, state, **late), want(4, **late), rtol=1e-6
    )


def test_rate_can_be_overridden_for_a_step(entry, grads):
    tx, params, state = warm(entry)
    other = entry.make(entry.rate / 4)
    overridden = step(tx, grads, params, state, learning_rate=jnp.float32(entry.rate / 4))
    chex.assert_trees_all_close(overridden, step(other, grads, params, state), rtol=1e-6)
    # Only for that step.
    dense = dense_grads(params)
    chex.assert_trees_all_close(
        step(tx, dense, *overridden)[0]["table"],
        step(entry.make(), dense, *overridden)[0]["table"],
        rtol=1e-6,
    )
    assert not np.allclose(overridden[0]["table"], step(tx, grads, params, state)[0]["table"])


# Arguments


def test_unknown_extra_args_are_ignored(entry):
    tx, params, state = warm(entry)
    grads = dense_grads(params)
    got = step(tx, grads, params, state, value=1.0, weather="fine")
    chex.assert_trees_all_equal(got, step(tx, grads, params, state))


def test_without_params_the_same_or_an_error(entry):
    tx, params, state = warm(entry)
    grads = dense_grads(params)
    try:
        without = tx.update(grads, state)
    except ValueError as error:
        assert "requires the current value of parameters" in str(error)
    else:
        chex.assert_trees_all_equal(without, tx.update(grads, state, params))


@pytest.mark.parametrize(
    ("grad", "error", "fix"),
    [
        (jnp.ones(4), ValueError, r"\(3,\)"),
        (jnp.ones(3, int), TypeError, "optax.masked"),
        (jnp.ones(3, "complex64"), TypeError, "split_real_and_imaginary"),
    ],
    ids=["shape", "integer", "complex"],
)
def test_errors_name_the_leaf(entry, grad, error, fix):
    tx, params = entry.make(), samples.params()
    grads = {**dense_grads(params), "layer": (grad, jnp.ones(()))}
    with pytest.raises(error, match=r"parameter 'layer/0'") as caught:
        tx.update(grads, tx.init(params), params)
    caught.match(fix)


def test_rows_of_another_shape_name_the_leaf(entry):
    tx, params = entry.make(), samples.params()
    grads = {**row_grads(params), "table": SparseRows(jnp.array([0]), jnp.ones((1, 2)), 4)}
    with pytest.raises(ValueError, match=r"parameter 'table' has shape \(5, 2\)"):
        tx.update(grads, tx.init(params), params)


# Other libraries


def test_linen_train_state(entry, grads):
    params, tx = samples.params(), entry.make()
    trained = TrainState.create(apply_fn=None, params=params, tx=tx).apply_gradients(grads=grads)
    assert trained.step == 1
    chex.assert_trees_all_equal(trained.params, step(tx, grads, params)[0])


def test_nnx_optimizer(entry):
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, entry.make(), wrt=nnx.Param)
    before = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    before = jax.tree.map(jnp.array, before)
    grads = nnx.grad(lambda model: jnp.sum(model(jnp.ones((1, 2))) ** 2))(model)
    optimizer.update(model, grads)
    after = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    want, _ = step(entry.make(), nnx.to_pure_dict(grads), before)
    chex.assert_trees_all_equal(after, want)


def test_orbax_round_trip(entry, tmp_path):
    _, params, state = warm(entry)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        target = jax.eval_shape(entry.make(lambda k: 0.1).init, params)
        restored = checkpointer.restore(tmp_path / "state", target)
    chex.assert_trees_all_equal(restored, state)
    chex.assert_trees_all_equal_structs(restored, state)


__all__ = ["grads", *(name for name in dir() if name.startswith("test_"))]
