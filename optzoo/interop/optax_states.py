"""The names of slots in optax, and their positions in its states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..core.paths import leaves_with_path, path_name
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
from ..state.types import NoSlots
from .fill import COUNTING

# The states of optax that have slots, with their fields.
STATES: dict[type, tuple[str, ...]] = {
    optax.ScaleByAdamState: ("mu", "nu"),
    optax.ScaleByAmsgradState: ("mu", "nu", "nu_max"),
    optax.ScaleByRmsState: ("nu",),
    optax.ScaleByRStdDevState: ("mu", "nu"),
    optax.ScaleByRssState: ("sum_of_squares",),
    optax.TraceState: ("trace",),
}
_RMS = {"rms": (optax.ScaleByRmsState, "nu")}
_CENTERED = {"rms": (optax.ScaleByRStdDevState, "nu"), "mg": (optax.ScaleByRStdDevState, "mu")}
_TRACE = {"momentum": (optax.TraceState, "trace")}
_MEANS = {"m": (optax.ScaleByAdamState, "mu"), "v": (optax.ScaleByAdamState, "nu")}
# The state and the field of optax for each slot.
FIELDS: dict[type, dict[str, tuple[type, str]]] = {
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
    **{kind: {field: (kind, field) for field in fields} for kind, fields in STATES.items()},
}
_STEPS = (RMSPropSlots, CenteredRMSPropSlots)


def sign_of(slots: type, state: type) -> int:
    """-1 where optax stores the opposite sign: it sums updates, RMSProp what it subtracts."""
    return -1 if state is optax.TraceState and slots in _STEPS else 1


class Found(NamedTuple):
    """A state of optax in which a parameter has slots."""

    path: tuple[Any, ...]
    is_last: bool  # in its chain
    fields: dict[str, Any]  # the arrays of the parameter
    count: int | None


ByParameter = dict[tuple[type, str], list[Found]]


def read_states(state: Any) -> tuple[ByParameter, list[int]]:
    """The slots of each parameter in a state of optax, by class and name, and all counts.

    Raises:
        ValueError: if there are slots of an unknown class, or if ``MultiSteps`` is within a cycle.
    """
    found, counts = ByParameter(), list[int]()

    def note(path: tuple[Any, ...], is_last: bool, node: Any) -> None:
        field = COUNTING.get(type(node), "count")
        count = int(getattr(node, field)) if field in node._fields else None
        if count is not None:
            counts.append(count)
        for field in STATES.get(type(node), ()):
            for at, a in leaves_with_path(getattr(node, field)):
                entries = found.setdefault((type(node), path_name(at)), [])
                if not entries or entries[-1].path != path:
                    entries.append(Found(path, is_last, {}, count))
                entries[-1].fields[field] = a

    _visit(state, note)
    return found, counts


def only(found: ByParameter, kind: type, name: str, slots: type) -> Found:
    """The only state of a class that a parameter has.

    Args:
        found: the result of :func:`read_states`.
        kind: the class.
        name: the name of the parameter.
        slots: the class of the slots to fill.

    Raises:
        ValueError: if there is not exactly one such state, or if the chain shows that the learning
            rate is at another position than the slots need.
    """
    entries = found.get((kind, name), [])
    if len(entries) > 1:
        at = ", ".join("/".join(map(str, entry.path)) for entry in entries)
        raise ValueError(f"'{name}' has several {kind.__name__}: at {at}")
    if not entries:
        fix = "; use momentum=None" if kind is optax.TraceState and slots in _STEPS else ""
        use = "" if kind is slots else f" for {slots.__name__}"
        raise ValueError(f"'{name}' has no {kind.__name__}{use}{fix}")
    [entry] = entries
    if kind is optax.TraceState and slots is MomentumSlots and entry.is_last:
        raise ValueError(
            f"the trace of '{name}' is the last of its chain, so it contains the learning rate; "
            "optzoo.momentum needs a trace without it, as that of optax.sgd"
        )
    if kind is optax.TraceState and slots in _STEPS:
        [(mean, _), *_] = FIELDS[slots].values()
        before = only(found, mean, name, slots).path
        if before and (*before[:-1], before[-1] + 1) == entry.path:
            raise ValueError(
                f"the trace of '{name}' precedes the learning rate; optzoo.rmsprop needs a trace "
                "that contains the rate, as that of optax.rmsprop"
            )
    return entry


def _visit(node: Any, f: Callable[..., None], path: Any = (), last: bool = False) -> None:
    """Calls ``f(path, is_last, node)`` for each known part; raises an error for unknown parts."""
    kind, names = type(node), getattr(node, "_fields", None)
    if isinstance(node, optax.MultiStepsState) and (step := int(jnp.asarray(node.mini_step))):
        raise ValueError(
            f"MultiSteps is within a cycle, after {step} of its steps: convert it at the end of a "
            "cycle"
        )
    if kind in STATES or kind in COUNTING:
        f(path, last, node)
    if kind in STATES:
        return
    if isinstance(node, dict):
        for k, part in node.items():
            _visit(part, f, (*path, k))
    elif isinstance(node, tuple | list) and names is None:
        for i, part in enumerate(node):
            _visit(part, f, (*path, i), i == len(node) - 1 > 0)
    else:
        for name in names or ():
            if name.startswith("inner"):
                _visit(getattr(node, name), f, (*path, name))
        others = [getattr(node, k) for k in names or () if not k.startswith("inner")]
        if kind not in COUNTING and _has_slots(others if names is not None else node):
            known = ", ".join(kind.__name__ for kind in STATES)
            where = "/".join(map(str, path))
            raise ValueError(
                f"{kind.__name__} at '{where}' of the state has no counterpart; the known classes "
                f"are {known}"
            )


def _has_slots(tree: Any) -> bool:
    """Whether there is an array with axes that is not a count."""
    is_slot = lambda a: hasattr(a, "dtype") and jnp.issubdtype(a.dtype, jnp.inexact) and a.ndim
    return any(map(is_slot, jax.tree.leaves(tree)))
