"""RETURNN's updater: what records cannot show, and what it refuses."""

import pathlib
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import returnn

import optzoo
from optzoo import SparseRows
from optzoo.interop.returnn.keys import refuse_unknown
from optzoo.interop.returnn.learning_rate import LearningRateControl
from optzoo.interop.returnn.updater import returnn_updater
from optzoo.testing import samples
from optzoo.testing.samples import avals
from optzoo.transforms.summaries import read_summaries

ADAM = {"class": "adam", "epsilon": 1e-8}
X = {"enc": {"w": jnp.array([1.0, -2, 3]), "b": jnp.ones(2)}, "out": {"table": jnp.ones((4, 2))}}
G = jax.tree.map(lambda x: jnp.cos(x) + 0.1, X)
ROWS = {**G, "out": {"table": SparseRows(jnp.array([2, 0, 2]), jnp.ones((3, 2)), 4)}}
EVERYTHING = {
    "optimizer": ADAM,
    "accum_grad_multiple_step": 2,
    "gradient_noise": 0.1,
    "gradient_clip": 1.0,
    "gradient_clip_norm": 1.0,
    "gradient_clip_avg_norm": 1.0,
    "gradient_clip_global_norm": 1.0,
    "gradient_nan_inf_filter": True,
    "grad_norm_to_clip_to_zero": 100.0,
    "debug_grad_summaries": True,
    "debug_add_check_numerics_ops": True,
    "deterministic_train": True,
    "log_grad_norm": True,
    "dynamic_learning_rate": {"interval": 3, "decay": 0.5},
    "decouple_constraints": True,
    "extra_updates": {"enc/w": lambda var: var},
}
LAYERS = {"enc": {"L2": 0.1, "updater_opts": {"optimizer": {"class": "momentum", "momentum": 0.9}}}}


def step(tx, grads=G, x=X, *args, **extra):
    return samples.step(tx, grads, x, *args, **extra)


def make(config=None, layers=None, **more):
    return returnn_updater({"optimizer": ADAM, **(config or {})}, layers=layers or {}, **more)


# What is off


def test_options_that_are_off_leave_nothing():
    off = {
        **dict.fromkeys(["accum_grad_multiple_step", "gradient_noise", "gradient_clip"], 0),
        **dict.fromkeys(["gradient_clip_norm", "gradient_clip_avg_norm"], 0.0),
        **dict.fromkeys(["gradient_clip_global_norm", "grad_norm_to_clip_to_zero"], 0.0),
        **dict.fromkeys(["gradient_nan_inf_filter", "debug_grad_summaries"], False),
        **dict.fromkeys(["decouple_constraints", "use_horovod", "log_grad_norm"], False),
        **dict.fromkeys(["dynamic_learning_rate", "extra_updates"], None),
        "weight_decay": 0,
        "horovod_scale_lr": False,
    }
    tx, plain = make(off), optzoo.adam(1.0)
    state = tx.init(X)
    theirs = [1 for _ in jax.tree.leaves(plain.init(X))]
    assert len(jax.tree.leaves(state)) == 1 + len(theirs)
    equations = lambda tx: len(jax.make_jaxpr(lambda g, s: tx.update(g, s, X))(G, tx.init(X)).eqns)
    assert equations(tx) == equations(make())
    assert equations(make({"gradient_clip": 1.0})) > equations(make())


FAST = {"xla_backend_optimization_level": 0}  # to compile takes longer than to run


@pytest.mark.parametrize("grads", [G, ROWS], ids=["dense", "rows"])
def test_a_scan_is_step_after_step_and_the_state_keeps_its_type(grads):
    tx = make(EVERYTHING, LAYERS)
    state = tx.init(X)
    assert avals(jax.eval_shape(tx.init, X)) == avals(state)
    one = lambda carry, _: (step(tx, grads, *carry), None)
    run = jax.jit(lambda carry: jax.lax.scan(one, carry, None, 4)[0], compiler_options=FAST)
    got = run((X, state))
    assert avals(got[1]) == avals(state) and got[1].count == 4
    assert not np.allclose(got[0]["enc"]["b"], X["enc"]["b"])
    train = jax.jit(lambda carry: one(carry, None)[0], compiler_options=FAST)
    want = X, state
    for _ in range(4):
        want = train(want)
    assert train._cache_size() == 1
    chex.assert_trees_all_close(got, want, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "wide"), [("bfloat16", 0), ("float16", 1), ("float64", 1)])
def test_other_types(x64, dtype, wide):
    """The state keeps its own, and an update has that of its gradient."""
    of = lambda x: jax.tree.map(jnp.cos, x)
    with x64(bool(wide)):
        x = jax.tree.map(lambda a: a.astype(dtype), X)
        for layers in ({}, LAYERS):
            tx = make({**EVERYTHING, "maximize_grad_norm": 0.1}, layers)
            state = tx.init(x)
            update = lambda g, s, x, tx=tx: tx.update(g, s, x, grad_fn=of)
            updates, after = jax.eval_shape(update, of(x), state, x)
            assert avals(after) == avals(state) and avals(updates) == avals(x)


def test_vmap():
    tx = make({"accum_grad_multiple_step": 2, "gradient_clip_global_norm": 1.0})
    many = lambda tree: jax.tree.map(lambda a: jnp.stack([a, 2 * a]), tree)
    train = jax.jit(lambda g, x, s: step(tx, g, x, s), compiler_options=FAST)
    trains = jax.jit(jax.vmap(lambda g, x, s: step(tx, g, x, s)), compiler_options=FAST)
    states, state = jax.vmap(tx.init)(many(X)), tx.init(X)
    double = lambda tree: jax.tree.map(lambda a: 2 * a, tree)
    for _ in range(2):
        got, states = trains(many(G), many(X), states)
        want, state = train(double(G), double(X), state)
    chex.assert_trees_all_close(jax.tree.map(lambda a: a[1], got), want, rtol=1e-6)


# Trees


def test_missing_and_masked_gradients_stay():
    tx = make({"decouple_constraints": True, "gradient_clip_norm": 1.0}, LAYERS)
    some = {**G, "enc": {"w": None, "b": G["enc"]["b"]}}
    updates, _ = tx.update(some, tx.init(X), X)
    assert updates["enc"]["w"] is None and jnp.all(updates["enc"]["b"] != 0)
    every = make(EVERYTHING, LAYERS)
    updates, _ = jax.eval_shape(every.update, some, every.init(X), X)
    assert updates["enc"]["w"].shape == X["enc"]["w"].shape  # there may be a sum of earlier steps
    masked = optax.masked(tx, {"enc": True, "out": {"table": False}})
    got, state = step(masked)
    assert avals(state) == avals(masked.init(X))
    chex.assert_trees_all_equal(got["enc"], step(tx)[0]["enc"])
    without = optax.masked(tx, {"enc": False, "out": True})  # the layer is not to be seen
    without.init(X)


def test_map_params_and_partition():
    tx = make({"accum_grad_multiple_step": 2, "gradient_noise": 1.0}, LAYERS)
    state = tx.init(X)
    marked = optax.tree.map_params(tx, lambda _: "slot", state)
    assert jax.tree.structure(marked) == jax.tree.structure(state)
    parts = optax.partition({"a": make(), "b": optax.sgd(1.0)}, {"enc": "a", "out": "b"})
    chex.assert_trees_all_equal(step(parts)[0]["enc"], step(make())[0]["enc"])


@pytest.mark.parametrize("coupled", [True, False])
def test_rows_stay_rows_unless_a_constraint_is_of_all_of_them(coupled):
    layers = {"out": {"L2": 0.5}} if coupled else {}
    tx = make({"optimizer": {"class": "momentum", "momentum": 0.5}}, layers)
    updates, _ = tx.update(ROWS, tx.init(X), X)
    assert isinstance(updates["out"]["table"], SparseRows) != coupled
    moved, _ = step(tx, ROWS)
    decay = 1.0 if coupled else 0.0
    want = 1 - np.array([[1.0, 0, 2, 0]]).T - decay
    np.testing.assert_allclose(moved["out"]["table"], want * np.ones(2), rtol=1e-6)


# Layers


def test_layers_of_the_network():
    network = {
        "#info": {"L2": 3.0},
        "enc": {"class": "linear", "n_out": 3, "L2": 0.1, "from": "data"},
        "sub": {"class": "subnetwork", "subnetwork": {"in": {"class": "linear", "L2": 0.2}}},
        "rec": {"class": "rec", "unit": {"s": {"updater_opts": {"gradient_clip": 0.1}}}},
        "plain": {"class": "softmax", "L2": None},
    }
    x = {"enc": {"W": jnp.ones(2)}, "sub": {"in": {"W": jnp.ones(2)}}, "rec": {"s": jnp.ones(2)}}
    config = {"network": network, "learning_rate": 1.0}
    tx = returnn_updater(config)
    g = jax.tree.map(jnp.ones_like, x)
    moved, _ = step(tx, g, x)
    for path, change in ((("enc", "W"), -1.2), (("sub", "in", "W"), -1.4), (("rec", "s"), -0.1)):
        leaf = moved
        for key in path:
            leaf = leaf[key]
        np.testing.assert_allclose(leaf, 1 + change * np.ones(2), rtol=1e-6)
    with pytest.raises(
        ValueError, match=r"no parameter's path begins with 'enc/'; the parameters are \['w'"
    ):
        tx.init({"w": jnp.ones(2)})


@pytest.mark.parametrize(
    ("layer", "has_options"),
    [
        ({"class": "linear", "reuse_params": "enc"}, False),
        ({"class": "linear", "reuse_params": {"map": {"W": {"reuse_layer": "enc"}}}}, True),
        ({"class": "linear", "trainable": False}, False),
        ({"class": "linear", "trainable": True}, True),
        ({"class": "copy"}, False),
        ({"class": "combine", "kind": "add"}, False),
        ({"class": "copy", "batch_norm": True}, True),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_options_of_layers_without_parameters_of_their_own(layer, has_options, nested):
    """In RETURNN they change nothing, so no parameter is missing."""
    network = {"enc": {"class": "linear", "L2": 0.1}, "other": {**layer, "L2": 0.1}}
    if nested:
        network["other"] = {"class": "subnetwork", "subnetwork": {"in": network["other"]}}
    tx = returnn_updater({"network": network, "learning_rate": 1.0})
    x = {"enc": {"W": jnp.ones(2)}}
    if has_options:
        with pytest.raises(ValueError, match="no parameter's path begins with 'other/"):
            tx.init(x)
    else:
        moved, _ = step(tx, jax.tree.map(jnp.zeros_like, x), x)
        np.testing.assert_allclose(moved["enc"]["W"], 0.8 * np.ones(2), rtol=1e-6)


def test_a_layer_inside_of_one_that_is_not_trained():
    inside = {"in": {"class": "linear", "L2": 0.1}}
    network = {"sub": {"class": "subnetwork", "trainable": False, "subnetwork": inside}}
    returnn_updater({"network": network}).init({"w": jnp.ones(2)})


def test_the_innermost_layer_counts():
    x = {"a": {"b": {"c": jnp.ones(2), "d": jnp.ones(2)}, "e": jnp.ones(2)}}
    layers = {
        "a": {"L2": 0.1, "updater_opts": {"gradient_clip": 0.5, "tags": ["t"]}},
        "a/b": {"L2": 0.2},
        "a/b/c": {"updater_opts": {"gradient_clip": 2.0}},
    }
    tx = returnn_updater({}, layers=layers)
    moved, _ = step(tx, jax.tree.map(lambda a: 0.2 * a, x), x)
    moves = jax.tree.map(lambda a, b: float((b - a)[0]), x, moved)
    chex.assert_trees_all_close(moves, {"a": {"b": {"c": -0.6, "d": -0.5}, "e": -0.4}}, rtol=1e-6)


def test_equal_optimizers_share_their_state():
    adam = lambda **more: {"updater_opts": {"optimizer": {"class": "Adam", **more}}}
    groups = lambda layers: len(make({"optimizer": {"class": "sgd"}}, layers).init(X)[-1][0])
    assert groups({"enc": adam()}) == groups({"enc": adam(), "out": adam()}) == 2
    assert groups({"enc": adam(), "out": adam(beta1=0.5)}) == 3
    only = make({"optimizer": {"class": "Adam"}}, {"enc": adam()}).init(X)
    assert not isinstance(only.inner, optax.transforms.PartitionState)


def test_a_layer_may_override_an_option_with_none_or_zero():
    config = {"gradient_clip": 0.01, "optimizer": {"class": "gradientdescent"}}
    clipped = lambda opts: step(make(config, {"enc": {"updater_opts": opts}}))[0]["enc"]["b"]
    off, same = clipped({"gradient_clip": 0}), clipped({"gradient_clip": None})
    np.testing.assert_allclose(off, X["enc"]["b"] - G["enc"]["b"], rtol=1e-6)
    np.testing.assert_allclose(same, X["enc"]["b"] - 0.01, rtol=1e-6)


# Rates and steps


def test_learning_rates():
    sgd = {"optimizer": {"class": "gradientdescent"}, "learning_rate": "0.5"}
    moved = lambda config, **extra: float(step(make(config), **extra)[0]["enc"]["b"][0])
    g = float(G["enc"]["b"][0])
    np.testing.assert_allclose(moved(sgd), 1 - 0.5 * g, rtol=1e-6)
    np.testing.assert_allclose(moved(sgd, learning_rate=0.1), 1 - 0.1 * g, rtol=1e-6)
    dynamic = {**sgd, "dynamic_learning_rate": {"interval": 3, "decay": 0.1}}
    got = moved(dynamic, learning_rate=0.3, global_step=4)
    np.testing.assert_allclose(got, 1 - 0.03 * g, rtol=1e-6)
    half = {**sgd, "dynamic_learning_rate": lambda learning_rate, **_: learning_rate / 2}
    np.testing.assert_allclose(moved(half), 1 - 0.25 * g, rtol=1e-6)


def test_accumulation_follows_the_global_step():
    tx = make({"accum_grad_multiple_step": 3})
    state, still = tx.init(X), []
    for n in range(4, 10):
        updates, state = tx.update(G, state, X, global_step=n)
        still.append(not np.any(updates["enc"]["b"]))
    assert still == [True, False, True, True, False, True]


@pytest.mark.parametrize("interval", [None, 4])
def test_positions_in_cycles_where_counts_end(interval):
    """Of accumulation, and of a dynamic learning rate."""
    dynamic = interval and {"interval": interval, "decay": 0.5}
    config = {"optimizer": {"class": "sgd"}, "accum_grad_multiple_step": 3}
    tx, x = returnn_updater({**config, "dynamic_learning_rate": dynamic}), jnp.ones(2)
    last = np.int32(2**31 - 1)
    _, after = tx.update(x, tx.init(x)._replace(count=last), x)
    assert 0 < after.count <= last
    assert (int(after.count) - int(last) - 1) % (3 * (interval or 1)) == 0


def test_what_counts_the_steps_of_the_original_counts_updates():
    """Adam on a global step is Adam, and follows a step that is given."""
    gs, adam = make({"optimizer": {"class": "adamgs", "epsilon": 1e-8}}), make()
    chex.assert_trees_all_close(step(gs)[0], step(adam)[0], rtol=1e-5)


# Noise


def noises(config=None, steps=1, grads=G, **extra):
    config = {"gradient_noise": 2.0, "optimizer": {"class": "gradientdescent"}, **(config or {})}
    tx = make(config)
    state = tx.init(X)
    for _ in range(steps):
        updates, state = tx.update(grads, state, X, **extra)
    return updates


def test_noise_is_a_truncated_normal():
    x = {"w": jnp.zeros((100, 100))}
    tx = make({"gradient_noise": 0.5, "optimizer": {"class": "gradientdescent"}})
    noise = np.asarray(tx.update(x, tx.init(x), x)[0]["w"])
    assert abs(noise.std() - 0.88 * 0.5) < 0.01 and abs(noise.mean()) < 0.02
    assert 0.9 < np.abs(noise).max() <= 1.0


def test_noise_by_seed_step_and_name():
    first = noises()
    chex.assert_trees_all_equal(first, noises())
    differs = lambda other: all(
        np.all(a != b) for a, b in zip(*map(jax.tree.leaves, (first, other)), strict=True)
    )
    assert differs(noises({"random_seed": 1})) and differs(noises(steps=2))
    chex.assert_trees_all_equal(noises(steps=2), noises(global_step=1))
    assert not np.allclose(first["enc"]["b"], first["enc"]["w"][:2])
    # Not by what other parameters there are.
    tx = make({"gradient_noise": 2.0, "optimizer": {"class": "gradientdescent"}})
    alone, _ = tx.update({"enc": G["enc"]}, tx.init({"enc": X["enc"]}), {"enc": X["enc"]})
    chex.assert_trees_all_equal(alone["enc"], first["enc"])
    assert not isinstance(noises(grads=ROWS)["out"]["table"], SparseRows)


def test_noise_counts_in_the_last_micro_step_only():
    got = noises({"accum_grad_multiple_step": 2}, steps=2)
    one = noises(steps=2)
    want = jax.tree.map(lambda u, g: u - g, one, G)
    chex.assert_trees_all_close(got, want, rtol=1e-5)


# Second order


def test_maximize_grad_norm_needs_a_function_and_no_rows():
    tx = make({"maximize_grad_norm": 0.5})
    with pytest.raises(ValueError, match=r"pass update\(\.\.\., grad_fn=f\)"):
        step(tx)
    with pytest.raises(TypeError, match="does not support row-sparse gradients"):
        step(tx, ROWS, grad_fn=lambda x: ROWS)


def test_maximize_grad_norm_by_definition():
    """The gradient of the loss minus 0.5 times the norm of its gradient; a zero one is no NaN."""
    loss = lambda x: sum(jnp.sum(jnp.sin(a) * a) for a in jax.tree.leaves(x))
    whole = lambda x: loss(x) - 0.5 * optax.tree.norm(jax.grad(loss)(x))
    tx = make({"maximize_grad_norm": 0.5, "optimizer": {"class": "gradientdescent"}})
    moved, _ = step(tx, jax.grad(loss)(X), grad_fn=jax.grad(loss))
    want = jax.tree.map(lambda x, g: x - g, X, jax.grad(whole)(X))
    chex.assert_trees_all_close(moved, want, rtol=1e-5)
    flat = lambda x: jax.tree.map(jnp.zeros_like, x)
    chex.assert_trees_all_equal(step(tx, flat(X), grad_fn=flat)[0], X)


# Replicas


@pytest.mark.parametrize("average", [True, False])
def test_horovod(average):
    config = {
        "use_horovod": True,
        "horovod_avg_grad": average,
        "horovod_scale_lr": True,
        "learning_rate": 0.1,
        "optimizer": {"class": "gradientdescent"},
        "gradient_clip_global_norm": 3.0,
    }
    tx = returnn_updater(config, layers={}, axis_name="r")
    grads = jax.tree.map(lambda g: jnp.stack([g, 2 * g]), G)
    got = jax.vmap(lambda g: step(tx, g)[0], axis_name="r")(grads)
    one = returnn_updater({**config, "use_horovod": False, "horovod_scale_lr": False}, layers={})
    total = jax.tree.map(lambda g: (1.5 if average else 3.0) * g, G)
    want, _ = step(one, total, learning_rate=0.2)
    chex.assert_trees_all_close(jax.tree.map(lambda a: a[1], got), want, rtol=1e-6)


def test_horovod_with_rows_on_devices():
    tx = make({"use_horovod": True, "optimizer": {"class": "gradientdescent"}}, axis_name="r")
    mesh = jax.make_mesh((2,), ("r",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def train(ids, values, x):
        grads = {
            **optzoo.replicas.per_replica(G, "r"),
            "out": {"table": SparseRows(ids[0], values[0], 4)},
        }
        return step(tx, grads, x)[0]

    ids, values = jnp.array([[0, 1], [1, 3]]), jnp.ones((2, 2, 2))
    mapped = jax.shard_map(
        train, mesh=mesh, in_specs=(spec("r"), spec("r"), spec()), out_specs=spec()
    )
    got = jax.jit(mapped)(ids, values, X)
    np.testing.assert_allclose(got["out"]["table"][:, 0], [0, -1, 1, 0], atol=1e-6)
    np.testing.assert_allclose(got["enc"]["b"], X["enc"]["b"] - 2 * G["enc"]["b"], rtol=1e-6)


# What one sees


def test_summaries_are_of_the_layers_that_want_them():
    layers = {"enc": {"updater_opts": {"debug_grad_summaries": True}}}
    tx = make({"accum_grad_multiple_step": 2, "gradient_clip": 0.1}, layers)
    _, state = step(tx)
    _, state = step(tx, state=state)
    leaves, _ = read_summaries(state)
    assert set(leaves) == {"enc/w", "enc/b"}  # of the sum, before the clip
    np.testing.assert_allclose(
        leaves["enc/b"]["norm"], 2 * jnp.linalg.norm(G["enc"]["b"]), rtol=1e-6
    )
    np.testing.assert_allclose(state.shared["grad_norm"], optax.tree.norm(G), rtol=1e-6)


def test_log_grad_norm_is_that_of_the_raw_gradients():
    tx = make({"log_grad_norm": True, "gradient_clip": 0.1}, {"enc": {"L2": 0.5}})
    raw = {"enc": jax.tree.map(lambda g, x: g + x, G["enc"], X["enc"]), "out": G["out"]}
    np.testing.assert_allclose(step(tx)[1].shared["grad_norm"], optax.tree.norm(raw), rtol=1e-6)


def test_check_numerics():
    tx = make({"debug_add_check_numerics_ops": True, "optimizer": {"class": "gradientdescent"}})
    step(tx)
    spoilt = {**G, "enc": {"w": G["enc"]["w"].at[0].set(jnp.nan), "b": G["enc"]["b"]}}
    with pytest.raises(FloatingPointError, match="the gradient of parameter 'enc/w' is NaN"):
        step(tx, spoilt)
    with pytest.raises(FloatingPointError, match="the update of parameter 'enc/b' is infinite"):
        step(tx, learning_rate=jnp.inf)


def test_a_global_norm_that_is_not_finite_spoils_all_gradients():
    infinite = {**G, "enc": {**G["enc"], "b": jnp.array([jnp.inf, 1.0])}}
    moved, _ = step(make({"gradient_clip_global_norm": 1.0}), infinite)
    assert all(jnp.isnan(x).all() for x in jax.tree.leaves(moved))


@pytest.mark.parametrize("named", [None, "a"])
def test_a_layer_clips_by_its_own_tag_unless_the_config_names_one(named):
    layers = {
        "enc/w": {"updater_opts": {"tags": ["a"]}},
        "enc/b": {"updater_opts": {"tags": ["b"], "global_norm_tag": "b"}},
    }
    config = {"optimizer": {"class": "sgd"}, "gradient_clip_global_norm": 0.1}
    tags = {"global_norm_tag": "a", "gradient_clip_global_norm_tag": named}
    moved, _ = step(make({**config, **tags}, layers))
    norm = {"a": jnp.linalg.norm(G["enc"]["w"]), "b": jnp.linalg.norm(G["enc"]["b"])}
    for (layer, name), tag in {("out", "table"): "a", ("enc", "b"): named or "b"}.items():
        want = X[layer][name] - 0.1 * G[layer][name] / norm[tag]
        np.testing.assert_allclose(moved[layer][name], want, rtol=1e-5)


def test_an_epsilon_by_our_name_is_not_replaced():
    ours, theirs = ({"class": "adam", name: 0.1} for name in ("eps", "epsilon"))
    chex.assert_trees_all_equal(step(make({"optimizer": ours})), step(make({"optimizer": theirs})))


# What is refused


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"optimizer": "adam"}, TypeError, "optimizer must be a dict"),
        ({"optimizer": {"beta1": 0.9}}, TypeError, "under 'class'"),
        ({"optimizer": {"class": "adamm"}}, ValueError, "the nearest are"),
        ({"optimizer": {"class": "adam", "learning_rate": 1}}, ValueError, "a learning_rate_mult"),
        ({"optimizer": {"class": "adam", "betta1": 1}}, TypeError, "has no argument 'betta1'"),
        ({"optimizer": {**ADAM, "learning_rate_multiplier": "x"}}, TypeError, "must be a number"),
        ({3: 4}, TypeError, "names of options must be strings, got 3"),
        ({"adam": True, "momentum": 0.9}, ValueError, "adam has no momentum"),
        ({"adam": True, "behavior_version": 2}, ValueError, "use optimizer={'class': 'adam'}"),
        ({"gradient_clip": -1}, ValueError, "gradient_clip must be zero or positive, got -1.0"),
        ({"gradient_clip": "hard"}, TypeError, "gradient_clip must be a number, got 'hard'"),
        ({"gradient_noise": -0.1}, ValueError, "gradient_noise must be zero or positive"),
        ({"gradient_clip_norm": float("nan")}, ValueError, "gradient_clip_norm must be zero or p"),
        ({"accum_grad_multiple_step": 2.5}, TypeError, "accum_grad_multiple_step must be an int"),
        ({"accum_grad_multiple_step": -2}, ValueError, "must be zero or positive"),
        ({"gradient_nan_inf_filter": "yes"}, TypeError, "must be True or False, got 'yes'"),
        ({"log_grad_norm": 3}, ValueError, "the only supported norm"),
        ({"dynamic_learning_rate": {"interval": 3}}, ValueError, "the keys interval and decay"),
        ({"dynamic_learning_rate": 3}, TypeError, "must be a dict or a function"),
        ({"dynamic_learning_rate": lambda step: 1}, TypeError, r"must take \*\*kwargs"),
        ({"dynamic_learning_rate": lambda epoch, **_: 1}, ValueError, r"needs \['epoch'\]"),
        ({"extra_updates": {"w": lambda var, network: var}}, ValueError, r"needs \['network'\]"),
        ({"extra_updates": [1]}, TypeError, "a dict of functions"),
        ({"use_horovod": True}, ValueError, "use_horovod needs the argument axis_name"),
        ({"horovod_reduce_type": "param"}, ValueError, "use optzoo.model_average"),
        (
            {"global_norm_tag": "a", "grad_norm_to_clip_to_zero": 1},
            ValueError,
            "no layer has the tag 'a'",
        ),
        ({"global_norm_tag": ["a"]}, TypeError, "must be the name of a tag"),
        ({"grad_clip": 5}, ValueError, "use gradient_clip or grad"),
        ({"gradient_clip_global": 5}, ValueError, "nearest is 'gradient_clip_global_norm'"),
        ({"gradient_nan_filter": 5}, ValueError, "nearest is 'gradient_nan_inf_filter'"),
        ({"optimiser": {}}, ValueError, "nearest is 'optimizer'"),
        ({"decouple_constraint": True}, ValueError, "nearest is 'decouple_constraints'"),
        ({"learningrate": 1}, ValueError, "nearest is 'learning_rate'"),
        ({"optimizer_epsiloon": 1}, ValueError, "nearest is 'optimizer_epsilon'"),
        ({"max_norm": 1.0}, ValueError, "in RETURNN's old Theano backend only"),
        ({"gradient_noise_decay": 0.5}, ValueError, "old Theano"),
        ({"reset_updater_vars_mod_step": 5}, ValueError, "call init of the updater again"),
        ({"num_allowed_consec_invalid_gradient_steps": 3}, ValueError, "optax.apply_if_finite"),
        ({"backend": "theano"}, ValueError, "backend must be one of tensorflow-net-dict, tensorf"),
    ],
    ids=lambda value: str(next(iter(value))) if isinstance(value, dict) else "",
)
def test_bad_options(config, error, message):
    with pytest.raises(error, match=message):
        returnn_updater(config)


@pytest.mark.parametrize(
    ("layer", "error", "message"),
    [
        ({"l2": 0.1}, ValueError, "may have L2 and updater_opts"),
        ({"L2": -0.1}, ValueError, "L2 must be zero or positive"),
        ({"updater_opts": {"gradient_clipp": 1}}, ValueError, "nearest is 'gradient_clip'"),
        ({"updater_opts": {"learning_rate": 1}}, ValueError, "unknown options: 'learning_rate'"),
        ({"updater_opts": {"optimizer": "adam"}}, TypeError, "layer 'enc': optimizer must be a"),
        ({"updater_opts": {"tags": "ab"}}, TypeError, "tags must be a list of strings"),
        ({"updater_opts": {"tags": 3}}, TypeError, "tags must be a list of strings, got 3"),
        ({"updater_opts": ["tags"]}, TypeError, "layer 'enc': updater_opts must be a dict"),
        ({"updater_opts": {"gradient_clip": -1}}, ValueError, "layer 'enc': gradient_clip"),
    ],
    ids=str,
)
def test_bad_layers(layer, error, message):
    with pytest.raises(error, match=message):
        returnn_updater({}, layers={"enc": layer})


def test_all_refused_keys_are_named_at_once():
    config = {"optimizer_epsiloon": 1, "grad_scaler": {}, "grad_clip": 5, "gradient_clp": 1}
    config |= {"reset_updater_vars_mod_step": 3, "horovod_reduce_type": "param", "max_norm": None}
    with pytest.raises(ValueError, match="config: ") as raised:
        returnn_updater(config)
    parts = str(raised.value).removeprefix("config: ").split("; ")
    found = [re.search(r"'?(\w+)", part.removeprefix("there is no option "))[1] for part in parts]
    assert found[:3] == ["grad_clip", "reset_updater_vars_mod_step", "horovod_reduce_type"]
    assert found[-2:] == ["optimizer_epsiloon", "gradient_clp"]


def test_variables_of_a_config_are_no_options():
    """Nor is what changes no value."""
    variables = {
        "L2": 1e-4,
        "statistics": np.ones(3),  # it is neither true nor false
        "_optimizer": {},
        "tags": ["a"],
        "darc1": 0.1,
        "spatial_smoothing": 0.1,
        "weight_decay": 0.01,
        "updater_opts": {},
        "learning_rate_multiplier": 3.0,
        "gradient_statistics": True,
        "learning_rate_piecewise_steps": [1],
        "horovod_hosts": 3,
        "param_groups_custom": len,
        "weight_decay_custom_include_check": len,
        "debug_add_check_numerics_on_output": True,
    }
    tx = make(variables)
    chex.assert_trees_all_equal(step(tx)[0], step(make())[0])
    optzoo.interop.returnn.LearningRateControl(variables)


def test_other_refusals():
    with pytest.raises(TypeError, match=r"returnn\.config\.Config, give its typed_dict"):
        returnn_updater("adam")
    with pytest.raises(TypeError, match="layers must be a dict"):
        returnn_updater({}, layers=["enc"])
    for unreadable in ({"get_network": lambda epoch: {}}, {"network": "net.json"}):
        with pytest.raises(ValueError, match="pass layers,"):
            returnn_updater(unreadable)
        returnn_updater(unreadable, layers={})
    with pytest.raises(ValueError, match="layer 'a': darc1 depends on the output of the layer"):
        returnn_updater({"network": {"a": {"darc1": 0.1}}})
    with pytest.raises(ValueError, match="returnn_version must be one of 2017, 2022, 2026"):
        returnn_updater({}, returnn_version="2018")
    decoupled = {"decouple_constraints": True}
    with pytest.raises(ValueError, match="use another returnn_version"):
        returnn_updater(
            {**decoupled, "extra_updates": {"enc/w": lambda var: var}}, returnn_version="2017"
        )
    with pytest.raises(ValueError, match="learning_rate must be positive"):
        returnn_updater({**decoupled, "learning_rate": 0}, returnn_version="2022")
    with pytest.raises(ValueError, match="extra_updates: no parameter has the path 'enc/v'"):
        make({"extra_updates": {"enc/v": lambda var: var}}).init(X)
    with pytest.raises(ValueError, match="returned an array of shape"):
        step(make({"extra_updates": {"enc/w": lambda var: var[:2]}}))
    with pytest.raises(ValueError, match="parameters"):
        make().update(G, make().init(X))


def test_the_other_options_of_returnn_are_not_taken_for_ours():
    """All that its own code reads from a config."""
    folder = pathlib.Path(returnn.__file__).parent
    get = r"config\.(?:typed_value|opt_typed_value|bool|float|int|value|is_true|has)\(\s*\"(\w+)\""
    names = {n for file in folder.rglob("*.py") for n in re.findall(get, file.read_text())}
    assert len(names) > 150
    taken = set()
    for name in sorted(names):
        try:
            refuse_unknown({name: 1})
        except ValueError:
            taken.add(name)
    assert (
        taken
        == {
            "grad_clip",
            "grad_scaler",
            "horovod_param_sync_step",
            "horovod_param_sync_time_diff",
            "horovod_reduce_type",
            "num_allowed_consec_invalid_gradient_steps",
            "reset_updater_vars_mod_step",
        }
        & names
    )


def test_arguments_of_the_learning_rate_control_are_no_options():
    """RETURNN reads them with a prefix alone; public configs have them without."""
    config = {"learning_rate": 0.1, "relative_error_div_by_old": True}
    config |= {"newbob_relative_error_threshold_div_by_old": True, "relative_error_threshold": 0}
    updates, _ = (tx := returnn_updater(config)).update(X, tx.init(X), X)
    want, _ = (tx := returnn_updater({"learning_rate": 0.1})).update(X, tx.init(X), X)
    chex.assert_trees_all_equal(updates, want)
    LearningRateControl({**config, "learning_rate_control": "newbob"})
