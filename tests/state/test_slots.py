"""Slots by name, in wrapped and chained optimizers."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo import CATALOG, get_slot, set_slot, slot_names
from optzoo.state.types import nodes_of
from optzoo.testing import samples

PARAMS = {"a": jnp.ones((2, 3)), "b": {"c": jnp.ones(4)}}
SHAPES = jax.tree.map(jnp.shape, PARAMS)
HALF = {"a": True, "b": {"c": False}}
LABELS = {"a": "x", "b": {"c": "y"}}
adam, momentum = optzoo.adam(1e-3), optzoo.momentum(0.1, 0.9)

WHOLE = {
    "plain": adam,
    "chain": optax.chain(optax.clip(1.0), adam),
    "chain of chains": optax.chain(optax.chain(optax.identity(), adam), optax.identity()),
    "partition": optax.partition({"x": adam, "y": optzoo.adam(0.1)}, LABELS),
    "MultiSteps": optax.MultiSteps(adam, 2),
    "inject_hyperparams": optax.inject_hyperparams(optzoo.adam)(learning_rate=1e-3),
    "apply_if_finite": optax.apply_if_finite(adam, 3),
    "slots_dtype": optzoo.slots_dtype(adam, "float32"),
    "on_rows": optzoo.on_rows(adam),
    "moving_average": optzoo.moving_average(adam),
    "multitask": optzoo.multitask(adam),
    "skip_spikes": optzoo.skip_spikes(adam),
    "decoupled_weight_decay": optzoo.decoupled_weight_decay(adam, weight_decay_per_step=0.1),
    "cautious_weight_decay": optzoo.cautious_weight_decay(adam, weight_decay_per_step=0.1),
    "ema_nesterov": optzoo.ema_nesterov(adam, 0.5),
    "hyperball": optzoo.hyperball(adam, 0.1, {"a": (0,)}),
    "variable_clipping": optzoo.variable_clipping(adam, {"a": (0,)}, 1.0),
    **{
        name: method.make(adam, 1, axis_name=None)
        for name, method in optzoo.catalog.DISTRIBUTED.items()
        if name not in ("agn", "diloco")  # two optimizers each
    },
}


@pytest.mark.parametrize("name", WHOLE)
def test_slots_through_everything(name):
    state = WHOLE[name].init(PARAMS)
    assert {"m", "v"} <= set(slot_names(state))
    for slot in slot_names(state):
        tree = get_slot(state, slot)
        assert jax.tree.map(jnp.shape, tree) == SHAPES
        new = set_slot(state, slot, jax.tree.map(lambda x: x + 2, tree))
        assert jax.tree.structure(new) == jax.tree.structure(state)
        jax.tree.map(
            lambda a, b: np.testing.assert_array_equal(a, b + 2), get_slot(new, slot), tree
        )
        changed = sum(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a != b).any()), new, state)))
        assert changed == len(jax.tree.leaves(tree))


@pytest.mark.parametrize("name", CATALOG)
def test_slots_are_those_of_the_optimizer(name):
    tx = samples.make(CATALOG[name])
    state = tx.init(samples.params())
    nodes = nodes_of(optzoo.state.LeafwiseState, state)
    fields = [field for node in nodes for field in node.slots._fields]
    assert list(slot_names(state)) == fields


def test_a_slot_is_what_the_optimizer_computes():
    _, state = adam.update(PARAMS, adam.init(PARAMS), PARAMS)
    np.testing.assert_allclose(get_slot(state, "m")["b"]["c"], 0.1 * np.ones(4), rtol=1e-6)
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    updates, _ = adam.update(zeros, set_slot(state, "m", zeros), PARAMS)
    assert not updates["a"].any()


def test_masked_parameters_have_no_slot():
    state = optax.masked(adam, HALF).init(PARAMS)
    slot = get_slot(state, "m")
    assert slot["b"]["c"] == optax.MaskedNode() and slot["a"].shape == (2, 3)
    assert get_slot(set_slot(state, "m", PARAMS), "m")["b"]["c"] == optax.MaskedNode()


def test_groups_of_different_optimizers():
    state = optax.partition({"x": adam, "y": momentum}, LABELS).init(PARAMS)
    assert set(slot_names(state)) == {"m", "v", "momentum"}
    assert get_slot(state, "momentum")["a"] == optax.MaskedNode()


def test_slots_of_optax():
    state = optax.chain(optax.adam(1e-3), optax.trace(0.9)).init(PARAMS)
    assert slot_names(state) == ("mu", "nu", "trace")
    assert jax.tree.map(jnp.shape, get_slot(state, "trace")) == SHAPES


def test_ambiguity_names_the_candidates():
    state = optax.chain(adam, adam).init(PARAMS)
    assert slot_names(state) == ("0/0/m", "1/0/m", "0/0/v", "1/0/v")
    with pytest.raises(ValueError, match="'m' is ambiguous; choose one of: 0/0/m, 1/0/m"):
        get_slot(state, "m")
    new = set_slot(state, "1/0/m", PARAMS)
    assert get_slot(new, "1/0/m")["a"].all() and not get_slot(new, "0/0/m")["a"].any()


def test_two_optimizers_of_one_replica():
    state = optzoo.agn(adam, axis_name=None).init(PARAMS)
    assert "per_replica/inner/0/m" in slot_names(state)
    assert get_slot(state, "per_replica/inner/0/m")["a"].shape == (2, 3)
    assert get_slot(state, "center_inner/0/m")["a"].shape == (2, 3)


def test_unknown_names():
    with pytest.raises(ValueError, match="no slot has the name 'mu'; the slots are: m, v"):
        get_slot(adam.init(PARAMS), "mu")
    with pytest.raises(ValueError, match="no slot has the name 'm'; the slots are: none"):
        get_slot(optzoo.gradient_descent(0.1).init(PARAMS), "m")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": jnp.ones((2, 3))}, "value must be a tree like the slot 'm'"),
        ({"a": jnp.ones(3), "b": {"c": jnp.ones(4)}}, r"shape \(2, 3\) at 'a' for the slot 'm'"),
        ({"a": {"d": 1}, "b": {"c": jnp.ones(4)}}, r"shape \(2, 3\) at 'a' for the slot 'm'"),
        ({"a": jnp.ones((2, 3)), "b": {"c": None}}, r"shape \(4,\) at 'b/c' .*, got None"),
    ],
)
def test_values_that_do_not_fit(value, message):
    with pytest.raises(ValueError, match=message):
        set_slot(adam.init(PARAMS), "m", value)


def test_a_slot_keeps_its_dtype():
    state = optzoo.slots_dtype(adam, "bfloat16").init(PARAMS)
    assert get_slot(set_slot(state, "m", PARAMS), "m")["a"].dtype == jnp.bfloat16


def test_a_parameter_alone():
    state = optax.chain(adam, optax.trace(0.9)).init(jnp.ones(3))
    assert slot_names(state) == ("m", "v", "trace") and get_slot(state, "trace").shape == (3,)


def test_under_jit():
    state = adam.init(PARAMS)
    new = jax.jit(lambda state: set_slot(state, "v", get_slot(state, "m")))(state)
    assert jax.tree.structure(new) == jax.tree.structure(state)


class Named(NamedTuple):
    """Parameters may be named tuples, too."""

    w: jax.Array
    b: jax.Array


class Running(NamedTuple):
    """The state of a transformation of a user, whose name says nothing."""

    mean: Any
    inner: Any


def running(inner):
    init = lambda params: Running(jax.tree.map(jnp.zeros_like, params), inner.init(params))
    return optax.GradientTransformation(init, lambda g, state, params=None: (g, state))


BY_TYPE = {
    "optax": (optax.adam(0.1), {"mu", "nu"}),
    "optzoo": (adam, {"m", "v"}),
    "another name": (optax.apply_every(2), {"grad_acc"}),
    "MultiSteps": (optax.MultiSteps(optax.trace(0.9), 2), {"trace", "acc_grads"}),
    "injected": (optax.inject_hyperparams(optax.adam)(0.1), {"mu", "nu"}),
    "noise": (optax.add_noise(0.1, 0.5, 0), set()),
    "of a user": (
        optax.MultiSteps(running(optax.trace(0.9)), 2),
        {"mean", "trace", "acc_grads"},
    ),
    "replicas": (optzoo.sync_replicas(adam, 1, axis_name=None), {"sum", "m", "v"}),
    "summaries": (optzoo.transforms.gradient_summaries(), {"norm", "largest"}),
}


@pytest.mark.parametrize("case", BY_TYPE)
def test_slots_by_type(case):
    tx, names = BY_TYPE[case]
    params = Named(jnp.ones((2, 3)), jnp.ones(3))
    state = tx.init(params)
    found = slot_names(state)
    assert set(found) == names
    assert all(isinstance(get_slot(state, name), Named) for name in found)


LOOK_FOR_SLOTS = {
    "multitask": optzoo.multitask,
    "agn": lambda tx: optzoo.agn(tx, axis_name=None),
    "model_average": lambda tx: optzoo.model_average(tx, axis_name=None),
    "elastic_average": lambda tx: optzoo.elastic_average(
        tx, 1, axis_name=None, skip_nonfinite=True
    ),
    "diloco": lambda tx: optzoo.diloco(tx, axis_name=None, skip_nonfinite=True),
}


@pytest.mark.parametrize("wrap", LOOK_FOR_SLOTS.values(), ids=list(LOOK_FOR_SLOTS))
def test_line_searches_go_around(wrap):
    """Their ``init`` reads parameters, so that ``optax.tree.map_params`` fails."""
    search = optax.scale_by_backtracking_linesearch(5)
    loss = lambda params: sum(jnp.sum(x**2) for x in jax.tree.leaves(params))
    value, grad = jax.value_and_grad(loss)(PARAMS)

    def update(tx):
        given = {"value": value, "grad": grad, "value_fn": loss}
        return tx.update(grad, tx.init(PARAMS), PARAMS, **given)[0]

    with pytest.raises(ValueError, match=r"Put the line search outside, such as optax\.chain"):
        update(wrap(optax.chain(optax.sgd(1.0), search)))
    updates = update(optax.chain(wrap(optax.sgd(1.0)), search))
    assert loss(optax.apply_updates(PARAMS, updates)) < value
