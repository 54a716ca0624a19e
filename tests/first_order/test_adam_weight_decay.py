"""The Adam of BERT against its formula; its names, exclusions and rows."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optzoo
from optzoo.testing.samples import dense_grads, params, row_grads, step, to_dense, trajectory

ORIGINAL = {
    "class": "AdamWeightDecayOptimizer",
    "learning_rate": 0.1,
    "weight_decay_rate": 0.01,
    "beta_1": 0.8,
    "beta_2": 0.99,
    "epsilon": 1e-3,
    "exclude_from_weight_decay": ["LayerNorm", "layer_norm", "bias"],
    "name": "AdamWeightDecayOptimizer",
}
MODEL = {
    "bert": {
        "LayerNorm_0": {"scale": jnp.ones(2)},
        "dense": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)},
    },
    "unbiased": jnp.ones(2),
    "head": jnp.ones(2),
}


def test_formula():
    """No bias correction; the decay is of the old parameter, times the rate."""
    rate = lambda k: 0.5 / (1 + k)
    tx = optzoo.adam_weight_decay(rate, b1=0.8, b2=0.99, eps=1e-3, weight_decay=0.1)
    path = trajectory(tx, params()["table"], lambda x, i: jnp.cos(x + i), jnp.arange(5.0))
    x, m, v = np.asarray(params()["table"], np.float64), 0.0, 0.0
    for i, got in enumerate(path):
        g = np.cos(x + i)
        m, v = 0.8 * m + 0.2 * g, 0.99 * v + 0.01 * g**2
        x = x - 0.5 / (1 + i) * (m / (np.sqrt(v) + 1e-3) + 0.1 * x)
        np.testing.assert_allclose(got, x, rtol=2e-5, atol=2e-6)


def decayed(tx, model=MODEL):
    """The names of the parameters that move without a gradient."""
    zero = jax.tree.map(jnp.zeros_like, model)
    updates, _ = tx.update(zero, tx.init(model), model)
    leaves = jax.tree_util.tree_leaves_with_path(updates)
    return {jax.tree_util.keystr(p, simple=True, separator="/") for p, u in leaves if np.any(u)}


@pytest.mark.parametrize("name", ["AdamWeightDecayOptimizer", "nvidia.LAMBOptimizer"])
def test_exclusions_are_found_anywhere_in_the_name_or_nowhere(name):
    """There is no ``layer_norm`` here; ``unbiased`` is excluded by ``bias``, as ``re.search``."""
    assert decayed(optzoo.create(ORIGINAL | {"class": name})) == {"bert/dense/kernel", "head"}
    for excluded, left in (
        (["^head$"], {*decayed(optzoo.lamb(0.1, weight_decay=0.1))} - {"head"}),
        (["nothing"], decayed(optzoo.lamb(0.1, weight_decay=0.1))),
        ([".*"], set()),
        (None, decayed(optzoo.lamb(0.1, weight_decay=0.1))),
    ):
        config = ORIGINAL | {"class": name, "exclude_from_weight_decay": excluded}
        assert decayed(optzoo.create(config)) == left
    names = {
        "/".join(re.findall(r"\w+", jax.tree_util.keystr(path)))
        for path, _ in jax.tree_util.tree_leaves_with_path(MODEL)
    }
    assert decayed(optzoo.lamb(0.1, weight_decay=0.1)) == names


@pytest.mark.parametrize(
    ("excluded", "error", "message"),
    [
        ("bias", TypeError, "^exclude_from_weight_decay must be a list of patterns, got 'bias'"),
        (3, TypeError, "^exclude_from_weight_decay must be a list of patterns, got 3"),
        ([3], TypeError, "^exclude_from_weight_decay: a pattern must be a string, got 3"),
        (["("], ValueError, "^exclude_from_weight_decay: '[(]' is not a regular expression"),
    ],
)
def test_bad_exclusions(excluded, error, message):
    with pytest.raises(error, match=message):
        optzoo.create(ORIGINAL | {"exclude_from_weight_decay": excluded})


def test_arguments_are_those_of_the_original_and_are_not_rounded():
    """TensorFlow computes ``1 - beta_2`` in double precision here."""
    tx = optzoo.create(ORIGINAL | {"weight_decay_rate": 0.0})
    ours = optzoo.adam_weight_decay(0.1, b1=0.8, b2=0.99, eps=1e-3)
    x = params()
    chex.assert_trees_all_equal(step(tx, dense_grads(x), x), step(ours, dense_grads(x), x))
    state = tx.init(x)
    assert optzoo.slot_names(state) == ("adam_m", "adam_v")
    one = tx.update(jax.tree.map(jnp.ones_like, x), state, x)[1]
    assert optzoo.get_slot(one, "adam_v")["table"][0, 0] == np.float32(1 - 0.99)


def test_skip_is_a_mask():
    some = optzoo.adam_weight_decay(0.1, weight_decay=0.1, skip=("kernel", "head"))
    every = {"bert/LayerNorm_0/scale", "bert/dense/bias", "unbiased"}
    assert decayed(some) == every
    with pytest.raises(ValueError, match=r"^skip: no parameter matches \['gamma'\]"):
        decayed(optzoo.adam_weight_decay(0.1, skip="gamma"))


def test_rows_are_as_the_dense_gradient():
    tx, x = optzoo.adam_weight_decay(0.1, weight_decay=0.1), params()
    rows = row_grads(x)
    first = step(tx, dense_grads(x), x)
    got, want = (step(tx, g, *first) for g in (rows, to_dense(rows)))
    chex.assert_trees_all_close(got, want, rtol=1e-6)
    assert np.all(got[0]["table"][0] != first[0]["table"][0])
