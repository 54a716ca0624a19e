"""The call that made a transformation: its text, equality, and pickle."""

import copy
import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo.core.optimizer import Optimizer, about_of
from tests import public

decay = optax.cosine_decay_schedule(1.0, 10)
TEXTS = {
    "adam(learning_rate=0.001, b1=0.8)": lambda: optzoo.adam(1e-3, b1=0.8),
    "adam()": optzoo.adam,
    "adam(learning_rate=0.001)": lambda: optzoo.adam(1e-3),
    "moving_average(adam(learning_rate=0.1), average_decay=0.9)": lambda: optzoo.moving_average(
        optzoo.adam(0.1), 0.9
    ),
    "adam(learning_rate=optax.cosine_decay_schedule(...))": lambda: optzoo.adam(decay),
    "adam(learning_rate=0.5)": lambda: optzoo.adam(jnp.float32(0.5)),
    "multitask(optax.chain(...))": lambda: optzoo.multitask(optax.adam(0.1)),
    "param_groups(transforms={'a': adam(), '.*': optax.chain(...)})": lambda: optzoo.param_groups(
        {"a": optzoo.adam(), ".*": optax.adam(0.1)}
    ),
    "clip_by_global_norm(max_norm=1.0)": lambda: optzoo.clip_by_global_norm(1.0),
}


@pytest.mark.parametrize("text", TEXTS)
def test_texts(text):
    """The arguments that were given, by their names; arrays by their types."""
    assert repr(TEXTS[text]()) == text


def test_text_of_what_is_traced():
    texts = []
    jax.jit(lambda rate: texts.append(repr(optzoo.adam(rate)))).trace(0.1)
    assert texts == ["adam(learning_rate=float32[])"]


# They make transformations from the user's functions, or from those of other libraries.
OTHERS = {"create", "keras_optimizer", "returnn_updater", "leafwise", "treewise"}


def test_each_public_factory_records_its_call():
    missing = [
        name
        for name, thing in public.NAMES.items()
        if inspect.isfunction(thing)
        and "Transformation" in str(inspect.signature(thing).return_annotation)
        and inspect.unwrap(thing) is thing
    ]
    assert {name.rpartition(".")[2] for name in missing} <= OTHERS


@pytest.mark.parametrize("name", optzoo.CATALOG)
def test_equality(name):
    entry = optzoo.CATALOG[name]
    first, second, other = entry.make(), entry.make(), entry.make(0.0321)
    assert first == second and hash(first) == hash(second)
    assert (first != second) is False  # which is another method
    assert first != other and first != optzoo.multitask(first) and first != optax.sgd(0.1)
    for copied in (pickle.loads(pickle.dumps(first)), copy.deepcopy(first), copy.copy(first)):
        assert copied == first and repr(copied) == repr(first)
        assert about_of(copied).reads == about_of(first).reads


WITHOUT_KEY = {
    "arrays": lambda: optzoo.adam(jnp.float32(0.1)),
    "functions made anew": lambda: optzoo.adam(optax.cosine_decay_schedule(1.0, 10)),
    "others inside": lambda: optzoo.multitask(optax.sgd(0.1)),
    "a chain": lambda: optax.chain(optzoo.adam(0.1)),
    "replaced": lambda: optzoo.adam(0.1)._replace(init=optax.sgd(0.1).init),
}


@pytest.mark.parametrize("name", WITHOUT_KEY)
def test_what_may_differ_is_not_equal(name):
    first, second = WITHOUT_KEY[name](), WITHOUT_KEY[name]()
    assert first != second and first == first and isinstance(hash(first), int)


def test_numbers():
    """Equal numbers of another type or sign are other arguments; a default may be given."""
    of = lambda value: optzoo.momentum(0.1, 0.9, nesterov=value)
    zeros = [optzoo.momentum(zero, 0.9) for zero in (0, 0.0, -0.0, np.float32(0))]
    assert len({*zeros}) == len(zeros)
    assert (
        of(False) == optzoo.momentum(0.1, 0.9) == optzoo.momentum(learning_rate=0.1, momentum=0.9)
    )
    assert of(False) != of(True)
    assert optzoo.adam(decay) == optzoo.adam(decay)
    wrapped = lambda rate: optzoo.param_groups({"a": optzoo.adam(rate), ".*": optzoo.adam(0.1)})
    assert wrapped(0.2) == wrapped(0.2) != wrapped(0.3)


def test_it_is_a_transformation_of_optax():
    tx = optzoo.adam(0.1)
    init, update = tx
    assert isinstance(tx, optax.GradientTransformation) and (init, update) == (tx.init, tx.update)
    assert jax.tree.leaves(tx) == [init, update] and optax.chain(tx).init(()) == (init(()),)
    filtered = optzoo.transforms.gradient_nan_inf_filter()  # whose update takes no extra arguments
    updates, _ = filtered.update(jnp.ones(2), filtered.init(jnp.ones(2)), None, value=1.0)
    np.testing.assert_array_equal(updates, [1, 1])


def test_an_equal_one_is_not_traced_again():
    traced = []

    def step(tx, x):
        traced.append(tx)
        return tx.update(x, tx.init(x), x)[0]

    step = jax.jit(step, static_argnums=0)
    for rate in (0.1, 0.1, 0.2):
        step(optzoo.gradient_descent(rate), jnp.ones(2))
    assert [tx.call.args for tx in traced] == [(0.1,), (0.2,)]


def test_states_are_short():
    state = optzoo.adam(0.1).init({"w": jnp.ones((8, 4))})
    _, state = optzoo.adam(0.1).update({"w": jnp.ones((8, 4))}, state)
    assert repr(state[0]) == (
        "LeafwiseState(count=1, slots=AdamSlots(m={'w': float32[8,4]}, v={'w': float32[8,4]}), "
        f"shared={{'beta1_power': {np.float32(0.9) ** 2!s}, 'beta2_power': "
        f"{np.float32(0.999) ** 2!s}}})"
    )
    shapes = jax.eval_shape(optzoo.adam(0.1).init, {"w": jnp.ones(3)})
    assert repr(shapes[0]).startswith("LeafwiseState(count=int32[], slots=AdamSlots(m={'w': flo")


def test_rows_are_one_line():
    rows = optzoo.SparseRows(jnp.arange(8), jnp.ones((8, 64)), 1000)
    want = "SparseRows(indices=int32[8], values=float32[8,64], shape=(1000, 64))"
    assert repr(rows) == want == repr(jax.tree.map(lambda x: x, rows))
    texts = []
    jax.jit(lambda rows: texts.append(repr(rows))).trace(rows)
    assert texts == [want]


def test_a_transformation_without_a_call():
    tx = Optimizer(*optax.sgd(0.1))
    assert tx == Optimizer(*tx) and repr(tx).startswith("Optimizer(init=")
