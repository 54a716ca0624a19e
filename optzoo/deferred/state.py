"""The state of an optimizer with deferred rows."""

from typing import Any, NamedTuple

import jax
import numpy as np

from ..core.boxes import Boxes
from ..core.paths import is_masked
from ..core.short import short_repr
from ..state.decay_rule import DecayRule, Form
from ..state.types import nodes_of
from .motion import Clock, make_motion


class CaughtUpState(NamedTuple):
    """The state of an optimizer that defers the updates of rows until they are read."""

    inner: Any  # the state of the optimizer; each row of its slots is as of the step in ``last``
    clock: dict[str, Clock]  # one for all tables; its key is that of the form of their decay rule
    last: Any  # a tree like the parameters: of a table the step of each row, MaskedNode of others

    @staticmethod
    def of_older(saved: dict[str, Any]) -> dict[str, Any]:
        """The structure of a checkpoint of an old version, whose key was the decay rule as text.

        The numbers are parsed from that text.
        """
        [(text, clock)] = saved["clock"].items()
        if Form.of_key(text) is not None:
            return saved
        rule = DecayRule.of_text(text)
        motion = make_motion(rule, np.asarray(clock["ring"]).dtype.name, len(clock["ring"]))
        entries = {name: motion.padded(np.asarray(clock[name])) for name in ("young", "ring")}
        clock = {**motion.start._asdict(), **clock, **entries}
        return {**saved, "clock": {rule.form.key: clock}}

    def is_behind(self) -> bool:
        """Whether a row is known to be deferred; False while arrays are traced."""
        [clock] = self.clock.values()
        arrays = [clock.count, *jax.tree.leaves(self.last)]
        if any(isinstance(a, jax.core.Tracer | jax.ShapeDtypeStruct) for a in arrays):
            return False
        return any((np.asarray(last) != clock.count).any() for last in arrays[1:])

    def check_current(self, what: str) -> None:
        """Raises ``ValueError`` if a row is known to be deferred; ``what`` would read it."""
        if self.is_behind():
            raise ValueError(
                f"{what} would read deferred rows: call optzoo.rows.catch_up(params, state) before"
            )

    __repr__ = short_repr


def deferred_leaves(params: Any, state: Any) -> set[int]:
    """The indices of all parameters whose rows may be deferred."""
    boxes = Boxes(params, none=False)
    lasts = [boxes.slots(node.last) for node in nodes_of(CaughtUpState, state)]
    return {i for last in lasts for i, a in enumerate(last) if not is_masked(a)}
