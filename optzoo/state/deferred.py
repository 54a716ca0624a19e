"""Parts of a state with deferred rows, which are current only as of an earlier update."""

from typing import Any, Protocol, runtime_checkable

from .types import nodes_of


@runtime_checkable
class Deferred(Protocol):
    """A part of a state with deferred rows: the state of :func:`optzoo.caught_up`."""

    inner: Any  # the state of the optimizer inside
    clock: Any  # the numbers of the updates so far

    def check_current(self, what: str) -> None:
        """Raises ``ValueError`` if a row is known to be deferred; ``what`` would read it."""


def has_deferred(state: Any) -> bool:
    """Whether rows of a state may be deferred."""
    return bool(nodes_of(Deferred, state))


def clocks_of(state: Any) -> list[Any]:
    """The clocks of all parts with deferred rows."""
    return [node.clock for node in nodes_of(Deferred, state)]


def check_current(state: Any, what: str) -> None:
    """Raises ``ValueError`` if a row of a state is known to be deferred; ignores traced arrays.

    Args:
        state: any state.
        what: the reader of the rows, for the error.
    """
    for node in nodes_of(Deferred, state):
        node.check_current(what)


def refuse_deferred(state: Any, what: str) -> None:
    """Raises ``ValueError`` if rows of a state may be deferred."""
    if has_deferred(state):
        raise ValueError(
            f"{what} does not support the deferred rows of optzoo.caught_up: use the optimizer "
            "inside of it"
        )
