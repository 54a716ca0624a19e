"""TensorFlow 1 names of the variables of an optimizer, declared with its slots."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

AVERAGE = "ExponentialMovingAverage"


class TF1Names(NamedTuple):
    """The TensorFlow variables of an optimizer; a class of slots has it as its attribute ``tf1``.

    By default, the slots of a parameter ``w`` are ``w/Adam``, ``w/Adam_1``, ... in the order of
    their fields, where ``Adam`` is the name of the optimizer in the graph. Each array shared by all
    parameters is a variable of the same name. The number of updates is the ``global_step`` of the
    graph.

    Example:
        >>> from optzoo.state.types import Slot
        >>> class AverageSlots(NamedTuple):
        ...     average: Slot
        ...     tf1 = TF1Names(slot="ExponentialMovingAverage")

    Args:
        slot: the last part of the names of slots, if it is not the name of the optimizer.
        by_field: the separator, if a variable has the names of the parameter and the field: ``"/"``
            for ``w/adam_m``. Such variables are float32.
        also_numbered: with ``by_field``, whether the variables may be numbered instead. They are if
            the checkpoint has no variables with names of fields, or, without a checkpoint, if the
            name of the optimizer is given.
        order: the fields in the order in which TensorFlow creates the variables, if it differs.
            Fields in an inner tuple have an array for each dimension and alternate:
            ``("a", ("b", "c"))`` is ``a``, ``b[0]``, ``c[0]``, ``b[1]``, ``c[1]``, ...
        optional: fields without variables in some graphs.
        hint: an addition to the error if a checkpoint lacks the slots.
        concatenated: whether each field is one variable of the field's name, in which the slots
            of all parameters are concatenated along the last axis, sorted by their names.
        count: the optimizer's own floating-point variable with the number of updates, if any.
        unread: vectors with the length of all parameters that the original writes before it reads
            them.
        not_in_tf1: the shared arrays that TensorFlow lacks, each with a function that computes it
            from the slots, or None if it is initialized as in ``init``.
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
