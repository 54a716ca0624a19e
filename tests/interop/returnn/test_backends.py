"""``backend`` in a config: which one is meant, and what differs from one to another."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from returnn.config import Config
from returnn.util.basic import BackendEngine

from optzoo import SparseRows
from optzoo.interop.returnn import returnn_updater
from optzoo.interop.returnn.backends import backend_of
from optzoo.testing import samples
from optzoo.testing.samples import avals

X = {"enc": {"weight": jnp.array([1.0, -2, 3]), "bias": jnp.ones(2)}, "out": jnp.ones((4, 2))}
G = jax.tree.map(lambda x: jnp.cos(x) + 0.1, X)
ADAMW = {"class": "adamw", "weight_decay": 0.1}
NAMES = {1: "TensorFlow", 2: "TensorFlow", 3: "torch", 4: "JAX"}  # of RETURNN's constants


def make(backend, optimizer=None, layers=None, decay_mask=None, **config):
    config = {"backend": backend, "learning_rate": 0.1, **config}
    config |= {"optimizer": optimizer} if optimizer else {}
    return returnn_updater(config, layers=layers, decay_mask=decay_mask)


def moved(tx, grads=G, x=X):
    return jax.tree.map(jnp.subtract, samples.step(tx, grads, x)[0], x)


@pytest.mark.parametrize(
    "config",
    [
        {"backend": "tensorflow"},
        {"backend": "tensorflow-net-dict"},
        {"backend": "torch"},
        {"backend": "jax"},
        {"backend": "jax", "use_tensorflow": True},
        {"use_tensorflow": True},
        {"use_tensorflow": False},
        {"backend": None},
        {},
    ],
    ids=str,
)
def test_the_backend_is_the_one_that_returnn_selects(config, monkeypatch):
    monkeypatch.setattr(BackendEngine, "selected_engine", None)
    jax_is_default = {"default_fallback_engine": BackendEngine.Jax, "_select_rf_backend": False}
    BackendEngine.select_engine(config=Config(config), **jax_is_default)
    assert backend_of(config, "jax").name == NAMES[BackendEngine.selected_engine]
    assert returnn_updater(config | {"optimizer": {"class": "sgd"}}, layers={})
    default = backend_of(config, "tensorflow").name
    assert default == ("TensorFlow" if not any(config.values()) else backend_of(config, "jax").name)


@pytest.mark.parametrize(
    ("backend", "want"),
    [("jax", [0.1, 0.019, 0.0271]), ("torch", [0.1, 0.019, 0.0271]), ("tensorflow", [0.1] * 3)],
)
def test_whether_a_velocity_contains_the_rate(backend, want):
    """With TensorFlow it is Keras' SGD."""
    tx = make(backend, {"class": "sgd", "momentum": 0.9}, layers={})
    x, state = jnp.zeros([]), tx.init(jnp.zeros([]))
    for rate, change in zip([0.1, 0.01, 0.01], want, strict=True):
        updates, state = tx.update(jnp.ones([]), state, x, learning_rate=rate)
        np.testing.assert_allclose(updates, -change, rtol=1e-5)


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_which_parameters_decay(backend):
    """All but biases, or those that the mask names; all by a default that is not set."""

    def decaying(optimizer, decay_mask=None, layers=None):
        tx = make(backend, optimizer, layers, decay_mask)
        zeros = jax.tree.map(jnp.zeros_like, X)
        return jax.tree.map(lambda u: bool(np.all(u != 0)), moved(tx, zeros))

    expected = lambda weight, bias, out: {"enc": {"weight": weight, "bias": bias}, "out": out}
    assert decaying(ADAMW) == expected(True, False, True)
    assert decaying(ADAMW, "out") == expected(False, False, True)
    assert decaying(ADAMW, ("weight", "bias")) == expected(True, True, False)
    assert decaying(ADAMW, expected(True, False, False)) == expected(True, False, False)
    assert decaying({"class": "adamw"}) == expected(True, True, True)
    assert decaying({**ADAMW, "weight_decay": 0}) == expected(False, False, False)
    modules = {**ADAMW, "weight_decay_modules_blacklist": ["rf.Embedding"]}
    assert decaying(modules, "weight") == expected(True, False, False)
    own = {"enc": {"updater_opts": {"optimizer": {"weight_decay": 0.2}}}}
    assert decaying({"class": "adamw"}, None, own) == expected(True, False, True)
    tree = expected(False, True, False)
    assert decaying({"class": "adamw"}, tree, own) == expected(False, True, True)
    assert decaying({"class": "adamw"}, "bias", own) == expected(False, True, True)
    with pytest.raises(ValueError, match=r"no parameter matches \['wait'\]"):
        make(backend, ADAMW, decay_mask="wait").init(X)


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_norms_are_those_of_clipped_sums_of_all_parameters(backend):
    """Also where layers have other optimizers or clips, and of rows that are merged."""
    config = {"accum_grad_multiple_step": 2, "gradient_clip": 2.0, "gradient_clip_global_norm": 1.0}
    layers = {
        "enc": {"updater_opts": {"optimizer": {"class": "sgd", "momentum": 0.9}}},
        "out": {"updater_opts": {"gradient_clip": 0.5}},
    }
    tx = make(backend, {"class": "sgd"}, layers, **config)
    state = tx.init(X)
    first, state = tx.update(jax.tree.map(lambda g: 3 * g, G), state, X)
    ids = jnp.array([2, 0, 2])
    rows = {**G, "out": SparseRows(ids, jnp.ones((3, 2)), 4)}
    got, _ = tx.update(rows, state, X)
    assert not any(np.any(u) for u in jax.tree.leaves(first))
    total = jax.tree.map(lambda g: jnp.clip(4 * g, -2, 2), G)
    total["out"] = jnp.clip(3 * G["out"].at[ids].add(1 / 3), -0.5, 0.5)
    want = jax.tree.map(lambda g: -0.1 * g / optax.tree.norm(total), total)
    chex.assert_trees_all_close(got, want, rtol=1e-5)


def test_what_optzoo_adds_to_the_jax_backend():
    """Other classes as with TensorFlow, all options about gradients, L2 of layers."""
    both = lambda *args, **kwargs: (
        moved(make(backend, *args, **kwargs)) for backend in ("jax", "tensorflow")
    )
    layers = {"enc": {"L2": 0.1, "updater_opts": {"gradient_clip_norm": 0.2}}}
    chex.assert_trees_all_equal(
        *both({"class": "nadam"}, layers, optimizer_epsilon=0.1, decouple_constraints=True)
    )
    chex.assert_trees_all_equal(*both({"class": "momentum"}, layers, momentum=0.9))
    ftrl = {"class": "ftrl", "l1_regularization_strength": 0.1}
    chex.assert_trees_all_equal(*both(ftrl, layers, gradient_noise=0.1, gradient_clip_avg_norm=0.1))


def test_rows_are_dense_for_optimizers_of_optax():
    rows = {**G, "out": SparseRows(jnp.array([2, 0, 2]), jnp.ones((3, 2)), 4)}
    dense = {**G, "out": rows["out"].to_dense()}
    tx = make("jax", ADAMW)
    chex.assert_trees_all_equal(moved(tx, rows), moved(tx, dense))
    # The norm is that of the dense gradient, too.
    tx = make("jax", {"class": "sgd"}, gradient_clip_global_norm=0.1)
    chex.assert_trees_all_close(moved(tx, rows), moved(tx, dense), rtol=1e-6)


@pytest.mark.parametrize("backend", ["jax", "torch"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_other_types(backend, dtype, x64):
    with x64(dtype == "float64"):
        x = jax.tree.map(lambda a: a.astype(dtype), X)
        clips = {"accum_grad_multiple_step": 2, "gradient_clip_global_norm": 1.0}
        tx = make(backend, ADAMW, **clips)
        state = jax.eval_shape(tx.init, x)
        updates, after = jax.eval_shape(tx.update, x, state, x)
        assert avals(after) == avals(state) and avals(updates) == avals(x)


CHECK, MODULES = "weight_decay_custom_include_check", "weight_decay_modules_blacklist"
WORDS = {"optimizer_epsilon": 1e-8, "extra_updates": {"out": lambda var: var}, "use_horovod": True}


@pytest.mark.parametrize(
    ("backend", "config", "error", "message"),
    [
        ("torch", {}, ValueError, "optimizer must be set with the torch backend"),
        ("torch", {"optimizer": {"eps": 0.1}}, TypeError, "under 'class'"),
        ("torch", {"optimizer": {"class": "lbfgs"}}, ValueError, "'lbfgs' is not supported for"),
        (
            "torch",
            {"optimizer": {"class": "radam", "betas": [0.9, 1.0]}},
            ValueError,
            "beta2 must be in",
        ),
        ("torch", {"optimizer": {"class": len}}, ValueError, "the class <built-in function len>"),
        (
            "torch",
            {"optimizer": {"class": "adam", "amsgrad": True}},
            ValueError,
            "amsgrad of torch",
        ),
        ("torch", {"optimizer": {"class": "sgd", "dampening": 0.1}}, ValueError, "dampening of"),
        ("torch", {"optimizer": {"class": "adam", "beta1": 0.9}}, TypeError, "has no argument 'be"),
        (
            "torch",
            {"optimizer": {"class": "adam", "lr": 0.1}},
            ValueError,
            "lr must not be in the optimizer's dict",
        ),
        (
            "torch",
            {"optimizer": {**ADAMW, "param_groups_custom": len}},
            ValueError,
            "pass the groups by the argument layers",
        ),
        ("torch", {"optimizer": {**ADAMW, CHECK: len}}, ValueError, f"{CHECK} need the modules"),
        (
            "torch",
            {"optimizer": {**ADAMW, MODULES: ["rf.Linear"]}},
            ValueError,
            "that decay as decay_mask",
        ),
        (
            "jax",
            {"optimizer": {**ADAMW, MODULES: ["rf.Linear"]}},
            ValueError,
            "that decay as decay_mask",
        ),
        ("jax", {"optimizer": "adam"}, TypeError, "optimizer must be a dict"),
        ("jax", {"optimizer": {"class": "adam", "weight_decay": 1}}, TypeError, "has no argument"),
        ("jax", {"optimizer": {"class": "adam", "learning_rate": 1}}, ValueError, "in the config"),
        ("jax", {"optimizer": {"class": "adamm"}}, ValueError, "the nearest are"),
        ("jax", WORDS, ValueError, "ilon is ignored .*; extra_updates is ignored .*; use_horovod"),
        ("torch", WORDS, ValueError, "ilon is ignored by RETURNN's torch backend: write epsilon"),
        (
            "jax",
            {"optimizer": {"class": "nadam"}, "use_horovod": True},
            ValueError,
            "config: use_horovod is ignored by RETURNN's JAX backend: average the gradients",
        ),
    ],
)
def test_bad_options(backend, config, error, message):
    with pytest.raises(error, match=message):
        returnn_updater({"backend": backend, **config})


def test_what_changes_no_value_is_ignored():
    """Torch's words about speed, and what it refuses where it is off."""
    words = {"foreach": True, "fused": None, "capturable": True, "amsgrad": False, "maximize": 0}
    plain = {"class": "adam"}
    chex.assert_trees_all_equal(moved(make("torch", plain | words)), moved(make("torch", plain)))
    with pytest.raises(ValueError, match=r"no option 'adamw' \(the nearest is 'adam'"):
        make("tensorflow", plain, {}, adamw={"class": "adamw"})
    make("torch", plain, adamw={"class": "adamw"}, adam=plain)
    # A network is TensorFlow's.
    assert make("jax", get_network=len, network={"enc": {"darc1": 1.0}})


def test_other_refusals():
    every = {"enc": {"updater_opts": {"accum_grad_multiple_step": 2}}}
    with pytest.raises(ValueError, match=r"accum_grad_multiple_step must be .*, as in the config"):
        make("jax", layers=every)
    make("tensorflow", layers=every)
    with pytest.raises(ValueError, match="decay_mask needs the torch or JAX backend"):
        make("tensorflow", ADAMW, {}, "weight")
    with pytest.raises(TypeError, match="decay_mask must be a pattern"):
        make("jax", decay_mask={"enc": 3})
    with pytest.raises(ValueError, match=r"\['enc/bias'\] have no gradients"):
        moved(make("jax"), {**G, "enc": {**G["enc"], "bias": None}})
    masked = optax.masked(make("jax"), {"enc": {"weight": True, "bias": False}, "out": True})
    assert masked.init(X)
