"""What is known of a transformation, as a part of it."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import optax

# Stands for the keywords of a transformation that is not of this library.
UNKNOWN = "**"


class About(NamedTuple):
    """What is known of a transformation; by default nothing."""

    # The policy for row-sparse gradients, of optzoo.rules: lazy, linear, ... None: unknown.
    rows: Callable[..., Any] | None = None
    # Whether it updates each touched row by itself, and no other. False: it must be proved.
    row_wise: bool = False
    # ``deferral(dense)`` gives the Deferral of the rows that a gradient does not name; with
    # ``dense`` of those whose dense gradient is zero. None if such rows do not change.
    deferral: Callable[[bool], Any] | None = None
    # The keywords that ``update`` reads, and UNKNOWN if there may be more.
    reads: frozenset[str] = frozenset({UNKNOWN})
    # What optzoo.caught_up made; then nothing may change its updates. None for all others.
    deferred: Any = None
    # Of optzoo.divide_states: ``divide(params)`` gives shapes that are divided as their slots.
    divide: Callable[[Any], Any] | None = None

    def with_deferral(self, change: Callable[[bool, Any], Any]) -> "About":
        """The same, with the deferral ``change(dense, deferral)`` if there is one."""
        if (deferral := self.deferral) is None:
            return self
        return self._replace(deferral=lambda dense: change(dense, deferral(dense)))

    def reading(self, *names: str) -> "About":
        """The same, of which an update reads these keywords too."""
        return self._replace(reads=self.reads.union(names))


class Optimizer(optax.GradientTransformationExtraArgs):
    """A transformation that carries what is known of it.

    ``optax.chain`` and other wrappers of optax make another transformation, of which nothing is
    known; so does ``_replace``.
    """

    about = About()

    def __new__(cls, init: Any, update: Any, about: About = about) -> "Optimizer":
        """The transformation of these functions."""
        self = super().__new__(cls, init, update)
        self.about = about
        return self


def about_of(tx: Any) -> About:
    """What is known of any transformation."""
    return tx.about if isinstance(tx, Optimizer) else About()


def reads_of(*txs: Any) -> frozenset[str]:
    """The keywords that several transformations read together."""
    return frozenset[str]().union(*(about_of(tx).reads for tx in txs))


def known(tx: optax.GradientTransformation, **facts: Any) -> Optimizer:
    """The same transformation, of which more is known."""
    return Optimizer(tx.init, tx.update, about_of(tx)._replace(**facts))


@jax.tree_util.register_static
class Notes:
    """A keyword of an update for what the transformations inside note while it is traced.

    A chain of optax gives it to all members, of which it does not know what they are.
    """

    def __init__(self) -> None:
        self.of = list[Any]()


def note(extra_args: Mapping[str, Any], key: str, value: Any) -> None:
    """Adds to the notes that an update was given by this keyword, if it was."""
    if key in extra_args:
        extra_args[key].of.append(value)
