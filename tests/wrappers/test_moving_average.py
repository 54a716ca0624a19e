"""Averages of the parameters against their recursion."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo import SparseRows
from optzoo.testing.samples import dense_grads, params, step

X, G = jnp.array([1.0, -2.0]), jnp.array([4.0, 8.0])


def run(tx, steps, **extra_args):
    """The last parameters and state, for a constant gradient."""
    x, state = X, tx.init(X)
    for _ in range(steps):
        x, state = step(tx, G, x, state, **extra_args)
    return x, state


def test_formula():
    tx = optzoo.moving_average(optzoo.gradient_descent(0.25), 0.75)
    want = np.asarray(X)
    for t in range(4):
        x, state = run(tx, t)
        np.testing.assert_allclose(x, X - 0.25 * t * G)
        want = want if t == 0 else 0.75 * want + 0.25 * x
        np.testing.assert_allclose(optzoo.eval_params(x, state), want, rtol=1e-6)


def test_training_is_that_of_the_inner_optimizer():
    x, grads = params(), dense_grads(params())
    plain = optzoo.adam(0.1)
    got, _ = optzoo.moving_average(plain).update(grads, optzoo.moving_average(plain).init(x), x)
    chex.assert_trees_all_equal(got, plain.update(grads, plain.init(x), x)[0])


@pytest.mark.parametrize(
    ("num_updates", "extra_args", "decay"),
    [
        (0, {}, 1 / 10),
        (3, {}, 4 / 13),
        (1000, {}, 0.75),
        ("count", {}, 2 / 11),
        ("count", {"global_step": 7}, 9 / 18),
        ("count", {"global_step": jnp.int32(10**6)}, 0.75),
    ],
)
def test_decay_is_smaller_at_first(num_updates, extra_args, decay):
    tx = optzoo.moving_average(optzoo.gradient_descent(1.0), 0.75, num_updates)
    x, state = run(tx, 1, **extra_args)
    want = decay * X + (1 - decay) * x
    np.testing.assert_allclose(optzoo.eval_params(x, state), want, rtol=1e-6)


def test_count_increases():
    tx = optzoo.moving_average(optzoo.gradient_descent(1.0), 0.9, "count")
    (x1, _), (x2, state) = run(tx, 1), run(tx, 2)
    first = 2 / 11 * X + 9 / 11 * x1
    want = 3 / 12 * first + 9 / 12 * x2
    np.testing.assert_allclose(optzoo.eval_params(x2, state), want, rtol=1e-6)


@pytest.mark.parametrize("inner", [optzoo.gradient_descent(1.0), optzoo.adam(1.0)])
def test_every_row_is_averaged_at_every_step(inner):
    """Also for a row without a gradient: its average moves towards it."""
    x = jnp.zeros((3, 1))
    tx = optzoo.moving_average(inner, 0.5)
    rows = lambda *at: SparseRows(jnp.array(at), jnp.ones((len(at), 1)), 3, coalesced=True)
    x1, state = step(tx, rows(0), x)
    np.testing.assert_allclose(optzoo.eval_params(x1, state), 0.5 * x1)
    x2, state = step(tx, rows(1), x1, state)
    np.testing.assert_allclose(optzoo.eval_params(x2, state), 0.25 * x1 + 0.5 * x2, rtol=1e-6)
    assert optzoo.eval_params(x2, state)[0] < 0.5 * x1[0]


def test_average_of_half_precision_is_exact():
    """In bfloat16 it would not change at all."""
    x, tx = jnp.ones(2, jnp.bfloat16), optzoo.moving_average(optzoo.gradient_descent(1.0), 0.999)
    state = tx.init(x)
    for g in (-1.0, 0, 0):
        x, state = step(tx, jnp.full(2, g, jnp.bfloat16), x, state)
    average = state[-1].slots.average
    np.testing.assert_allclose(average, 1 + 3e-3, rtol=1e-5)
    assert average.dtype == jnp.float32 and x.dtype == jnp.bfloat16
    assert optzoo.eval_params(x, state).dtype == jnp.bfloat16


# How averages are found

LABELS = {"table": "a", "layer": ("b", "a"), "one_row": "b"}


def averaged(rate=0.1):
    return optzoo.moving_average(optzoo.gradient_descent(rate), 0.5)


NESTED = {
    "alone": averaged(),
    "chain": optax.chain(optax.clip(1e9), averaged()),
    "masked": optax.masked(averaged(), jax.tree.map(lambda _: True, LABELS)),
    "partition": optax.partition({"a": averaged(), "b": averaged()}, LABELS),
    "multi_steps": optax.MultiSteps(averaged(), 1).gradient_transformation(),
    "inside another wrapper": optzoo.multitask(averaged()),
    "injected": optax.inject_hyperparams(optzoo.moving_average)(optzoo.gradient_descent(0.1), 0.5),
    "slots_dtype": optzoo.slots_dtype(averaged(), "float32"),
}


@pytest.mark.parametrize("tx", NESTED.values(), ids=list(NESTED))
def test_averages_are_found_anywhere(tx):
    x, state = step(tx, dense_grads(params()), params())
    want = jax.tree.map(lambda old, new: 0.5 * (old + new), params(), x)
    got = jax.jit(optzoo.eval_params)(x, state)
    chex.assert_trees_all_close(got, want, rtol=1e-6)


@pytest.mark.parametrize("layer", [False, (False, False)])
def test_parameters_without_an_average_are_returned_unchanged(layer):
    mask = {"table": True, "layer": layer, "one_row": True}
    for tx in (
        optax.masked(averaged(), mask),
        optax.chain(
            optax.masked(averaged(), mask),
            optax.masked(optax.sgd(0.1), jax.tree.map(lambda m: not m, mask)),
        ),
    ):
        x, state = step(tx, dense_grads(params()), params())
        got = optzoo.eval_params(x, state)
        chex.assert_trees_all_equal(got["layer"], x["layer"])
        for name in ("table", "one_row"):
            np.testing.assert_allclose(got[name], 0.5 * (x[name] + params()[name]), rtol=1e-6)


@pytest.mark.parametrize("tx", [optzoo.adam(), optax.sgd(0.1, 0.9), optax.identity()])
def test_a_state_without_averages(tx):
    x = params()
    with pytest.raises(ValueError, match=r"no averages and no center: .*moving_average"):
        optzoo.state.swap_averages(x, tx.init(x))
    chex.assert_trees_all_equal(optzoo.eval_params(x, tx.init(x)), x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tx", NESTED.values(), ids=list(NESTED))
def test_swapping_twice_is_nothing(tx, dtype):
    x = jax.tree.map(lambda a: a.astype(dtype), params())
    x, state = step(tx, jax.tree.map(lambda a: a / 3, x), x)
    swapped, other = optzoo.state.swap_averages(x, state)
    chex.assert_trees_all_equal(
        jax.tree.map(lambda a, like: a.astype(like.dtype), swapped, x),
        optzoo.eval_params(x, state),
    )
    assert not np.array_equal(swapped["table"], x["table"])
    again = optzoo.state.swap_averages(swapped, other)
    chex.assert_trees_all_equal(again, (x, state))  # bit for bit
    chex.assert_trees_all_equal_dtypes(again, (x, state))


def test_swapping_twice_is_nothing_for_an_average_of_an_average():
    tx = optzoo.moving_average(averaged(), 0.9)
    before = step(tx, dense_grads(params()), *step(tx, dense_grads(params()), params()))
    chex.assert_trees_all_equal(
        optzoo.state.swap_averages(*optzoo.state.swap_averages(*before)), before
    )


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"average_decay": 1.0}, r"average_decay must be in \[0, 1\), got 1.0"),
        ({"average_decay": -0.1}, "average_decay must be"),
        ({"num_updates": -1}, "num_updates must be zero or positive"),
        ({"num_updates": "steps"}, "num_updates must be a number, 'count' or None, got 'steps'"),
    ],
)
def test_bad_arguments(bad, message):
    with pytest.raises(ValueError, match=message):
        optzoo.moving_average(optzoo.adam(), **bad)
