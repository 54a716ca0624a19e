"""The conformance tests for optimizers.

Import them into a test module with a fixture ``entry`` of the scope ``"module"`` that returns an
:class:`optzoo.catalog.Entry`::

    from optzoo.testing.contract import *

A step is compiled once for dense gradients and once for rows, for all tests of an optimizer.
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


class Case:
    """An optimizer, and results that several tests share."""

    def __init__(self, entry):
        self.tx = entry.make()
        self.compiled = jax.jit(functools.partial(step, self.tx), donate_argnums=(1, 2))

    def step(self, grads, params=None, state=None):
        """The compiled step, from the first parameters by default; nothing is donated."""
        params = samples.params() if params is None else params
        state = self.tx.init(params) if state is None else state
        with jax.disable_jit(False):
            return self.compiled(grads, *jax.tree.map(jnp.array, (params, state)))

    @functools.cached_property
    def warm(self):
        """The parameters and the state after a first step by dense gradients, not compiled."""
        return step(self.tx, dense_grads(samples.params()), samples.params())

    @functools.cached_property
    def warm_by_rows(self):
        """The parameters and the state after a first step by row-sparse gradients."""
        return step(self.tx, row_grads(samples.params()), samples.params())

    def first(self, grads):
        """The first step by row-sparse or dense gradients."""
        return self.warm_by_rows if isinstance(grads["table"], SparseRows) else self.warm


@pytest.fixture(scope="module")
def case(entry):
    return Case(entry)


@pytest.fixture(autouse=True)
def eager():
    """Disables compilation except by tests, since an eager ``cond`` compiles at each call."""
    with jax.disable_jit():
        yield


# Types


def test_compiles_once_and_takes_donated_buffers(case, grads):
    params = samples.params()
    state = case.tx.init(params)
    first = avals(state)
    with jax.disable_jit(False):
        for _ in range(3):
            params, state = case.compiled(grads, params, state)
    assert case.compiled._cache_size() <= len(GRADS)
    assert avals(state) == first
    chex.assert_tree_all_finite(params)


@pytest.mark.parametrize(
    ("of_params", "of_grads"),
    [
        (lambda x: cast(x, "bfloat16"), lambda g: g),
        (lambda x: cast(x, "bfloat16"), lambda g: cast(g, "bfloat16")),
        (lambda x: x, lambda g: cast(g, "bfloat16")),
        (lambda x: cast(x, "float16"), lambda g: cast(g, "float16")),
        (weak, lambda g: g),
        (weak, lambda g: cast(g, "bfloat16")),
    ],
    ids=["bf16-f32", "bf16-bf16", "f32-bf16", "f16-f16", "weak-f32", "weak-bf16"],
)
def test_state_keeps_its_type_and_updates_take_that_of_the_gradient(
    case, grads, of_params, of_grads
):
    """Slots have at least 32 bits, for any dtype of the parameters."""
    params, grads, tx = of_params(samples.params()), of_grads(grads), case.tx
    state = jax.eval_shape(tx.init, params)
    updates, after = jax.eval_shape(tx.update, grads, state, params)
    assert avals(after) == avals(state)
    assert not any(jax.tree.leaves(jax.tree.map(lambda s: s.weak_type, after)))
    dtypes = lambda tree: [a.dtype for a in jax.tree.leaves(tree)]
    if isinstance(updates["table"], SparseRows) or not isinstance(grads["table"], SparseRows):
        assert dtypes(updates) == dtypes(grads)
    else:
        assert set(dtypes(updates)) == {grads["table"].dtype}
    assert all(dtype.itemsize >= 4 for dtype in dtypes(samples.slots(state)))


@pytest.mark.parametrize(
    ("dtype", "large"), [("float16", 6e4), ("bfloat16", 1e15), ("float32", 1e15)]
)
def test_extreme_gradients_give_finite_updates(case, dtype, large):
    info, tx = jnp.finfo(dtype), case.tx
    values = [0, info.tiny, -info.smallest_subnormal, large, -large, info.eps]
    params = {"x": jnp.ones(6, dtype), "zero": jnp.zeros(6, dtype)}
    grads = {"x": jnp.array(values, dtype), "zero": jnp.zeros(6, dtype)}
    state = tx.init(params)
    for _ in range(3):
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        chex.assert_tree_all_finite((updates, state, params))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_strict_settings(case, grads, dtype):
    """No implicit promotion of dtypes or ranks, and no NaN or infinity in intermediate results."""
    params, grads = cast(samples.params(), dtype), cast(grads, dtype)
    zeros = {**grads, "layer": jax.tree.map(jnp.zeros_like, grads["layer"])}

    def steps():
        first = step(case.tx, zeros, params)
        return step(case.tx, grads, *first)

    want = steps()
    with samples.strict_settings():
        got = steps()
    chex.assert_trees_all_equal(got, want)


def test_abstract_init_is_init(case):
    params, tx = samples.params(), case.tx
    abstract = jax.eval_shape(lambda: params)
    want = avals(tx.init(params))
    assert avals(jax.eval_shape(tx.init, abstract)) == want
    assert avals(tx.init(abstract)) == want


def test_no_two_buffers_are_the_same(case):
    params = samples.params()
    leaves = jax.tree.leaves((params, case.tx.init(params)))
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


# Rows


def test_untouched_rows(entry, case):
    params, state = case.warm
    moved, aged = case.step(row_grads(params), params, state)
    stay = lambda new, old: np.array_equal(new["table"][REST], old["table"][REST])
    old_slots, new_slots = samples.slots(state), samples.slots(aged)
    rests = [stay(new, old) for new, old in zip(new_slots, old_slots, strict=True)]
    assert stay(moved, params) == (entry.rows != "dense")
    assert any(not still for still in rests) == (entry.rows in ("touched", "dense"))
    assert jnp.all(moved["table"][jnp.array([1, 3])] != params["table"][jnp.array([1, 3])])
    assert jnp.any(moved["one_row"] != params["one_row"])
    for new, old in zip(new_slots, old_slots, strict=True):
        assert jnp.all(new["table"][jnp.array([1, 3])] != old["table"][jnp.array([1, 3])])
        assert jnp.any(new["one_row"] != old["one_row"])


def test_rows_sum_in_any_order_and_padding_is_ignored(case):
    nan = np.nan
    two_steps = lambda grads: case.step(grads, *case.step(grads))
    want = two_steps(with_rows([1, 3, 5, 5], [[6.0, 8], [3, 4], [0, 0], [0, 0]]))
    for same in (
        with_rows([1, 3, 1, 5], [[1.0, 2], [3, 4], [5, 6], [7, 8]]),
        with_rows([5, 1, 1, 3], [[7.0, 8], [5, 6], [1, 2], [3, 4]]),
        with_rows([-1, 3, 1, 9], [[nan, nan], [3, 4], [6, 8], [np.inf, nan]]),
    ):
        chex.assert_trees_all_close(two_steps(same), want, rtol=1e-6)


def test_rows_equal_the_dense_gradient_where_they_touch(case):
    params, state = case.warm
    grads = row_grads(params)
    dense = samples.to_dense(grads)
    (got, state), (want, wanted) = (step(case.tx, g, params, state) for g in (grads, dense))
    here = jnp.array([1, 3])
    pairs = [(got, want), *zip(samples.slots(state), samples.slots(wanted), strict=True)]
    for actual, expected in pairs:
        chex.assert_trees_all_close(actual["table"][here], expected["table"][here], rtol=1e-6)
        chex.assert_trees_all_close(actual["one_row"], expected["one_row"], rtol=1e-6)
        chex.assert_trees_all_equal(actual["layer"], expected["layer"])


def test_no_rows_are_as_good_as_padding(case):
    got, want = (
        step(case.tx, with_rows(ids, values), *case.warm)
        for ids, values in (([], []), ([5, -1, 5, 6], np.ones((4, 2), np.float32)))
    )
    chex.assert_trees_all_equal(got, want)


def test_rows_of_other_ranks(case):
    """Rows of a vector, of an array of rank 3, and of a table without rows."""
    ids = jnp.array([1, 1, 0])
    params = {"cube": jnp.ones((2, 2, 3)), "none": jnp.ones((0, 2)), "vector": jnp.ones(2)}
    rows = {k: SparseRows(ids, jnp.ones((3, *x.shape[1:])), len(x)) for k, x in params.items()}
    dense = {k: g.to_dense() for k, g in rows.items()}
    both = jax.jit(lambda *grads: [step(case.tx, g, params)[0] for g in grads])
    with jax.disable_jit(False):
        chex.assert_trees_all_close(*both(rows, dense), rtol=1e-6)


# Unusual trees


def test_empty_tree(case):
    assert step(case.tx, {}, {})[0] == {}


def test_no_gradient_no_change(case):
    tx, (params, state) = case.tx, case.warm
    some = {"table": None, "layer": (None, jnp.ones(())), "one_row": None}
    updates, after = tx.update(some, state, params)
    kept = lambda tree: (tree["table"], tree["layer"][0], tree["one_row"])
    assert kept(updates) == (None, None, None) and updates["layer"][1] != 0
    for new, old in zip(samples.slots(after), samples.slots(state), strict=True):
        chex.assert_trees_all_equal(kept(new), kept(old))
        assert new["layer"][1] != old["layer"][1]


def test_leaves_that_cannot_be_trained(case):
    params, tx = samples.params(), case.tx
    fixed = {
        "complex": jnp.ones(3, "complex64"),
        "integers": jnp.arange(3),
        "bool": jnp.array(True),
    }
    both, none = {**params, "fixed": fixed}, dict.fromkeys(fixed)
    updates, state = tx.update({**dense_grads(params), "fixed": none}, tx.init(both), both)
    assert avals(state) == avals(tx.init(both)) and updates.pop("fixed") == none
    chex.assert_trees_all_equal(optax.apply_updates(params, updates), case.warm[0])


def test_random_keys_are_refused_unless_they_are_hidden(case):
    params = {**samples.params(), "key": jax.random.key(0)}
    with pytest.raises(TypeError, match=r"'key' has dtype key<fry>: .* hide them by optax.masked"):
        case.tx.init(params)
    hidden = optax.masked(case.tx, {"table": True, "layer": True, "one_row": True, "key": False})
    grads = {**dense_grads(samples.params()), "key": None}
    updates, _ = hidden.update(grads, hidden.init(params), params)
    assert updates.pop("key") is None
    chex.assert_trees_all_equal(optax.apply_updates(samples.params(), updates), case.warm[0])


def test_leaves_without_elements_or_axes(case):
    tx, params = case.tx, {"none": jnp.ones((0, 2)), "scalar": jnp.ones(())}
    moved, state = step(tx, params, params)
    assert avals(moved) == avals(params) and avals(state) == avals(tx.init(params))
    assert moved["scalar"] < 1


def test_masked_leaves_pass(case):
    params, grads = samples.params(), dense_grads(samples.params())
    tx = optax.masked(case.tx, {"table": True, "layer": False, "one_row": True})
    moved, state = step(tx, grads, params)
    want = {**case.warm[0], "layer": optax.apply_updates(params, grads)["layer"]}
    chex.assert_trees_all_equal(moved, want)
    layers = [slot["layer"] for slot in samples.slots(state)]
    assert all(layer == optax.MaskedNode() for layer in layers)


def test_numpy_in_place_of_jax(case, grads):
    """Without ``jit``, which would convert them, as after a state is restored from a file."""
    params = samples.in_numpy(samples.params())
    state = samples.in_numpy(case.tx.init(params))
    got = step(case.tx, samples.in_numpy(grads), params, state)
    chex.assert_trees_all_equal(got, case.first(grads))


def test_python_floats_in_place_of_arrays(case):
    params = {"scalar": 1.0, "other": jnp.ones(2)}
    grads = {"scalar": 0.5, "other": jnp.ones(2)}
    arrays = lambda tree: jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), tree)
    (got, state), (want, wanted) = (
        step(case.tx, f(grads), f(params)) for f in (lambda tree: tree, arrays)
    )
    chex.assert_trees_all_equal((got, state), (want, wanted))


def test_nan_stays_in_its_leaf(case, grads):
    with_nan = {**grads, "layer": (np.full(3, np.nan, np.float32), grads["layer"][1])}
    (got, state), (want, wanted) = map(case.step, (with_nan, grads))
    assert jnp.all(jnp.isnan(got["layer"][0]))
    clean = lambda tree: (tree["table"], tree["layer"][1], tree["one_row"])
    chex.assert_trees_all_equal(clean(got), clean(want))
    for actual, expected in zip(samples.slots(state), samples.slots(wanted), strict=True):
        chex.assert_trees_all_equal(clean(actual), clean(expected))


# Transformations of JAX


def test_vmap(case):
    tx, params = case.tx, samples.params()["table"]
    other = with_rows([4, 4, 0, 1], [[3.0, 1], [2, 1], [1, 1], [0, 1]])["table"]
    lanes = [(row_grads(samples.params())["table"], params), (other, params + 1)]
    stack = lambda *trees: jax.tree.map(lambda *a: jnp.stack(a), *trees)
    grads, xs = stack(*lanes)
    with jax.disable_jit(False):
        got = jax.jit(jax.vmap(functools.partial(step, tx)))(grads, xs, jax.vmap(tx.init)(xs))
    chex.assert_trees_all_close(got, stack(*(step(tx, *lane) for lane in lanes)), rtol=1e-6)


def sharded(mesh, tree):
    """The arrays on a mesh: the first axis is divided, or the second axis, too."""
    spec = lambda a: jax.sharding.PartitionSpec(*mesh.axis_names[: a.ndim])
    place = lambda a: jax.device_put(a, jax.sharding.NamedSharding(mesh, spec(a)))
    return jax.tree.map(place, tree)


@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_meshes(case, kind, grads):
    """Values equal those of one device; on explicit axes no type changes."""
    kinds = 2 * (jax.sharding.AxisType[kind],)
    sizes = (2, 2) if jax.device_count() >= 4 else (1, 1)
    mesh = jax.make_mesh(sizes, ("rows", "columns"), axis_types=kinds)
    params = {"table": jnp.arange(1.0, 13).reshape(6, 2) / 10, "layer": (jnp.ones(4), jnp.ones(()))}
    gs = dense_grads(params)
    of_table = grads["table"]
    if isinstance(of_table, SparseRows):
        of_table = SparseRows(of_table.indices, of_table.values, 6)
    else:
        of_table = sharded(mesh, gs["table"])
    with jax.disable_jit(False):
        want, state = case.step({**gs, "table": jax.device_get(of_table)}, params)
        want, _ = case.step({**gs, "table": jax.device_get(of_table)}, want, state)
        gs, x = {**sharded(mesh, gs), "table": of_table}, sharded(mesh, params)
        state = case.tx.init(x)
        types, made = jax.tree.map(jax.typeof, (x, state)), case.compiled._cache_size()
        for _ in range(2):
            x, state = case.compiled(gs, x, state)
    chex.assert_trees_all_close(jax.device_get(x), jax.device_get(want), rtol=1e-5)
    if kind == "Explicit":
        assert jax.tree.map(jax.typeof, (x, state)) == types
        assert case.compiled._cache_size() == made + 1


def test_cond_and_scan_accept_the_old_state(case, grads):
    params, tx = samples.params(), case.tx

    def maybe(state, keep):
        new = lambda: step(tx, grads, params, state)[1]
        return jax.lax.cond(keep, lambda: state, new), None

    both = lambda: jax.lax.scan(maybe, tx.init(params), jnp.array([True, False]))[0]
    assert avals(jax.eval_shape(both)) == avals(tx.init(params))


@jax.jit
@jax.value_and_grad
def bowl(x):
    return sum(jnp.sum((leaf - 2) ** 2) for leaf in jax.tree.leaves(x))


def test_goes_downhill(case):
    x = samples.params()
    with jax.disable_jit(False):
        state, (first, _) = case.tx.init(x), bowl(x)
        for _ in range(200):
            x, state = case.compiled(bowl(x)[1], x, state)
        assert bowl(x)[0] < 0.5 * first


# Compositions

LABELS = {"table": "a", "layer": ("b", "a"), "one_row": "b"}


def inject(entry, rate):
    injected = optax.inject_hyperparams(entry.factory, static_args=entry.static)
    return injected(rate, **entry.required)


COMPOSITIONS = {
    "chain": lambda entry: optax.chain(optax.clip(1e9), entry.make()),
    "masked": lambda entry: optax.masked(entry.make(), jax.tree.map(lambda _: True, LABELS)),
    "partition": lambda entry: optax.partition({"a": entry.make(), "b": entry.make()}, LABELS),
    "inject number": lambda entry: inject(entry, entry.rate),
    "inject schedule": lambda entry: inject(entry, lambda k: entry.rate),
    "conditionals": lambda entry: optax.apply_if_finite(
        optax.MultiSteps(entry.make(), 1).gradient_transformation(), 3
    ),
}


def test_hyperparameters_injected_into_16_bits(entry, case):
    params = cast(samples.params(), "bfloat16")
    grads = dense_grads(params)
    rounded = inject(entry, entry.rate)
    state = rounded.init(params)
    moved, after = step(rounded, grads, params, state)
    assert avals(after) == avals(state)
    chex.assert_tree_all_finite((moved, after))
    exact = optax.inject_hyperparams(entry.factory, entry.static, hyperparam_dtype=jnp.float32)
    moved, _ = step(exact(entry.rate, **entry.required), grads, params)
    chex.assert_trees_all_close(moved, step(case.tx, grads, params)[0], rtol=1e-2)


def test_injected_hyperparameters_are_traced(entry):
    """In a compiled step their values are tracers, so no branch may depend on them."""
    params, tx = samples.params(), inject(entry, entry.rate)
    state = jax.eval_shape(tx.init, params)
    updates, after = jax.eval_shape(tx.update, dense_grads(params), state, params)
    assert avals(after) == avals(state)
    assert avals(updates) == avals(params)


@pytest.mark.parametrize("compose", COMPOSITIONS.values(), ids=list(COMPOSITIONS))
def test_composes_with_optax(entry, case, compose):
    params, tx = samples.params(), compose(entry)
    grads = dense_grads(params)
    state = tx.init(params)
    moved, after = step(tx, grads, params, state)
    assert avals(after) == avals(state)
    # An injected rate is a float32 array; a Python number is not rounded.
    chex.assert_trees_all_close(moved, case.warm[0], rtol=1e-5)


def test_flatten(case):
    params, tx = samples.params(), optax.flatten(case.tx)
    grads = dense_grads(params)
    moved, after = step(tx, grads, params)
    assert avals(after) == avals(tx.init(params))
    chex.assert_trees_all_close(moved, case.warm[0], rtol=1e-6)


def test_composes_with_optax_on_rows(entry):
    params = samples.params()
    everything = jax.tree.map(lambda _: True, LABELS)
    tx = optax.masked(optax.partition({"a": entry.make(), "b": entry.make()}, LABELS), everything)
    tx = optax.apply_if_finite(optax.chain(optzoo.rows.on_values(optax.clip(1e9)), tx), 3)
    # apply_if_finite does not accept an update that is dense if the gradient is row-sparse.
    front = optzoo.rows.densify() if entry.rows == "dense" else optax.identity()
    tx = optax.chain(front, tx, optax.inject_hyperparams(optzoo.gradient_descent)(-1.0))
    grads, state = row_grads(params), tx.init(params)
    moved, after = step(tx, grads, params, state)
    assert avals(after) == avals(state)
    want, _ = step(optax.chain(front, entry.make()), grads, params)
    chex.assert_trees_all_close(moved, want, rtol=1e-5)


def test_map_params_finds_all_slots(case):
    tx = optax.masked(case.tx, {"table": True, "layer": (True, True), "one_row": True})
    state = tx.init(samples.params())
    marked = optax.tree.map_params(tx, lambda _: "slot", state)
    found = [leaf for leaf in jax.tree.leaves(marked) if isinstance(leaf, str)]
    assert len(found) == len(jax.tree.leaves(samples.slots(state)))
    assert jax.tree.structure(marked) == jax.tree.structure(state)


# Rates


def test_constant_and_schedule_are_the_same(entry, case):
    number, schedule, params = case.tx, entry.make(lambda k: entry.rate), samples.params()
    grads = dense_grads(params)
    # The state of one is valid for the other.
    by_number, by_schedule = case.warm, step(schedule, grads, params)
    chex.assert_trees_all_equal_structs(by_number, by_schedule)
    want = step(number, grads, *by_number)
    chex.assert_trees_all_equal(step(schedule, grads, *by_number), want)
    chex.assert_trees_all_equal(step(number, grads, *by_schedule), want)


def test_schedule_counts_from_zero_or_follows_the_global_step(entry, case):
    params, state = case.warm
    grads, rate = dense_grads(params), entry.rate
    falling = entry.make(lambda k: rate / (1 + k))
    want = lambda k, **at: step(entry.make(rate / (1 + k)), grads, params, state, **at)
    chex.assert_trees_all_close(step(falling, grads, params, state), want(1), rtol=1e-6)
    late = {"global_step": jnp.int32(4)}
    chex.assert_trees_all_close(
        step(falling, grads, params, state, **late), want(4, **late), rtol=1e-6
    )


def test_rate_can_be_overridden_for_a_step(entry, case, grads):
    params, state = case.warm
    other = entry.make(entry.rate / 4)
    overridden = step(case.tx, grads, params, state, learning_rate=jnp.float32(entry.rate / 4))
    chex.assert_trees_all_close(overridden, step(other, grads, params, state), rtol=1e-6)
    assert not np.allclose(overridden[0]["table"], case.step(grads, params, state)[0]["table"])


# Arguments


def test_unknown_extra_args_are_ignored(case):
    params = samples.params()
    got = step(case.tx, dense_grads(params), params, value=1.0, weather="fine")
    chex.assert_trees_all_equal(got, case.warm)


def test_without_params_the_same_or_an_error(case):
    params = samples.params()
    grads, state = dense_grads(params), case.tx.init(params)
    try:
        updates, after = case.tx.update(grads, state)
    except ValueError as error:
        assert "requires the current value of parameters" in str(error)
    else:
        got = optax.apply_updates(params, updates), after
        chex.assert_trees_all_equal(got, case.warm)


@pytest.mark.parametrize(
    ("grad", "error", "fix"),
    [
        (np.ones(4), ValueError, r"\(3,\)"),
        (np.ones(3, int), TypeError, "optax.masked"),
        (np.ones(3, "complex64"), TypeError, "split_real_and_imaginary"),
    ],
    ids=["shape", "integer", "complex"],
)
def test_errors_name_the_leaf(case, grad, error, fix):
    params = samples.params()
    grads = {**dense_grads(params), "layer": (grad, jnp.ones(()))}
    with pytest.raises(error, match=r"parameter 'layer/0'") as caught:
        case.tx.update(grads, case.tx.init(params), params)
    caught.match(fix)


def test_rows_of_another_shape_name_the_leaf(case):
    params = samples.params()
    grads = {**row_grads(params), "table": SparseRows(jnp.array([0]), jnp.ones((1, 2)), 4)}
    with pytest.raises(ValueError, match=r"parameter 'table' has shape \(5, 2\)"):
        case.tx.update(grads, case.tx.init(params), params)


# Other libraries


def test_linen_train_state(case, grads):
    state = TrainState.create(apply_fn=None, params=samples.params(), tx=case.tx)
    trained = state.apply_gradients(grads=grads)
    assert trained.step == 1
    chex.assert_trees_all_equal(trained.params, case.first(grads)[0])


def test_nnx_optimizer(case):
    model = nnx.Linear(5, 2, use_bias=False, rngs=nnx.Rngs(0))  # a kernel as large as the table
    optimizer = nnx.Optimizer(model, case.tx, wrt=nnx.Param)
    before = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    before = jax.tree.map(jnp.array, before)
    grads = jax.tree.map(jnp.cos, nnx.state(model, nnx.Param))
    optimizer.update(model, grads)
    after = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    want, _ = step(case.tx, nnx.to_pure_dict(grads), before)
    chex.assert_trees_all_equal(after, want)


def test_orbax_round_trip(entry, case, tmp_path):
    params, state = case.warm
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        target = jax.eval_shape(entry.make(lambda k: 0.1).init, params)
        restored = checkpointer.restore(tmp_path / "state", target)
    chex.assert_trees_all_equal(restored, state)
    chex.assert_trees_all_equal_structs(restored, state)


__all__ = ["case", "eager", "grads", *(name for name in dir() if name.startswith("test_"))]
