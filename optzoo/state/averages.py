"""Averages and centers: parameters to evaluate that differ from the trained ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ..core.numerics import wide_dtype
from ..core.paths import flatten_with_path, is_masked, path_name
from ..core.rows import is_rows
from .fit import StateError, kind_of
from .of_nnx import OF_NNX
from .stacks import restack, unstack
from .tf1_names import AVERAGE, TF1Names
from .types import Exact, LocalSGDState, ReplicaState, Signed


class MovingAverageSlots(NamedTuple):
    """The state of the moving average."""

    average: Exact  # of the parameters, in float32 at least

    tf1 = TF1Names(slot=AVERAGE)


class EMANesterovSlots(NamedTuple):
    """The state of EMA-Nesterov."""

    iterate: Exact  # the parameters without the step ahead, in float32 at least
    direction: Signed  # the moving average of their changes


def averages_of(params: Any, state: Any) -> Any:
    """The averages or the center of the parameters, in their dtypes.

    Raises:
        ValueError: as in :func:`optzoo.state.swap_averages`.
    """
    averages, _ = swap_averages(params, state)
    return jax.tree.map(lambda a, x: _on_device(a).astype(jnp.result_type(x)), averages, params)


def swap_averages(params: Any, state: Any) -> tuple[Any, Any]:
    """Swaps the parameters and the averages or the center; a second call reverts it.

    A checkpoint of the result has the averages in place of the parameters, for evaluation. Swap
    again after loading to resume training. The counterpart of the originals' ``swapping_saver``.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.moving_average(optzoo.gradient_descent(1.0), average_decay=0.5)
        >>> params = jnp.zeros(1)
        >>> updates, state = tx.update(jnp.array([1.0]), tx.init(params), params)
        >>> averages, swapped = optzoo.state.swap_averages(params + updates, state)
        >>> print(averages, optzoo.state.swap_averages(averages, swapped)[0])
        [-0.5] [-1.]

    Args:
        params: the trained parameters.
        state: the state of an optimizer, as in :func:`optzoo.eval_params`.

    Returns:
        The averages in place of the parameters, and the state with the parameters in place of the
        averages. Each array keeps its dtype and shape. If replicas with shared parameters have no
        averages, nothing is swapped.

    Raises:
        ValueError: if the state has no averages or center and is not that of a method for replicas;
            or if the averages have a replica axis and the parameters do not.
        StateError: if the parameters and the averages differ in structure.
    """
    nodes, treedef = jax.tree.flatten(state, is_leaf=_is_average)
    if not has_averages(state) and not _is_of_replicas(state):
        raise ValueError(
            "state has no averages and no center: wrap the optimizer in optzoo.moving_average, "
            "or evaluate params themselves"
        )
    exchanged = set()
    # Of averages of averages the outermost; an iterate is no average, so it is the last choice.
    is_iterate = lambda found: isinstance(found[1], EMANesterovSlots)
    for i, node in sorted(reversed(list(enumerate(nodes))), key=is_iterate):
        if not _is_average(node):
            continue
        with_paths = flatten_with_path
        averages, shape = with_paths(unstack(_averages(node)), is_leaf=is_masked)
        if isinstance(node, MovingAverageSlots | EMANesterovSlots):
            _check_fits(averages, _like(shape, params))
        pairs = [
            (x, a) if path in exchanged or is_masked(a) else (a, x)
            for (path, a), x in zip(averages, _like(shape, params), strict=True)
        ]
        exchanged |= {path for path, a in averages if not is_masked(a)}
        params = shape.unflatten([x for x, _ in pairs])
        averages = shape.unflatten([a for _, a in pairs])
        nodes[i] = _with_averages(node, restack(averages, _averages(node)))
    return params, treedef.unflatten(nodes)


def _like(shape: Any, params: Any) -> list[Any]:
    """The parameters in the structure of the averages."""
    try:
        return shape.flatten_up_to(params)
    except ValueError as error:
        raise StateError(
            f"params do not have the structure of the averages in the state: {OF_NNX}"
        ) from error


def start_of_average(x: Any) -> Array:
    """A copy of a parameter in float32 at least; zeros for an abstract parameter.

    In 16 bits, small changes of an average would be rounded away. The parameter is copied since its
    buffer may be donated.
    """
    if isinstance(x, jax.ShapeDtypeStruct):
        return jnp.zeros_like(x, dtype=wide_dtype(x))
    return jnp.array(x, wide_dtype(x), copy=True)


def wide_zeros_like(params: Any) -> Any:
    """Zeros like the parameters, in float32 at least.

    ``optax.tree.zeros_like`` supports only one dtype for all leaves.
    """
    return jax.tree.map(lambda x: jnp.zeros_like(x, dtype=wide_dtype(x)), params)


def _on_device(a: Array) -> Array:
    """Copies an average in host memory to the device."""
    is_on_host = getattr(jax.typeof(a), "memory_space", None) == jax.memory.Space.Host
    return jax.device_put(a, jax.memory.Space.Device) if is_on_host else a


def _is_of_replicas(state: Any) -> bool:
    is_replicas = lambda node: isinstance(node, ReplicaState)
    return any(map(is_replicas, jax.tree.leaves(state, is_leaf=is_replicas)))


def _check_fits(averages: Iterable[tuple[Any, Any]], params: Iterable[Any]) -> None:
    """Raises ``ValueError`` if averages do not match the parameters."""
    for (path, a), x in zip(averages, params, strict=True):
        if is_masked(a):
            continue
        average = f"the average of parameter '{path_name(path)}', of shape {jnp.shape(a)},"
        of_x = getattr(x, "shape", ())
        if jnp.shape(a)[1:] == of_x != jnp.shape(a):
            raise ValueError(
                f"{average} has a replica axis: write sync_replicas(moving_average(optimizer), ...)"
            )
        if is_rows(x) or kind_of(a) != kind_of(x):
            raise ValueError(
                f"{average} does not match params: it has {kind_of(a)}, but params has {kind_of(x)}"
            )


def _is_average(node: Any) -> bool:
    return _averages(node) is not None


def has_averages(state: Any) -> bool:
    """Whether a part of a state has averages or a center."""
    return any(map(_is_average, jax.tree.leaves(state, is_leaf=_is_average)))


def _averages(node: Any) -> Any:
    """The averages or the center in a part of a state; None without them."""
    match node:
        case LocalSGDState():
            return node.replicated.center
        case MovingAverageSlots():
            return node.average
        case EMANesterovSlots():
            return node.iterate
    return None


def _with_averages(node: Any, averages: Any) -> Any:
    if isinstance(node, LocalSGDState):
        return node._replace(replicated=node.replicated._replace(center=averages))
    name = "average" if isinstance(node, MovingAverageSlots) else "iterate"
    return node._replace(**{name: averages})
