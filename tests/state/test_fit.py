"""Errors about states are worded by what ``init`` has made: nothing is traced again for them."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optzoo
from optzoo.state.fit import StateError
from optzoo.state.inner import fitting

X, OTHER = {"w": jnp.ones((3, 2))}, {"w": jnp.ones((4, 2))}


def counted(tx):
    """A transformation, and the calls of its ``init``."""
    calls = []

    def init(params):
        calls.append(params)
        return tx.init(params)

    return fitting(optax.GradientTransformation(init, tx.update)), calls


def test_a_state_of_other_parameters():
    tx, calls = counted(optax.scale_by_adam())
    state = tx.init(OTHER)
    tx.init(X)
    with pytest.raises(StateError, match=r"\(3, 2\) at 'mu/w', got an array .*\(4, 2\)"):
        tx.update(X, state, X)
    assert len(calls) == 2


@pytest.mark.parametrize("number", [5, 6])
def test_an_error_lists_five_names(number):
    tx, more = optzoo.adam(0.1), ", ..." if number == 6 else ""
    state = tx.init(dict.fromkeys("abcdef"[:number], X["w"]))
    with pytest.raises(StateError) as error:
        tx.update(X, state, X)
    assert f"parameters ['w'], got ['a', 'b', 'c', 'd', 'e'{more}]." in str(error.value)


def test_a_gradient_without_params_is_compared_with_those_that_the_state_is_of():
    tx, calls = counted(optax.scale_by_adam())
    with pytest.raises(ValueError, match=r"'w' has shape \(4, 2\), but its gradient \(3, 2\)"):
        tx.update(X, tx.init(OTHER))
    assert len(calls) == 1


def test_a_state_of_another_transformation():
    tx, calls = counted(optax.scale_by_adam())
    state = optax.trace(0.9).init(X)
    expected = "expected ScaleByAdamState, got TraceState"
    with pytest.raises(StateError, match=expected):
        tx.update(X, state, X)
    assert len(calls) == 1  # nothing was known, so it was traced for the error
    tx.init(X)
    with pytest.raises(StateError, match=expected):
        tx.update(X, state, X)
    with pytest.raises(StateError, match="swapped"):
        tx.update(X, X, state)
    assert len(calls) == 2


def test_a_state_that_an_update_broadcasts():
    tx = fitting(optax.trace(0.9))
    with pytest.raises(StateError, match=r"\(3, 2\) at 'trace/w', got an array .*\(1, 2\)"):
        tx.update(X, optax.TraceState({"w": jnp.ones((1, 2))}), X)


def test_an_error_that_no_state_explains_passes():
    def update(updates, state, params=None):
        raise ZeroDivisionError("mine")

    tx = fitting(optax.GradientTransformation(optax.scale_by_adam().init, update))
    with pytest.raises(ZeroDivisionError, match="mine"):
        tx.update(X, tx.init(X), X)


def test_numbers_of_python_in_a_state():
    """Their kind is that of the array which replaces them."""
    tx = fitting(
        optax.GradientTransformation(
            lambda params: 0, lambda updates, state, params=None: (updates, jnp.asarray(state) + 1)
        )
    )
    _, state = tx.update(X, tx.init(X), X)
    np.testing.assert_array_equal(state, 1)
