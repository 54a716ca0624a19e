"""Conformance tests of every wrapper around every kind of optimizer."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import optzoo
from optzoo import SparseRows
from optzoo.state import LeafwiseState
from optzoo.state.types import LocalSGDState
from optzoo.testing import samples
from optzoo.testing.samples import avals, dense_grads, step, step_of

DIMS = {"table": (1,), "layer/1": ()}
TURNED = {"table": (1,)}  # one element would stay as it is
WRAPPERS = {
    "moving_average": lambda inner, **_: optzoo.moving_average(inner, 0.9),
    "variable_clipping": lambda inner, dims=DIMS: optzoo.variable_clipping(inner, dims, 0.8),
    "decoupled_weight_decay": lambda inner, **_: optzoo.decoupled_weight_decay(
        inner, weight_decay_per_step=0.1
    ),
    "cautious_weight_decay": lambda inner, **_: optzoo.cautious_weight_decay(
        inner, weight_decay_per_step=0.1
    ),
    "hyperball": lambda inner, dims=TURNED: optzoo.hyperball(inner, 0.1, dims),
    "ema_nesterov": lambda inner, **_: optzoo.ema_nesterov(inner, 0.5, 0.75),
    "ema_in_place": lambda inner, **_: optzoo.interop.fbgemm.ema_in_place(inner, 3),
    "ensemble": lambda inner, **_: optzoo.interop.fbgemm.ensemble(inner, 2, 3),
    "multitask": lambda inner, **_: optzoo.multitask(inner),
    "skip_spikes": lambda inner, **_: optzoo.skip_spikes(inner, on="norm"),
    # A single replica; methods with an exchange do it in every other step.
    "agn": lambda inner, **_: optzoo.agn(inner, axis_name=None, communication_period=2),
    "diloco": lambda inner, **_: optzoo.diloco(inner, axis_name=None, communication_period=2),
    "drop_stale_gradient": lambda inner, **_: optzoo.drop_stale_gradient(inner, 0, axis_name=None),
    "elastic_average": lambda inner, **_: optzoo.elastic_average(
        inner, 1, axis_name=None, communication_period=2
    ),
    "model_average": lambda inner, **_: optzoo.model_average(
        inner, axis_name=None, interval_steps=2
    ),
    "sync_replicas": lambda inner, **_: optzoo.sync_replicas(inner, 1, axis_name=None),
}
INNER = {
    "momentum": lambda rate=0.1: optzoo.momentum(rate, 0.9),
    "adam": lambda rate=0.1: optzoo.adam(rate),  # dense updates for rows
    "lazy_adam": lambda rate=0.1: optzoo.lazy_adam(rate),
    "add_sign": lambda rate=0.1: optzoo.add_sign(rate),  # slots decay in rows without a gradient
    "optax.sgd": lambda rate=0.1: optax.sgd(rate, momentum=0.9),
}
OURS = sorted(INNER.keys() - {"optax.sgd"})
READS_PARAMS = WRAPPERS.keys() - {"multitask", "skip_spikes", "sync_replicas"}
# These keep parameters for all replicas and exchange whole tables.
CENTERED = ("agn", "diloco", "elastic_average", "model_average")
REPLICAS = (*CENTERED, "drop_stale_gradient", "sync_replicas")
# The number of trees like the parameters in addition to those of the inner optimizer.
TREES = {
    "ema_nesterov": 2,
    "ensemble": 1,
    "moving_average": 1,
    "diloco": 2,
    "elastic_average": 2,
    "model_average": 1,
}
TREES |= {"agn": 3, "sync_replicas": 3}

pytestmark = pytest.mark.usefixtures("eager")
wrapped = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=list(WRAPPERS))


def wrapped_around(*inners):
    """Each wrapper around each inner optimizer; distributed methods around two of them."""
    inners = inners or INNER
    some = lambda name: inners if name not in REPLICAS else ("lazy_adam", "optax.sgd")
    pairs = [(w, inner) for w in WRAPPERS for inner in some(w) if inner in inners]
    cases = [(WRAPPERS[w], inner) for w, inner in pairs]
    return pytest.mark.parametrize(("wrap", "inner"), cases, ids=["-".join(p) for p in pairs])


def is_centered(*wraps):
    return any(wrap is WRAPPERS[name] for name in CENTERED for wrap in wraps)


def moves_all_rows(wrap):
    move = ("ema_in_place", "ema_nesterov", "ensemble")
    return is_centered(wrap) or any(wrap is WRAPPERS[name] for name in move)


def params():
    """Those of ``samples``, but every row has two halves, as ``ema_in_place`` requires."""
    return {**samples.params(), "one_row": jnp.array([[0.5, -0.25, 2.0, 1.5]])}


def row_grads(like):
    """The rows of ``samples.row_grads``, with one more element in those of ``one_row``."""
    values = jnp.array([[9.0, 9, 9, 9], [-1, 0, 3, 2]])
    one_row = SparseRows(jnp.array([1, 0]), values, 1)
    return {**samples.row_grads(like), "one_row": one_row}


def rows():
    """The rows of ``row_grads``, but merged."""
    values = jnp.array([[6.0, 8], [3, 4], [0, 0]])
    table = SparseRows(jnp.array([1, 3, 5]), values, 5, coalesced=True)
    values = jnp.array([[-1.0, 0, 3, 2], [0, 0, 0, 0]])
    one_row = SparseRows(jnp.array([0, 1]), values, 1, coalesced=True)
    return {**dense_grads(params()), "table": table, "one_row": one_row}


def kinds(inner):
    return [dense_grads(params())] + ([] if inner == "optax.sgd" else [rows()])


def cast(tree, dtype):
    floating = lambda a: jnp.issubdtype(a.dtype, jnp.floating)
    return jax.tree.map(lambda a: a.astype(dtype) if floating(a) else a, tree)


def traced(tx, grads, state, x):
    """The state after an update, abstractly: with both branches of each condition."""
    return jax.eval_shape(tx.update, grads, state, x)[1]


def check_traced_once(wrap, updates=1):
    """Checks how often the update of an inner optimizer is traced."""
    rates = []

    def rule(g, x, slots, t, learning_rate):
        rates.append(learning_rate)
        return -learning_rate * g, slots

    inner = optzoo.rules.leafwise(rule, scheduled={"learning_rate": 0.1})
    tx, x = wrap(inner), params()
    state = tx.init(x)
    rates.clear()
    with jax.disable_jit(False):
        traced(tx, dense_grads(x), state, x)
    assert len(rates) == updates * len(jax.tree.leaves(x))


@wrapped
def test_an_update_is_traced_once(wrap):
    # agn has an update of the replica, of the center, and for the step counts.
    check_traced_once(wrap, 3 if wrap is WRAPPERS["agn"] else 1)


def test_an_update_in_several_wrappers_is_traced_once():
    """Otherwise the time to trace a step would double with each."""
    spikes = lambda inner: optzoo.moving_average(optzoo.skip_spikes(inner, on="norm"))
    check_traced_once(lambda inner: optzoo.accumulate(spikes(inner), 2))


def everywhere(value):
    return jax.tree.map(lambda _: value, params())


# Types


# What is compiled: each wrapper around rows and around dense updates of several kinds.
SECOND = itertools.cycle(["optax.sgd", "adam", "add_sign", "momentum"])
COMPILED = [(w, inner) for w in WRAPPERS for inner in ("lazy_adam", next(SECOND))]


@pytest.mark.parametrize(("wrap", "inner"), COMPILED)
def test_compiled_is_eager_and_compiles_once_with_donated_buffers(wrap, inner):
    tx = WRAPPERS[wrap](INNER[inner]())
    grads = dense_grads(params()) if inner == "optax.sgd" else row_grads(params())
    train = jax.jit(step_of(tx), donate_argnums=(0, 1))
    x, state = params(), tx.init(params())
    first = avals(state)
    with jax.disable_jit(False):
        for _ in range(3):
            x, state = train(x, state, grads)
    assert train._cache_size() == 1 and avals(state) == first
    merged = grads if inner == "optax.sgd" else rows()
    want = params(), tx.init(params())
    for _ in range(3):
        want = step(tx, merged, *want)
    chex.assert_trees_all_close((x, state), want, rtol=1e-5, atol=1e-6)


@wrapped_around(*OURS)
@pytest.mark.parametrize(
    ("of_params", "of_grads"),
    [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "float16")],
)
def test_state_keeps_its_type_and_updates_take_that_of_the_gradient(
    wrap, inner, of_params, of_grads
):
    tx, x = wrap(INNER[inner]()), cast(params(), of_params)
    state = jax.eval_shape(tx.init, x)
    for grads in kinds(inner):
        updates, after = jax.eval_shape(tx.update, cast(grads, of_grads), state, x)
        assert avals(after) == avals(state)
        updates = jax.tree.leaves(updates, is_leaf=lambda u: isinstance(u, optzoo.SparseRows))
        assert [u.dtype for u in updates] == [of_grads] * 4


@wrapped_around("optax.sgd")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_around_optax(wrap, inner, dtype):
    tx, x = wrap(INNER[inner]()), cast(params(), dtype)
    state = jax.eval_shape(tx.init, x)
    updates, after = jax.eval_shape(tx.update, cast(dense_grads(x), dtype), state, x)
    assert avals(after) == avals(state) and avals(updates) == avals(x)


@wrapped_around()
def test_abstract_init_is_init_and_shares_no_buffers(wrap, inner):
    tx, x = wrap(INNER[inner]()), params()
    state, abstract = tx.init(x), jax.eval_shape(lambda: x)
    assert avals(jax.eval_shape(tx.init, abstract)) == avals(state)
    if inner != "optax.sgd":  # whose zeros_like is for arrays
        assert avals(tx.init(abstract)) == avals(state)
    leaves = jax.tree.leaves((x, state))
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


@wrapped_around()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_strict_settings(wrap, inner, dtype):
    """No dtype or rank is promoted without a word, and no NaN or infinity made on the way."""
    tx, x = wrap(INNER[inner]()), cast(params(), dtype)
    for grads in cast(kinds(inner), dtype):
        want = step(tx, grads, *step(tx, grads, x))
        with samples.strict_settings():
            got = step(tx, grads, *step(tx, grads, x))
        chex.assert_trees_all_equal(got, want)


@wrapped_around("lazy_adam")
def test_strict_promotion_with_float64(wrap, inner, x64):
    """Of parameters of unlike dtypes; integers without a dtype have 64 bits then."""
    with x64(True), jax.numpy_dtype_promotion("strict"):
        of_two = lambda tree: {
            "table": cast(tree["table"], "bfloat16"),
            "layer": cast(tree["layer"], "float64"),
            "one_row": cast(tree["one_row"], "float64"),
        }
        tx, x = wrap(INNER[inner]()), of_two(params())
        state = jax.eval_shape(tx.init, x)
        after = traced(tx, of_two(rows()), state, x)
        assert avals(after) == avals(state)


# Unusual trees


def test_complex_gradients():
    """What does no arithmetic with parameters takes them."""
    x = {"w": jnp.ones(2, "complex64")}
    inner = optax.sgd(0.1)
    wrapped = optzoo.multitask(inner), optzoo.skip_spikes(inner, on="norm"), optzoo.stacked(inner)
    for tx in (*wrapped, optzoo.on_rows(inner)):
        updates, _ = jax.eval_shape(tx.update, x, jax.eval_shape(tx.init, x), x)
        assert avals(updates) == avals(x)


def test_an_update_of_a_missing_gradient():
    """That of the inner optimizer, such as a decay, is passed on."""
    of_leaf = lambda g, x: -0.5 * x if g is None else -g

    def update(gs, state, params):
        return jax.tree.map(of_leaf, gs, params, is_leaf=lambda g: g is None), state

    inner = optax.GradientTransformation(lambda x: optax.EmptyState(), update)
    x = params()
    grads = {**dense_grads(x), "layer": (None, jnp.ones(()))}
    for name, wrap in WRAPPERS.items():
        tx = wrap(inner)
        updates, _ = jax.eval_shape(tx.update, grads, jax.eval_shape(tx.init, x), x)
        assert avals(updates) == avals(x), name


def test_a_gradient_of_another_shape_is_refused():
    """Also around an optimizer that would broadcast it."""
    more = {"accumulate": lambda tx: optzoo.accumulate(tx, 2), "stacked": optzoo.stacked}
    grads = {**dense_grads(params()), "table": jnp.ones((1, 2))}
    for name, wrap in (WRAPPERS | more).items():
        tx = wrap(optax.sgd(0.1))
        state = jax.eval_shape(tx.init, params())
        with pytest.raises(ValueError) as error:
            jax.eval_shape(tx.update, grads, state, params())
        assert "'table' has shape (5, 2), but its gradient (1, 2)" in str(error.value), name


@wrapped_around(*OURS)
def test_no_gradient_no_change(wrap, inner):
    tx, x = wrap(INNER[inner]()), params()
    x, state = step(tx, dense_grads(x), x)
    some = {"table": None, "layer": (None, jnp.ones(())), "one_row": None}
    local = {"exchange": False}  # in an exchange all parameters take part
    updates, after = tx.update(some, state, x, **local)
    assert avals(after) == avals(traced(tx, some, state, x))
    kept = lambda tree: (tree["table"], tree["layer"][0], tree["one_row"])
    assert kept(updates) == (None, None, None) and updates["layer"][1] != 0
    if isinstance(after, LocalSGDState):  # the center of agn has slots of its own
        both = [samples.slots(s.replicated) for s in (after, state)]
        chex.assert_trees_all_equal(*both)
        after, state = after.per_replica, state.per_replica
    slots = zip(samples.slots(after), samples.slots(state), strict=True)
    for new, old in slots:
        chex.assert_trees_all_equal(kept(new), kept(old))
        assert new["layer"][1] != old["layer"][1]


@wrapped_around("lazy_adam", "optax.sgd")
def test_leaves_without_elements_or_axes_and_no_leaves_at_all(wrap, inner):
    tx = wrap(INNER[inner](), dims={".*": ()})
    x = {"none": jnp.ones((0, 4)), "scalar": jnp.ones(())}
    moved, state = step(tx, x, x)
    assert avals(moved) == avals(x)
    assert avals(state) == avals(traced(tx, x, state, x)) == avals(tx.init(x))
    assert moved["scalar"] < 1 or wrap is WRAPPERS["hyperball"]
    assert step(wrap(INNER[inner](), dims={}), {}, {})[0] == {}


@wrapped_around("lazy_adam")
def test_numpy_and_python_floats_in_place_of_jax(wrap, inner):
    tx, x = wrap(INNER[inner](), dims={".*": ()}), params()
    state = samples.in_numpy(tx.init(samples.in_numpy(x)))
    got = step(tx, samples.in_numpy(rows()), samples.in_numpy(x), state)
    chex.assert_trees_all_equal(got, step(tx, rows(), x))
    floats = jax.tree.map(lambda a: float(jnp.ravel(a)[0]), (dense_grads(x), x))
    assert all(isinstance(a, jax.Array) for a in jax.tree.leaves(tx.init(floats[1])))
    chex.assert_trees_all_equal(step(tx, *floats), step(tx, *jax.tree.map(jnp.float32, floats)))


MORE = {
    "accumulate": lambda inner: optzoo.accumulate(inner, 1),
    "accumulate_2": lambda inner: optzoo.accumulate(inner, 2),
    "stacked": optzoo.stacked,
    "bfloat16": lambda inner: optzoo.slots_dtype(inner, "bfloat16", stochastic=True),
    "int8": lambda inner: optzoo.slots_dtype(inner, "int8"),
    "caught_up": lambda inner: optzoo.caught_up(optzoo.adam(), mask="table"),
}


@pytest.mark.parametrize("name", [*WRAPPERS, *MORE])
def test_leaves_that_cannot_be_trained(name):
    tx, x = {**WRAPPERS, **MORE}[name](INNER["lazy_adam"]()), params()
    fixed = {"complex": jnp.ones(3, "complex64"), "integers": jnp.arange(3)}
    both, none = {**x, "fixed": fixed}, dict.fromkeys(fixed)
    (updates, state), (want, _) = (
        tx.update({**dense_grads(x), **more}, tx.init(all_of), all_of)
        for more, all_of in (({"fixed": none}, both), ({}, x))
    )
    assert avals(state) == avals(tx.init(both)) and updates.pop("fixed") == none
    chex.assert_trees_all_equal(updates, want)
    with pytest.raises(TypeError, match=r"'key' has dtype key<fry>: .* hide them by optax.masked"):
        tx.init({**x, "key": jax.random.key(0)})


@wrapped_around()
def test_nan_stays_in_its_leaf(wrap, inner):
    tx, x = wrap(INNER[inner]()), params()
    for grads in kinds(inner) if wrap is not WRAPPERS["skip_spikes"] else ():  # no leaf changes
        with_nan = {**grads, "layer": (jnp.full(3, jnp.nan), grads["layer"][1])}
        (got, state), (want, wanted) = (step(tx, g, x) for g in (with_nan, grads))
        assert jnp.all(jnp.isnan(got["layer"][0]))
        clean = lambda tree: [a for a in jax.tree.leaves(tree) if jnp.shape(a) != (3,)]
        chex.assert_trees_all_equal(clean((got, state)), clean((want, wanted)))


# Rows


@wrapped_around(*OURS)
def test_rows_equal_the_dense_gradient_where_they_touch(wrap, inner):
    tx, x = wrap(INNER[inner]()), params()
    x, state = step(tx, dense_grads(x), x)
    grads, here = rows(), jnp.array([1, 3])
    dense = samples.to_dense(grads)
    (got, state), (want, wanted) = (step(tx, g, x, state) for g in (grads, dense))
    pairs = [(got, want), *zip(samples.slots(state), samples.slots(wanted), strict=True)]
    for actual, expected in pairs:
        chex.assert_trees_all_close(actual["table"][here], expected["table"][here], rtol=1e-5)
        chex.assert_trees_all_close(actual["one_row"], expected["one_row"], rtol=1e-5)
        chex.assert_trees_all_equal(actual["layer"], expected["layer"])


@wrapped
def test_rows_of_an_odd_number_of_elements(wrap):
    """They are updated as by their sum, or refused by the wrapper that halves each row."""
    tx, x = wrap(INNER["lazy_adam"]()), samples.params()
    grads, state = samples.row_grads(x), tx.init(x)
    if wrap is WRAPPERS["ema_in_place"]:
        with pytest.raises(ValueError, match="'one_row' has rows of 3 elements, an odd number"):
            tx.update(grads, state, x)
        return
    dense = {**grads, "one_row": grads["one_row"].to_dense()}
    (got, state), (want, wanted) = (step(tx, g, x, state) for g in (grads, dense))
    pairs = [(got, want), *zip(samples.slots(state), samples.slots(wanted), strict=True)]
    for actual, expected in pairs:
        assert actual["one_row"].shape == (1, 3)
        chex.assert_trees_all_close(actual, expected, rtol=1e-5)
    assert np.any(got["one_row"] != x["one_row"])


@wrapped_around("lazy_adam", "momentum")
def test_untouched_rows_stay(wrap, inner):
    tx, x = wrap(INNER[inner]()), params()
    x, state = step(tx, dense_grads(x), x)
    moved, _ = step(tx, rows(), x, state, exchange=False)  # an exchange moves all rows
    rest = jnp.array([0, 2, 4])
    if wrap is WRAPPERS["ema_nesterov"]:  # as with zeros in their place
        assert np.all(moved["table"][rest] != x["table"][rest])
        return
    np.testing.assert_array_equal(moved["table"][rest], x["table"][rest])


# Compositions

LABELS = {"table": "a", "layer": ("b", "a"), "one_row": "b"}
AROUND = {
    "chain": lambda tx: optax.chain(optax.clip(1e9), tx),
    "masked": lambda tx: optax.masked(tx, everywhere(True)),
    "partition": lambda tx: optax.partition({"a": tx, "b": tx}, LABELS),
    "multi_steps": lambda tx: optax.MultiSteps(tx, 1).gradient_transformation(),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
}
INJECTED = {
    "moving_average": lambda inner: optax.inject_hyperparams(optzoo.moving_average)(inner, 0.9),
    "variable_clipping": lambda inner: optax.inject_hyperparams(optzoo.variable_clipping)(
        inner, DIMS, lambda k: 0.8
    ),
    "decoupled_weight_decay": lambda inner: optax.inject_hyperparams(optzoo.decoupled_weight_decay)(
        inner, weight_decay_per_step=lambda k: 0.1
    ),
    "cautious_weight_decay": lambda inner: optax.inject_hyperparams(optzoo.cautious_weight_decay)(
        inner, weight_decay_per_step=lambda k: 0.1
    ),
    "ema_nesterov": lambda inner: optax.inject_hyperparams(optzoo.ema_nesterov)(
        inner, lambda k: 0.5, lambda k: 0.75
    ),
    "hyperball": lambda inner: optax.inject_hyperparams(optzoo.hyperball)(
        inner, lambda k: 0.1, TURNED
    ),
    "multitask": lambda inner: optax.inject_hyperparams(optzoo.multitask)(inner),
    "skip_spikes": lambda inner: optax.inject_hyperparams(
        optzoo.skip_spikes, ("window", "min_values", "correction")
    )(inner, deviations=lambda k: 6.0, on="norm"),
    "elastic_average": lambda inner: optax.inject_hyperparams(
        optzoo.elastic_average, ("num_workers", "communication_period", "bucket_bytes")
    )(inner, 1, axis_name=None, communication_period=2, rho=lambda k: 0.0, moving_rate=0.45),
}


@functools.cache
def alone(wrap):
    """The parameters after a step by dense gradients and one by rows, without a composition."""
    tx = wrap(INNER["lazy_adam"](), dims={".*": ()})
    return tuple(step(tx, grads, params())[0] for grads in (dense_grads(params()), rows()))


# Of the methods with a center, which share an engine, only one.
COMPOSED = [w for w in WRAPPERS if w not in CENTERED or w == "elastic_average"]


@pytest.mark.parametrize("where", ["outside", "inside"])
@pytest.mark.parametrize("compose", AROUND.values(), ids=list(AROUND))
@pytest.mark.parametrize("wrap", [WRAPPERS[name] for name in COMPOSED], ids=COMPOSED)
def test_composes_with_optax(wrap, compose, where):
    takes_rows = (
        compose is not AROUND["apply_if_finite"] or where == "inside" or not moves_all_rows(wrap)
    )
    want, want_by_rows = alone(wrap)
    # Each group of a partition has some parameters only, so use a pattern that always matches.
    wrap, make = functools.partial(wrap, dims={".*": ()}), INNER["lazy_adam"]
    tx = compose(wrap(make())) if where == "outside" else wrap(compose(make()))
    x, grads = params(), dense_grads(params())
    state = tx.init(x)
    moved, after = step(tx, grads, x)
    assert avals(after) == avals(traced(tx, grads, state, x)) == avals(state)
    chex.assert_trees_all_close(moved, want, rtol=1e-6)
    # Optax's transformations take no rows; apply_if_finite takes none with a dense update.
    if compose not in (AROUND["chain"], AROUND["multi_steps"]) and takes_rows:
        assert avals(traced(tx, rows(), state, x)) == avals(state)
        moved, _ = step(optax.chain(optzoo.rows.on_values(optax.clip(1e9)), tx), rows(), x)
        chex.assert_trees_all_close(moved, want_by_rows, rtol=1e-6)


@pytest.mark.parametrize("inner", ["lazy_adam", "optax.sgd"])
@pytest.mark.parametrize("wrapper", INJECTED)
def test_arguments_can_be_injected(wrapper, inner):
    tx, x = INJECTED[wrapper](INNER[inner]()), params()
    state = tx.init(x)
    moved, after = step(tx, dense_grads(x), x, state)
    assert avals(after) == avals(traced(tx, dense_grads(x), state, x)) == avals(state)
    want, _ = step(WRAPPERS[wrapper](INNER[inner]()), dense_grads(x), x)
    chex.assert_trees_all_close(moved, want, rtol=1e-6)


@wrapped_around("lazy_adam", "optax.sgd")
def test_inner_rate_can_be_injected(wrap, inner):
    tx = wrap(optax.inject_hyperparams(INNER[inner])(rate=lambda k: 0.1))
    x = params()
    want, _ = step(wrap(INNER[inner]()), dense_grads(x), x)
    chex.assert_trees_all_close(step(tx, dense_grads(x), x)[0], want, rtol=1e-6)


@pytest.mark.parametrize("dims", [DIMS, {"table": (1,), "layer": (None, ()), "one_row": None}])
@wrapped_around("lazy_adam", "optax.sgd")
def test_masked_leaves_pass(wrap, inner, dims):
    """With ``dims`` as patterns and as a tree."""
    x, grads = params(), dense_grads(params())
    wrap = functools.partial(wrap, dims=dims)
    want, _ = wrap(INNER[inner]()).update(grads, wrap(INNER[inner]()).init(x), x)
    tx = optax.masked(
        wrap(INNER[inner]()), {"table": True, "layer": (False, False), "one_row": True}
    )
    updates, after = tx.update(grads, tx.init(x), x)
    assert avals(after) == avals(traced(tx, grads, after, x))
    chex.assert_trees_all_equal(updates, {**want, "layer": grads["layer"]})


# The others are in test_pairs.py: of methods for replicas alone averages are tried here, and around
# those that share parameters they are refused.
PAIRS = [
    (outer, wrap)
    for outer, wrap in itertools.permutations(WRAPPERS, 2)
    if "moving_average" in (outer, wrap) or not {outer, wrap} & set(REPLICAS)
    if outer != "moving_average" or wrap in CENTERED or wrap not in REPLICAS
]


@pytest.mark.parametrize(("outer", "wrap"), PAIRS)
def test_wrappers_wrap_each_other(outer, wrap):
    """In both orders: types are unchanged, and a second step takes the state of the first."""
    tx, x = WRAPPERS[outer](WRAPPERS[wrap](INNER["lazy_adam"]())), params()
    moved, state = step(tx, rows(), *step(tx, dense_grads(x), x))
    assert avals(state) == avals(traced(tx, rows(), state, x)) == avals(tx.init(x))
    assert not np.array_equal(moved["table"], x["table"])
    averaging = {"moving_average", "ema_nesterov"}
    if not {outer, wrap} & {*averaging, *REPLICAS}:
        chex.assert_trees_all_equal(optzoo.eval_params(moved, state), moved)
    elif "elastic_average" not in (outer, wrap):  # the center lags behind the parameters
        averages = optzoo.eval_params(moved, state)
        has_average = outer in averaging or (wrap in averaging and outer not in CENTERED)
        assert has_average != np.allclose(averages["table"], moved["table"], rtol=1e-6)


@wrapped_around()
def test_map_params_finds_all_slots(wrap, inner):
    tx, x = wrap(INNER[inner]()), params()
    state = tx.init(x)
    marked = optax.tree.map_params(tx, lambda _: "slot", state)
    assert jax.tree.structure(marked) == jax.tree.structure(state)
    shapes = [a.shape for a in jax.tree.leaves(x)]
    for part in jax.tree.leaves(state, is_leaf=is_leafwise):
        if is_leafwise(part):
            assert all([a.shape for a in jax.tree.leaves(tree)] == shapes for tree in part.slots)
    shared = [a for a in jax.tree.leaves(marked) if not isinstance(a, str)]
    slots = len(jax.tree.leaves(state)) - len(shared)
    assert all(a.shape in ((), (128,)) for a in shared)  # of skip_spikes the window
    [name] = [name for name in WRAPPERS if WRAPPERS[name] is wrap]
    of_inner = (2 if inner in ("adam", "lazy_adam") else 1) * len(shapes)
    center = of_inner if name == "agn" else 0
    assert slots == len(shapes) * TREES.get(name, 0) + of_inner + center


def is_leafwise(node):
    return isinstance(node, LeafwiseState)


# Arguments


@wrapped_around("add_sign", "lazy_adam")
def test_extra_arguments_reach_the_inner_optimizer(wrap, inner):
    if wrap is WRAPPERS["hyperball"]:
        wrap = functools.partial(wrap, dims={})  # with axes it has a rate itself
    x, grads = params(), dense_grads(params())
    falling = wrap(INNER[inner](lambda k: 0.1 / (1 + k)))
    at = lambda rate: step(wrap(INNER[inner](rate)), grads, x)[0]
    step_of = lambda tx, **extra_args: step(tx, grads, x, **extra_args)[0]
    chex.assert_trees_all_close(step_of(falling, global_step=4), at(0.02), rtol=1e-6)
    chex.assert_trees_all_close(step_of(falling, learning_rate=0.03), at(0.03), rtol=1e-6)
    chex.assert_trees_all_equal(step_of(falling, value=1.0, weather="fine"), at(0.1))


@wrapped
def test_inner_optimizer_that_needs_an_argument(wrap):
    x, grads, tx = params(), dense_grads(params()), wrap(optzoo.adam_gs(0.1))
    with pytest.raises(ValueError, match=r"pass update\(\.\.\., global_step=n\)"):
        tx.update(grads, tx.init(x), x)
    got, want = step(tx, grads, x, global_step=0), step(wrap(INNER["adam"]()), grads, x)
    chex.assert_trees_all_close(got[0], want[0], rtol=1e-5)


@pytest.mark.parametrize("inner", ["lazy_adam", "optax.sgd"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_params_are_needed_where_they_are_read(wrapper, inner):
    tx, x = WRAPPERS[wrapper](INNER[inner]()), params()
    if wrapper in READS_PARAMS:
        with pytest.raises(ValueError, match="requires the current value of parameters"):
            tx.update(dense_grads(x), tx.init(x))
    else:
        got = tx.update(dense_grads(x), tx.init(x))
        chex.assert_trees_all_equal(got, tx.update(dense_grads(x), tx.init(x), x))


@wrapped
def test_errors_name_the_leaf(wrap):
    tx, x = wrap(INNER["momentum"]()), params()
    short = {**dense_grads(x), "layer": (jnp.ones(4), jnp.ones(()))}
    with pytest.raises(ValueError, match=r"parameter 'layer/0' has shape \(3,\)"):
        tx.update(short, tx.init(x), x)
    few = {**dense_grads(x), "table": SparseRows(jnp.array([0]), jnp.ones((1, 2)), 4)}
    with pytest.raises(ValueError, match=r"parameter 'table' has shape \(5, 2\)"):
        tx.update(few, tx.init(x), x)
    whole = {**dense_grads(x), "layer": (jnp.ones(3, int), jnp.ones(()))}
    with pytest.raises(TypeError, match=r"parameter 'layer/0' has a gradient of dtype int32"):
        tx.update(whole, tx.init(x), x)


# Checkpoints


@wrapped_around("lazy_adam", "optax.sgd")
def test_orbax_round_trip(wrap, inner, tmp_path):
    tx, x = wrap(INNER[inner]()), cast(params(), "bfloat16")
    _, state = step(tx, cast(dense_grads(x), "bfloat16"), x)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.eval_shape(tx.init, x))
    chex.assert_trees_all_equal(restored, state)
    chex.assert_trees_all_equal_structs(restored, state)
