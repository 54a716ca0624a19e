"""A moving average of the parameters beside any optimizer."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from ..core.checks import check_decays, check_not_negative
from ..core.leafwise import leafwise
from ..core.paths import is_masked
from ..core.treewise import LeafwiseState, Slot


class MovingAverageSlots(NamedTuple):
    """What the moving average keeps."""

    average: Slot  # of the parameters, in float32 at least


def moving_average(
    inner: optax.GradientTransformation,
    average_decay: float = 0.9999,
    num_updates: float | str | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Averages the parameters, as in ``tf.contrib.opt.MovingAverageOptimizer``.

    .. math::
        x_t &= x_{t-1} + u_t \\
        a_t &= d_t\, a_{t-1} + (1 - d_t)\, x_t, \qquad a_0 = x_0

    where :math:`u_t` is the update of ``inner`` and :math:`d_t` is the decay or, with
    ``num_updates`` :math:`N`, :math:`\min(d, \frac{1 + N}{10 + N})`, so that the average follows
    quickly at first. :func:`optzoo.eval_params` gives the averages, :func:`optzoo.swap` puts them
    in the place of the parameters. The average takes in every row of a table at every step, also
    with row-sparse gradients, so a step costs what the table costs.

    It must be the last link of a chain: what it averages is the parameters plus this update.

    Args:
        inner: a whole optimizer, its learning rate included.
        average_decay: :math:`d`, in [0, 1).
        num_updates: :math:`N`, at least 0, or ``"count"`` for the number of updates so far, this
            one included (counted here, or ``update(..., global_step=)`` plus one).

    Raises:
        ValueError: if an argument is out of its range, or if no params are given to ``update``.

    References:
        Polyak and Juditsky, `Acceleration of Stochastic Approximation by Averaging
        <https://doi.org/10.1137/0330046>`_, 1992; ``tf.train.ExponentialMovingAverage``.

    Differences from the original:
        The average is always of the new parameters (``sequential_update=True``); without it the
        original leaves the order open. The average of parameters in 16 bits is kept in float32,
        where it can move.
    """
    [average_decay] = check_decays(average_decay=average_decay)
    if isinstance(num_updates, str) and num_updates != "count":
        raise ValueError(f"num_updates must be a number, 'count' or None, got {num_updates!r}")
    if not isinstance(num_updates, str):
        check_not_negative(num_updates=num_updates)

    def decay_at(step):
        n = jnp.float32(step + 1 if num_updates == "count" else num_updates)
        return jnp.minimum(jnp.float32(average_decay), (1 + n) / (10 + n))

    def rule(u, x, s, t, average_decay):
        return u, MovingAverageSlots(s.average - (s.average - (x + u)) * (1 - average_decay))

    def rows(rule):
        return lambda u, x, s, t, **decay: (u, rule(u.to_dense(), x, s, t, **decay)[1])

    link = leafwise(
        rule,
        slots=MovingAverageSlots(_copy),
        rows=rows,
        scheduled={"average_decay": average_decay if num_updates is None else decay_at},
        needs_params=True,
    )
    return optax.chain(inner, link)


def eval_params(params: Any, state: Any) -> Any:
    """The parameters to evaluate and to deploy: the averages, if the state holds some.

    Args:
        params: the parameters that are trained.
        state: the state of an optimizer, in which :func:`optzoo.moving_average` may stand
            anywhere (in a chain, in ``optax.masked`` or ``optax.partition``, ...).

    Returns:
        A tree like ``params``, also in its dtypes: the average of every parameter that has one,
        the parameter itself otherwise.
    """
    averages, _ = swap(params, state)
    return jax.tree.map(lambda a, x: a.astype(jnp.result_type(x)), averages, params)


def swap(params: Any, state: Any) -> tuple[Any, Any]:
    """Exchanges parameters and averages; twice is nothing.

    Save what it gives, and whoever loads the checkpoint for evaluation finds the averages in the
    place of the parameters; swap again after loading to train on. The counterpart of the
    original's ``swapping_saver``.

    Args:
        params: the parameters that are trained.
        state: the state of an optimizer that holds :func:`optzoo.moving_average`.

    Returns:
        The averages in the place of the parameters, and the state with the parameters in the
        place of the averages. Each array keeps its dtype, so nothing is lost.
    """
    nodes, treedef = jax.tree.flatten(state, is_leaf=_is_average)
    exchanged = set()
    for i, node in reversed(list(enumerate(nodes))):  # of averages of averages the outermost
        if not _is_average(node):
            continue
        with_paths = jax.tree_util.tree_flatten_with_path
        averages, shape = with_paths(node.slots.average, is_leaf=is_masked)
        pairs = [
            (x, a) if path in exchanged or is_masked(a) else (a, x)
            for (path, a), x in zip(averages, shape.flatten_up_to(params), strict=True)
        ]
        exchanged |= {path for path, a in averages if not is_masked(a)}
        params = shape.unflatten([x for x, _ in pairs])
        nodes[i] = node._replace(slots=MovingAverageSlots(shape.unflatten([a for _, a in pairs])))
    return params, treedef.unflatten(nodes)


def _is_average(node: Any) -> bool:
    return isinstance(node, LeafwiseState) and isinstance(node.slots, MovingAverageSlots)


def _copy(x: Any) -> Array:
    """A copy, for the parameter's own buffer may be donated; zeros for an abstract parameter."""
    dtype = jnp.promote_types(jnp.result_type(x), jnp.float32)
    if isinstance(x, jax.ShapeDtypeStruct):
        return jnp.zeros(x.shape, dtype)
    return jnp.array(x, dtype, copy=True)
