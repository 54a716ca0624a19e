"""The parameters to evaluate."""

from __future__ import annotations

from typing import Any

from ..core.donation import unshared
from ..deferred.catch_up import catch_up
from ..state.averages import averages_of, has_averages
from ..state.deferred import has_deferred
from ..state.of_nnx import refuse_nnx


def eval_params(params: Any, state: Any) -> Any:
    """The parameters to evaluate and deploy: averages or a center, if the state has them.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.moving_average(optzoo.gradient_descent(1.0), average_decay=0.5)
        >>> params = jnp.ones(2)
        >>> state = tx.init(params)
        >>> print(optzoo.eval_params(params, state))
        [1. 1.]

    Args:
        params: the trained parameters.
        state: the state of an optimizer. :func:`optzoo.moving_average` or a wrapper with a center
            (:func:`optzoo.elastic_average`, :func:`optzoo.agn`, :func:`optzoo.model_average`,
            :func:`optzoo.diloco`) is found anywhere in it, such as in a chain, ``optax.masked`` or
            ``optax.partition``. For :func:`optzoo.ema_nesterov` the result is the parameters
            without the look-ahead step.

    Returns:
        A tree with the structure and dtypes of ``params``: the average of each parameter that has
        one, otherwise the parameter itself. A center has no replica axis. With
        :func:`optzoo.caught_up`, all rows are caught up. Outside of ``jit`` the arrays are copies,
        which remain valid after a step that donates ``params``, and can be trained themselves.

    Raises:
        StateError: if the parameters and the averages differ in structure, as with Flax NNX
            variables.
        TypeError: if the state is an ``nnx.State`` or ``nnx.Optimizer``, which lose the types of
            the state (use :func:`optzoo.nnx_split`).
        ValueError: if the averages have a replica axis and the parameters do not.
    """
    refuse_nnx(state)
    given = params, state
    if has_deferred(state):
        params, state = catch_up(params, state)
    return unshared(averages_of(params, state) if has_averages(state) else params, given)
