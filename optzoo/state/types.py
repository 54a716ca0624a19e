"""The types of the states of this library."""

from typing import Any, NamedTuple

from jax import Array

# A field of a slots tuple: an initializer in the call of treewise, an array (or a tuple of some)
# in the rule, a params-shaped tree in the state.
Slot = Any


class NoSlots(NamedTuple):
    """What a stateless optimizer keeps: nothing."""


class LeafwiseState(NamedTuple):
    """The number of updates, a params-shaped tree for each slot, and optimizer-wide arrays."""

    count: Array
    slots: Any
    shared: dict[str, Array]


class LocalSGDReplicated(NamedTuple):
    """What is the same on all replicas: it is computed from sums over them."""

    count: Array  # ticks
    global_step: Array
    any_inactive: Any  # whether a replica was inactive so far; () if inactive ones exchange too
    center: Any  # params-shaped, in float32 at least: what all replicas agreed on last
    method: Any  # a named tuple of the method; () if it needs no more


class LocalSGDPerReplica(NamedTuple):
    """What each replica has for itself, beside its parameters."""

    local_step: Array
    inner: Any  # the state of the inner optimizer
    method: Any  # a named tuple of the method; () if it needs no more


class LocalSGDState(NamedTuple):
    """Replicas that train separately, each with its own parameters."""

    replicated: LocalSGDReplicated
    per_replica: LocalSGDPerReplica


class SharedParamsState(NamedTuple):
    """Replicas that share one copy of the parameters and of the inner state."""

    replicated: Any  # a named tuple of the method, with at least ``global_step`` and ``inner``
    per_replica: Any  # a named tuple of the method, with at least ``local_step``


# For isinstance.
ReplicaState = LocalSGDState | SharedParamsState
