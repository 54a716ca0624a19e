"""Which slots are averages of the parameters."""

from typing import Any, NamedTuple

import chex
import jax.numpy as jnp
import pytest

import optzoo

PARAMS = {"a": jnp.arange(3.0), "b": jnp.ones((2, 2))}


class Slots(NamedTuple):
    average: Any  # of gradients, not of parameters


def test_a_slot_called_average_is_no_average_of_parameters():
    rule = lambda g, x, s, t: (-g, Slots(0.9 * s.average + 0.1 * g))
    tx = optzoo.rules.leafwise(rule, slots=Slots(optzoo.rules.zeros))
    state = tx.init(PARAMS)
    with pytest.raises(ValueError, match="state has no averages and no center"):
        optzoo.state.swap_averages(PARAMS, state)
    chex.assert_trees_all_equal(optzoo.eval_params(PARAMS, state), PARAMS)
    moved = {name: x + 1 for name, x in PARAMS.items()}
    averaged = optzoo.moving_average(tx).init(PARAMS)
    chex.assert_trees_all_equal(optzoo.eval_params(moved, averaged), PARAMS)
