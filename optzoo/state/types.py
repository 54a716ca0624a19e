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


class ReplicaState(NamedTuple):
    """What is the same on all replicas, since it is computed from sums over them, and the rest."""

    shared: dict[str, Any]
    own: dict[str, Any]
