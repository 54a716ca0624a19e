"""The law by which a row moves without a gradient, and how an optimizer states it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import optax
from jax import Array


class Law(NamedTuple):
    r"""What an update with the gradient zero does to a row of a parameter and its slots.

    .. math::
        s &\leftarrow d_s\, s \quad\text{for each slot} \\
        x &\leftarrow (1 - \lambda)\, x - a_t\, \frac{m}{\sqrt{v} + \epsilon} \\
        e &\leftarrow D_t\, e + (1 - D_t)\, x

    where :math:`m` and :math:`v` are two of the new slots, and :math:`a_t` and :math:`D_t` are the
    same for all rows. The slot :math:`e` is called ``average``; an optimizer may have none.

    A law is the key of the clock in the state, and so a part of its structure: it is known when
    a program is traced, and every format of checkpoints keeps it and refuses another one. (Of a
    static node Orbax would not see that it differs, and ``flax.serialization`` could not save it.)
    """

    decays: tuple[tuple[str, float], ...]  # of the slots that change, by their names
    moves: str | None = None  # the slot m; None if the row rests
    over: str | None = None  # the slot v; None to divide by one
    root: bool = True  # whether to take the root of v
    eps: float = 0.0
    shrink: float = 0.0  # lambda
    average: float | None = None  # D, or the greatest D_t; None if there is no average
    varies: bool = False  # whether D_t is another one in each step

    def __str__(self) -> str:
        """The name in a checkpoint. Defaults are left out, so a new field changes no name."""
        defaults = self._field_defaults
        given = {k: v for k, v in self._asdict().items() if k not in defaults or v != defaults[k]}
        return ", ".join(f"{name}={value}" for name, value in given.items())


class Sleeper(NamedTuple):
    """The law of an optimizer, and how far a step of it moves rows."""

    law: Law
    rate: optax.ScalarOrSchedule = 1.0
    # size(rate, t, powers) is a_t; ``t`` counts the updates from 1, ``powers`` are those of this
    # update, by the names in the state.
    size: Callable[[Any, Any, dict[str, Array]], Any] = lambda rate, t, powers: 1.0
    average: Callable[[Any], Any] | None = None  # D_t by the number of steps before; if it varies
    at_random: bool = False  # whether slots in 16 bits are rounded at random
