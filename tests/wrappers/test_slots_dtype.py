"""Slots in another dtype than the parameters, for every optimizer."""

import collections

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo import CATALOG, SparseRows, slots_dtype
from optzoo.core.rows import map_rows
from optzoo.first_order.adam import AdamSlots, adam_rule, corrected
from optzoo.jaxprs.graph import Graph
from optzoo.jaxprs.primitives import CALLS, Kind
from optzoo.state import LeafwiseState
from optzoo.state.storage import packing
from optzoo.state.types import nodes_of
from optzoo.testing import samples
from optzoo.testing.samples import avals, dense_grads, params, row_grads, step, step_of


def cast(tree, dtype):
    floating = lambda a: jnp.issubdtype(a.dtype, jnp.floating)
    return jax.tree.map(lambda a: a.astype(dtype) if floating(a) else a, tree)


def dtypes(tree):
    return {a.dtype for a in jax.tree.leaves(tree, is_leaf=lambda a: isinstance(a, SparseRows))}


def merged(grads):
    return map_rows(SparseRows.coalesce, grads)


ROWS = merged(row_grads(params()))


@pytest.mark.parametrize(
    ("of_params", "of_slots"), [("float32", "bfloat16"), ("bfloat16", "float32")]
)
def test_slots_keep_their_dtype(entry, of_params, of_slots):
    plain, x = entry.make(), cast(params(), of_params)
    tx = slots_dtype(plain, of_slots)
    state, usual = jax.eval_shape(tx.init, x), jax.eval_shape(plain.init, x)
    assert dtypes(samples.slots(state)) <= {jnp.dtype(of_slots)}
    # All but the slots is as it was.
    assert jax.tree.structure(state) == jax.tree.structure(usual)
    for ours, theirs in zip(leafwise_states(state), leafwise_states(usual), strict=True):
        chex.assert_trees_all_equal(avals((ours.count, ours.shared)), avals(theirs[::2]))
    for grads in (dense_grads(x), cast(row_grads(x), of_params)):
        updates, after = jax.eval_shape(tx.update, grads, state, x)
        assert avals(after) == avals(state)
        assert dtypes(updates) == {jnp.dtype(of_params)}


def leafwise_states(state):
    return nodes_of(LeafwiseState, state)


@pytest.mark.usefixtures("eager")
def test_half_precision_parameters_train_with_the_slots_of_single_precision(entry):
    """Step by step what the same numbers give in float32; only the update is rounded."""
    tx, wide = slots_dtype(entry.make(), "float32"), entry.make()
    x = cast(params(), "bfloat16")
    x["layer"] = (x["table"] + 1, x["layer"][1])  # few shapes: few programs
    state, wide_state = tx.init(x), wide.init(cast(x, "float32"))
    # LARS has a transformation, and so a rounding, before its slots.
    rtol = 1e-2 if entry.factory is optzoo.lars else 1e-6
    for table in (dense_grads(x)["table"], ROWS["table"].astype("bfloat16")):
        grads = {**dense_grads(x), "table": table}
        wide_grads = {**cast(grads, "float32"), "table": grads["table"].astype("float32")}
        updates, state = tx.update(grads, state, x)
        wanted, wide_state = wide.update(wide_grads, wide_state, cast(x, "float32"))
        chex.assert_trees_all_close(
            samples.slots(state), samples.slots(wide_state), rtol=rtol, atol=1e-7
        )
        chex.assert_trees_all_close(dense(updates), dense(wanted), rtol=2e-2, atol=1e-5)
        x = optax.apply_updates(x, updates)


def dense(updates):
    return cast(samples.to_dense(updates), "float32")


def test_slots_start_with_the_precision_they_keep():
    """In float16 this value would be zero, and the first step NaN."""
    tx, x = slots_dtype(optzoo.adagrad(1.0, 1e-10), "float32"), jnp.ones(3, jnp.float16)
    state = tx.init(x)
    np.testing.assert_array_equal(state[0].slots.accumulator, jnp.float32(1e-10))
    updates, _ = tx.update(jnp.zeros_like(x), state, x)
    np.testing.assert_array_equal(updates, 0)


@pytest.mark.parametrize("rows", [False, True], ids=["dense", "rows"])
def test_sums_do_not_stall(rows):
    """Squares of 1/1024 on a sum of 1: in bfloat16 it would stay at 1."""
    x, g = jnp.ones(3, jnp.bfloat16), jnp.full(3, 1 / 32, jnp.bfloat16)
    grads = SparseRows(jnp.arange(3), g, 3, coalesced=True) if rows else g
    for dtype, total in (("bfloat16", 1), ("float32", 2)):
        tx = slots_dtype(optzoo.adagrad(1.0, initial_accumulator_value=1.0), dtype)
        update = lambda state, _, tx=tx: (tx.update(grads, state, x)[1], None)
        state, _ = jax.lax.scan(update, tx.init(x), length=1024)
        np.testing.assert_array_equal(state[0].slots.accumulator, total)
        updates, _ = tx.update(grads, state, x)
        assert updates.dtype == jnp.bfloat16


def test_compiles_once_and_takes_donated_buffers():
    tx, x = slots_dtype(optzoo.lazy_adam(), "bfloat16"), params()
    train = jax.jit(step_of(tx), donate_argnums=(0, 1))
    state = tx.init(x)
    grads = row_grads(x)
    for _ in range(3):
        x, state = train(x, state, grads)
    assert train._cache_size() == 1 and dtypes(samples.slots(state)) == {jnp.dtype("bfloat16")}


LABELS = {"table": "a", "layer": ("b", "a"), "one_row": "b"}
ADAM = lambda: optzoo.adam(0.1)
NESTED = {
    "chain": lambda: optax.chain(optax.clip(1.0), ADAM()),
    "masked": lambda: optax.masked(
        ADAM(), {"table": True, "layer": (False, True), "one_row": True}
    ),
    "partition": lambda: optax.partition({"a": ADAM(), "b": optzoo.momentum(0.1, 0.9)}, LABELS),
    "multi_steps": lambda: optax.MultiSteps(ADAM(), 2).gradient_transformation(),
    "injected": lambda: optax.inject_hyperparams(optzoo.adam)(0.1),
    "moving_average": lambda: optzoo.moving_average(ADAM(), 0.9),
    "variable_clipping": lambda: optzoo.variable_clipping(ADAM(), {"table": (1,)}, 1.0),
    "decoupled_weight_decay": lambda: optzoo.decoupled_weight_decay(
        ADAM(), weight_decay_per_step=0.1
    ),
    "ema_nesterov": lambda: optzoo.ema_nesterov(ADAM(), 0.5),
    "hyperball": lambda: optzoo.hyperball(ADAM(), 0.1, {"table": (1,)}),
    "cautious_weight_decay": lambda: optzoo.cautious_weight_decay(
        ADAM(), weight_decay_per_step=0.1
    ),
    "multitask": lambda: optzoo.multitask(ADAM()),
    "skip_spikes": lambda: optzoo.skip_spikes(ADAM(), on="norm"),
    "beside optax": lambda: optax.chain(optax.trace(0.9), ADAM()),
}


@pytest.mark.parametrize("nested", NESTED.values(), ids=list(NESTED))
def test_slots_are_found_anywhere(nested):
    tx, x = slots_dtype(nested(), "bfloat16"), params()
    state = tx.init(x)
    for node in leafwise_states(state):
        if hasattr(node.slots, "v"):
            assert dtypes(node.slots) == {jnp.dtype("bfloat16")}
    assert avals(tx.update(dense_grads(x), state, x)[1]) == avals(state)
    assert avals(jax.eval_shape(tx.init, x)) == avals(state)
    marked = optax.tree.map_params(tx, lambda _: "slot", state)
    assert jax.tree.structure(marked) == jax.tree.structure(state)


def test_an_average_beside_short_slots_stays_exact():
    """With the wrapper outside, the slots of the inner optimizer alone are short."""
    tx = optzoo.moving_average(slots_dtype(optzoo.adam(1e-3), "bfloat16"), 0.999)
    x = jax.tree.map(jnp.ones_like, params())
    x, state = step(tx, x, x)
    np.testing.assert_allclose(optzoo.eval_params(x, state)["table"], 1 - 1e-6, rtol=1e-7)


def test_arguments_pass():
    tx, x = slots_dtype(optzoo.adam_gs(lambda k: 1.0 / (1 + k)), "float32"), params()
    plain = optzoo.adam_gs(0.25)
    got, _ = step(tx, dense_grads(x), x, global_step=3)
    chex.assert_trees_all_close(got, step(plain, dense_grads(x), x, global_step=3)[0], rtol=1e-6)


@pytest.mark.parametrize("dtype", [int, "int16", jnp.bool_, "complex64"])
def test_dtype_must_be_floating(dtype):
    with pytest.raises(TypeError, match=r"floating-point dtype or one of int8, float8_e4m3fn, got"):
        slots_dtype(optzoo.adam(), dtype)


@pytest.mark.parametrize("foreign", [optax.adam(0.1), optax.sgd(0.1), optax.identity()])
def test_foreign_optimizers_are_refused(foreign):
    with pytest.raises(ValueError, match="finds no slots of optzoo"):
        slots_dtype(foreign, "bfloat16").init(params())


# Rounded at random, and packed.

BOTH = {"stochastic": True, "packed": True}
OPTIONS = [{"stochastic": True}, {"packed": True}, BOTH]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_slow_mean_moves_only_at_random(dtype):
    """Gradients become ten times smaller: to the nearest it stalls, at random it follows."""
    scale = {"bfloat16": 1e-3, "float16": 3.0}[dtype]  # squares that float16 can hold
    falls = jnp.where(jnp.arange(1500) < 500, 10 * scale, scale)
    gs = falls[:, None] * jax.random.normal(jax.random.key(0), (1500, 512))

    def mean_square(tx):
        x = jnp.zeros(512)
        update = lambda state, g: (tx.update(g, state, x)[1], None)
        state, _ = jax.jit(lambda gs: jax.lax.scan(update, tx.init(x), gs))(gs)
        return np.asarray(optzoo.get_slot(state, "v"), np.float32)

    want = mean_square(optzoo.adam())
    nearest = mean_square(slots_dtype(optzoo.adam(), dtype))
    at_random = mean_square(slots_dtype(optzoo.adam(), dtype, **BOTH))
    off, spread = {"bfloat16": (1.5, 0.06), "float16": (0.08, 0.01)}[dtype]
    assert nearest.mean() / want.mean() > 1 + off
    assert abs(at_random.mean() / want.mean() - 1) < 0.01
    assert np.median(abs(at_random / want - 1)) < spread


def test_state_keeps_its_type_with_options(entry):
    """With both options; with one of them the values below."""
    x = params()
    tx = slots_dtype(entry.make(), "bfloat16", **BOTH)
    state = jax.eval_shape(tx.init, x)
    for grads in (dense_grads(x), row_grads(x)):
        updates, after = jax.eval_shape(tx.update, grads, state, x)
        assert avals(after) == avals(state)
        assert dtypes(updates) == {jnp.dtype("float32")}
    # Rounding at random alone changes nothing of the state.
    plain, at_random = (
        jax.eval_shape(slots_dtype(entry.make(), "bfloat16", stochastic=s).init, x)
        for s in (False, True)
    )
    assert avals(at_random) == avals(plain)
    # Each slot by itself, in the dtype and the shape that it has when it is not packed.
    assert optzoo.slot_names(state) == optzoo.slot_names(plain)
    for name in optzoo.slot_names(plain):
        assert avals(optzoo.get_slot(state, name)) == avals(optzoo.get_slot(plain, name))


SEVERAL_SLOTS = {
    "adam": optzoo.adam(0.1),
    "lazy_adam": optzoo.lazy_adam(0.1),
    "nadam": optzoo.nadam(0.1),
    "rmsprop": optzoo.rmsprop(0.1, momentum=0.9, centered=True),
    "grad_variance_scaled": optzoo.grad_variance_scaled(0.1),
    "shampoo": optzoo.shampoo(0.1, gbar_decay=0.9, grafting="rmsprop", momentum=0.9),
}


def train(tx, *gradients):
    """The table and its slots, after steps whose states have the type of the first."""
    x = {"table": params()["table"]}
    state = first = tx.init(x)
    for grads in gradients:
        x, state = step(tx, {"table": grads["table"]}, x, state)
        assert avals(state) == avals(first)
    return x, {name: optzoo.get_slot(state, name) for name in optzoo.slot_names(state)}


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        *(("bfloat16", name) for name in SEVERAL_SLOTS),
        ("float32", "lazy_adam"),
        ("float32", "rmsprop"),
    ],
)
def test_packed_slots_are_those_that_are_not(name, dtype):
    grads = dense_grads(params()), row_grads(params())
    options = {"stochastic": dtype == "bfloat16"}
    (x, apart), (y, packed) = (
        train(slots_dtype(SEVERAL_SLOTS[name], dtype, **options, packed=p), *grads)
        for p in (False, True)
    )
    chex.assert_trees_all_equal(packed, apart)
    chex.assert_trees_all_close(y, x, rtol=1e-6)


@pytest.mark.parametrize("make", [optzoo.soap, optzoo.shampoo])
@pytest.mark.parametrize("shape", [(1, 3), (2, 1, 3)])
def test_some_matrices_of_a_slot_are_packed(make, shape):
    """A matrix of one element lies beside no other; those of other axes do."""
    x, results = jnp.ones(shape), []
    for packed in (False, True):
        tx = slots_dtype(make(0.1), "float32", packed=packed)
        y, state = step(tx, jnp.arange(x.size).reshape(shape) / 4 - 0.5, x)
        names = optzoo.slot_names(state)
        results.append([y, {name: optzoo.get_slot(state, name) for name in names}])
    chex.assert_trees_all_close(*results, rtol=1e-5, atol=1e-6)
    fewer = slots_dtype(make(0.1, max_matrix_size=2), "float32", packed=True)
    for other, y in ((tx, x.T), (fewer, x)):  # with other matrices
        with pytest.raises(ValueError, match="expected real numbers of shape"):
            other.update(y, state, y)


def test_two_slots_take_one_word():
    x = params()
    state = slots_dtype(optzoo.adam(), "bfloat16", packed=True).init(x)
    words, nothing = state[0].slots
    assert avals(words) == avals(jax.tree.map(lambda a: a.astype(jnp.uint32), x))
    assert jax.tree.leaves(nothing) == []
    # A slot without a partner stays alone.
    state = slots_dtype(optzoo.momentum(0.1, 0.9), "float16", packed=True).init(x)
    assert dtypes(state[0].slots) == {jnp.dtype("float16")}


def test_two_slots_lie_side_by_side():
    """Those of arrays that have rows of several elements; others are as they were."""
    x = {"table": jnp.ones((5, 3)), "b": jnp.ones(4), "column": jnp.ones((5, 1)), "c": jnp.ones(())}
    tx = slots_dtype(optzoo.adam(), "float32", packed=True)
    state = tx.init(x)
    both, second = state[0].slots
    assert avals(both) == avals({**x, "table": jnp.ones((5, 6))})
    assert avals(second) == avals({**x, "table": packing.SecondHalf()})
    rows = SparseRows(jnp.array([3]), jnp.full((1, 3), 2.0), 5)
    _, state = jax.jit(tx.update)({**x, "table": rows}, state, x)
    both = state[0].slots.m["table"]
    for name, half in (("m", both[:, :3]), ("v", both[:, 3:])):
        np.testing.assert_array_equal(optzoo.get_slot(state, name)["table"], half)
    assert (both[3, :3] > 0.1).all() and (both[3, 3:] < 0.1).all()


def test_a_third_slot_between_two():
    """The array of two is the last one before the marker, so that the marker finds it."""
    of = lambda *shape: jnp.arange(float(np.prod(shape))).reshape(shape)
    make = collections.namedtuple("Slots", "a b c d e")
    packed = packing.pack(slots := make(of(2, 3), of(4, 5), of(2, 3), of(2, 3), of(2)), "float32")
    assert packed.d == packing.SecondHalf() and packed.c.shape == (2, 6)
    chex.assert_trees_all_equal(packing.unpack(packed), slots)
    apart = packing.pack(make(of(2, 3), of(4, 5), of(2, 3), of(1), of(2, 3)), "float32")
    assert not packing.is_packed(apart)


def test_slots_in_complex_numbers_are_refused():
    """As they were stored in the past."""
    tx, x = slots_dtype(optzoo.adam(), "float32", packed=True), jnp.ones((2, 3))
    state = tx.init(x)
    past = state[0]._replace(
        slots=AdamSlots(jnp.full((2, 3), 1 + 2j, jnp.complex64), state[0].slots.v)
    )
    for use in (lambda s: tx.update(x, s, x), lambda s: optzoo.get_slot(s, "m")):
        with pytest.raises(ValueError, match=r"one complex array.*set_slot\(tx\.init"):
            use((past, *state[1:]))
    now = optzoo.set_slot(state, "m", past.slots.m.real)
    now = optzoo.set_slot(now, "v", past.slots.m.imag)
    np.testing.assert_array_equal(optzoo.get_slot(now, "v"), jnp.full((2, 3), 2.0))


def test_slots_of_other_shapes_and_dtypes_stay_apart():
    """Those of the same shape and dtype find each other, whatever is between."""
    slots = collections.namedtuple("Slots", "a b c d e f")(
        *(jnp.arange(n, dtype=dtype) for n, dtype in [
            (3, "float32"), (2, "bfloat16"), (3, "float32"),
            (3, "bfloat16"), (2, "bfloat16"), (3, "bfloat16"),
        ])
    )  # fmt: skip
    packed = packing.pack(slots, "bfloat16")
    kept = [name for name in slots._fields if jax.tree.leaves(getattr(packed, name))]
    assert kept in (["a", "b", "c", "d", "e"], ["a", "b", "c", "d", "f"])
    chex.assert_trees_all_equal(packing.unpack(packed), slots)
    assert not packing.is_packed(slots) and packing.is_packed(packed)


def test_a_start_that_is_not_zero_is_packed():
    state = slots_dtype(optzoo.ftrl(0.1), "bfloat16", packed=True).init(params())
    accum = jax.tree.leaves(optzoo.get_slot(state, "accum"))
    assert all((np.asarray(a, np.float32) == np.float32(jnp.bfloat16(0.1))).all() for a in accum)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
def test_updates_are_of_the_slots_as_kept(options):
    """In bfloat16; in float16 of the slots before they are rounded."""
    x, g = jnp.ones(64), np.random.default_rng(1).normal(size=64).astype("float32")
    small = np.float32(1e-4) * g  # squares that float16 takes for zero
    update = lambda tx, g: jax.jit(tx.update)(g, tx.init(x), x)
    updates, state = update(slots_dtype(optzoo.adam(0.1), "bfloat16", **options), g)
    m, v = (np.float32(optzoo.get_slot(state, name)) for name in "mv")
    want = -0.1 * np.sqrt(1 - 0.999) / (1 - 0.9) * m / (np.sqrt(v) + 1e-8)
    np.testing.assert_allclose(updates, want, rtol=1e-4)
    updates, _ = update(slots_dtype(optzoo.adam(0.1), "float16", **options), small)
    want, _ = update(optzoo.adam(0.1), small)
    np.testing.assert_allclose(updates, want, rtol=1e-6)


@pytest.mark.usefixtures("eager")
def test_rows_are_rounded_as_in_the_dense_gradient_and_others_are_unchanged():
    tx = slots_dtype(optzoo.lazy_adam(0.1), "bfloat16", **BOTH)
    x, warm = step(tx, dense_grads(params()), params())
    rows = ROWS["table"]
    (_, by_rows), (_, by_array) = (
        step(tx, {**ROWS, "table": table}, x, warm) for table in (rows, rows.to_dense())
    )
    here, rest = jnp.array([1, 3]), jnp.array([0, 2, 4])
    for name in "mv":
        got, want, old = (optzoo.get_slot(s, name)["table"] for s in (by_rows, by_array, warm))
        np.testing.assert_array_equal(got[here], want[here])
        np.testing.assert_array_equal(got[rest], old[rest])
        assert (got[here] != old[here]).any()


def test_a_run_repeats_whatever_it_runs_under():
    tx = slots_dtype(optzoo.adam(0.1), "bfloat16", **BOTH)
    x, gs = jnp.ones((8, 4)), np.random.default_rng(0).normal(size=(3, 8, 4)).astype("float32")

    def steps(x, gs):
        body = lambda carry, g: (step(tx, g, *carry), None)
        return jax.lax.scan(body, (x, tx.init(x)), gs)[0]

    want = (x, tx.init(x))
    with jax.disable_jit():
        for g in gs:
            want = step(tx, g, *want)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("d",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    lanes = jax.jit(jax.vmap(steps))(np.stack([x + 1, x]), np.stack([gs, gs]))
    lanes = jax.tree.map(lambda a: a[1], lanes)
    for got in (jax.jit(steps)(x, gs), jax.jit(steps)(jax.device_put(x, split), gs), lanes):
        chex.assert_trees_all_close(got[0], want[0], rtol=1e-5)
        for name in "mv":
            ours, theirs = (optzoo.get_slot(s, name).astype(jnp.float32) for s in (got[1], want[1]))
            # Fused arithmetic may round a last bit otherwise, and that may tip a number.
            assert (ours != theirs).mean() < 0.05
            np.testing.assert_allclose(ours, theirs, rtol=2**-7)


def test_seeds_differ_and_can_be_given_for_a_step():
    x, g = jnp.ones(64), jnp.linspace(0.1, 1, 64)
    make = lambda seed: slots_dtype(optzoo.adam(0.1), "bfloat16", stochastic=True, seed=seed)
    after = lambda tx, **extra: optzoo.get_slot(step(tx, g, x, **extra)[1], "v")
    assert (after(make(0)) != after(make(1))).any()
    np.testing.assert_array_equal(after(make(0), rounding_seed=1), after(make(1)))


def multi_steps():
    """As a transformation that passes keywords on, among them how to round."""
    many = optax.MultiSteps(ADAM(), 2)
    return optax.GradientTransformationExtraArgs(many.init, many.update)


# multitask tells apart the live arrays of a state, one for each parameter and slot.
OF_PACKED = {name: nested for name, nested in NESTED.items() if name != "multitask"}
OF_PACKED["multi_steps"] = multi_steps


@pytest.mark.parametrize("nested", OF_PACKED.values(), ids=list(OF_PACKED))
def test_packed_slots_are_found_anywhere(nested):
    tx, x = slots_dtype(nested(), "bfloat16", **BOTH), params()
    state = tx.init(x)
    assert jnp.dtype("uint32") in dtypes(state)
    assert avals(jax.eval_shape(tx.update, dense_grads(x), state, x)[1]) == avals(state)
    assert avals(jax.eval_shape(tx.init, x)) == avals(state)
    marked = optax.tree.map_params(tx, lambda _: "slot", state)
    assert jax.tree.structure(marked) == jax.tree.structure(state)
    plain = slots_dtype(nested(), "bfloat16").init(x)
    for name in optzoo.slot_names(plain):
        chex.assert_trees_all_equal(optzoo.get_slot(state, name), optzoo.get_slot(plain, name))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_packed_slots_can_be_set(dtype):
    x = params()
    state = slots_dtype(optzoo.adam(), dtype, packed=True).init(x)
    new = optzoo.set_slot(state, "v", x)
    assert avals(new) == avals(state)
    half = jax.tree.map(lambda a: a.astype(dtype), x)
    chex.assert_trees_all_equal(optzoo.get_slot(new, "v"), half)
    chex.assert_trees_all_equal(optzoo.get_slot(new, "m"), optzoo.get_slot(state, "m"))


def test_packed_slots_are_saved_as_plain_arrays(tmp_path):
    x, tx = params(), slots_dtype(optzoo.adam(), "bfloat16", packed=True)
    _, state = step(tx, x, x)
    leaves = [np.asarray(a) for a in jax.tree.leaves(state)]
    np.savez(tmp_path / "state.npz", *leaves)
    with np.load(tmp_path / "state.npz") as file:
        restored = jax.tree.unflatten(jax.tree.structure(state), [file[k] for k in file.files])
    chex.assert_trees_all_equal(optzoo.get_slot(restored, "v"), optzoo.get_slot(state, "v"))
    chex.assert_trees_all_equal(step(tx, x, x, restored), step(tx, x, x, state))


@pytest.mark.optimized
@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="XLA then copied a slot in 16 bits")
@pytest.mark.parametrize("options", [{"stochastic": True}, BOTH], ids=["apart", "packed"])
def test_no_copy_of_the_slots(options):
    x, tx = jnp.ones(100_000), slots_dtype(optzoo.adam(), "bfloat16", **options)
    train = jax.jit(step_of(tx), donate_argnums=(0, 1))
    memory = train.lower(x, tx.init(x), x).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 10_000


def test_options_need_their_dtypes():
    for options in ({"stochastic": True}, BOTH):
        with pytest.raises(
            ValueError, match=r"one of int8, float8_e4m3fn, bfloat16 and .* got 'float32'"
        ):
            slots_dtype(optzoo.adam(), "float32", **options)
    with pytest.raises(ValueError, match=r"dtype must have 16, 32 or 64 bits .* got 'float8_e5m2'"):
        slots_dtype(optzoo.adam(), "float8_e5m2", packed=True)
    with pytest.raises(
        ValueError, match=r"16 bits, or be one of int8, float8_e4m3fn, got 'float8_e5m2'"
    ):
        slots_dtype(optzoo.adam(), "float8_e5m2")


def test_seed_must_be_an_int():
    with pytest.raises(TypeError, match=r"seed must be an int, got 0\.5"):
        slots_dtype(optzoo.adam(), "bfloat16", stochastic=True, seed=0.5)


# Rules, policies and transformations in between do not know the storage.


def touched_sums(rule):
    """A rows policy of a user."""
    return lambda g, x, s, t, **scheduled: optzoo.rules.lazy(rule)(g, x, s, t, **scheduled)


@pytest.mark.optimized
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
def test_a_rows_policy_of_a_user_is_lazy_in_any_storage(options):
    """Nothing of the table's size is made: only the touched rows are loaded."""
    plain = optzoo.transforms.scale_by_lazy_adam()
    tx = optzoo.rules.leafwise(
        adam_rule(0.9, 0.999, 1e-8), slots=plain_slots(), rows=touched_sums, **POWERS
    )
    tx, plain = (slots_dtype(t, "bfloat16", **options) for t in (tx, plain))
    x, state = jnp.ones((50_000, 8)), tx.init(jnp.ones((50_000, 8)))
    rows = SparseRows(jnp.array([3, 7, 3]), jnp.ones((3, 8)), len(x))
    chex.assert_trees_all_equal(tx.update(rows, state, x)[1], plain.update(rows, state, x)[1])
    if "packed" in options:  # XLA scatters rows of 16 bits by way of a copy
        update = jax.jit(lambda g, s: tx.update(g, s)[1], donate_argnums=1)
        memory = update.lower(rows, state).compile().memory_analysis()
        assert memory.temp_size_in_bytes < 0.2 * x.nbytes


POWERS = {"powers": {"beta1_power": 0.9, "beta2_power": 0.999}, "precompute": corrected}
plain_slots = lambda: AdamSlots(optzoo.rules.zeros, optzoo.rules.zeros)


@pytest.mark.parametrize("name", ["lars", "lazy_adam", "momentum"])
def test_only_the_touched_rows_are_loaded(name):
    """No operation makes a table in float32, though all slots are in bfloat16."""
    x = jnp.ones((100, 3), jnp.bfloat16)
    tx = slots_dtype(CATALOG[name].make(), "bfloat16", stochastic=True)
    rows = SparseRows(jnp.array([3, 7, 3]), jnp.ones((3, 3), jnp.bfloat16), len(x))
    jaxpr = jax.make_jaxpr(tx.update)(rows, tx.init(x), x if name == "lars" else None)
    made = [v.aval for op in operations(jaxpr) for v in op.outs]
    assert any(a.shape == x.shape for a in made)  # the slots that the rows are scattered into
    assert not any(a.shape == x.shape and a.dtype == jnp.float32 for a in made)


def operations(jaxpr):
    return [op for op, *_ in Graph.of(jaxpr).walk({*CALLS, Kind.MAP})]


def test_a_policy_that_looks_into_packed_slots_is_told():
    looks = lambda rule: lambda g, x, s, t, **scheduled: (g, s._replace(m=s.m))
    tx = optzoo.rules.leafwise(
        adam_rule(0.9, 0.999, 1e-8), slots=plain_slots(), rows=looks, **POWERS
    )
    packed = slots_dtype(tx, "bfloat16", packed=True)
    x = params()["table"]
    with pytest.raises(AttributeError, match=r"packed or stochastically rounded .* no field 'm'"):
        packed.update(ROWS["table"], packed.init(x), x)


def test_a_transformation_in_between_that_swallows_the_seed_is_refused():
    adam = optzoo.adam(0.1)
    forgets = optax.GradientTransformation(
        adam.init, lambda updates, state, params=None: adam.update(updates, state, params)
    )
    x, g = jnp.ones(64), jnp.linspace(0.1, 1, 64)
    make = lambda tx: slots_dtype(tx, "bfloat16", stochastic=True)
    for tx in (forgets, optax.chain(optzoo.transforms.scale_by_momentum(0.9), forgets)):
        with pytest.raises(
            ValueError, match=r"pass on the keyword arguments .* put slots_dtype inside"
        ):
            step(make(tx), g, x)
    rounds = make(adam)
    inside = optax.GradientTransformation(
        rounds.init, lambda updates, state, params=None: rounds.update(updates, state, params)
    )
    chex.assert_trees_all_equal(step(inside, g, x), step(rounds, g, x))


INSIDE = {
    "agn": lambda tx: optzoo.agn(tx, axis_name=None, communication_period=2),
    "model_average": lambda tx: optzoo.model_average(tx, axis_name=None, interval_steps=2),
    "multitask": optzoo.multitask,
    "skip_spikes": lambda tx: optzoo.skip_spikes(tx, on="norm"),
    "stacked": optzoo.stacked,
}


@pytest.mark.parametrize("name", INSIDE)
def test_wrappers_that_look_for_slots_do_so_while_they_are_rounded(name):
    x = {"a": jnp.ones(64), "b": jnp.ones(64)}
    g = jax.tree.map(lambda x: jnp.linspace(0.1, 1, len(x)), x)
    make = lambda stochastic: slots_dtype(
        INSIDE[name](optzoo.adam(0.1)), "bfloat16", stochastic=stochastic
    )
    got, want = ((step(tx, g, *step(tx, g, x))) for tx in map(make, (True, False)))
    assert avals(got) == avals(want)
    chex.assert_trees_all_close(got[1], want[1], rtol=2**-6)
    differs = jax.tree.map(lambda a, b: bool((a != b).any()), got[1], want[1])
    assert any(jax.tree.leaves(differs))


def test_of_nested_wrappers_the_outermost_seed_counts():
    x, g = jnp.ones(64), jnp.linspace(0.1, 1, 64)
    make = lambda tx, seed: slots_dtype(tx, "bfloat16", stochastic=True, seed=seed)
    got, want = make(make(optzoo.adam(0.1), 0), 1), make(optzoo.adam(0.1), 1)
    chex.assert_trees_all_equal(step(got, g, x), step(want, g, x))


def test_a_seed_for_a_step_passes_a_wrapper_that_rounds_to_the_nearest():
    x, g = jnp.ones(64), jnp.linspace(0.1, 1, 64)
    make = lambda seed: slots_dtype(optzoo.adam(0.1), "bfloat16", stochastic=True, seed=seed)
    around = slots_dtype(make(0), "bfloat16")
    got, want = step(around, g, x, rounding_seed=1), step(make(1), g, x)
    assert (got[1][0].slots.v != step(around, g, x)[1][0].slots.v).any()
    chex.assert_trees_all_equal(got, want)


# Derivatives through an update.


def after_two_steps(tx):
    """A function of the first gradient: the sum of the parameters after two steps."""

    def total(g):
        x, state = step(tx, g, jnp.ones_like(g))
        return jnp.sum(step(tx, jnp.ones_like(g), x, state)[0] ** 2)

    return total


@pytest.mark.parametrize("make", [optzoo.adam, lambda lr: optzoo.momentum(lr, 0.9)])
def test_derivatives_pass_straight_through_random_rounding(make):
    g = np.linspace(0.5, 1.5, 8, dtype="float32")
    rounded = slots_dtype(make(0.1), "bfloat16", stochastic=True)
    got, want = (jax.jit(jax.grad(after_two_steps(tx)))(g) for tx in (rounded, make(0.1)))
    # The derivatives at slots that are rounded to 1/256.
    np.testing.assert_allclose(got, want, atol=0.1 * np.max(np.abs(want)))


@pytest.mark.parametrize("make", [optzoo.adam, lambda lr: optzoo.ftrl(lr)])
def test_derivatives_pass_through_slots_packed_in_float32(make):
    g = np.linspace(0.5, 1.5, 8, dtype="float32").reshape(2, 4)
    packed = slots_dtype(make(0.1), "float32", packed=True)
    got, want = (jax.jit(jax.grad(after_two_steps(tx)))(g) for tx in (packed, make(0.1)))
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("options", [{"packed": True}, BOTH], ids=["nearest", "random"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_derivatives_through_words_are_refused(dtype, options):
    g, tx = np.ones(8, "float32"), slots_dtype(optzoo.adam(0.1), dtype, **options)
    with pytest.raises(TypeError, match=r"packed 16-bit slots .* no derivative.*packed=False"):
        jax.eval_shape(jax.grad(after_two_steps(tx)), g)
    with pytest.raises(TypeError, match="packed 16-bit slots"):
        jax.eval_shape(lambda g: jax.jvp(after_two_steps(tx), (g,), (g,)), g)


def test_frozen_parameters_keep_their_dtype_in_64_bits(x64):
    with x64(True):
        fixed = {"complex": jnp.ones(2, "complex64"), "integers": jnp.ones(2, "int32")}
        params = {"w": jnp.ones(2, "float32"), "fixed": fixed}
        tx = optzoo.slots_dtype(optzoo.momentum(0.1, 0.9), "float64")
        state = tx.init(params)
        dtypes = jax.tree.map(lambda a: a.dtype.name, optzoo.get_slot(state, "momentum"))
        grads = {"w": jnp.ones(2, "float32"), "fixed": dict.fromkeys(fixed)}
        updates, _ = tx.update(grads, state, params)
    assert dtypes == {"w": "float64", "fixed": {"complex": "complex64", "integers": "int32"}}
    np.testing.assert_allclose(updates["w"], -0.1, rtol=1e-6)
