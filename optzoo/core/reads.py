"""Which keyword arguments of an update are read."""

import contextvars
import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from .checks import right_name
from .compat import used_inputs

# What the transformations of this library noted in the trace of `find_reads`.
_NOTED = contextvars.ContextVar[set[str] | None]("noted", default=None)


def note_reads(names: Iterable[str]) -> None:
    """Notes the keywords that a transformation reads, given or not, for :func:`unread`.

    It is needed for those on which no result depends, such as the global step of a constant rate.
    """
    noted = _NOTED.get()
    if noted is not None:
        noted.update(names)


def unread(
    update: Callable[..., Any], extra_args: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """The given keywords that nothing in an update reads, and those that it is known to read.

    A keyword is read if a result depends on it, or if a transformation of this library notes it.
    The update is traced once, which costs nothing at run time.

    Args:
        update: ``update(**extra_args)`` returns a tree of arrays.
        extra_args: trees of arrays, by keyword. One without arrays (None) is not looked for.
    """
    token = _NOTED.set(noted := set[str]())
    try:
        jaxpr = jax.make_jaxpr(lambda given: update(**given))(dict(extra_args))
    finally:
        _NOTED.reset(token)
    used = iter(used_inputs(jaxpr.jaxpr))
    found = []
    for name in sorted(extra_args):  # the order of the inputs
        uses = [next(used) for _ in jax.tree.leaves(extra_args[name])]
        if uses and not any(uses) and name not in noted:
            found.append(name)
    return found, sorted(noted)


def check_all_read(update: Callable[..., Any], extra_args: Mapping[str, Any]) -> None:
    """Raises ``TypeError`` if nothing in an update reads one of the keywords given."""
    names, known = unread(update, extra_args) if extra_args else ([], [])
    if names:
        [name, *_] = names
        near = difflib.get_close_matches(name, known, n=1)
        right = right_name(name) if right_name(name) != name else near[0] if near else None
        meant = f"; did you mean {right!r}?" if right else ""
        read = f" What optzoo's transformations in it read: {', '.join(known)}" if known else ""
        raise TypeError(f"nothing in this transformation reads {name!r}{meant}.{read}")
