"""A state of this library, filled by the names of slots and parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..core.checks import check_size, check_transformation
from ..core.lines import from_lines, to_lines_of
from ..core.numerics import is_real, saturating_cast
from ..core.paths import leaves_with_path, map_with_path, path_name
from ..state.storage import pack_state_like, unpack_state
from ..state.types import LeafwiseState, map_nodes, nodes_of


class Source(NamedTuple):
    """What another library has for one parameter."""

    slots: Mapping[str, Any]  # arrays by the names of the slots here
    count: int | None  # the number of its updates, if it is known


def fill_state(
    tx: optax.GradientTransformation,
    params: Any,
    read: Callable[[str, LeafwiseState], Source],
    *,
    known: Collection[type],
    count: int,
    finish: Callable[[], Iterable[str]],
    argument: str,
) -> Any:
    """The state of ``tx`` with the slots, counts and powers of another library's state.

    What has no slots there, such as the averages of a wrapper, is as ``tx.init`` makes it.

    Args:
        tx: an optimizer of this library, alone or in chains, masks and wrappers.
        params: the parameters, or their shapes and dtypes.
        read: ``read(name, node)`` gives what belongs to a parameter in a node of the initial
            state, or raises ``ValueError``.
        known: the classes of slots that can be filled.
        count: the number of updates of nodes whose sources have none.
        finish: called at the end, gives further messages, such as what is left over.
        argument: the name of the argument in messages.

    Raises:
        ValueError: if anything does not fit: the message lists all of it.
    """
    check_transformation(tx=tx)
    like, params = params, from_lines(params)
    start = tx.init(params)
    problems: list[str] = []
    if not nodes_of(LeafwiseState, start):
        raise ValueError("tx must be an optimizer of optzoo, alone or in chains, got another one")

    def filled(node):
        Slots = type(node.slots)
        if Slots not in known:
            names = ", ".join(sorted(kind.__name__ for kind in known))
            problems.append(f"tx has {Slots.__name__}, which it cannot fill; it can fill {names}")
            return node
        found = dict[str, Source]()
        for name in names_of(node):
            try:
                found[name] = read(name, node)
            except ValueError as error:
                problems.append(str(error))
        return _with(node, found, count, problems)

    state = map_nodes(LeafwiseState, filled, unpack_state(start))
    problems += finish()
    if problems:
        raise ValueError(f"{argument} does not fit tx: " + "; ".join(problems))
    return to_lines_of(like, tx, (params, pack_state_like(start, state)))[1]


def names_of(node: LeafwiseState) -> list[str]:
    """The names of the parameters that have slots in a node."""
    first = node.slots[0] if node.slots else ()
    return [path_name(path) for path, _ in leaves_with_path(first)]


def only_count(counts: Iterable[int], given: int | None) -> int:
    """The number of updates; 0 where neither the state nor the caller has one.

    Args:
        counts: those of the state.
        given: what the caller says, the argument ``count``.

    Raises:
        TypeError: if it is no int.
        ValueError: if it is negative, or if the counts differ.
    """
    found = {*counts}
    if given is not None:
        found.add(check_size(0, count=given))
    if len(found) > 1:
        raise ValueError(
            f"the numbers of updates differ: {sorted(found)}; an optimizer has one for all of its "
            "parameters"
        )
    return found.pop() if found else 0


def _with(node: Any, found: Mapping[str, Source], count: int, problems: list[str]) -> Any:
    """A node with what was found."""
    try:
        counts = {s.count for s in found.values() if s.count is not None}
        number = only_count(counts, None) if counts else count
    except ValueError as error:
        problems.append(str(error))
        return node

    def tree_of(slot, tree):
        def array(path, old):
            name = path_name(path)
            if name not in found:  # there is a message about it
                return old
            new = found[name].slots[slot]
            problems.extend(_wrong(f"{slot} of '{name}'", new, old))
            return like(new, old) if np.shape(new) == old.shape and is_real(new) else old

        return map_with_path(array, tree)

    slots = {slot: tree_of(slot, tree) for slot, tree in node.slots._asdict().items()}
    return node._replace(
        count=like(number, node.count),
        slots=node.slots._replace(**slots),
        shared={name: _power(name, base, number) for name, base in node.shared.items()},
    )


def _wrong(what: str, new: Any, old: Any) -> Iterator[str]:
    if np.shape(new) != old.shape:
        yield f"{what} must have shape {old.shape}, got {np.shape(new)}"
    elif not is_real(new):
        yield f"{what} must have a real dtype such as {old.dtype}, got {new.dtype}"


def like(new: Any, old: Any) -> Any:
    """A copy of an array in the dtype of another one, and where that is."""
    cast = saturating_cast if jnp.issubdtype(old.dtype, jnp.inexact) else jnp.asarray
    new = jnp.array(cast(jnp.asarray(new), old.dtype))
    return jax.device_put(new, old.sharding) if isinstance(old, jax.Array) else new


def _power(name: str, base: Any, count: int) -> Any:
    """``base ** (count + 1)``: the initial state has the base itself."""
    if not name.endswith("_power"):
        raise ValueError(f"tx has {name}, which another library's state does not have")
    return like(np.float64(base) ** (count + 1), base)
