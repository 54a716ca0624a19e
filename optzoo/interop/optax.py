"""States of optax's optimizers, read and written by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..core.checks import check_transformation
from ..core.lines import from_lines
from ..core.paths import leaves_with_path, map_with_path, path_name
from ..first_order.adagrad import AdagradSlots
from ..first_order.adam import AdamSlots
from ..first_order.adamax import AdaMaxSlots
from ..first_order.amsgrad import AMSGradSlots
from ..first_order.momentum import MomentumSlots
from ..first_order.rmsprop import (
    CenteredRMSPropSlots,
    PlainCenteredRMSPropSlots,
    PlainRMSPropSlots,
    RMSPropSlots,
)
from ..state.deferred import check_current
from ..state.storage import unpack_state
from ..state.types import AccumulateState, Cycle, LeafwiseState, NoSlots, map_nodes, nodes_of
from .fill import Source, fill_state, like, only_count

__all__ = ["from_optax", "to_optax"]

_RMS = {"rms": (optax.ScaleByRmsState, "nu")}
_CENTERED = {"rms": (optax.ScaleByRStdDevState, "nu"), "mg": (optax.ScaleByRStdDevState, "mu")}
_TRACE = {"momentum": (optax.TraceState, "trace")}
_MEANS = {"m": (optax.ScaleByAdamState, "mu"), "v": (optax.ScaleByAdamState, "nu")}
# The state and the field of optax for each slot of an optimizer.
_FIELDS: dict[type, dict[str, tuple[type, str]]] = {
    AdagradSlots: {"accumulator": (optax.ScaleByRssState, "sum_of_squares")},
    AdamSlots: _MEANS,
    AdaMaxSlots: _MEANS,
    AMSGradSlots: {
        "m": (optax.ScaleByAmsgradState, "mu"),
        "v": (optax.ScaleByAmsgradState, "nu"),
        "v_hat": (optax.ScaleByAmsgradState, "nu_max"),
    },
    MomentumSlots: _TRACE,
    NoSlots: {},
    PlainRMSPropSlots: _RMS,
    RMSPropSlots: {**_RMS, **_TRACE},
    PlainCenteredRMSPropSlots: _CENTERED,
    CenteredRMSPropSlots: {**_CENTERED, **_TRACE},
}
# optax adds up the updates, which are subtracted here.
_STEPS = (RMSPropSlots, CenteredRMSPropSlots)
_KNOWN = tuple({kind: None for fields in _FIELDS.values() for kind, _ in fields.values()})
_INJECTED = (optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState)
_COUNTING = (optax.ScaleByScheduleState, optax.MultiStepsState, *_INJECTED)
_COUNTS = ("count", "gradient_step")


class _Found(NamedTuple):
    """A state of optax in which a parameter has slots."""

    path: tuple[Any, ...]
    is_last: bool  # in its chain
    fields: dict[str, Any]  # the arrays of the parameter
    count: int | None


def from_optax(
    optax_state: Any, tx: optax.GradientTransformation, params: Any, *, count: int | None = None
) -> Any:
    """The state of an optimizer of this library that continues the run of one of optax.

    Slots are found by the classes of optax's states (``ScaleByAdamState``, ``TraceState``, ...) in
    chains, masks, partitions, ``inject_hyperparams`` and ``MultiSteps``. A state does not show the
    arguments of its optimizer: which ones make both runs equal is a `table
    <https://optzoo.readthedocs.io/from_optax_and_torch>`_.

    Example:
        >>> import jax.numpy as jnp, optax, optzoo
        >>> params = {"w": jnp.array([1.0, -2.0])}
        >>> old = optax.adamw(0.1, weight_decay=0.01)
        >>> updates, state = old.update(params, old.init(params), params)
        >>> tx = optzoo.sparse_adamw(0.1, weight_decay=0.01)
        >>> state = optzoo.interop.optax.from_optax(state, tx, params)
        >>> print(optzoo.get_slot(state, "m")["w"])
        [ 0.1 -0.2]

    Args:
        optax_state: the state after any number of updates; within ``MultiSteps`` at the end of a
            cycle.
        tx: the optimizer, alone or in chains, masks, groups and wrappers.
        params: the parameters, or their shapes and dtypes (``jax.ShapeDtypeStruct``).
        count: the number of updates made so far, where ``optax_state`` does not count them; None
            for 0. A schedule of ``tx`` goes on from it.

    Returns:
        The state. Slots are copied, and converted to the dtypes that it keeps them in. What optax
        does not have, such as an average of the parameters, is as ``tx.init`` makes it.

    Raises:
        TypeError: if ``tx`` is no transformation, or ``count`` no int.
        ValueError: if ``optax_state`` has a class that is not known, if a parameter has no state of
            the class that belongs to ``tx``, or several, if anything is left over, of another shape
            or dtype, or if the numbers of updates differ: the message lists what is found.
    """
    found, counts = _read(optax_state)
    used = set[tuple[type, str]]()

    def read(name, node):
        slots, count = {}, None
        for slot, (kind, field) in _FIELDS[type(node.slots)].items():
            entry = _only(found, kind, name, type(node.slots))
            _check_order(entry, kind, name, found, type(node.slots))
            is_negative = kind is optax.TraceState and isinstance(node.slots, _STEPS)
            slots[slot] = -jnp.asarray(entry.fields[field]) if is_negative else entry.fields[field]
            count = entry.count if count is None else count
        keys = {(kind, name) for kind, _ in _FIELDS[type(node.slots)].values()}
        if keys & used:
            raise ValueError(f"tx has several of {type(node.slots).__name__} for '{name}'")
        used.update(keys)
        return Source(slots, count)

    def left_over():
        for kind, name in found.keys() - used:
            yield f"left over: {kind.__name__} of '{name}'"

    state = fill_state(
        tx, params, read, known=_FIELDS, count=only_count(counts, count),
        finish=lambda: sorted(left_over()), argument="optax_state",
    )  # fmt: skip
    cycles = [int(node.gradient_step) for node in nodes_of(optax.MultiStepsState, optax_state)]
    begin = lambda node: node._replace(
        cycle=Cycle(node.cycle.position, like(cycles[0], node.cycle.updates))
        if cycles and node.cycle
        else node.cycle
    )
    return map_nodes(AccumulateState, begin, state)


def to_optax(state: Any, optax_tx: optax.GradientTransformation, params: Any) -> Any:
    """The state of an optimizer of optax that continues the run of one of this library.

    Example:
        >>> import jax.numpy as jnp, optax, optzoo
        >>> params, tx = {"w": jnp.array([1.0, -2.0])}, optzoo.momentum(0.1, 0.9)
        >>> updates, state = tx.update(params, tx.init(params), params)
        >>> new = optzoo.interop.optax.to_optax(state, optax.sgd(0.1, 0.9), params)
        >>> print(new[0].trace["w"])
        [ 1. -2.]

    Args:
        state: of an optimizer that :func:`from_optax` can fill; in a cycle of
            :func:`optzoo.accumulate` at its end.
        optax_tx: the optimizer of optax, in its chains, masks, partitions,
            ``inject_hyperparams`` and ``MultiSteps``.
        params: the parameters.

    Returns:
        The state of ``optax_tx``.

    Raises:
        TypeError: if ``optax_tx`` is no transformation.
        ValueError: as :func:`from_optax`, and if deferred rows are not current.
    """
    check_transformation(optax_tx=optax_tx)
    check_current(state, "to_optax")
    given, owners, counts = _slots_of(from_lines(unpack_state(state)))
    count = only_count(counts, None)
    problems, used = list[str](), set[tuple[type, str]]()

    def array(kind, field):
        def of(path, old):
            name = path_name(path)
            used.add((kind, name))
            entry = given.get((kind, name))
            if entry is None:
                problems.append(f"state has no slots for {kind.__name__} of '{name}'")
            elif (shape := np.shape(entry[field])) != np.shape(old):
                problems.append(f"{field} of '{name}' must have shape {old.shape}, got {shape}")
            else:
                return like(entry[field], old)
            return old

        return of

    def write(path, is_last, node):
        if isinstance(node, optax.MultiStepsState):
            return node._replace(gradient_step=like(count, node.gradient_step))
        fields = {field for kind, field in _all_fields() if kind is type(node)}
        new = {k: map_with_path(array(type(node), k), getattr(node, k)) for k in sorted(fields)}
        if "count" in node._fields:
            new["count"] = like(count, node.count)
        if isinstance(node, optax.InjectStatefulHyperparamsState):  # their schedules count, too
            is_count = lambda x: getattr(x, "_fields", None) == ("count",)
            counted = lambda x: x._replace(count=like(count, x.count)) if is_count(x) else x
            new["hyperparams_states"] = jax.tree.map(
                counted, node.hyperparams_states, is_leaf=is_count
            )
        return node._replace(**new)

    new = _mapped(optax_tx.init(from_lines(params)), write)
    left = given.keys() - used
    problems += sorted(f"left over: {kind.__name__} of '{name}'" for kind, name in left)
    if problems:
        raise ValueError("state does not fit optax_tx: " + "; ".join(problems))
    found, _ = _read(new)
    for (kind, name), Slots in owners.items():
        _check_order(_only(found, kind, name, Slots), kind, name, found, Slots)
    return new


# The states of optax


def _all_fields() -> Iterator[tuple[type, str]]:
    for fields in _FIELDS.values():
        yield from fields.values()


def _mapped(
    node: Any, f: Callable[..., Any], path: tuple[Any, ...] = (), last: bool = False
) -> Any:
    """A state with ``f(path, is_last, node)`` of each known part; raises for unknown ones."""
    if isinstance(node, _KNOWN):
        return f(path, last, node)
    if isinstance(node, optax.MultiStepsState) and int(node.mini_step):
        raise ValueError(f"MultiSteps is in a cycle, after {int(node.mini_step)} of its steps")
    if isinstance(node, _COUNTING):
        node = f(path, last, node)
    if isinstance(node, dict):
        return {k: _mapped(part, f, (*path, k)) for k, part in node.items()}
    if not isinstance(node, tuple | list):
        _check_no_slots(node, type(node).__name__, path)
        return node
    names = getattr(node, "_fields", None)
    if names is None:
        end = len(node) - 1
        parts = (_mapped(x, f, (*path, i), i == end > 0) for i, x in enumerate(node))
        return type(node)(parts)
    new = {}
    for name in names:
        if name.startswith("inner"):
            new[name] = _mapped(getattr(node, name), f, (*path, name))
        elif not isinstance(node, _COUNTING):
            _check_no_slots(getattr(node, name), type(node).__name__, path)
    return node._replace(**new) if new else node


def _check_no_slots(value: Any, kind: str, path: tuple[Any, ...]) -> None:
    arrays = [a for a in jax.tree.leaves(value) if hasattr(a, "dtype")]
    if any(jnp.issubdtype(a.dtype, jnp.inexact) and a.ndim for a in arrays):
        known = ", ".join(kind.__name__ for kind in _KNOWN)
        where = "/".join(map(str, path))
        raise ValueError(
            f"the state has {kind} at '{where}', which has no counterpart; known are {known}"
        )


def _read(state: Any) -> tuple[dict[tuple[type, str], list[_Found]], list[int]]:
    """What each parameter has in a state of optax, by classes and names, and all counts."""
    found, counts = dict[tuple[type, str], list[_Found]](), list[int]()

    def note(path, is_last, node):
        count = next((int(getattr(node, k)) for k in _COUNTS if k in node._fields), None)
        if count is not None:
            counts.append(count)
        fields = sorted({field for kind, field in _all_fields() if isinstance(node, kind)})
        for field in fields:
            for at, a in leaves_with_path(getattr(node, field)):
                entries = found.setdefault((type(node), path_name(at)), [])
                if not entries or entries[-1].path != path:
                    entries.append(_Found(path, is_last, {}, count))
                entries[-1].fields[field] = a
        return node

    _mapped(state, note)
    return found, counts


def _only(found: Any, kind: type, name: str, Slots: type) -> _Found:
    """The only state of a class that a parameter has; raises ``ValueError``."""
    entries = found.get((kind, name), [])
    if len(entries) == 1:
        return entries[0]
    if entries:
        at = ", ".join("/".join(map(str, entry.path)) for entry in entries)
        raise ValueError(f"'{name}' has several of {kind.__name__}: at {at}")
    fix = "; take momentum=None" if kind is optax.TraceState and Slots in _STEPS else ""
    raise ValueError(f"'{name}' has no {kind.__name__} for {Slots.__name__}{fix}")


def _check_order(entry: _Found, kind: type, name: str, found: Any, Slots: type) -> None:
    """Raises ``ValueError`` if the rate is on the other side of a trace, where a chain shows it."""
    if kind is not optax.TraceState:
        return
    if Slots is MomentumSlots:
        if entry.is_last:
            raise ValueError(
                f"the trace of '{name}' is the last of its chain, so the learning rate is in it; "
                "optzoo.momentum multiplies by it afterwards, as optax.sgd"
            )
        return
    [(other, _), *_] = _FIELDS[Slots].values()
    before = _only(found, other, name, Slots).path
    if before[:-1] == entry.path[:-1] and before[-1:] and entry.path[-1] == before[-1] + 1:
        raise ValueError(
            f"the trace of '{name}' comes before the learning rate; optzoo.rmsprop has the rate in "
            "its momentum, as optax.rmsprop"
        )


def _slots_of(state: Any) -> tuple[dict[Any, dict[str, Any]], dict[Any, type], list[int]]:
    """The arrays of parameters by optax's class and names, whose they are, and all counts."""
    given, owners, counts = dict[Any, dict[str, Any]](), dict[Any, type](), list[int]()
    if any(int(node.cycle.position) for node in nodes_of(AccumulateState, state) if node.cycle):
        raise ValueError("state: accumulate is in a cycle; convert at the end of one")
    for node in nodes_of(LeafwiseState, state):
        Slots = type(node.slots)
        if Slots not in _FIELDS:
            raise ValueError(f"state has {Slots.__name__}, which optax does not have")
        counts.append(int(node.count))
        for slot, (kind, field) in _FIELDS[Slots].items():
            sign = -1 if kind is optax.TraceState and Slots in _STEPS else 1
            for path, a in leaves_with_path(getattr(node.slots, slot)):
                key = kind, path_name(path)
                if field in given.setdefault(key, {}):
                    raise ValueError(f"state has several of {kind.__name__} for '{key[1]}'")
                given[key][field], owners[key] = sign * a, Slots
    return given, owners, counts
