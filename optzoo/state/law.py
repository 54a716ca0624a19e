"""The law by which a row moves without a gradient, and how an optimizer states it."""

from __future__ import annotations

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

    The key of the clock in the state is a string that holds the law, so it is a part of the state's
    structure: it is known when a program is traced, and every format of checkpoints keeps it and
    refuses another one. (Of a static node Orbax would not see that it differs, and
    ``flax.serialization`` could not save it.)
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
        """The law in words, which were the key in old checkpoints."""
        return ", ".join(f"{name}={value}" for name, value in self._given().items())

    def _given(self) -> dict[str, Any]:
        """The fields without defaults, so that a new field changes no name."""
        defaults = self._field_defaults
        return {k: v for k, v in self._asdict().items() if k not in defaults or v != defaults[k]}

    @property
    def key(self) -> str:
        """The key: ``decay_m_0.9__decay_v_0.999__moves_m__over_v__eps_1e-08`` of Adam."""
        given = self._given()
        words = [f"decay_{slot}_{decay!r}" for slot, decay in given.pop("decays")]
        return "__".join([*words, *(f"{name}_{value}" for name, value in given.items())])

    @classmethod
    def of_key(cls, key: Any) -> Law | None:
        """The law of a key; None if it is no key of a law, such as one of an old version."""
        if not isinstance(key, str):
            return None
        read = {"moves": str, "over": str, "eps": float, "shrink": float, "average": float}
        decays, fields = [], dict[str, Any]()
        for word in key.split("__"):
            name, _, value = word.partition("_")
            if name == "decay":
                slot, _, decay = value.rpartition("_")
                decays.append((slot, float(decay)))
            elif name in cls._fields:
                fields[name] = read[name](value) if name in read else value == "True"
            else:
                return None
        return cls(tuple(decays), **fields)


class Sleeper(NamedTuple):
    """The law of an optimizer, and how far a step of it moves rows."""

    law: Law
    rate: optax.ScalarOrSchedule = 1.0
    # size(rate, t, powers) is a_t; ``t`` counts the updates from 1, ``powers`` are those of this
    # update, by the names in the state.
    size: Callable[[Any, Any, dict[str, Array]], Any] = lambda rate, t, powers: 1.0
    average: Callable[[Any], Any] | None = None  # D_t by the number of steps before; if it varies
    at_random: bool = False  # whether slots in 16 bits are rounded at random
