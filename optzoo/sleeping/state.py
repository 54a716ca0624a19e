"""The state of an optimizer whose rows rest until they are read."""

from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from ..core.boxes import Boxes
from ..core.paths import is_masked
from ..state.types import nodes_of


class Clock(NamedTuple):
    """How far each step of the past has moved the rows that sleep since then."""

    count: Array  # updates so far
    young: Array  # (window, features): entry j is for the rows last updated j steps ago
    ring: Array  # (horizon, features): entry l % horizon is for those of step l, final

    left_to_xla = True  # of a native step: it is small, and no part of it belongs to a row


class CaughtUpState(NamedTuple):
    """An optimizer whose rows sleep until they are read."""

    inner: Any  # the state of the optimizer; each row of its slots is as of the step in ``last``
    clock: dict[str, Clock]  # one for all tables; its key is that of the Law of the rows
    last: Any  # a tree like the parameters: of a table the step of each row, MaskedNode of others

    def check_awake(self, what: str) -> None:
        """Raises ``ValueError`` if a row is known to rest, with ``what`` would read it."""
        [clock] = self.clock.values()
        arrays = [clock.count, *jax.tree.leaves(self.last)]
        if any(isinstance(a, jax.core.Tracer | jax.ShapeDtypeStruct) for a in arrays):
            return
        if any((np.asarray(last) != clock.count).any() for last in arrays[1:]):
            raise ValueError(
                f"{what} would read rows that sleep: call optzoo.rows.catch_up(params, state) "
                "before"
            )


def sleeping_leaves(params: Any, state: Any) -> set[int]:
    """The positions of all parameters whose rows may sleep."""
    boxes = Boxes(params, none=False)
    lasts = [boxes.slots(node.last) for node in nodes_of(CaughtUpState, state)]
    return {i for last in lasts for i, a in enumerate(last) if not is_masked(a)}
