"""Operations on rows that :mod:`optzoo.native` finds in a jaxpr.

Inside :func:`marking`, each of them is one equation, with its own primitive. Otherwise they are
plain functions.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

from .compat import make_replaceable

# The marks of what changes rows of its first operand.
WRITES = {"rows_scatter", "rows_scatter_equal", "rows_add"}
_names: dict[Any, str] = {}  # of the marked functions, by their primitives
_is_on = contextvars.ContextVar("marking", default=False)


@contextlib.contextmanager
def marking() -> Iterator[None]:
    """Marks the operations traced in the body."""
    token = _is_on.set(True)
    try:
        yield
    finally:
        _is_on.reset(token)


def marked(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Marks a function of arrays and static keywords with a name."""

    def decorate(f):
        def in_list(*arrays, **keywords):
            made = f(*arrays, **keywords)
            return made if isinstance(made, tuple) else (made,)

        primitive = make_replaceable(f"optzoo_{name}", in_list)
        _names[primitive] = name

        @functools.wraps(f)
        def call(*arrays, **keywords):
            if not _is_on.get():
                return f(*arrays, **keywords)
            made = primitive.bind(*arrays, **keywords)
            return tuple(made) if len(made) > 1 else made[0]

        return call

    return decorate


def mark_of(eqn: Any) -> str | None:
    """The name of the marked function that an equation calls; None for any other equation."""
    return _names.get(eqn.primitive)
