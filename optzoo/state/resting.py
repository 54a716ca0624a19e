"""Parts of a state whose rows may be as of an earlier update, until something reads them."""

from typing import Any, Protocol, runtime_checkable

from .types import nodes_of


@runtime_checkable
class Resting(Protocol):
    """Such a part: the state of :func:`optzoo.caught_up`."""

    inner: Any  # the state of the optimizer inside

    def check_awake(self, what: str) -> None:
        """Raises ``ValueError`` if a row is known to rest, with ``what`` would read it."""


def has_resting(state: Any) -> bool:
    """Whether rows of a state may rest."""
    return bool(nodes_of(Resting, state))


def check_awake(state: Any, what: str) -> None:
    """Raises ``ValueError`` if a row of a state is known to rest; traced arrays pass.

    Args:
        state: any.
        what: for the error, what would read the rows.
    """
    for node in nodes_of(Resting, state):
        node.check_awake(what)


def refuse_resting(state: Any, what: str) -> None:
    """Raises ``ValueError`` if rows of a state may rest."""
    if has_resting(state):
        raise ValueError(
            f"{what} does not support optzoo.caught_up, whose rows sleep: take the optimizer inside"
        )
