"""What TensorFlow 1 calls the variables of an optimizer, declared beside its slots."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

AVERAGE = "ExponentialMovingAverage"


class TF1Names(NamedTuple):
    """The TensorFlow variables of an optimizer; a class of slots has it as its attribute ``tf1``.

    A class without it has the default. The slots of a parameter ``w`` are then ``w/Adam``,
    ``w/Adam_1``, ... in the order of their fields, where ``Adam`` is the name that the optimizer
    has in the graph. Each optimizer-wide array is a variable of the name that it has here. The
    number of updates is the ``global_step`` of the graph.

    Example:
        >>> from optzoo.state.types import Slot
        >>> class AverageSlots(NamedTuple):
        ...     average: Slot
        ...     tf1 = TF1Names(slot="ExponentialMovingAverage")

    Args:
        slot: the last part of the slots' names, where it is not the name of the optimizer.
        by_field: what is between the name of a parameter and that of a field, where this is the
            name of the variable: ``"/"`` for ``w/adam_m``. Such variables are float32.
        also_numbered: with ``by_field``, whether the variables may be numbered instead: they are if
            the checkpoint has none by the fields' names, or if, without a checkpoint to look at,
            the name of the optimizer is given.
        order: the fields in the order in which TensorFlow creates the variables, where that is
            not their own order. Fields in an inner tuple hold an array for each dimension and
            take turns: ``("a", ("b", "c"))`` is ``a``, ``b[0]``, ``c[0]``, ``b[1]``, ``c[1]``, ...
        optional: fields that some graphs have no variables for.
        hint: what the error adds if a checkpoint does not have the slots.
        concatenated: whether each field is one variable of the field's name, in which the slots
            of all parameters are concatenated along the last axis, sorted by their names.
        count: the optimizer's own floating-point variable with the number of updates, if any.
        unread: vectors as long as all parameters that the original writes before it reads them.
        not_in_tf1: the optimizer-wide arrays that TensorFlow does not have, each with a function
            that computes it from the slots, or None if it starts again as in ``init``.
    """

    slot: str | None = None
    by_field: str = ""
    also_numbered: bool = False
    order: tuple[str | tuple[str, ...], ...] = ()
    optional: tuple[str, ...] = ()
    hint: str = ""
    concatenated: bool = False
    count: str | None = None
    unread: tuple[str, ...] = ()
    not_in_tf1: Mapping[str, Callable[[Any], Any] | None] = MappingProxyType({})


def tf1_names(slots: Any) -> TF1Names:
    """The names of the variables for the slots of an optimizer."""
    names = getattr(type(slots), "tf1", None)
    return names if isinstance(names, TF1Names) else TF1Names()
