"""All that takes patterns, on names that are parts of each other."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo.core.paths import path_name
from optzoo.sharded.row_sharding import shardings_by_leaf
from optzoo.state.types import RowsOfCycle, nodes_of

NAMES = (
    *("bias", "bias_scale", "my_bias", "bias+", "a/bias", "a/bias_scale", "a/my_bias"),
    *("ab/bias", "a.b/bias", "a/bias_/x", "b/a/bias"),
)
# A pattern, and which of the names it matches: as a whole, or without a slash by last parts.
CHOSEN = {
    "bias": {"bias", "a/bias", "ab/bias", "a.b/bias", "b/a/bias"},
    "bias.?": {"bias", "bias+", "a/bias", "ab/bias", "a.b/bias", "b/a/bias"},
    "x": {"a/bias_/x"},
    "a/bias": {"a/bias"},
    "a/.*": {"a/bias", "a/bias_scale", "a/my_bias", "a/bias_/x"},
    ".*/bias": {"a/bias", "ab/bias", "a.b/bias", "b/a/bias"},
    "(.*/)?my_.*": {"my_bias", "a/my_bias"},
    "a.*/bias": {"a/bias", "ab/bias", "a.b/bias"},
    r"a\.b/bias": {"a.b/bias"},
    "bias|a/bias": {"bias", "a/bias"},
    "b.a.b.*": {"b/a/bias"},  # it matches no last part
    ".*_.x": {"a/bias_/x"},
    "BIAS": set(),
    "ias": set(),
    "a/bia": set(),
    "a": set(),
}
# The name of a layer of RETURNN, and of what is in it.
LAYERS = {
    "a": {"a/bias", "a/bias_scale", "a/my_bias", "a/bias_/x"},
    "a/bias": {"a/bias"},
    "a/bias_": {"a/bias_/x"},
    "b": {"b/a/bias"},
    "bia": set(),
    "a.b": {"a.b/bias"},
}


def tree(value=lambda name: jnp.ones((2, 2))):
    made = {}
    for name in NAMES:
        *scopes, last = name.split("/")
        inside = made
        for scope in scopes:
            inside = inside.setdefault(scope, {})
        inside[last] = value(name)
    return made


def where(marks):
    """The names of the leaves that are true."""
    paths = jax.tree_util.tree_leaves_with_path(marks)
    return {path_name(path) for path, mark in paths if mark}


def moved(tx):
    """The parameters that an update changes."""
    x = tree()
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, x), tx.init(x), x)
    return where(jax.tree.map(lambda u: bool(np.any(u)), updates))


def accumulated(pattern):
    state = optzoo.accumulate(optax.sgd(0.1), 2, max_rows={pattern: 1}).init(tree())
    is_kept = lambda a: isinstance(a, RowsOfCycle)
    return where(jax.tree.map(is_kept, state.sums, is_leaf=is_kept))


def clipped(pattern):
    return moved(optzoo.variable_clipping(optax.sgd(0.1), {pattern: (1,)}, 0.5))


def sharded(pattern):
    found = shardings_by_leaf({pattern: optzoo.sharded.RowSharding(2, 1, multiple=1)}, tree())
    names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree())]
    return {name for name, sharding in zip(names, found, strict=True) if sharding}


def described(pattern):
    tables = {pattern: optzoo.sharded.RowSharding(2, 1, multiple=1)}
    shown = optzoo.describe(optzoo.gradient_descent(0.1), tree(), tables=tables, ids={pattern: 3})
    return {table.parameter for table in shown.tables}


def grouped(pattern):
    move = optax.stateless(lambda updates, params: jax.tree.map(jnp.ones_like, updates))
    return moved(optzoo.param_groups({pattern: move, ".*": optax.set_to_zero()}))


def decayed(pattern):
    inner = optax.sgd(0.1)
    return moved(optzoo.decoupled_weight_decay(inner, weight_decay_per_step=0.5, mask=pattern))


def decayed_cautiously(pattern):
    inner = optax.sgd(0.1)
    return moved(optzoo.cautious_weight_decay(inner, weight_decay_per_step=0.5, mask=pattern))


def turned(pattern):
    x = tree(lambda name: jnp.array([3.0, 4.0]))
    tx = optzoo.hyperball(optax.sgd(0.1), 0.1, {pattern: (0,)})
    updates, _ = tx.update(tree(lambda name: jnp.ones(2)), tx.init(x), x)
    norms = jax.tree.map(lambda u: jnp.linalg.norm(jnp.array([3.0, 4.0]) + u), updates)
    return where(jax.tree.map(lambda norm: abs(norm - 5) < 1e-5, norms))


def ahead(pattern):
    """Those that have slots."""
    state = optzoo.ema_nesterov(optax.sgd(0.1), 0.5, mask=pattern).init(tree())
    slots = state[1].inner_state.slots.direction
    return {path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(slots)}


def not_skipped(pattern):
    return {*NAMES} - moved(optzoo.lars(0.1, l2_weight_decay=0.5, skip=[pattern]))


def not_skipped_by_part(part):
    """``skip_list`` of the original has parts of names."""
    lars = {"class": "LARS", "learning_rate": 0.1, "weight_decay": 0.5, "skip_list": [part]}
    return {*NAMES} - moved(optzoo.create(lars))


# Parts of names.
PARTS = {
    "my_": {"my_bias", "a/my_bias"},
    "a/bias": {"a/bias", "a/bias_scale", "a/bias_/x", "b/a/bias"},
    "a.b": {"a.b/bias"},
    "s+": {"bias+"},
    "/x": {"a/bias_/x"},
    "x/": set(),
    "BIAS": set(),
}


def in_layer(layer):
    config = {"optimizer": {"class": "GradientDescent"}, "learning_rate": 1.0}
    return moved(optzoo.interop.returnn.returnn_updater(config, layers={layer: {"L2": 0.5}}))


def saved(pattern, folder):
    """The parameters whose slots have a name of the optimizer of their own."""
    path, x = str(folder / "model.npz"), tree()
    names = {pattern: "Chosen", ".*": "Rest"}
    state = optzoo.momentum(0.1, 0.9).init(x)
    optzoo.save_tf1_state(path, x, state, optimizer_name=names)
    with np.load(path) as file:
        return {name.removesuffix("/Chosen") for name in file if name.endswith("/Chosen")}


@pytest.mark.parametrize(
    ("chosen", "table"),
    [
        *((f, CHOSEN) for f in (accumulated, clipped, turned, sharded, described, grouped)),
        *((f, CHOSEN) for f in (decayed, decayed_cautiously, ahead, not_skipped)),
        (not_skipped_by_part, PARTS),
        (in_layer, LAYERS),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_which_names_are_chosen(chosen, table):
    for pattern, want in table.items():
        if want:
            assert chosen(pattern) == want, pattern
            continue
        with pytest.raises(ValueError, match="no parameter"):
            chosen(pattern)


def test_names_of_optimizers_in_a_checkpoint(tmp_path):
    for pattern, want in CHOSEN.items():
        assert saved(pattern, tmp_path) == want, pattern


class Slots(NamedTuple):
    m: Any
    ema_m: Any
    m_ema: Any


def test_slots_whose_names_are_parts_of_each_other():
    slots = Slots(*(optzoo.rules.full(value) for value in (1.0, 2.0, 3.0)))
    tx = optzoo.rules.leafwise(lambda g, x, s, t: (g, s), slots=slots)
    state = optzoo.param_groups({"m": tx, "ema_m": tx}).init(
        {"m": jnp.ones(1), "ema_m": jnp.ones(1)}
    )
    for name, want in {"m": 1, "ema_m": 2, "m_ema": 3}.items():
        assert optzoo.get_slot(state, name) == {"m": want, "ema_m": want}
    for name in ("ema", "a_m", "m_", "_m", "M"):
        with pytest.raises(ValueError, match="no slot has the name"):
            optzoo.get_slot(state, name)


def test_steps_whose_names_are_parts_of_each_other():
    x, state = {"w": jnp.ones(2)}, {"w/Momentum": np.ones(2, "float32")}
    others = {"my_global_step": 1, "global_step_2": 2, "a_global_step/x": 3, "a/global_step": 7}
    given = {"w": np.ones(2, "float32"), **state, **{k: np.int64(n) for k, n in others.items()}}
    left = ["my_global_step", "global_step_2", "a_*"]
    _, loaded = optzoo.load_tf1_state(optzoo.momentum(0.1, 0.9), x, given, ignore=left)
    assert nodes_of(optzoo.state.LeafwiseState, loaded)[0].count == 7
