"""The state of an optimizer, and the bytes that a step reads, writes and sends."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import optax

from .core.checks import check_transformation
from .core.optimizer import about_of
from .core.paths import leaves_with_path, out_of_box, path_name, value_by_name
from .core.terminal import columns
from .jaxprs.graph import Graph
from .jaxprs.primitives import CALLS, Kind
from .sharded.row_sharding import RowSharding, shardings_by_leaf
from .state.sharding import state_sharding
from .state.slots import get_slot, slot_names
from .state.storage.codes import Codes, nbytes_of_codes, shape_of
from .state.types import map_nodes, needs_loss


class SlotOf(NamedTuple):
    """A slot of one parameter."""

    slot: str
    parameter: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


class TableOf(NamedTuple):
    """The sizes of a table sharded by rows, on one device. All sizes are in bytes.

    Attributes:
        parameter: its name.
        sharding: the sharding of its rows.
        kept: the shard and its slots.
        capacity: the number of rows that the device requests from each owner in a round.
        sent: sent in a round: ids, rows, the ids of gradients, and gradients.
        moved: the minimum that an owner reads and writes if it receives as many rows as a device
            has ids: gradients once, rows and slots twice.
    """

    parameter: str
    sharding: RowSharding
    kept: int
    capacity: int
    sent: int
    moved: int


@dataclasses.dataclass(frozen=True)
class Description:
    """The result of :func:`optzoo.describe`; its ``str`` is a table. All sizes are in bytes.

    Example:
        >>> import jax.numpy as jnp, optzoo
        >>> found = optzoo.describe(optzoo.adam(0.1), {"w": jnp.ones((3, 2))})
        >>> print([slot.slot for slot in found.slots], found.state_per_parameter > 8)
        ['m', 'v'] True

    Attributes:
        slots: every slot of every parameter.
        elements: the number of elements of all parameters together.
        parameters: the size of the parameters.
        state: the size of the whole state, including slots.
        state_on_device: the size on one device with :func:`optzoo.divide_states`, otherwise None.
        moved: the minimum that a step with dense gradients reads and writes: gradients once,
            parameters and state twice. With row-sparse gradients a lazy optimizer moves only the
            touched rows.
        sent: the bytes that each replica sends by collectives in every update.
        sent_at_times: the additional bytes in updates with an exchange.
        tables: the tables that are sharded by rows. The sizes above include all rows.
    """

    slots: tuple[SlotOf, ...]
    elements: int
    parameters: int
    state: int
    moved: int
    sent: int
    sent_at_times: int
    tables: tuple[TableOf, ...] = ()
    state_on_device: int | None = None

    @property
    def state_per_parameter(self) -> float:
        """Bytes of state for each element of the parameters."""
        return self.state / self.elements if self.elements else 0.0

    def __str__(self) -> str:
        rows = [
            (s.slot, s.parameter, str(list(s.shape)), s.dtype, f"{s.nbytes:,}") for s in self.slots
        ]
        here = "" if (nbytes := self.state_on_device) is None else f", {nbytes:,} on one device"
        totals = [
            f"parameters: {self.elements:,} elements, {self.parameters:,} bytes",
            f"state: {self.state:,} bytes, {self.state_per_parameter:.3g} per element{here}",
            f"a dense step reads and writes at least {self.moved:,} bytes",
            f"a step sends {self.sent:,} bytes, and {self.sent_at_times:,} more with an exchange",
        ]
        lines = [*columns([("slot", "parameter", "shape", "dtype", "bytes"), *rows]), *totals]
        if self.tables:
            head = ("table", "owners", "kept", "capacity", "sent in a round", "moved")
            sizes = lambda t: [f"{n:,}" for n in (t.kept, t.capacity, t.sent, t.moved)]
            tables = [
                (t.parameter, f"{t.sharding.num_shards} ({t.sharding.partition})", *sizes(t))
                for t in self.tables
            ]
            lines += ["sharded by rows, bytes of one device:", *columns([head, *tables])]
        return "\n".join(lines)


def describe(
    tx: optax.GradientTransformation,
    params: Any,
    *,
    axis_name: str = "replica",
    num_replicas: int = 8,
    tables: Mapping[str, RowSharding] | None = None,
    ids: Mapping[str, int] | None = None,
    capacity_factor: float | None = 1.0,
    **extra_args: Any,
) -> Description:
    """The slots of an optimizer for these parameters, and the bytes that a step moves and sends.

    .. code-block:: python

        print(optzoo.describe(optzoo.adam(1e-3), params))

    Nothing is computed: the state is from ``jax.eval_shape``, and collectives are read from the
    traced update.

    Example:
        >>> import jax, jax.numpy as jnp, optzoo
        >>> params = {"table": jax.ShapeDtypeStruct((1000, 64), jnp.float32)}
        >>> print(optzoo.describe(optzoo.row_wise_adagrad(0.1), params))
        slot         parameter  shape   dtype    bytes
        accumulator  table      [1000]  float32  4,000
        parameters: 64,000 elements, 256,000 bytes
        state: 4,004 bytes, 0.0626 per element
        a dense step reads and writes at least 776,008 bytes
        a step sends 0 bytes, and 0 more with an exchange

    Args:
        tx: any optax transformation.
        params: the parameters, or ``jax.ShapeDtypeStruct`` objects.
        axis_name: the axis of the replicas, if ``tx`` communicates along one.
        num_replicas: the number of replicas along that axis.
        tables: the tables that are sharded by rows, as in :func:`optzoo.sharded_minimize`.
        ids: for each pattern of ``tables``, the number of ids that a device looks up in a step.
        capacity_factor: as in :meth:`optzoo.sharded.RowSharding.capacity`. The default is the
            capacity for random ids; that of :func:`optzoo.sharded_minimize` is smaller if ids
            repeat.
        **extra_args: further arguments that ``update`` needs.

    Raises:
        TypeError: if ``tx`` is not a transformation.
        ValueError: as ``update``, for example if ``num_replicas`` is not that of ``tx``; or if
            ``ids`` does not have the patterns of ``tables``.
        NameError: if ``tx`` communicates along another axis.
    """
    check_transformation(tx=tx)
    places = None if about_of(tx).divide is None else state_sharding(tx, params)
    tx = optax.with_extra_args_support(tx)
    place = lambda x: None if places is None else x.sharding
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place(x)), params
    )
    state = jax.eval_shape(tx.init, params)
    as_stored = map_nodes(Codes, _of_codes, state)
    slots = {name: get_slot(as_stored, name) for name in slot_names(state)}

    given = {"value": 0.0} if needs_loss(state) else {}
    extra_args = {"global_step": 0, **given, **extra_args}
    update = lambda gs, state, xs: tx.update(gs, state, xs, **extra_args)
    try:
        traced = jax.make_jaxpr(update, axis_env=[(axis_name, num_replicas)])(params, state, params)
    except Exception as error:
        at = f"{num_replicas=} and {axis_name=}"
        error.add_note(f"describe traced an update with {at}: give the values of the optimizer")
        raise
    sent = list(_sent(traced.jaxpr))
    always = sum(nbytes for nbytes, at_times in sent if not at_times)
    sizes = [_nbytes(x) for x in jax.tree.leaves(params)]
    state_bytes = sum(map(_nbytes, jax.tree.leaves(state)))
    return Description(
        slots=tuple(row for name in slots for row in _rows_of(name, slots[name])),
        elements=sum(math.prod(x.shape) for x in jax.tree.leaves(params)),
        parameters=sum(sizes),
        state=state_bytes,
        moved=3 * sum(sizes) + 2 * state_bytes,
        sent=always,
        sent_at_times=sum(nbytes for nbytes, _ in sent) - always,
        tables=tuple(_tables(params, slots, tables or {}, ids or {}, capacity_factor)),
        state_on_device=None if places is None else _on_device(state, places),
    )


def _tables(
    params: Any,
    slots: Mapping[str, Any],
    tables: Mapping[str, RowSharding],
    ids: Mapping[str, int],
    capacity_factor: float | None,
) -> Iterator[TableOf]:
    if tables.keys() != ids.keys():
        raise ValueError(
            f"ids must have the patterns of tables, {sorted(tables)}, got {sorted(ids)}: give the "
            "number of ids that a device looks up in a step"
        )
    shardings = shardings_by_leaf(tables, params)
    number_of = value_by_name("ids", ids, params)
    of_slots = [
        {out_of_box(path): a for path, a in leaves_with_path(tree)} for tree in slots.values()
    ]
    for (path, x), s in zip(leaves_with_path(params), shardings, strict=True):
        if s is None:
            continue
        number = number_of[path_name(path)]
        row, capacity = _nbytes(x) // s.stored_rows, s.capacity(number, capacity_factor)
        mine = [slot[out_of_box(path)] for slot in of_slots if out_of_box(path) in slot]
        of_slots_of_row = sum(
            _of_slot(a) // s.stored_rows for a in mine if a.shape[:1] == (s.stored_rows,)
        )
        yield TableOf(
            path_name(path),
            s,
            kept=s.rows_per_shard * (row + of_slots_of_row),
            capacity=capacity,
            sent=(s.num_shards - 1) * capacity * 2 * (row + 4),
            moved=number * (3 * row + 2 * of_slots_of_row),
        )


def _rows_of(slot: str, tree: Any) -> Iterator[SlotOf]:
    for path, x in leaves_with_path(tree):
        yield SlotOf(slot, path_name(path), x.shape, x.dtype.name, _of_slot(x))


def _sent(jaxpr: Any) -> Iterator[tuple[int, bool]]:
    """For every collective, its bytes, and whether it is in some updates only."""
    for op, _, times, sometimes in Graph.of(jaxpr).walk({*CALLS, Kind.MAP}):
        if op.kind is Kind.COLLECTIVE:
            arrays = [v.aval for v in op.ins if hasattr(v.aval, "dtype")]
            yield times * sum(map(_nbytes, arrays)), sometimes


def _of_codes(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape_of(x), x.codes.dtype)


def _of_slot(x: Any) -> int:
    """The bytes of a slot, including the scales of 8-bit slots."""
    return _nbytes(x) if x.dtype.itemsize > 1 else nbytes_of_codes(x.shape)


def _on_device(state: Any, places: Any) -> int:
    """The bytes of a state on one device."""
    of = lambda x, place: math.prod(place.shard_shape(x.shape)) * x.dtype.itemsize
    return sum(jax.tree.leaves(jax.tree.map(of, state, places)))


def _nbytes(x: Any) -> int:
    return math.prod(x.shape) * x.dtype.itemsize
