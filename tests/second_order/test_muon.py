"""Muon: Newton-Schulz steps by singular values of NumPy, axes, and what is refused."""

import pathlib
import re
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import optzoo
from optzoo.testing import samples

RNG = np.random.default_rng(0)
MATRIX = RNG.normal(size=(4, 6)).astype("float32")
EACH = ((3.0, -4.0, 1.5), (2.5, -2.0, 0.5), (1.5, -0.5, 0.0))
PLAIN = {"momentum": 0.0, "weight_decay": 0.0, "iteration_dtype": None}


def first(tx, grads, params):
    return jax.jit(tx.update)(grads, tx.init(params), params)


def direction(g, **arguments):
    """What the first step moves against, at rate 1."""
    return first(optzoo.muon(-1.0, **{**PLAIN, **arguments}), g, g)[0]


def by_singular_values(g, each, eps=1e-7):
    """The singular values of a matrix over its norm go through the polynomials; by NumPy."""
    u, s, v = np.linalg.svd(g.astype(np.float64), full_matrices=False)
    s = s / max(np.sqrt(np.sum(s**2)), eps)
    for a, b, c in each:
        s = a * s + b * s**3 + c * s**5
    return u * s @ v


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
def test_singular_values(shape, x64):
    """With coefficients of each step; a matrix wider than high has a factor."""
    g = RNG.normal(size=shape)
    with x64(True):
        got = direction(g, ns_coefficients=EACH, ns_steps=3)
        large = direction(g, ns_coefficients=EACH, ns_steps=3, eps=30.0)
        one = direction(g, ns_coefficients=EACH[0], ns_steps=3, adjust_lr="match_rms_adamw")
    factor = max(1, shape[1] / shape[0]) ** 0.5
    np.testing.assert_allclose(got, factor * by_singular_values(g, EACH), rtol=0, atol=1e-13)
    np.testing.assert_allclose(large, factor * by_singular_values(g, EACH, 30.0), atol=1e-13)
    want = 0.2 * max(shape) ** 0.5 * by_singular_values(g, 3 * [EACH[0]])
    np.testing.assert_allclose(one, want, rtol=0, atol=1e-13)


def test_the_most_steps():
    """99 are taken, and 100 refused."""
    steps = {"ns_coefficients": EACH[2], "ns_steps": 99}
    got = direction(MATRIX, **steps)
    np.testing.assert_allclose(got @ got.T, 1.5 * np.eye(4), atol=1e-5)
    with pytest.raises(ValueError, match="ns_steps must be at most 99, got 100"):
        optzoo.muon(ns_steps=100)


def test_axes():
    """Batches by themselves, inputs together, outputs together, in any order."""
    cube = RNG.normal(size=(3, 4, 5)).astype("float32")
    matrix = jax.jit(lambda g: direction(g))
    want = {
        "bio": np.stack([matrix(g) for g in cube]),
        "iio": matrix(cube.reshape(12, 5)).reshape(cube.shape),
        "ioo": matrix(cube.reshape(3, 20)).reshape(cube.shape),
        "oib": np.stack([matrix(g.T).T for g in np.moveaxis(cube, 2, 0)], axis=2),
        "oio": np.moveaxis(matrix(np.moveaxis(cube, 1, 0).reshape(4, 15)).reshape(4, 3, 5), 0, 1),
    }
    got = jax.jit(lambda g: {axes: direction(g, axes=axes) for axes in want})(cube)
    for axes, x in want.items():
        np.testing.assert_allclose(got[axes], x, rtol=0, atol=1e-5, err_msg=axes)


def test_vectors_and_scalars():
    """A vector of outputs is divided by its root mean square, a scalar by its size."""
    keep = {"ns_coefficients": EACH[2], "axes": ("", "o", "bo")}
    vector = MATRIX[0]
    over_rms = lambda x: x / np.sqrt(np.mean(x**2))
    np.testing.assert_allclose(direction(vector, **keep), over_rms(vector), rtol=1e-5)
    np.testing.assert_allclose(direction(-vector[1], **keep), -np.sign(vector[1]), rtol=1e-6)
    want = [over_rms(x) for x in MATRIX]
    np.testing.assert_allclose(direction(MATRIX, **keep), want, rtol=1e-5)


@pytest.mark.parametrize("shape", [(3,), (), (2, 3, 4), (3, 3, 4, 8)])
def test_other_parameters_are_refused(shape):
    params = {"layer": {"kernel": jnp.ones((2, 3)), "other": jnp.ones(shape)}}
    error = f"'layer/other' has shape {re.escape(str(shape))}.* 'io': use .*param_groups"
    tx = optzoo.muon()
    with pytest.raises(ValueError, match=error):
        tx.init(params)
    # A state from elsewhere does not help.
    other = optzoo.muon(axes=("io", "biioo"[-len(shape) :] if shape else ""))
    state = jax.eval_shape(other.init, params)
    with pytest.raises(ValueError, match=error):
        jax.eval_shape(tx.update, params, state, params)
    groups = optzoo.param_groups({"kernel": tx, ".*": optax.adamw(1e-3)})
    assert samples.step(groups, params, params)[0]["layer"]["other"].shape == shape


def test_what_is_not_trained_may_have_any_axes():
    params = {"kernel": jnp.ones((2, 3)), "steps": jnp.arange(3), "none": None}
    grads = {"kernel": jnp.ones((2, 3)), "steps": None, "none": None}
    updates, _ = optzoo.muon().update(grads, optzoo.muon().init(params), params)
    assert updates["steps"] is None


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"axes": "hwio"}, ValueError, "axes must be letters b .* got 'hwio'"),
        ({"axes": ("io", 3)}, TypeError, "axes must be a string such as 'io', or a tuple"),
        ({"axes": ("io", "oi")}, ValueError, "axes must be one string for each number of axes"),
        ({"ns_coefficients": "dion"}, TypeError, "ns_coefficients must be three numbers, or"),
        ({"ns_coefficients": EACH}, ValueError, "got 3 rows for ns_steps=5"),
        ({"ns_coefficients": (1, 2)}, ValueError, r"got \(1, 2\)"),
        ({"iteration_dtype": "float16"}, ValueError, "must be one of bfloat16, float32, float64"),
        ({"iteration_dtype": "int32"}, TypeError, "must be a floating-point dtype or None"),
    ],
)
def test_errors(arguments, error, text):
    with pytest.raises(error, match=text):
        optzoo.muon(**arguments)


def test_float64_needs_x64():
    tx = optzoo.muon(iteration_dtype="float64")
    with pytest.raises(ValueError, match="iteration_dtype float64 needs jax"):
        jax.eval_shape(tx.update, MATRIX, tx.init(MATRIX), MATRIX)


def test_norms_beyond_the_numbers():
    """The square of the norm overflows; of zero there is no direction, with any epsilon."""
    want, huge = (direction(g, iteration_dtype="bfloat16") for g in (MATRIX, MATRIX * 2.0**100))
    np.testing.assert_array_equal(huge, want)
    assert np.max(np.abs(want)) > 0.1
    for eps in (1e-7, 0.0):
        assert not np.any(direction(0 * MATRIX, eps=eps))


@pytest.mark.parametrize(("dtype", "short"), [("bfloat16", "bf16"), ("float32", "f32")])
def test_dtypes_of_products(dtype, short):
    """All three in the dtype that is asked for, with sums in float32."""
    program = jax.jit(lambda g: direction(g, iteration_dtype=dtype)).lower(MATRIX).as_text()
    found = re.findall(r"dot_general .*: \(tensor<.*x(.*)>, tensor<.*x(.*)>\) -> .*x(.*)>", program)
    assert found == 3 * [(short, short, "f32")]


def test_the_momentum_of_parameters_in_16_bits():
    state = jax.eval_shape(optzoo.muon().init, jnp.ones((2, 3), jnp.bfloat16))
    assert state[0].slots.momentum_buffer.dtype == jnp.float32


def test_by_name():
    """With torch's name of the argument, from a config, and its slot."""
    config = {"class": "muon", "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0}
    tx = optzoo.create(config, learning_rate=1.0, iteration_dtype="float32", momentum=0.0)
    updates, state = first(tx, MATRIX, MATRIX)
    want = -direction(MATRIX, adjust_lr="match_rms_adamw")
    np.testing.assert_allclose(updates, want, rtol=1e-5)
    assert optzoo.slot_names(state) == ("momentum_buffer",)
    np.testing.assert_allclose(optzoo.get_slot(state, "momentum_buffer"), MATRIX, rtol=1e-6)


def test_which_parameters_decay():
    params = {"kernel": MATRIX, "table": MATRIX}
    zeros = jax.tree.map(np.zeros_like, params)
    updates, _ = first(optzoo.muon(0.1, weight_decay=0.5, mask="kernel"), zeros, params)
    np.testing.assert_allclose(updates["kernel"], -0.05 * MATRIX, rtol=1e-6)
    assert not np.any(updates["table"])


# As docs/second_order.md says of optax


def distances(**more):
    """How far the directions of optax and of optzoo are from each other, by steps."""
    grads = RNG.normal(size=(100, 64, 64)).astype("float32")
    ours = optzoo.muon(1.0, weight_decay=0.0, iteration_dtype=None, **more)
    theirs = optax.contrib.muon(1.0, **more)
    both = samples.side_by_side({"ours": ours, "theirs": theirs})
    found = samples.run(both, grads)[0]
    apart = np.linalg.norm(found["ours"] - found["theirs"], axis=(1, 2))
    return apart / np.linalg.norm(found["ours"], axis=(1, 2))


def test_optax_has_another_bias():
    """Of independent gradients, the worst case; without Nesterov there is one factor alone."""
    far = distances()
    assert far[0] < 1e-5 and 0.12 < far[1] < 0.2 and far[19] < 0.03 and far[-1] < 1e-3
    assert np.max(distances(nesterov=False)) < 1e-5


def test_the_example_learns():
    path = pathlib.Path(__file__).parents[2] / "examples" / "muon.py"
    with jax.numpy_rank_promotion("allow"):
        losses = runpy.run_path(str(path))["train"](steps=60)
    assert losses[0] > 4 and np.mean(losses[-5:]) < 2.7
