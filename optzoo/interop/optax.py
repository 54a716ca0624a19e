"""States of optax's optimizers, read and written by name."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax

from ..core.checks import check_transformation
from ..core.lines import from_lines
from ..core.paths import leaves_with_path, path_name
from ..state.deferred import check_current
from ..state.storage.stored import unpack_state
from ..state.types import AccumulateState, LeafwiseState, map_nodes, nodes_of
from .fill import Source, fill_state, kind_of, like, only_count
from .optax_states import FIELDS, ByParameter, Found, only, read_states, sign_of

__all__ = ["from_optax", "to_optax"]


def from_optax(
    optax_state: Any, tx: optax.GradientTransformation, params: Any, *, count: int | None = None
) -> Any:
    """Converts a state of optax to a state of ``tx``, to continue the run with this library.

    Slots are found by the classes of optax's states (``ScaleByAdamState``, ``TraceState``, ...) in
    chains, masks, partitions, ``inject_hyperparams`` and ``MultiSteps``. A state does not contain
    the arguments of its optimizer: ``docs/from_optax_and_torch.md`` lists those that make both runs
    equal.

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
        optax_state: the state after any number of updates; with ``MultiSteps``, at the end of a
            cycle.
        tx: the optimizer, alone or in chains, masks, groups and wrappers.
        params: the parameters, or their shapes and dtypes (``jax.ShapeDtypeStruct``).
        count: the number of updates so far, if ``optax_state`` does not count them; None for 0. A
            schedule of ``tx`` continues from it.

    Returns:
        The state. Slots are copied and converted to the dtypes of ``tx``. Parts that optax does not
        have, such as an average of the parameters, keep the values of ``tx.init``.

    Raises:
        TypeError: if ``tx`` is not a transformation, or ``count`` is not an int.
        ValueError: if ``optax_state`` has an unknown class, if a parameter does not have exactly
            one state of the class that ``tx`` needs, if anything is left over, of another shape or
            dtype, or if the numbers of updates differ: the message lists all problems.
    """
    found, counts = read_states(optax_state)
    state = _filled(tx, params, found, only_count(counts, count), "optax_state does not fit tx")
    cycles = [node.gradient_step for node in nodes_of(optax.MultiStepsState, optax_state)]

    def begin(node):
        if not node.cycle or not cycles:
            return node
        return node._replace(cycle=node.cycle._replace(updates=like(cycles[0], node.count)))

    return map_nodes(AccumulateState, begin, state)


def to_optax(state: Any, optax_tx: optax.GradientTransformation, params: Any) -> Any:
    """Converts a state of this library to a state of ``optax_tx``, to continue the run with optax.

    Example:
        >>> import jax.numpy as jnp, optax, optzoo
        >>> params, tx = {"w": jnp.array([1.0, -2.0])}, optzoo.momentum(0.1, 0.9)
        >>> updates, state = tx.update(params, tx.init(params), params)
        >>> new = optzoo.interop.optax.to_optax(state, optax.sgd(0.1, 0.9), params)
        >>> print(new[0].trace["w"])
        [ 1. -2.]

    Args:
        state: the state of an optimizer that :func:`from_optax` can fill; with
            :func:`optzoo.accumulate`, at the end of a cycle.
        optax_tx: the optax optimizer, alone or in chains, masks, partitions, ``inject_hyperparams``
            and ``MultiSteps``.
        params: the parameters.

    Returns:
        The state of ``optax_tx``.

    Raises:
        TypeError: if ``optax_tx`` is not a transformation.
        ValueError: as :func:`from_optax`, and if deferred rows are not current.
    """
    check_transformation(optax_tx=optax_tx)
    check_current(state, "to_optax")
    read_states(optax_tx.init(from_lines(params)))  # raises for what cannot be filled
    found, counts, owners = _read_slots(from_lines(unpack_state(state)))
    new = _filled(optax_tx, params, found, only_count(counts, None), "state does not fit optax_tx")
    written, _ = read_states(new)
    for (kind, name), slots in owners.items():
        only(written, kind, name, slots)
    return new


def _filled(tx: Any, params: Any, found: ByParameter, count: int, error: str) -> Any:
    """The state of ``tx`` with all that was found; raises an error if something is left over."""
    used = set[tuple[type, str]]()

    def read(name, kind, node):
        del node
        slots, number = {}, None
        for slot, (state, field) in FIELDS[kind].items():
            entry = only(found, state, name, kind)
            array = entry.fields[field]
            slots[slot] = -jnp.asarray(array) if sign_of(kind, state) < 0 else array
            number = entry.count if number is None else number
        keys = {(state, name) for state, _ in FIELDS[kind].values()}
        if keys & used:
            raise ValueError(f"tx has several {kind.__name__} for '{name}'")
        used.update(keys)
        return Source(slots, number)

    def left_over():
        left = found.keys() - used
        return sorted(f"left over: {kind.__name__} of '{name}'" for kind, name in left)

    return fill_state(tx, params, read, known=FIELDS, count=count, finish=left_over, error=error)


def _read_slots(state: Any) -> tuple[ByParameter, list[int], dict[tuple[type, str], type]]:
    """The slots of each parameter as in a state of optax, all counts, and the classes of slots."""
    found, counts, owners = ByParameter(), list[int](), dict[tuple[type, str], type]()
    if any(int(node.cycle.position) for node in nodes_of(AccumulateState, state) if node.cycle):
        raise ValueError(
            "state is within a cycle of optzoo.accumulate: convert it at the end of a cycle"
        )
    for i, node in enumerate(nodes_of(LeafwiseState, state)):
        if (slots := kind_of(node)) not in FIELDS:
            raise ValueError(f"state has {slots.__name__}, which optax does not have")
        counts.append(int(node.count))
        for slot, (kind, field) in FIELDS[slots].items():
            for path, a in leaves_with_path(getattr(node.slots, slot)):
                key = kind, path_name(path)
                entries = found.setdefault(key, [])
                if not entries or entries[-1].path != (i,):
                    entries.append(Found((i,), False, {}, counts[-1]))
                entries[-1].fields[field] = sign_of(slots, kind) * a
                owners[key] = slots
    return found, counts, owners
