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
    same for all rows. The slot :math:`e` is called ``average``; an optimizer may have none. It is
    all that is needed to catch up a row, and the state has it in words (:func:`record`).
    """

    decays: tuple[tuple[str, float], ...]  # of the slots that change, by their names
    moves: str | None = None  # the slot m; None if the row rests
    over: str | None = None  # the slot v; None to divide by one
    root: bool = True  # whether to take the root of v
    eps: float = 0.0
    shrink: float = 0.0  # lambda
    average: float | None = None  # D, or the greatest D_t; None if there is no average
    varies: bool = False  # whether D_t is another one in each step


class Sleeper(NamedTuple):
    """The law of an optimizer, and how far a step of it moves rows."""

    law: Law
    rate: optax.ScalarOrSchedule = 1.0
    # size(rate, t, powers) is a_t; ``t`` counts the updates from 1, ``powers`` are those of this
    # update, by the names in the state.
    size: Callable[[Any, Any, dict[str, Array]], Any] = lambda rate, t, powers: 1.0
    average: Callable[[Any], Any] | None = None  # D_t by the number of steps before; if it varies
    at_random: bool = False  # whether slots in 16 bits are rounded at random


def record(law: Law) -> str:
    """The law in words, which a checkpoint keeps whatever its format: ``decay_m=0.9, ...``."""
    fields = {f"decay_{name}": decay for name, decay in law.decays}
    fields |= {name: value for name, value in law._asdict().items() if name != "decays"}
    if law.average is None:
        del fields["average"]
    if not law.varies:
        del fields["varies"]
    return ", ".join(f"{name}={value}" for name, value in fields.items())


def law_of_record(words: str) -> Law:
    """The opposite of :func:`record`."""
    fields = dict(field.split("=") for field in words.split(", "))
    decays = tuple(
        (name.removeprefix("decay_"), float(value))
        for name, value in fields.items()
        if name.startswith("decay_")
    )
    slot = lambda name: None if fields[name] == "None" else fields[name]
    number = lambda name: float(fields[name])
    is_root = fields["root"] == "True"
    average = number("average") if "average" in fields else None
    return Law(
        decays,
        slot("moves"),
        slot("over"),
        is_root,
        number("eps"),
        number("shrink"),
        average,
        fields.get("varies") == "True",
    )
