"""The types of the states of this library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, get_type_hints

import jax
from jax import Array

from ..core.short import short_repr

# A field of a slots tuple: an initializer in the call of treewise, an array (or a tuple of some)
# in the rule, a params-shaped tree in the state. Its annotation says what it holds, by which
# optzoo.slots_dtype knows how few bits it may have.
Slot = Any  # nothing is said: 16 bits or more
Signed = Annotated[Any, "signed"]  # a mean or a decaying sum of either sign
NotNegative = Annotated[Any, "not negative"]  # a mean or a maximum of squares or magnitudes
Sum = Annotated[Any, "sum"]  # of all steps: single ones are lost in 8 bits
Exact = Annotated[Any, "exact"]  # a count, an average, a factor of a matrix: 32 bits or more


def holds(slots: Any) -> dict[str, Any]:
    """The type of each slot of a named tuple, by its name: the annotations of its class."""
    hints = get_type_hints(type(slots), include_extras=True)
    return {name: hints.get(name, Slot) for name in getattr(slots, "_fields", ())}


class NoSlots(NamedTuple):
    """The slots of an optimizer without slots."""


class LeafwiseState(NamedTuple):
    """The number of updates, a params-shaped tree for each slot, and shared arrays.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> state = optzoo.transforms.scale_by_momentum(0.9).init({"w": jnp.ones(2)})
        >>> print(state.slots.momentum["w"])
        [0. 0.]
    """

    count: Array
    slots: Any
    shared: dict[str, Array]

    __repr__ = short_repr


class OwnersState(NamedTuple):
    """The states of matrices with owners, and of the other parameters.

    The trees of ``matrices`` have stacks of all matrices of one shape, divided over the devices
    along their first axis, and padded at the end so that all devices have equal numbers.
    """

    matrices: Any
    others: Any

    __repr__ = short_repr


def count_of(state: LeafwiseState | OwnersState) -> Array:
    """The number of updates, which both parts of an ``OwnersState`` have."""
    return (state.matrices if isinstance(state, OwnersState) else state).count


class SlotsByName(NamedTuple):
    """A state with slots by the names of another library, such as Keras."""

    variables: dict[str, Array]  # the optimizer-wide arrays
    slots: dict[str, Any]  # trees like the parameters


class Cycle(NamedTuple):
    """The step in this cycle of :func:`optzoo.accumulate`, and the number of completed cycles."""

    position: Array
    updates: Array


class AccumulateState(NamedTuple):
    """The number of steps, the sums of this cycle, and the state of the inner optimizer."""

    count: Array
    # Params-shaped, in float32 at least, or RowsOfCycle; empty if every step is applied. None for
    # a parameter of integers, which has no gradient.
    sums: Any
    came: Any  # whether a parameter had a gradient in this cycle
    inner: Any
    cycle: Any = ()  # a Cycle if a schedule gives its length

    __repr__ = short_repr


class SkipSpikesState(NamedTuple):
    """The state of :func:`optzoo.skip_spikes`.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> state = optzoo.skip_spikes(optzoo.adam(0.1)).init(jnp.ones(2))
        >>> print(state.num_skipped, state.losses.shape)
        0 (128,)
    """

    count: Array  # the values that came into the window
    num_skipped: Array
    losses: Any  # of shape (window,) in float32, the oldest is replaced; () if not judged
    norms: Any  # the same of the gradients
    inner: Any

    __repr__ = short_repr


class MasterWeightsState(NamedTuple):
    """The state of :func:`optzoo.master_weights`.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> tx = optzoo.master_weights(optzoo.momentum(0.1, 0.9))
        >>> print(tx.init(jnp.ones(2, jnp.bfloat16)).corrections)
        [0 0]
    """

    inner: Any
    corrections: Any  # like the parameters: int8 or int16; () of one that is not in bfloat16

    __repr__ = short_repr


class RowsOfCycle(NamedTuple):
    """The rows of the steps of a cycle of :func:`optzoo.accumulate`, concatenated."""

    indices: Array  # of shape (every * k,); where a step has fewer rows, the greatest integer
    values: Array  # of shape (every * k, *row_shape), in float32 at least


class LocalSGDReplicated(NamedTuple):
    """The part of the state that is equal on all replicas: it is computed from sums over them."""

    count: Array  # ticks
    global_step: Array
    any_inactive: Any  # whether a replica was inactive so far; () if inactive ones exchange too
    center: Any  # params-shaped, in float32 at least: what all replicas agreed on last
    method: Any  # a named tuple of the method; () if it needs no more


class LocalSGDPerReplica(NamedTuple):
    """The part of the state that each replica has for itself, without its parameters."""

    local_step: Array
    inner: Any  # the state of the inner optimizer
    method: Any  # a named tuple of the method; () if it needs no more


class LocalSGDState(NamedTuple):
    """Replicas that train separately, each with its own parameters.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> state = optzoo.model_average(optzoo.adam(0.1)).init(jnp.ones(2))
        >>> print(type(state).__name__, state.replicated.center)
        LocalSGDState [1. 1.]
    """

    replicated: LocalSGDReplicated
    per_replica: LocalSGDPerReplica

    __repr__ = short_repr


class SharedParamsState(NamedTuple):
    """Replicas that share one copy of the parameters and of the inner state.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> state = optzoo.sync_replicas(optzoo.adam(0.1), 2).init(jnp.ones(2))
        >>> print(type(state).__name__, state.replicated.global_step)
        SharedParamsState 0
    """

    replicated: Any  # a named tuple of the method, with at least ``global_step`` and ``inner``
    per_replica: Any  # a named tuple of the method, with at least ``local_step``

    __repr__ = short_repr


# For isinstance.
ReplicaState = LocalSGDState | SharedParamsState


GROUP = "group_"  # begins the keys of the states of optzoo.param_groups


def map_nodes(kind: Any, f: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """The first tree with ``f`` applied to nodes of a type, together with those of the others."""
    is_node = lambda node: isinstance(node, kind)
    change = lambda node, *others: f(node, *others) if is_node(node) else node
    return jax.tree.map(change, tree, *rest, is_leaf=is_node)


def nodes_of(kind: Any, tree: Any) -> list[Any]:
    """The nodes of a type in a tree."""
    is_node = lambda node: isinstance(node, kind)
    return [node for node in jax.tree.leaves(tree, is_leaf=is_node) if is_node(node)]


def needs_loss(state: Any) -> bool:
    """Whether the transformation with this state needs the loss, by :func:`optzoo.skip_spikes`."""
    nodes = nodes_of(SkipSpikesState, state)
    return any(jax.tree.leaves(node.losses) or needs_loss(node.inner) for node in nodes)
