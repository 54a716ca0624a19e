"""Parameters that the current task does not use are unchanged, and their slots, too."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo import SparseRows
from optzoo.jaxprs.graph import Graph
from optzoo.jaxprs.primitives import CALLS, Kind
from optzoo.testing import samples
from optzoo.testing.samples import dense_grads, params, step, step_of

INNER = {
    "momentum": optzoo.momentum(0.1, 0.9),  # lazy
    "adam": optzoo.adam(0.1),  # dense
    "add_sign": optzoo.add_sign(0.1),  # touched
    "gradient_descent": optzoo.gradient_descent(0.1),  # linear
    "averaged": optzoo.moving_average(optzoo.rmsprop(0.1, momentum=0.5), 0.5),
    "decayed": optzoo.decoupled_weight_decay(optzoo.adagrad(0.1), weight_decay_per_step=0.5),
    "partition": optax.partition(
        {"a": optzoo.nadam(0.1)}, {"table": "a", "layer": ("a", "a"), "one_row": "a"}
    ),
    "optax.adamw": optax.adamw(0.1),
    # Several arrays in one slot of a parameter; eps, since roots are rounded by 1e-7 / eps.
    "shampoo": optzoo.shampoo(0.1, eps=1.0),
    "packed": optzoo.slots_dtype(optzoo.adam(0.1), "bfloat16", packed=True),
}
OURS = sorted(INNER.keys() - {"optax.adamw"})

ZERO_ROWS = {
    "zeros": ([1, 3, 1], [0, 0, 0]),
    "rows that cancel out": ([1, 3, 1], [2, 0, -2]),
    "padding": ([5, -1, 9], [1, np.nan, np.inf]),
    "none": ([], []),
}


def of_rows(indices, values):
    values = np.array(values, "float32").reshape(-1, 1) * np.ones((1, 2), "float32")
    return SparseRows(np.array(indices, "int32"), values, 5)


@functools.cache
def compiled(inner):
    """A step with the wrapper and one without it, and what a first step makes."""
    inner, x = INNER[inner], params()
    tx = optzoo.multitask(inner)
    train, alone = (jax.jit(step_of(t)) for t in (tx, inner))
    return train, alone, train(x, tx.init(x), dense_grads(x))


@pytest.mark.parametrize("inner", INNER)
def test_zero_gradients_change_nothing(inner):
    """For the table; the other parameters are updated as without the wrapper."""
    train, alone, (x, state) = compiled(inner)
    for zero in (0.0, -0.0):
        grads = {**dense_grads(x), "table": np.full((5, 2), zero, "float32")}
        check(x, state, train(x, state, grads), alone(x, state, grads))


@pytest.mark.parametrize("inner", OURS)
def test_zero_rows_change_nothing(inner):
    train, alone, (x, state) = compiled(inner)
    want = alone(x, state, {**dense_grads(x), "table": np.zeros((5, 2), "float32")})
    for zero in ZERO_ROWS.values():
        check(x, state, train(x, state, {**dense_grads(x), "table": of_rows(*zero)}), want)


def check(x, state, got, want):
    (moved, after), (inner_moved, inner_after) = got, want
    np.testing.assert_array_equal(moved["table"], x["table"])
    for name in ("layer", "one_row"):
        chex.assert_trees_all_close(moved[name], inner_moved[name], rtol=1e-6)
    # The slots of the table are unchanged; those of the others, the count and the powers are not.
    states = map(jax.tree.leaves, (state, after, inner_after))
    for old, new, inner_new in zip(*states, strict=True):
        if jnp.shape(old) == (5, 2):
            np.testing.assert_array_equal(new, old)
        else:
            # A root is as exact as its largest element.
            atol = 5e-7 if jnp.shape(old) == (3, 3) else 0
            np.testing.assert_allclose(new, inner_new, rtol=1e-6, atol=atol)


@pytest.mark.parametrize("inner", ["momentum", "gradient_descent", "decayed", "adam"])
def test_slots_of_a_table_are_selected_only_if_all_of_its_rows_change(inner):
    tx, x = optzoo.multitask(INNER[inner]), {"table": jnp.ones((5, 2))}
    rows = {"table": of_rows([1, 3, 1], [1, 2, 3])}
    jaxpr = jax.make_jaxpr(tx.update)(rows, tx.init(x), x)
    made = [(op.name, v.shape) for op in operations(jaxpr) for v in op.outs]
    assert (("select_n", (5, 2)) in made) == (inner == "adam")


def operations(jaxpr):
    return [op for op, *_ in Graph.of(jaxpr).walk({*CALLS, Kind.MAP})]


def test_momentum_does_not_run_on_while_another_task_is_trained():
    """Two tasks trained in turns give the same as each task alone."""
    tx, alone = optzoo.multitask(optzoo.momentum(0.1, 0.9)), optzoo.momentum(0.1, 0.9)
    a, b = jnp.array([1.0, 2.0]), jnp.array([[3.0]])
    turns = [(a, 0 * b), (0 * a, b), (a, 0 * b), (a, b)]
    x, state = (a, b), tx.init((a, b))
    for grads in turns:
        x, state = step(tx, grads, x, state)
    for i, start in enumerate((a, b)):
        want, state = start, alone.init(start)
        for _ in range(3 - i):
            want, state = step(alone, start, want, state)
        np.testing.assert_allclose(x[i], want, rtol=1e-6)


def test_one_element_makes_the_whole_parameter_live():
    """NaN is not zero, either."""
    x = jnp.ones(3)
    inner = optzoo.momentum(0.1, 0.9)
    tx = optzoo.multitask(inner)
    x, state = step(tx, jnp.ones(3), x)
    for g in (jnp.array([0.0, 0, 1e-30]), jnp.array([0.0, jnp.nan, 0])):
        chex.assert_trees_all_equal(step(tx, g, x, state), step(inner, g, x, state))


@pytest.mark.parametrize("layer", [False, (False, True)])
@pytest.mark.parametrize("outside", [True, False])
def test_masked(layer, outside):
    mask = {"table": True, "layer": layer, "one_row": True}
    inner, x = optzoo.adam(0.1), params()
    tx = (
        optax.masked(optzoo.multitask(inner), mask)
        if outside
        else optzoo.multitask(optax.masked(inner, mask))
    )
    grads = {**dense_grads(x), "table": jnp.zeros((5, 2))}
    state = tx.update(dense_grads(x), tx.init(x), x)[1]
    updates, after = tx.update(grads, state, x)
    np.testing.assert_array_equal(updates["table"], 0)
    assert np.all(updates["one_row"] != 0)
    np.testing.assert_array_equal(updates["layer"][0], grads["layer"][0])
    for new, old in zip(samples.slots(after), samples.slots(state), strict=True):
        np.testing.assert_array_equal(new["table"], old["table"])
        assert np.all(new["one_row"] != old["one_row"])
    powers = lambda tree: [s.shared for s in leafwise_states(tree)]
    assert all(p["beta1_power"] < 0.75 for p in powers(after) if p)


def leafwise_states(state):
    is_leafwise = lambda s: isinstance(s, optzoo.state.LeafwiseState)
    return [s for s in jax.tree.leaves(state, is_leaf=is_leafwise) if is_leafwise(s)]
