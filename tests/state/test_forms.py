"""The forms in which trainers keep states: names, flat files, shapes to restore into."""

import re

import chex
import flax.serialization
import jax
import numpy as np
import pytest
from flax import nnx

import optzoo
from optzoo.state import state_like
from optzoo.testing import samples

from ..test_meshes import ALL

CASES = {
    **ALL,
    "groups": optzoo.param_groups({"table": optzoo.lazy_adam(0.1), ".*": optzoo.adam(0.1)}),
}


def stepped(name):
    tx, params = CASES[name], samples.params()
    if name == "ema_in_place":
        del params["one_row"]  # its rows have no halves
    return samples.step(tx, samples.dense_grads(params), params, tx.init(params))


def names_of(tree):
    """Names by dicts, tuples and lists alone, as a trainer's own walk makes them."""
    if isinstance(tree, dict):
        parts = [(key, tree[key]) for key in sorted(tree)]
    elif isinstance(tree, tuple | list):
        parts = [(str(i), part) for i, part in enumerate(tree)]
    else:
        return [("", tree)] if jax.tree.leaves(tree) else []
    return [(f"{key}/{name}".strip("/"), x) for key, part in parts for name, x in names_of(part)]


@pytest.mark.parametrize("name", CASES)
def test_a_state_is_of_dicts_and_tuples_with_plain_keys(name):
    """Walks that know nothing but dicts and tuples find all arrays, under names of files."""
    _, state = stepped(name)
    names = [name for name, _ in names_of(state)]
    assert len(set(names)) == len(names) == len(jax.tree.leaves(state))
    assert all(re.fullmatch(r"[\w.\-/]+", name) for name in names)
    of_jax = [
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, _ in jax.tree_util.tree_leaves_with_path(state)
    ]
    assert len(set(of_jax)) == len(of_jax)
    assert all(re.fullmatch(r"[\w.\-]+", name) for name in of_jax)


@pytest.mark.parametrize("name", CASES)
def test_a_state_comes_back_from_every_form(name, tmp_path):
    """As bytes of Flax, as flat names in a file, as pure dicts of NNX."""
    tx = CASES[name]
    params, state = stepped(name)
    like = jax.eval_shape(tx.init, params)
    same = lambda got: chex.assert_trees_all_equal(*map(jax.device_get, (got, state)))

    same(flax.serialization.from_bytes(state, flax.serialization.to_bytes(state)))

    keys = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_leaves_with_path(state)
    ]
    flat = dict(zip(keys, map(np.asarray, jax.tree.leaves(state)), strict=True))
    np.savez(tmp_path / "state.npz", **{k: a.view(f"V{a.itemsize}") for k, a in flat.items()})
    found = np.load(tmp_path / "state.npz")
    read = [found[k].view(a.dtype) for k, a in zip(keys, jax.tree.leaves(like), strict=True)]
    same(jax.tree.unflatten(jax.tree.structure(like), read))

    nested = {}
    for key, a in flat.items():
        *folders, last = key.split("/")
        node = nested
        for folder in folders:
            node = node.setdefault(folder, {})
        node[last] = a
    same(state_like(nested, like))

    if not isinstance(state, tuple) or jax.tree.leaves(state) == []:
        return
    variables = nnx.State({"state": jax.tree.map(nnx.OptVariable, state)})
    pure = nnx.to_pure_dict(variables)["state"]
    same(state_like(pure, like))
