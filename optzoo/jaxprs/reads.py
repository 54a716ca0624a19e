"""Finds the keyword arguments that an update reads."""

import difflib
from collections.abc import Callable, Mapping
from typing import Any

import jax

from ..core.checks import right_name
from ..core.optimizer import UNKNOWN, Notes, about_of, note
from .equations import used_inputs

# The keyword by which an update is given the notes of :func:`unread`.
_READS = "optzoo_reads"


def note_reads(extra_args: Mapping[str, Any], reads: frozenset[str]) -> None:
    """Records the keywords that a transformation reads, for :func:`unread`.

    This is needed for keywords on which no result depends, such as the global step with a constant
    rate.
    """
    note(extra_args, _READS, reads)


def unread(
    update: Callable[..., Any], extra_args: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """The given keywords that an update does not read, and those that it is known to read.

    A keyword is read if a result depends on it, or if a transformation of this library records it.
    The update is traced once, at no cost at run time.

    Args:
        update: ``update(**extra_args)`` returns a tree of arrays.
        extra_args: trees of arrays, by keyword. Trees without arrays (None) are ignored.
    """
    notes = Notes()
    jaxpr = jax.make_jaxpr(lambda given: update(**given, **{_READS: notes}))(dict(extra_args))
    known = frozenset[str]().union(*notes.of) - {UNKNOWN}
    used = iter(used_inputs(jaxpr.jaxpr))
    found = []
    for name in sorted(extra_args):  # the order of the inputs
        uses = [next(used) for _ in jax.tree.leaves(extra_args[name])]
        if uses and not any(uses) and name not in known:
            found.append(name)
    return found, sorted(known)


class UnusedKeyword(TypeError):
    """A keyword of an update that the transformation does not use."""

    def __init__(self, name: str, text: str):
        super().__init__(name, text)
        self.name = name

    def __str__(self) -> str:
        return self.args[1]


def check_all_read(tx: Any, update: Callable[..., Any], extra_args: Mapping[str, Any]) -> None:
    """Raises ``UnusedKeyword`` if a transformation does not use one of the given keywords.

    Args:
        tx: the transformation.
        update: ``update(**extra_args)`` returns a tree of arrays. It is traced if the keywords that
            ``tx`` reads are unknown.
        extra_args: trees of arrays, by keyword.
    """
    reads, names = about_of(tx).reads, [k for k, v in extra_args.items() if jax.tree.leaves(v)]
    if reads.issuperset(names):
        return
    names, known = (
        unread(update, extra_args)
        if UNKNOWN in reads
        else (sorted({*names} - reads), sorted(reads))
    )
    if names:
        [name, *_] = names
        near = difflib.get_close_matches(name, known, n=1)
        right = right_name(name) if right_name(name) != name else near[0] if near else None
        meant = f"; did you mean {right!r}?" if right else ""
        read = f" Keywords of the optzoo transformations in it: {', '.join(known)}" if known else ""
        raise UnusedKeyword(name, f"this transformation does not use {name!r}{meant}.{read}")
