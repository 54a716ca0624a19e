"""Adafactor against its formula and optax's: which axes are factored, rates, slots, rows."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo.testing.samples import dense_grads, params, row_grads, step, to_dense, trajectory

RNG = np.random.default_rng(0)
SHAPES = {"w": (6, 4), "wide": (3, 5), "cube": (3, 5, 4), "ties": (4, 4, 2), "b": (4,), "s": ()}
X = {k: jnp.asarray(RNG.normal(size=shape), jnp.float32) for k, shape in SHAPES.items()}
X["zero"] = jnp.zeros((4, 4))


def gradients(x, i):
    return jax.tree.map(lambda x: jnp.cos(x + i) * jnp.arange(1.0, 1 + x.size).reshape(x.shape), x)


def rms(a):
    return np.sqrt(np.mean(a**2))


def in_numpy(x, rate, decay, axes, b1=0.0, threshold=1.0, scaled=True, eps=1e-30, least=1e-3):
    """The path of a parameter, in float64; ``rate`` and ``decay`` are functions of the step."""
    x, v, m = np.asarray(x, np.float64), [0.0, 0.0], 0.0
    for i in range(5):
        g = np.asarray(gradients(x, i), np.float64)
        squares, d = g**2 + eps, decay(i)
        if axes is None:
            v[0] = d * v[0] + (1 - d) * squares
            u = g / np.sqrt(v[0])
        else:
            v = [
                d * a + (1 - d) * squares.mean(k, keepdims=True)
                for a, k in zip(v, axes, strict=True)
            ]
            u = g / np.sqrt(v[0] / v[0].mean(axes[1], keepdims=True) * v[1])
        u = u if threshold is None else u / max(1, rms(u) / threshold)
        down = rate(i) * (max(rms(x), least) if scaled else 1) * u
        m = b1 * m + (1 - b1) * down
        x = x - m
        yield x


OF_T2T = {"w": (1, 0), "wide": (1, 0), "cube": (2, 1), "ties": (2, 1), "zero": (1, 0)}
# The longest axis, then the second longest; of equal ones the first.
OF_MESH = {"w": (0, 1), "cube": (1, 2), "ties": (0, 1), "zero": (0, 1)}
DEFAULT_RATE, DEFAULT_DECAY = (
    (lambda k: min((k + 1) ** -0.5, 0.01)),
    (lambda k: 1 - (k + 1) ** -0.8),
)
SETTINGS = {
    "default": ({}, OF_T2T, {}),
    "mesh": ({"min_dim_size_to_factor": 4}, OF_MESH, {}),
    "whole": ({"factored": False}, {}, {}),
    "momentum": ({"b1": 0.7}, OF_T2T, {"b1": 0.7}),
    "no scale": (
        {"multiply_by_parameter_scale": False},
        OF_T2T,
        {"scaled": False, "rate": lambda k: 0.05 * DEFAULT_RATE(k)},
    ),
    "no clipping": ({"clipping_threshold": None}, OF_T2T, {"threshold": None}),
    "others": (
        {
            "learning_rate": lambda k: 0.2 / (1 + k),
            "decay_rate": 0.9,
            "clipping_threshold": 0.5,
            "eps": 1e-2,
            "min_parameter_scale": 0.3,
        },
        OF_T2T,
        {
            "rate": lambda k: 0.2 / (1 + k),
            "decay": lambda k: 0.9,
            "threshold": 0.5,
            "eps": 1e-2,
            "least": 0.3,
        },
    ),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_formula(setting):
    ours, axes, theirs = SETTINGS[setting]
    theirs = {"rate": DEFAULT_RATE, "decay": DEFAULT_DECAY, **theirs}
    path = trajectory(optzoo.adafactor(**ours), X, gradients, jnp.arange(5.0))
    for name, x in X.items():
        for i, want in enumerate(in_numpy(x, axes=axes.get(name), **theirs)):
            scale = np.max(np.abs(want))
            np.testing.assert_allclose(path[name][i], want, rtol=1e-5, atol=1e-5 * scale)


def test_is_adafactor_of_optax_for_matrices():
    """Unless the second and the third longest axes are equal: of these it takes the last."""
    ours = optzoo.adafactor(0.1, b1=0.9, min_dim_size_to_factor=4)
    theirs = optax.adafactor(0.1, momentum=0.9, min_dim_size_to_factor=4)
    of_shape = lambda *shape: jnp.cos(jnp.arange(float(np.prod(shape)))).reshape(shape)
    ties = {"4, 4, 4": of_shape(4, 4, 4), "6, 4, 4": of_shape(6, 4, 4)}
    x = {**X, "6, 6, 4": of_shape(6, 6, 4), **ties}
    path, want = (trajectory(tx, x, gradients, jnp.arange(5.0)) for tx in (ours, theirs))
    for name in ties:
        assert not np.allclose(path.pop(name), want.pop(name), rtol=1e-2), name
    chex.assert_trees_all_close(path, want, rtol=1e-5, atol=1e-6)


def test_slots_and_their_shapes():
    shapes = lambda tx, slot: jax.tree.map(jnp.shape, optzoo.get_slot(tx.init(X), slot))
    t2t, mesh = optzoo.adafactor(), optzoo.adafactor(b1=0.9, min_dim_size_to_factor=4)
    whole = {"wide": (3, 5), "b": (4,), "s": ()}
    assert optzoo.slot_names(t2t.init(X)) == ("m", "vr", "vc", "v")
    assert optzoo.get_slot(t2t.init(X), "m")["w"] == ()
    rows = shapes(t2t, "vr")
    assert rows["w"] == (6,) and rows["cube"] == (3, 5) and rows["wide"] == (3,)
    columns = shapes(t2t, "vc")
    assert columns["w"] == (4,) and columns["cube"] == (3, 4) and columns["wide"] == (5,)
    v = shapes(mesh, "v")
    assert {name: v[name] for name in whole} == whole and v["w"] == ()
    assert optzoo.get_slot(mesh.init(X), "v")["w"] == ()
    assert shapes(mesh, "vr")["w"] == (4,) and shapes(mesh, "vc")["w"] == (6,)
    assert shapes(mesh, "m") == {name: x.shape for name, x in X.items()}


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("tensor2tensor.adafactor", 1),
        ("AdafactorOptimizer", 1),
        ("mesh_tensorflow.optimize.AdafactorOptimizer", 128),
        ("t5.Adafactor", 128),
    ],
)
def test_which_projects_factor_which_parameters(name, least):
    tx = optzoo.create(name)
    for shape in ((127, 128), (128, 128)):
        state = jax.eval_shape(tx.init, jnp.ones(shape))
        is_whole = min(shape) < least
        v, vr = (optzoo.get_slot(state, slot) for slot in ("v", "vr"))
        assert v.shape == shape and vr == () if is_whole else v == () and vr.shape == shape[:1]


def test_arguments_by_the_names_of_the_originals():
    theirs = {"beta1": 0.5, "epsilon1": 1e-3, "epsilon2": 0.1, "decay_rate": 0.9}
    unused = {"simulated_quantize_bits": None, "parameter_encoding": None, "name": "Adafactor"}
    tx = optzoo.create("tensor2tensor.adafactor", learning_rate=0.1, **theirs, **unused)
    ours = optzoo.adafactor(0.1, 0.9, 0.5, eps=1e-3, min_parameter_scale=0.1)
    chex.assert_trees_all_equal(step(tx, gradients(X, 0), X), step(ours, gradients(X, 0), X))
    with pytest.raises(TypeError, match="adafactor has no argument 'simulated_quantize_bits'"):
        optzoo.create("Adafactor", simulated_quantize_bits=8)


def test_rows_are_as_the_dense_gradient():
    tx, x = optzoo.adafactor(0.1), params()
    rows = row_grads(x)
    first = step(tx, dense_grads(x), x)
    got, want = (step(tx, g, *first) for g in (rows, to_dense(rows)))
    chex.assert_trees_all_close(got, want, rtol=1e-6)


def test_missing_gradients_change_nothing():
    tx, x = optzoo.adafactor(0.1, b1=0.9), params()
    _, state = step(tx, dense_grads(x), x)
    some = {"table": None, "layer": (None, jnp.ones(())), "one_row": None}
    updates, after = tx.update(some, state, x)
    assert updates["table"] is updates["one_row"] is None and updates["layer"][1] != 0
    for slot in ("m", "vr", "vc", "v"):
        old, new = (optzoo.get_slot(s, slot) for s in (state, after))
        for name in ("table", "one_row"):
            chex.assert_trees_all_equal(new[name], old[name])
        chex.assert_trees_all_equal(new["layer"][0], old["layer"][0])


def test_rows_far_below_the_mean_give_no_nan():
    """The quotient of a row without gradients and the mean is no number of float32."""
    x = jnp.ones((4, 3))
    g = jnp.zeros((4, 3)).at[0].set(1e6)
    tx = optzoo.adafactor(0.1)
    updates, _ = tx.update(g, tx.init(x), x)
    assert np.all(np.isfinite(updates)) and np.all(updates[1:] == 0) and np.all(updates[0] < 0)


def test_16_bits_have_slots_in_32():
    x = jax.tree.map(lambda x: x.astype(jnp.bfloat16), X)
    state = optzoo.adafactor(b1=0.9).init(x)
    assert {a.dtype for a in jax.tree.leaves(state)} == {jnp.dtype("int32"), jnp.dtype("float32")}


def test_what_needs_one_array_of_the_parameter_is_refused():
    """A row of a table sharded by rows does not have the whole table's norms and means."""
    tx, table = optzoo.adafactor(0.1), jnp.ones((8, 4))
    with pytest.raises(ValueError, match="rows"):
        optzoo.on_rows(tx).update(
            optzoo.SparseRows(jnp.array([1]), jnp.ones((1, 4)), 8), tx.init(table), table
        )
    with pytest.raises(ValueError, match="native code is required"):
        optzoo.native_step(tx, required=True)(table, tx.init(table), table)
