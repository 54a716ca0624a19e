"""States of Flax NNX."""

import sys
from typing import Any

import jax

from .deferred import clocks_of

OF_NNX = "for Flax NNX use params, state = optzoo.nnx_split(model, optimizer)"


def refuse_nnx(state: Any, *, variables: bool = False) -> None:
    """Raises ``TypeError`` for a state of Flax NNX without the types of the optimizer state.

    Slots may be in variables, like parameters in boxes. With ``variables``, the clock of
    :func:`optzoo.caught_up` may be in variables, too.
    """
    nnx = sys.modules.get("flax.nnx")  # who has a state of it has imported it
    if nnx is None:
        return
    is_variable = lambda x: isinstance(x, nnx.Variable)
    clocks = () if variables else clocks_of(state)
    if isinstance(state, nnx.State | nnx.Optimizer):
        got = f"an nnx.{type(state).__name__}"
    elif any(map(is_variable, jax.tree.leaves(clocks, is_leaf=is_variable))):
        got = "one with nnx.Variable"
    else:
        return
    raise TypeError(f"state must be a state of tx, got {got}: {OF_NNX}")
