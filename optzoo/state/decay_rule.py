"""The decay rule of rows without a gradient, and how an optimizer declares it."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any, NamedTuple

import optax
from jax import Array


class DecayRule(NamedTuple):
    r"""The effect of an update with a zero gradient on a row of a parameter and its slots.

    .. math::
        s &\leftarrow d_s\, s \quad\text{for each slot} \\
        x &\leftarrow (1 - \lambda)\, x - a_t\, \frac{m}{\sqrt{v} + \epsilon} \\
        e &\leftarrow D_t\, e + (1 - D_t)\, x

    where :math:`m` and :math:`v` are two of the new slots, and :math:`a_t` and :math:`D_t` are the
    same for all rows. The slot :math:`e` is called ``average``; an optimizer may have none.
    """

    decays: tuple[tuple[str, float], ...]  # of the slots that change, by their names
    moves: str | None = None  # the slot m; None if the row does not move
    over: str | None = None  # the slot v; None to divide by one
    root: bool = True  # whether to take the root of v
    eps: float = 0.0
    shrink: float = 0.0  # lambda
    average: float | None = None  # D, or the greatest D_t; None if there is no average
    varies: bool = False  # whether D_t is another one in each step

    @property
    def form(self) -> Form:
        """The decay rule without its numbers."""
        return Form(
            tuple(name for name, _ in self.decays),
            self.moves,
            self.over,
            self.root,
            self.eps >= 1e-30,  # denormals count as zero
            self.shrink != 0,
            self.average is not None,
            self.varies,
        )

    @classmethod
    def of_text(cls, text: str) -> DecayRule:
        """The decay rule of a checkpoint of an old version, whose key is its text.

        An example is ``decays=(('m', 0.9), ('v', 0.999)), moves=m, over=v, eps=1e-08``.
        """
        nodes = ast.walk(ast.parse(f"DecayRule({text})"))
        [call] = (node for node in nodes if isinstance(node, ast.Call))
        value = lambda node: node.id if isinstance(node, ast.Name) else ast.literal_eval(node)
        given: dict[str, Any] = {str(word.arg): value(word.value) for word in call.keywords}
        return cls(**given)


class Form(NamedTuple):
    """A decay rule without its numbers: the static part of a program.

    Its key is the key of the clock in the state. The numbers are arrays of the clock, so that they
    can change without changing the structure of the state.
    """

    decays: tuple[str, ...]
    moves: str | None
    over: str | None
    root: bool
    eps: bool
    shrink: bool
    average: bool
    varies: bool

    @property
    def key(self) -> str:
        """The key: ``decays_m__decays_v__moves_m__over_v__root__eps`` of Adam."""
        words = [f"decays_{name}" for name in self.decays]
        for name, value in zip(self._fields[1:], self[1:], strict=True):
            if value:
                words.append(name if value is True else f"{name}_{value}")
        return "__".join(words)

    @classmethod
    def of_key(cls, key: Any) -> Form | None:
        """The form of a key; None if it is not a key of a form, such as a key of an old version."""
        words = [word.partition("_") for word in str(key).split("__")]
        decays = tuple(value for name, _, value in words if name == "decays")
        given = {name: value for name, _, value in words}
        flags = (name in given for name in cls._fields[3:])
        form = cls(decays, given.get("moves"), given.get("over"), *flags)
        return form if form.key == key else None

    @property
    def powers(self) -> tuple[str, ...]:
        """The decays whose powers rows need: of slots, of the row, of the average."""
        constant = self.average and not self.varies
        return (*self.decays, *["shrink"] * self.shrink, *["average"] * constant)


class Deferral(NamedTuple):
    """The decay rule of an optimizer, and the size of its steps."""

    rule: DecayRule
    rate: optax.ScalarOrSchedule = 1.0
    # size(rate, t, powers) is a_t; ``t`` counts the updates from 1, ``powers`` are those of this
    # update, by the names in the state.
    size: Callable[[Any, Any, dict[str, Array]], Any] = lambda rate, t, powers: 1.0
    average: Callable[[Any], Any] | None = None  # D_t by the number of steps before; if it varies
    at_random: bool = False  # whether slots in 16 bits are rounded at random
