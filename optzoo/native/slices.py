"""Arrays of which a step replaces a slice, which XLA writes in place."""

from collections.abc import Mapping

from ..jaxprs.graph import Graph, Value


def find_slices(program: Graph, places: Mapping[Value, Value]) -> dict[Value, Value]:
    """For arrays of which a slice is replaced, the value into which it is written.

    This value has no other readers, so XLA writes only the slice, without a copy. The slice is
    computed from gradients, so XLA makes no pass over parameters and slots for it.

    Args:
        program: a step, or a branch in it.
        places: the next value of each array of the parameters and the state.
    """
    made, readers = program.depending(places), program.readers()
    found = dict[Value, Value]()
    for before, after in places.items():
        op = after.maker
        if op is None or op.name != "dynamic_update_slice":
            continue
        array, part = op.ins[:2]
        is_free = array not in program.results and readers[array] == [op]
        if is_free and array.shape != part.shape and part not in made:
            found[before] = array
    return found
