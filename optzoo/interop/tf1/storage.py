"""Arrays of parameters and states by the names of their paths, each slot in arrays of its own."""

from typing import Any

import jax

from ...core.paths import path_name
from ...state.packing import pack_like, unpack
from ...state.stacks import layout_of, stack, unstack
from ...state.types import LeafwiseState, map_nodes


def unpack_state(state: Any) -> Any:
    """The state with every slot in arrays of its own, without stacks and packed pairs."""
    unpacked = lambda slots: type(slots)._make(map(unstack, unpack(slots)))
    return map_nodes(LeafwiseState, lambda x: x._replace(slots=unpacked(x.slots)), state)


def pack_state_like(packed: Any, state: Any) -> Any:
    """An unpacked state in the form of another one."""

    def packed_like(x, old):
        pairs = zip(unpack(old.slots), x.slots, strict=True)
        stacked = [stack(new, layout_of(tree)) for tree, new in pairs]
        return x._replace(slots=pack_like(old.slots, type(x.slots)._make(stacked)))

    return map_nodes(LeafwiseState, packed_like, state, packed)


def arrays_by_path(tree: Any) -> dict[str, Any]:
    """The arrays of a tree, where they are."""
    return {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}
