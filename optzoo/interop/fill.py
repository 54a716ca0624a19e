"""Fills states from those of other libraries, by the names of slots and parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..core.checks import check_size, check_transformation
from ..core.lines import from_lines, to_lines_of
from ..core.meshes import where_it_was
from ..core.numerics import is_real, saturating_cast
from ..core.paths import leaves_with_path, map_with_path, path_name
from ..state.averages import EMANesterovSlots, MovingAverageSlots
from ..state.storage.stored import pack_state_like, unpack_state
from ..state.types import LeafwiseState, ReplicaState, map_nodes, nodes_of


class Source(NamedTuple):
    """The slots and counts that another library has for one parameter."""

    slots: Mapping[str, Any]  # arrays by the names of this library's slots
    count: int | None  # the number of its updates, if it is known


# These are initialized from the parameters.
_AVERAGES = (MovingAverageSlots, EMANesterovSlots)
# The states of optax that count updates, besides its optimizers.
COUNTING = {
    optax.ScaleByScheduleState: "count",
    optax.InjectHyperparamsState: "count",
    optax.InjectStatefulHyperparamsState: "count",
    optax.MultiStepsState: "gradient_step",
}


def fill_state(
    tx: optax.GradientTransformation,
    params: Any,
    read: Callable[[str, type, Any], Source],
    *,
    known: Collection[type],
    count: int,
    finish: Callable[[], Iterable[str]],
    error: str,
) -> Any:
    """The state of ``tx`` with the slots, counts and powers of another state.

    Parts without a counterpart, such as the averages of a wrapper, keep their initial values.

    Args:
        tx: an optimizer of this library or of optax, alone or in chains, masks and wrappers.
        params: the parameters, or their shapes and dtypes.
        read: ``read(name, kind, node)`` returns the source of a parameter for a node of the initial
            state whose class, or class of slots, is ``kind``, or raises ``ValueError``.
        known: the classes of slots, and of optax's states, that can be filled.
        count: the number of updates of nodes whose sources have no count.
        finish: called at the end; returns further messages, such as unused sources.
        error: the beginning of the error message.

    Raises:
        ValueError: if ``tx`` is a method for replicas, or if anything does not fit: the message
            lists all problems.
    """
    check_transformation(tx=tx)
    given, params = params, from_lines(params)
    start = tx.init(params)
    problems: list[str] = []

    if nodes_of(ReplicaState, start):
        raise ValueError(
            "tx is a method for replicas, which has its own step counts: fill the state of its "
            "inner optimizer"
        )

    def filled(node):
        if (kind := kind_of(node)) in _AVERAGES:
            return node
        if kind not in known:
            names = ", ".join(sorted(k.__name__ for k in known))
            problems.append(
                f"tx has {kind.__name__}, which cannot be filled; the classes that can are {names}"
            )
            return node
        found = dict[str, Source]()
        for name in {name: None for tree in trees_of(node).values() for name in _names(tree)}:
            try:
                found[name] = read(name, kind, node)
            except ValueError as error:
                problems.append(str(error))
        return _with(node, found, count, problems)

    kinds = (LeafwiseState, *(kind for kind in known if kind.__module__.startswith("optax")))
    state = map_nodes(kinds, filled, unpack_state(start))
    for kind, field in COUNTING.items():
        state = map_nodes(kind, functools.partial(_counted, field, count), state)
    problems += finish()
    if problems:
        raise ValueError(f"{error}: " + "; ".join(problems))
    return to_lines_of(given, tx, (params, pack_state_like(start, state)))[1]


def kind_of(node: Any) -> type:
    """The class of the slots of an optimizer, or of a state of optax."""
    return type(node.slots) if isinstance(node, LeafwiseState) else type(node)


def trees_of(node: Any) -> dict[str, Any]:
    """The slots of an optimizer, or the fields of a state of optax, by name."""
    if isinstance(node, LeafwiseState):
        return node.slots._asdict()
    return {name: tree for name, tree in node._asdict().items() if name != "count"}


def _names(tree: Any) -> list[str]:
    return [path_name(path) for path, _ in leaves_with_path(tree)]


def _counted(field: str, count: int, node: Any) -> Any:
    """A node of optax with another count, also for the schedules in it."""
    node = node._replace(**{field: like(count, getattr(node, field))})
    if not isinstance(node, optax.InjectStatefulHyperparamsState):
        return node
    is_count = lambda x: getattr(x, "_fields", None) == ("count",)
    set_count = lambda x: x._replace(count=like(count, x.count)) if is_count(x) else x
    states = jax.tree.map(set_count, node.hyperparams_states, is_leaf=is_count)
    return node._replace(hyperparams_states=states)


def only_count(counts: Iterable[int], given: int | None) -> int:
    """The number of updates; 0 if neither the state nor the caller has one.

    Args:
        counts: the counts of the state.
        given: the argument ``count`` of the caller.

    Raises:
        TypeError: if ``given`` is not an int.
        ValueError: if ``given`` is negative, or if the counts differ.
    """
    found = {*counts}
    if given is not None:
        found.add(check_size(0, count=given))
    if len(found) > 1:
        raise ValueError(
            f"the numbers of updates differ: {sorted(found)}; an optimizer has one number for all "
            "parameters"
        )
    return found.pop() if found else 0


def _with(node: Any, found: Mapping[str, Source], count: int, problems: list[str]) -> Any:
    """A node with the sources that were found."""
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

    new = {slot: tree_of(slot, tree) for slot, tree in trees_of(node).items()}
    if not isinstance(node, LeafwiseState):
        counted = {"count": like(number, node.count)} if "count" in node._fields else {}
        return node._replace(**new, **counted)
    return node._replace(
        count=like(number, node.count),
        slots=node.slots._replace(**new),
        shared={name: _power(name, base, number) for name, base in node.shared.items()},
    )


def _wrong(what: str, new: Any, old: Any) -> Iterator[str]:
    if np.shape(new) != old.shape:
        yield f"{what} must have shape {old.shape}, got {np.shape(new)}"
    elif not is_real(new):
        yield f"{what} must have a real dtype such as {old.dtype}, got {new.dtype}"


def like(new: Any, old: Any) -> Any:
    """A copy of an array, with the dtype and sharding of another one."""
    cast = saturating_cast if jnp.issubdtype(old.dtype, jnp.inexact) else jnp.asarray
    return where_it_was(jnp.array(cast(jnp.asarray(new), old.dtype)), old)


def _power(name: str, base: Any, count: int) -> Any:
    """``base ** (count + 1)``, as the initial state has the base."""
    if not name.endswith("_power"):
        raise ValueError(f"tx has {name}, which another library's state does not have")
    return like(np.float64(base) ** (count + 1), base)
