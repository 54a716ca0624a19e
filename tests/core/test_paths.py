"""Names of parameters, and parameters by name."""

import inspect
from typing import Any, NamedTuple

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optzoo
from optzoo import SparseRows
from optzoo.core.boxes import Boxes, without_boxes
from optzoo.core.paths import (
    check_mask,
    path_name,
    resolve_mask,
    resolve_unmasked,
)
from tests.public import NAMES


class Layer(NamedTuple):
    kernel: float
    bias: float


X = {"encoder": [Layer(1.0, 2.0), Layer(3.0, 4.0)], "head": {"bias": 5.0}, "table": 6.0}


def names(tree):
    return [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def test_names():
    assert names(X) == [
        *("encoder/0/kernel", "encoder/0/bias", "encoder/1/kernel", "encoder/1/bias"),
        *("head/bias", "table"),
    ]
    assert names(1.0) == [""]


class Boxed(NamedTuple):
    value: Any
    other: Any = None


def test_a_box_has_no_name():
    """The last ``value`` is the box of Flax; parameters still have different names."""
    inside = Boxed(Boxed(1.0, 2.0), 3.0)
    tree = {"a": Boxed(1.0), "b": {"value": 2.0}, "c": inside}
    assert names(tree) == ["a", "b/value", "c/value", "c/value/other", "c/other"]
    assert names(nnx.Param(jnp.ones(2))) == names(1.0)
    assert names(nnx.State({"a": nnx.Param(jnp.ones(2))})) == ["a"]


def test_without_boxes():
    """The state has none; updates have those of the gradients."""
    tx = without_boxes(optax.trace(0.5))
    grads = {"a": nn.Partitioned(jnp.ones(2), ("x",)), "b": Boxed(jnp.ones(3))}
    state = tx.init(grads)
    assert jax.tree.structure(state.trace) == jax.tree.structure({"a": 0, "b": Boxed(0)})
    for _ in range(2):
        updates, state = tx.update(grads, state, grads)
    chex.assert_trees_all_equal(updates, jax.tree.map(lambda g: 1.5 * g, grads))
    rows = {"a": nn.Partitioned(SparseRows(jnp.array([1]), jnp.ones((1, 2)), 3), ("x", None))}
    unchanged = without_boxes(optax.identity())
    chex.assert_trees_all_equal_structs(unchanged.update(rows, unchanged.init(rows))[0], rows)


@pytest.mark.parametrize(
    ("which", "chosen"),
    [
        (("bias",), ["encoder/0/bias", "encoder/1/bias", "head/bias"]),
        (["encoder/1/.*", "tab.*"], ["encoder/1/kernel", "encoder/1/bias", "table"]),
        ("kernel|bias", names(X)[:5]),
        (".*", names(X)),
        ((), []),
        ([], []),
        (None, []),
        (True, names(X)),
        (False, []),
        (
            {"encoder": [True, Layer(False, True)], "head": False, "table": True},
            ["encoder/0/kernel", "encoder/0/bias", "encoder/1/bias", "table"],
        ),
        (lambda x: {**jax.tree.map(lambda leaf: leaf > 4, x), "table": False}, ["head/bias"]),
        (lambda x: {"encoder": False, "head": np.True_, "table": False}, ["head/bias"]),
    ],
    ids=lambda value: None if callable(value) else str(value),
)
def test_marked(which, chosen):
    marks = resolve_mask(which, X)
    assert jax.tree.structure(marks) == jax.tree.structure(X)
    flags = jax.tree_util.tree_leaves_with_path(marks)
    assert [path_name(path) for path, mark in flags if mark] == chosen
    rest = jax.tree_util.tree_leaves_with_path(resolve_unmasked(which, X))
    assert [path_name(path) for path, mark in rest if not mark] == chosen


@pytest.mark.parametrize(
    "which", [("t.*",), {"table": True, "none": True, "x": (False, True)}, True]
)
def test_a_gradient_is_a_leaf_whatever_it_is(which):
    """Rows and a missing gradient are marked as one; a masked leaf is none."""
    rows = SparseRows(jnp.array([0]), jnp.ones((1, 2)), 3)
    grads = {"table": rows, "none": None, "x": (np.ones(2), optax.MaskedNode())}
    got = resolve_mask(which, grads)
    assert got["table"] is True and got["none"] is (which != ("t.*",))
    assert got["x"] == (which is True, optax.MaskedNode())


def test_other_marks_are_refused():
    check_mask(none=None, pattern="bias", patterns=("bias",), tree={"head": True}, nothing=())
    with pytest.raises(ValueError, match=r"^skip: '\(' is not a regular expression"):
        check_mask(skip="(")
    for wrong in ({"head": 1}, ("bias", True, None, 0)):
        with pytest.raises(TypeError, match="mask must be a pattern of names"):
            check_mask(mask=wrong)
        with pytest.raises(TypeError, match="mask must be a pattern of names"):
            resolve_mask(lambda x, wrong=wrong: wrong, X)
    with pytest.raises(TypeError, match="must return a tree of bools, got None"):
        resolve_mask(lambda x: None, X)


def test_patterns_that_match_nothing_are_refused():
    """But what optax.masked hides may be what they match; an empty tree has nothing to match."""
    message = r"skip: no parameter matches \['/table', 'Bias'\]; the parameters are \['encoder/0/"
    with pytest.raises(ValueError, match=message):
        resolve_mask(("bias", "Bias", "/table"), X, "skip")
    assert not any(jax.tree.leaves(resolve_mask(lambda x: jax.tree.map(lambda _: False, x), X)))
    hidden = {**X, "head": {"bias": optax.MaskedNode()}}
    assert not any(jax.tree.leaves(resolve_mask("head/.*", hidden)))
    assert resolve_mask("bias", {}) == {}


def test_a_pattern_of_no_last_part_is_one_of_whole_names():
    marked = lambda pattern, tree: names(
        jax.tree.map(lambda m: m or None, resolve_mask(pattern, tree))
    )
    assert marked(".*code.*", X) == [name for name in names(X) if "encoder" in name]
    assert marked("ta.*", {**X, "tail": {"bias": 1.0}}) == ["table"]
    # Whether the last part is hidden here does not matter.
    hidden = {**X, "table": optax.MaskedNode(), "tail": {"bias": 1.0}}
    assert marked("ta.*", hidden) == []
    assert marked("tai.*", hidden) == ["tail/bias"]


def test_a_function_sees_rows_as_their_array():
    """What is hidden stays so, and a missing gradient is not marked."""
    grads = {
        "table": SparseRows(jnp.array([0]), jnp.ones((1, 2)), 3),
        "rest": (np.ones(2), None, optax.MaskedNode()),
    }
    got = resolve_mask(lambda tree: jax.tree.map(lambda x: x.shape == (3, 2), tree), grads)
    assert got == {"table": True, "rest": (False, False, optax.MaskedNode())}
    with pytest.raises(TypeError, match="True or False for each parameter, got None"):
        resolve_mask({**dict.fromkeys(X, True), "table": None}, X)


def test_a_tree_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="encoder"):
        resolve_mask({"encoder": True}, X)


OF_MARKED = {
    "adam_weight_decay": lambda: optzoo.adam_weight_decay(0.1, skip="table", weight_decay=0.1),
    "lamb": lambda: optzoo.lamb(0.1, skip="table", weight_decay=0.1),
    "lars": lambda: optzoo.lars(0.1, skip="table"),
    "muon": lambda: optzoo.muon(0.1, mask="table", weight_decay=0.1),
    "soap": lambda: optzoo.soap(0.1, mask="table", weight_decay=0.1),
    "blocked_shampoo": lambda: optzoo.blocked_shampoo(0.1, mask="table", weight_decay=0.1),
    "cautious": lambda: optzoo.cautious_weight_decay(
        optax.sgd(0.1), weight_decay_per_step=0.1, mask="table"
    ),
    "ema_nesterov": lambda: optzoo.ema_nesterov(optax.sgd(0.1), 2.0, mask="table"),
}


@pytest.mark.parametrize("name", OF_MARKED)
def test_missing_parameters_are_what_is_said_to_be_missing(name):
    """A mask is of the parameters: it cannot be said to match none of them."""
    tx, x = OF_MARKED[name](), {"table": jnp.ones((3, 2))}
    with pytest.raises(ValueError, match="not passing `params`"):
        tx.update(x, tx.init(x))
    with pytest.raises(ValueError, match="no parameter matches"):
        tx.init({"other": jnp.ones((3, 2))})


def test_no_default_marks_anything():
    """A default of patterns would refuse models that have no such parameter."""
    named = [
        (name, argument)
        for name, factory in NAMES.items()
        if inspect.isfunction(factory)
        for argument in inspect.signature(factory).parameters.values()
        if argument.name in ("mask", "skip")
    ]
    assert len(named) > 4
    assert all(a.default in (None, inspect.Parameter.empty) for _, a in named), named


def test_slots_of_parameters_of_which_some_are_none():
    boxes = Boxes({"a": None, "b": jnp.ones(2), "c": nnx.Param(jnp.ones(3))}, none=False)
    slots = {"a": None, "b": 1, "c": nnx.Param(2)}
    assert boxes.slots(slots) == [1, 2]
    hidden = {**slots, "a": optax.MaskedNode()}
    assert boxes.slots(hidden) == [1, 2]
    changed = boxes.refilled(hidden, [3, 4])
    assert (changed["a"], changed["b"], changed["c"].get_value()) == (optax.MaskedNode(), 3, 4)
    with pytest.raises(ValueError, match="a parameter that is None has a slot"):
        boxes.slots({**slots, "a": 0})
