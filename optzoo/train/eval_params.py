"""The parameters to evaluate."""

from __future__ import annotations

from typing import Any

from ..core.donation import unshared
from ..deferred.catch_up import catch_up
from ..state.averages import averages_of, has_averages
from ..state.deferred import has_deferred
from ..state.of_nnx import refuse_nnx


def eval_params(params: Any, state: Any) -> Any:
    """The parameters to evaluate and to deploy: averages or a center, if the state has them.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.moving_average(optzoo.gradient_descent(1.0), average_decay=0.5)
        >>> params = jnp.ones(2)
        >>> state = tx.init(params)
        >>> print(optzoo.eval_params(params, state))
        [1. 1.]

    Args:
        params: the parameters that are trained.
        state: the state of an optimizer, in which :func:`optzoo.moving_average` or a wrapper with
            a center (:func:`optzoo.elastic_average`, :func:`optzoo.agn`,
            :func:`optzoo.model_average`, :func:`optzoo.diloco`) may be anywhere (in a chain,
            in ``optax.masked`` or ``optax.partition``, ...). Of :func:`optzoo.ema_nesterov` they
            are the parameters without the step ahead.

    Returns:
        A tree like ``params``, also in its dtypes: the average of every parameter that has one,
        the parameter itself otherwise, so of an optimizer without averages all parameters. A
        center is replicated: it has no axis of replicas. With :func:`optzoo.caught_up` no row of
        it is deferred. Outside of ``jit`` the arrays are copies: a step that donates its arguments
        leaves them as they are, and they can be trained on.

    Raises:
        StateError: if the parameters have another structure than the averages, such as those of
            Flax NNX with its variables.
        TypeError: if the state is an ``nnx.State`` or ``nnx.Optimizer``, which do not keep the
            types of the state (:func:`optzoo.nnx_split`).
        ValueError: if the averages have an axis of replicas and the parameters do not.
    """
    refuse_nnx(state)
    given = params, state
    if has_deferred(state):
        params, state = catch_up(params, state)
    return unshared(averages_of(params, state) if has_averages(state) else params, given)
