"""Operations on rows that :mod:`optzoo.native` finds in a jaxpr, by the names of their equations.

While :func:`marking` is on, each of them is one ``jit`` equation. Otherwise, and for everyone else,
they are plain functions.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax

_PREFIX = "optzoo_mark_"
_is_on = contextvars.ContextVar("marking", default=False)


@contextlib.contextmanager
def marking() -> Iterator[None]:
    """Marks the operations that are traced in the body."""
    token = _is_on.set(True)
    try:
        yield
    finally:
        _is_on.reset(token)


def marked(name: str, *static: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Marks a function of arrays, and of some static keywords, with a name."""

    def decorate(f):
        def equation(*arrays, **keywords):
            return f(*arrays, **keywords)

        equation.__name__ = equation.__qualname__ = _PREFIX + name
        jitted = jax.jit(equation, static_argnames=static)

        @functools.wraps(f)
        def call(*arrays, **keywords):
            return (jitted if _is_on.get() else f)(*arrays, **keywords)

        return call

    return decorate


def mark_of(eqn: Any) -> str | None:
    """The name of the marked function that an equation calls; None for any other equation."""
    name = eqn.params.get("name")
    if isinstance(name, str) and name.startswith(_PREFIX):
        return name.removeprefix(_PREFIX)
    return None
