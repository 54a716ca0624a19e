"""Stacks give the values of the optimizer inside, with fewer arrays."""

import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import optzoo
from optzoo import CATALOG, SparseRows
from optzoo.core.paths import path_name
from optzoo.state.sharding import state_sharding
from optzoo.state.stacks import Stack, layout_of, stack, unstack
from optzoo.testing import check_stacked, samples
from optzoo.testing.samples import avals, dense_grads, step, step_of
from optzoo.wrappers.stacked import stacked

from ..selection import chosen_first


class LateState(NamedTuple):
    """A count and a slot."""

    count: jax.Array
    total: Any


# What looks at more than an element.
WHOLE = {
    "adafactor", "blocked_shampoo", "counter_row_wise_adagrad", "cowclip_row_wise_adagrad", "ggt",
    "global_decay_row_wise_adagrad", "row_wise_lamb", "lamb", "lars", "muon",
    "normalized_sgd",
    "partial_row_wise_adam",
    "partial_row_wise_lamb", "row_wise_adagrad", "row_wise_lars", "row_wise_rmsprop", "shampoo",
    "soap",
}  # fmt: skip
LABELS = {"table": "a", "layers": "b"}

OPTAX = {
    "adam": lambda: optax.adam(0.1),
    "adamw": lambda: optax.adamw(0.1, weight_decay=0.1),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(lambda k: 0.1 / (1 + k)),
    "lion": lambda: optax.lion(0.1),
    "rmsprop": lambda: optax.rmsprop(0.1, momentum=0.9),
    "sgd": lambda: optax.sgd(0.1),
    "sgd momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
}


def params(number=2):
    """Kernels and biases that fit one another, and two that fit nothing."""
    layer = lambda k: {
        "bias": jnp.linspace(-1.0, 1, 3) * (k + 1),
        "kernel": jnp.cos(jnp.arange(6.0) + k).reshape(2, 3),
    }
    table = jnp.arange(1.0, 41).reshape(20, 2) / 10
    layers = [layer(k) for k in range(number)]
    return {"layers": (*layers, jnp.ones(())), "table": table}


def three_steps(tx):
    """The parameters after three steps, each with the gradient of where it begins."""
    x, state = params(), None
    for _ in range(3):
        x, state = step(tx, dense_grads(x), x, state)
    return x


def assert_same(got, want):
    chex.assert_trees_all_close(jax.tree.leaves(got), jax.tree.leaves(want), rtol=1e-6, atol=1e-7)


def arrays(tree):
    return len(jax.tree.leaves(tree))


@pytest.mark.parametrize("name", ["adam", "amsgrad", "ftrl", "optax.adam"])
def test_scalars(name):
    """Such as a learned scale of each layer. In jaxprs zeros of a scalar are a constant."""
    inner = OPTAX["adam"]() if name == "optax.adam" else CATALOG[name].make()
    x = {name: jnp.float32(value) for name, value in zip("abc", (0.5, -2.0, 1.0), strict=True)}
    g = {name: jnp.float32(value) for name, value in zip("abc", (3.0, 0.25, -1.0), strict=True)}
    after, states = {}, {}
    for tx in (inner, stacked(inner)):
        state, now = tx.init(x), x
        for _ in range(2):
            now, state = step(tx, g, now, state)
        after[tx is inner], states[tx is inner] = now, state
    assert_same(after[False], after[True])
    assert arrays(states[False]) < arrays(states[True])


# Values


def test_equals_every_optimizer_of_the_catalogue_or_refuses(entry, request):
    name = request.node.callspec.params["entry"]
    if name not in WHOLE:
        same = chex.assert_trees_all_equal  # to the bit, operation by operation
        same(three_steps(stacked(entry.make())), three_steps(entry.make()))
        return
    with pytest.raises(ValueError, match="cannot stack parameters here"):
        jax.eval_shape(lambda: three_steps(stacked(entry.make())))


@pytest.mark.parametrize("make", OPTAX.values(), ids=list(OPTAX))
def test_equals_optimizers_of_optax(make):
    assert_same(three_steps(stacked(make(), max_members=3)), three_steps(make()))


def _plus_the_first(grads, _):
    first, *_ = jax.tree.leaves(grads)
    return jax.tree.map(lambda g: g + first if g.shape == first.shape else g, grads)


REFUSED = {
    "norm": (
        optax.lamb(0.1),
        r"parameter 'layers/1/bias' and on its stack differ in .*reduce_sum",
    ),
    "global norm": (optax.clip_by_global_norm(1.0), r"on its stack differ in reduce_sum\n"),
    "noise": (
        optax.add_noise(0.1, 0.5, jax.random.key(0)),
        "and on its stack differ in random_bits",
    ),
    "all finite": (
        optax.apply_if_finite(optax.sgd(0.1), 2),
        r"and on its stack differ in reduce_and\n",
    ),
    "names": (
        optax.masked(
            optax.scale(2.0),
            lambda tree: jax.tree_util.tree_map_with_path(lambda k, _: "1" in str(k), tree),
        ),
        r"parameter 'layers/1/(bias|kernel)' and on its stack differ in mul\n",
    ),
    "sizes": (
        optax.stateless(lambda g, _: jax.tree.map(lambda x: x / x.size, g)),
        r"parameter 'layers/1/bias' and on its stack differ in div\n",
    ),
    "neighbours": (
        optax.stateless(lambda g, _: jax.tree.map(lambda x: jnp.roll(x, 1, 0), g)),
        "parameter 'layers/1/bias' and on its stack differ in .*slice",
    ),
}
REFUSED |= {
    "cumulative": (
        optax.stateless(lambda g, _: jax.tree.map(lambda x: jnp.cumsum(x, 0), g)),
        r"has operations along the first axis \(cumsum\)",
    ),
    "columns": (
        optzoo.variable_clipping(optax.sgd(0.1), {".*": (0,)}, 1.0),
        "is in a stack along the first axis: put optzoo.stacked inside this wrapper",
    ),
    "rows": (
        optzoo.variable_clipping(optax.sgd(0.1), {".*kernel": (1,)}, 1.0),
        "is in a stack along the first axis",
    ),
    "ranks": (
        optax.adamw(0.1, mask=lambda tree: jax.tree.map(lambda x: jnp.ndim(x) > 1, tree)),
        "parameter 'layers/1/bias' and on its stack differ in add, mul",
    ),
}
# Not found by the operations of the update.
DIFFERENT = {
    "factored": optax.scale_by_factored_rms(),
    "others": optax.stateless(_plus_the_first),
    "slots of others": optax.chain(optax.stateless(_plus_the_first), optax.scale_by_adam()),
    "one name of many": optax.adamw(
        1e-3,
        mask=lambda tree: jax.tree_util.tree_map_with_path(
            lambda path, _: "2/bias" not in path_name(path), tree
        ),
    ),
}
# A sum over all parameters is the same with stacks, but its operations are not.
SAME = {"global norm", "all finite"}


@pytest.mark.parametrize(("inner", "reason"), REFUSED.values(), ids=list(REFUSED))
def test_refuses_other_operations_and_names_them(inner, reason):
    tx, x = stacked(inner), params()
    with pytest.raises(ValueError, match=reason) as caught:
        jax.eval_shape(lambda: step(tx, dense_grads(x), x))
    text = str(caught.value) + " ".join(getattr(caught.value, "__notes__", []))
    assert "optzoo.stacked" in text and "optax.chain(optax.clip_by_global_norm" in text


@pytest.mark.parametrize("x", [params(), jax.eval_shape(params)], ids=["arrays", "abstract"])
def test_slots_of_other_shapes_are_refused(x):
    refused = (
        "optzoo.stacked cannot stack .* shape is not that of parameter 'layers/0/bias'.*`mask`"
    )
    with pytest.raises(ValueError, match=refused):
        stacked(optax.scale_by_factored_rms(), check=False).init(x)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", sorted(SAME))
def test_sums_over_all_parameters_are_right_without_the_check(name):
    inner, _ = REFUSED[name]
    assert_same(three_steps(stacked(inner, check=False)), three_steps(inner))
    check_stacked(inner, params())


# The check of the values


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("make", OPTAX.values(), ids=list(OPTAX))
def test_check_passes_element_wise_optimizers_of_optax(make):
    check_stacked(make(), params(3), max_members=2)


# Of the others, test_equals_every_optimizer_of_the_catalogue_or_refuses has the values.
QUICK = {
    "adam",
    "blocked_shampoo",
    "ftrl",
    "row_wise_lamb",
    "normalized_sgd",
    "rmsprop",
    "row_wise_adagrad",
}


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    "name",
    chosen_first(sorted(optzoo.CATALOG), QUICK),
)
def test_check_passes_the_catalogue_or_names_the_difference(name):
    check = lambda: check_stacked(samples.make(optzoo.CATALOG[name]), params(3), missing=True)
    if name not in WHOLE:
        check()
        return
    with pytest.raises(AssertionError, match="with stacks"):
        check()


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    "inner",
    [*(inner for name, (inner, _) in REFUSED.items() if name not in SAME), *DIFFERENT.values()],
    ids=[*(name for name in REFUSED if name not in SAME), *DIFFERENT],
)
def test_check_finds_every_difference(inner):
    x = params(5)
    x["layers"] = (*x["layers"][:-1], jnp.ones(1))  # of a scalar there are no neighbours
    with pytest.raises(
        AssertionError, match=r"update of 'layers/\d/(bias|kernel)'|fails with stacks"
    ):
        check_stacked(inner, x)


def test_check_names_the_slot_and_the_step():
    def late(updates, state, params=None):
        del params
        total = jax.tree.map(lambda s, g: s + g, state.total, updates)
        rolled = jax.tree.map(lambda s: jnp.where(state.count > 0, jnp.flip(s, 0), s), total)
        return updates, LateState(state.count + 1, rolled)

    init = lambda params: LateState(jnp.zeros([], jnp.int32), jax.tree.map(jnp.zeros_like, params))
    x = [jnp.ones(3), jnp.ones(3), jnp.ones(2)]
    with pytest.raises(AssertionError, match=r"with stacks .* 'total/0' is .* in step 1, without"):
        check_stacked(optax.GradientTransformation(init, late), x)


def test_check_needs_stacks():
    with pytest.raises(ValueError, match="share a stack"):
        check_stacked(optax.adam(0.1), [jnp.ones(2), jnp.ones(3)])
    with pytest.raises(ValueError, match="share a stack"):
        check_stacked(optax.adam(0.1), params(), max_members=1)


def test_check_takes_abstract_parameters_and_extra_arguments():
    x = jax.eval_shape(params)
    check_stacked(CATALOG["adam_gs"].make(), x, extra_args={"global_step": jnp.int32(3)})
    with pytest.raises(ValueError, match="global step"):
        check_stacked(CATALOG["adam_gs"].make(), x)


def test_names_may_tell_whole_stacks_from_each_other():
    tx = optzoo.adamw(0.1, weight_decay_per_step=0.1, mask=("kernel", "table"))
    assert_same(three_steps(stacked(tx)), three_steps(tx))


# Which


def test_state_has_a_few_arrays():
    def few(x=None, **how):
        tx = stacked(optzoo.momentum(0.1, 0.9), **how)
        return arrays(tx.init(params() if x is None else x)) - arrays(tx.init({}))

    assert few() == 4
    assert few(params(5), max_members=3) == 6
    assert few(max_members=1) == 6
    assert few(max_size=3) == 5
    assert few(mask=("kernel",)) == 5
    assert few(mask={"layers": True, "table": False}) == 4
    assert few(mask=()) == 6
    assert few([jnp.ones(3), jnp.ones(3, "bfloat16"), jnp.ones(3), jnp.ones(2)]) == 3


def test_sharded_parameters_are_refused():
    mesh = jax.make_mesh((8,), ("x",))
    place = lambda spec: jax.device_put(jnp.ones((8, 2)), NamedSharding(mesh, spec))
    tx = stacked(optzoo.adam())
    tx.init([place(PartitionSpec())] * 2)
    with pytest.raises(ValueError, match=r"parameter '0' is sharded over devices.*`mask`"):
        tx.init([place(PartitionSpec("x"))] * 2)
    stacked(optzoo.adam(), max_size=15).init([place(PartitionSpec("x"))] * 2)


def test_state_sharding():
    mesh = jax.make_mesh((8,), ("x",))
    one, split = (NamedSharding(mesh, spec) for spec in (PartitionSpec(), PartitionSpec("x")))
    x = {"large": jax.device_put(jnp.ones((8, 2)), split)}
    x |= {k: jax.device_put(jnp.ones(3), one) for k in "ab"}
    tx = stacked(optzoo.momentum(0.1, 0.9), max_size=4)
    shardings = state_sharding(tx, x)
    state = jax.jit(tx.init, out_shardings=shardings)(x)
    momentum = state[0].slots.momentum
    assert momentum["large"].sharding.is_equivalent_to(split, 2)
    assert jax.tree.leaves(momentum["a"])[0].sharding.is_equivalent_to(one, 1)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"mask": {"kernel": "yes"}}, TypeError, "mask must be a pattern"),
        ({"max_size": 0.5}, TypeError, "max_size must be an int"),
        ({"max_size": -1}, ValueError, "max_size must be at least 0"),
        ({"max_members": 0}, ValueError, "max_members must be at least 1"),
    ],
)
def test_bad_arguments(arguments, error, match):
    with pytest.raises(error, match=match):
        stacked(optzoo.adam(), **arguments)


# State


def test_slots_by_name():
    x, tx = params(), stacked(optzoo.adam(0.1))
    _, state = step(tx, dense_grads(x), x)
    _, plain = step(optzoo.adam(0.1), dense_grads(x), x)
    assert optzoo.slot_names(state) == ("m", "v")
    assert_same(optzoo.get_slot(state, "m"), optzoo.get_slot(plain, "m"))
    other = jax.tree.map(lambda a: a + 1, optzoo.get_slot(plain, "v"))
    changed = optzoo.set_slot(state, "v", other)
    chex.assert_trees_all_equal(optzoo.get_slot(changed, "v"), other)
    assert avals(changed) == avals(state)
    with pytest.raises(ValueError, match=r"shape \(3,\) at 'layers/0/bias'"):
        optzoo.set_slot(state, "v", jax.tree.map(lambda a: a[..., None], other))
    abstract = optzoo.get_slot(jax.eval_shape(tx.init, x), "m")
    assert avals(abstract) == avals(x)


def test_map_params_finds_the_stacks():
    x, tx = params(), stacked(optax.adam(0.1))
    state = tx.init(x)
    marked = optax.tree.map_params(tx, lambda _: "slot", state)
    assert jax.tree.structure(marked) == jax.tree.structure(state)
    assert jax.tree.leaves(marked).count("slot") == 2 * 4


def test_abstract_init_and_checkpoints(tmp_path):
    x, tx = params(), stacked(optzoo.lazy_adam(0.1))
    _, state = step(tx, dense_grads(x), x)
    abstract = jax.eval_shape(lambda: x)
    target = jax.eval_shape(stacked(optzoo.lazy_adam(lambda k: 0.1)).init, abstract)
    assert avals(tx.init(abstract)) == avals(target) == avals(state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", target)
    chex.assert_trees_all_equal(restored, state)
    chex.assert_trees_all_equal_structs(restored, state)


def test_trees_say_what_belongs_where():
    tree = {"a": [jnp.full(2, k) for k in range(6)], "hole": optax.MaskedNode(), "none": None}
    in_stacks = stack(tree, ((0, 1, 2, 5), (3, 4)))
    assert in_stacks["a"][0].arrays.keys() == {"0_1_2_5"}
    assert isinstance(in_stacks["a"][3], Stack) and in_stacks["a"][4] == optax.MaskedNode()
    assert layout_of(in_stacks) == ((0, 1, 2, 5), (3, 4))
    chex.assert_trees_all_equal(unstack(in_stacks), tree)
    assert layout_of(tree) == ()


def test_numbers_alone_and_empty_trees():
    tx = stacked(optzoo.adam(0.1))
    assert step(tx, {}, {})[0] == {}
    alone, want = (step(t, jnp.ones(3), jnp.ones(3)) for t in (tx, optzoo.adam(0.1)))
    chex.assert_trees_all_equal(alone, want)
    weak, one = jnp.full(3, 0.5), np.ones(3, np.float32)
    x = [jnp.ones(2), one, one, weak, weak, jnp.ones((0, 3)), jnp.ones((0, 3))]
    got, state = step(tx, x, x)
    assert layout_of(state) == ((1, 2), (5, 6))
    assert_same(got, step(optzoo.adam(0.1), x, x)[0])
    assert avals(state) == avals(tx.init(x))


# Gradients


def some(like):
    """Gradients of which one is missing, one is rows and one has another dtype."""
    grads = dense_grads(like)
    grads["layers"][0]["kernel"] = None
    grads["layers"][1]["bias"] = grads["layers"][1]["bias"].astype("bfloat16")
    grads["layers"][2]["kernel"] = SparseRows(jnp.array([1, 1]), jnp.ones((2, 3)), 2)
    return grads


@pytest.mark.parametrize("make", [optzoo.lazy_adam, optzoo.adam, lambda: optzoo.add_sign(0.1)])
def test_members_whose_gradients_differ(make):
    x, tx = params(4), stacked(make())
    state, plain = tx.init(x), make().init(x)
    two = lambda tx, s: tx.update(some(x), tx.update(dense_grads(x), s, x)[1], x)
    got, want = (jax.jit(functools.partial(two, t))(s) for t, s in ((tx, state), (make(), plain)))
    assert jax.tree.structure(got[0]) == jax.tree.structure(want[0])
    assert [u.dtype for u in jax.tree.leaves(got[0])] == [u.dtype for u in jax.tree.leaves(want[0])]
    assert_same(samples.plain(got[0]), samples.plain(want[0]))
    assert avals(got[1]) == avals(state)
    for name in optzoo.slot_names(state):
        assert_same(*(optzoo.get_slot(s, name) for s in (got[1], want[1])))


def test_no_gradient_at_all():
    x, tx = params(), stacked(optzoo.adam(0.1))
    state = tx.init(x)
    updates, after = tx.update(jax.tree.map(lambda _: None, x), state, x)
    assert jax.tree.leaves(updates) == []
    assert avals(after) == avals(state)
    chex.assert_trees_all_equal(optzoo.get_slot(after, "m"), optzoo.get_slot(state, "m"))


@pytest.mark.parametrize("bad", [jnp.ones(4), jnp.ones(3, int)], ids=["shape", "integer"])
def test_errors_name_the_parameter(bad):
    x, tx = params(), stacked(optzoo.adam(0.1))
    grads = dense_grads(x)
    grads["layers"][1]["bias"] = bad
    with pytest.raises((ValueError, TypeError), match="parameter 'layers/1/bias'"):
        tx.update(grads, tx.init(x), x)


# Compositions

COMPOSED = {
    "chain": lambda tx: optax.chain(optax.clip_by_global_norm(0.5), tx),
    "masked": lambda tx: optax.masked(tx, {"table": False, "layers": True}),
    "partition": lambda tx: optax.partition({"a": tx, "b": tx}, LABELS),
    "multi_steps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "moving_average": lambda tx: optzoo.moving_average(tx, 0.9),
    "weight decay": lambda tx: optzoo.decoupled_weight_decay(
        tx, weight_decay_per_step=0.1, mask="layers/1/kernel"
    ),
}


@pytest.mark.parametrize("compose", COMPOSED.values(), ids=list(COMPOSED))
def test_composes(compose):
    tx, plain = compose(stacked(optzoo.adam(0.1))), compose(optzoo.adam(0.1))
    assert_same(three_steps(tx), three_steps(plain))


def test_averages_within_are_found_and_exchanged():
    x = params()
    averaged = optzoo.moving_average(optzoo.adam(0.1), 0.9)
    (y, plain), (z, few) = (step(tx, x, x) for tx in (averaged, stacked(averaged)))
    chex.assert_trees_all_close(optzoo.eval_params(z, few), optzoo.eval_params(y, plain), rtol=1e-6)
    averages, holding = optzoo.state.swap_averages(z, few)
    assert avals(holding) == avals(few)
    back, again = optzoo.state.swap_averages(averages, holding)
    chex.assert_trees_all_equal((back, again), (z, few))


@pytest.mark.parametrize("packed", [False, True])
def test_slots_of_16_bits_around_it(packed):
    x = params()
    halves = lambda tx: optzoo.slots_dtype(tx, "bfloat16", packed=packed)
    inners = optzoo.adam(), stacked(optzoo.adam())
    (y, plain), (z, few) = (step(halves(tx), x, x) for tx in inners)
    assert len(jax.tree.leaves(few)) < len(jax.tree.leaves(plain))
    chex.assert_trees_all_close(z, y, rtol=1e-6)
    for name in "mv":
        ours, theirs = (optzoo.get_slot(s, name) for s in (few, plain))
        chex.assert_trees_all_close(ours, theirs, rtol=2**-7)


def test_schedules_rates_and_global_steps():
    falling = functools.partial(optzoo.adam, lambda k: 0.1 / (1 + k))
    run = lambda tx, **at: jax.jit(functools.partial(step, tx))(params(), params(), **at)[0]
    for at in ({}, {"learning_rate": 0.3}, {"global_step": 4, "weather": 1.0}):
        at = {k: jnp.asarray(v) for k, v in at.items()}
        assert_same(run(stacked(falling()), **at), run(falling(), **at))
    gs = CATALOG["adam_gs"].make()
    assert_same(run(stacked(gs), global_step=jnp.int32(3)), run(gs, global_step=jnp.int32(3)))
    with pytest.raises(ValueError, match="global step"):
        stacked(gs).update(params(), stacked(gs).init(params()), params())


def test_flags_are_checked_one_by_one():
    tx, x = optzoo.reg_adagrad(0.1), params()
    both, state = stacked(tx), stacked(tx).init(x)
    for flag in (True, False):
        got, _ = both.update(dense_grads(x), state, x, update_slots=flag)
        want, _ = tx.update(dense_grads(x), tx.init(x), x, update_slots=flag)
        assert_same(got, want)


def test_the_same_update_is_checked_once():
    adam, x, calls = optzoo.adam(0.1), params(), []

    def update(*args, **more):
        calls.append(args)
        return adam.update(*args, **more)

    tx = stacked(optax.GradientTransformationExtraArgs(adam.init, update))
    _, state = tx.update(dense_grads(x), tx.init(x), x)
    assert len(calls) > 1
    calls.clear()
    tx.update(dense_grads(x), state, x)
    assert len(calls) == 1


def test_scan():
    downhill = lambda x, _: dense_grads(x)
    run = lambda tx: samples.trajectory(tx, params(), downhill, jnp.arange(3))
    assert_same(run(stacked(optzoo.adamax(0.1))), run(optzoo.adamax(0.1)))


def test_vmap():
    tx, x = stacked(optzoo.adam(0.1)), params()
    lanes = [x, jax.tree.map(lambda a: a + 1, x)]
    xs = jax.tree.map(lambda *a: jnp.stack(a), *lanes)
    got, _ = jax.vmap(lambda x: step(tx, dense_grads(x), x))(xs)
    want = [step(optzoo.adam(0.1), dense_grads(x), x)[0] for x in lanes]
    assert_same(got, jax.tree.map(lambda *a: jnp.stack(a), *want))


def test_compiles_once_and_takes_donated_buffers():
    tx, x = stacked(optzoo.adam(0.1)), params()
    train = jax.jit(step_of(tx), donate_argnums=(0, 1))
    state = tx.init(x)
    first, grads = avals(state), dense_grads(x)
    for _ in range(3):
        x, state = train(x, state, grads)
    assert train._cache_size() == 1
    assert avals(state) == first


def test_without_params():
    x, tx = params(), stacked(optzoo.adam(0.1))
    state = tx.init(x)
    want = tx.update(dense_grads(x), state, x)
    chex.assert_trees_all_equal(tx.update(dense_grads(x), state), want)
    with pytest.raises(ValueError, match="requires the current value of parameters"):
        needs = stacked(optzoo.momentumw(0.1, 0.9, weight_decay_per_step=0.1))
        needs.update(dense_grads(x), needs.init(x))
