"""The train step of one device, with tables sharded by rows."""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ..core.compat import gather_invarying, vary, varying
from ..core.lines import Lines, is_lines, param_tree
from ..core.norms import clipped_by_global_norm, squares_of_device
from ..core.numerics import upcast
from ..core.rows import is_rows
from ..deferred.optimizer import CurrentRows, DeferredOptimizer
from ..deferred.state import CaughtUpState, deferred_leaves
from ..deferred.tables import Table, by_ids, map_tables, swept, tables_of
from ..distributed.engine.collectives import Replicas, divide_gradients
from ..jaxprs.loss import Gradients, Loss, TracedLoss, trace_loss
from ..jaxprs.prove_shards import check_update
from ..jaxprs.reads import check_all_read
from ..sharded.exchange import make_route
from ..sharded.lookup import Read
from ..sharded.rounds import Arrived, Asked, Part, read_first, read_further, send_gradients
from ..sharded.row_sharding import RowSharding, measured_capacity
from ..sparse.lookup import lookup
from ..state.deferred import has_deferred
from ..state.types import nodes_of
from .deferred import DeferredTables, look_up
from .step import Model

CapacityFactor = float | None | Literal["auto"]
# Of how many rows for each owner messages are small: nothing is won by fewer.
SMALL = 128


class Mapped(NamedTuple):
    """How a step is mapped over the devices of a mesh."""

    mesh: Mesh
    capacity_factor: CapacityFactor
    # By the position of a table the most distinct ids that one owner has of those of a device, in
    # the batch by which messages are made so large; of tables whose messages are not small.
    most: Mapping[int, int]
    max_norm: float | None
    transport: Any
    shardings: list[RowSharding | None]  # of the parameters
    state_specs: Any

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of the mesh."""
        return self.mesh.axis_names

    @property
    def tables(self) -> dict[int, RowSharding]:
        """The shardings of the parameters that are sharded by rows, by their indices."""
        return {i: s for i, s in enumerate(self.shardings) if s is not None}

    def capacity(self, table: int, num_ids: int) -> int:
        """The number of rows that a device requests from each owner of a table in one round."""
        s = self.shardings[table]
        assert s is not None
        if table in self.most:
            return measured_capacity(s, num_ids, self.most[table])
        return s.capacity(num_ids, 1.0 if self.capacity_factor == "auto" else self.capacity_factor)


class ShardedTables(DeferredTables):
    """The shards of one device and the replicated parameters; rows of both may be deferred."""

    def __init__(self, model: Model, mapped: Mapped, params: Any, state: Any):
        super().__init__(model, params, state)
        self.mapped = mapped
        self.sharded = frozenset(mapped.tables)
        self.read_first |= self.sharded
        # In the loss a table has the shape of all its rows, also if its shards are in lines.
        tables, treedef = param_tree.flatten(params)
        pairs = zip(tables, mapped.shardings, strict=True)
        self.seen = jax.tree.structure(treedef.unflatten([x if s is None else 0 for x, s in pairs]))
        self.asked: list[Asked] = []  # for each part of the batch
        if model.deferred is not None:
            self._change(dict.fromkeys(deferred_leaves(params, state), swept))

    def _map(
        self, params: Any, state: Any, change: Callable[[int, Table], Table]
    ) -> tuple[Any, Any]:
        """Like :func:`map_tables`; sets the axes over which the tables are divided."""
        axes = {i: s.axes for i, s in self.mapped.tables.items()}
        return map_tables(params, state, lambda i, t: change(i, t.divided(axes.get(i, ()))))

    def leaves(self) -> list[Array]:
        """The parameters that the loss of this device gets."""
        tables = param_tree.leaves(self.params)
        leaves = Replicas(self.mapped.axes).vary(jax.tree.leaves(self.params))
        # This array is never made.
        stand_in = lambda x, s, of: jnp.zeros_like(x, shape=(s.num_rows, *of.shape[1:]))
        return [
            x if s is None else stand_in(x, s, table)
            for x, s, table in zip(leaves, self.mapped.shardings, tables, strict=True)
        ]

    def check(self, loss: Loss) -> None:
        """Raises ``ValueError`` for unsupported reads of a table; reports dense gradients."""
        reasons, reads = dict(loss.dense_tables()), loss.reads()
        for i in self.mapped.tables:
            if loss.uses[i] or reads[i]:
                reason = reasons.get(i, "it is used in another way")
                raise ValueError(
                    f"table '{self.names[i]}' is sharded by rows, so the loss can read it by "
                    f"lookups and gathers of whole rows only: {reason}"
                )
        self.has_gradient = loss.has_gradient
        super().check(loss)

    @property
    def parts(self) -> dict[int, Part]:
        """The requests to each table, by its index, for the first part of the batch.

        The requests for the other parts have the same sizes.
        """
        return dict(zip(self.mapped.tables, self.asked[0].parts if self.asked else (), strict=True))

    def read(self, ids: Sequence[Mapping[int, Array]]) -> list[dict[int, Array]]:
        """For each part of the batch, the rows of its ids, by the index of the table."""
        axes, tables = self.mapped.axes, self.mapped.tables
        self._ids = [{i: of for i, of in part.items() if i not in tables} for part in ids]
        replicated = {i: jnp.concatenate([part[i] for part in ids]) for i in self._ids[0]}
        everywhere = {i: gather_invarying(vary(of, axes), axes) for i, of in replicated.items()}
        catch_up = {i: lambda t, of=of: by_ids(t, of) for i, of in everywhere.items()}
        self._change(catch_up)
        reads, transport = self._reads(), self.mapped.transport
        for of_part in ids:
            parts = [self._part(i, of_part[i]) for i in tables]
            self.asked.append(read_first(parts, reads, transport))
        return [
            dict(zip(tables, asked.rows, strict=True)) | self._looked_up(of_replicated)
            for asked, of_replicated in zip(self.asked, self._ids, strict=True)
        ]

    def read_further(self, part: int, rows: Mapping[int, Array]) -> Mapping[int, Array]:
        """The rows of a part of the batch, with rows that did not fit into the first round."""
        tables, mapped = self.mapped.tables, self.mapped
        if not tables:
            return rows
        asked = self.asked[part]._replace(rows=[rows[i] for i in tables])
        found = read_further(asked, self._reads(), mapped.axes, mapped.transport)
        return {**rows, **dict(zip(tables, found, strict=True))}

    def _part(self, table: int, ids: Array) -> Part:
        s = self.mapped.tables[table]
        places = s.places_of(ids)
        replicas = tuple(a for a in self.mapped.axes if a not in s.axes)
        capacity = self.mapped.capacity(table, len(ids))
        return Part(s, capacity, places, make_route(places, s), replicas)

    def most(self, parts: Sequence[Sequence[Any]]) -> dict[int, Array]:
        """The largest number of distinct ids per owner, over the devices and parts of a batch.

        By the indices of the tables whose messages are not small.
        """
        found = dict[int, list[Array]]()
        for batch in parts:
            traced = trace_loss(self.model.loss_of(self.seen, batch), self.leaves())
            loss = traced.with_taps(self.read_first, self.wanted.gathers(traced, self.sharded))
            for i, ids in loss.ids(self.leaves()).items():
                if i in self.mapped.tables and self.mapped.capacity(i, len(ids)) > SMALL:
                    part = self._part(i, ids)
                    found.setdefault(i, []).append(jnp.max(part.ends - part.starts))
        of_all = {i: functools.reduce(jnp.maximum, counts) for i, counts in found.items()}
        return {i: lax.pmax(count, self.mapped.axes) for i, count in of_all.items()}

    def _shards(self) -> dict[int, Any]:
        """The shard of each sharded table on this device: an array, or packed lines."""
        leaves = param_tree.leaves(self.params)
        local = lambda x, s: Lines(x.value, (s.rows_per_shard, *x.shape[1:])) if is_lines(x) else x
        return {i: local(leaves[i], s) for i, s in self.mapped.tables.items()}

    def _reads(self) -> list[Read]:
        """Functions that read the rows of each sharded table."""
        deferred = dict[int, Table]()
        for node in nodes_of(CaughtUpState, self.state):
            deferred |= tables_of(node, self.params)[0]
        current = lambda table, ids: self.model.read(lambda: look_up(table, ids))
        return [
            functools.partial(current, deferred[i])
            if i in deferred
            else functools.partial(lookup, shard)
            for i, shard in self._shards().items()
        ]

    def update(
        self, found: Sequence[Gradients], extra_args: Mapping[str, Any]
    ) -> tuple[Any, Any, Array]:
        """The parameters, the state and the mean loss after all rounds."""
        rest, value = self.means(found)
        extra_args = self.arguments(value, extra_args)
        return *self._in_rounds(self._arrived(found), rest, extra_args), value

    def means(self, found: Sequence[Gradients]) -> tuple[dict[int, Any], Array]:
        """The means of the loss and, by index, of the gradients of all but sharded tables."""
        axes, tables, number = self.mapped.axes, self.mapped.tables, self._number(found)
        dtype = found[0].value.dtype
        total = functools.reduce(jnp.add, [upcast(part.value) for part in found])
        # A loss without gradient, as of no ids, is not the sum of a collective.
        missing = set(axes) - varying(total)
        if missing and self.has_gradient:
            raise ValueError(
                f"the loss does not vary over the mesh axes {sorted(missing)}: return the loss of "
                "one device's part of the batch. sharded_minimize computes the mean over the "
                "devices"
            )
        of_parts = [part.of_leaves for part in self._with_rows(found)]
        like = {i: g for i, g in enumerate(of_parts[0]) if i not in tables}
        rest = {i: _sum_of_parts([gs[i] for gs in of_parts]) for i in like}
        sums, value = self._sum(rest, vary(total, axes))
        return divide_gradients(sums, jnp.asarray(number), like), (value / number).astype(dtype)

    def _number(self, found: Sequence[Gradients]) -> int:
        """The number of losses in the sum: over all devices and all parts of their batches."""
        return self.mapped.mesh.size * len(found)

    def _arrived(self, found: Sequence[Gradients]) -> Arrived:
        """The gradients of the rows of sharded tables, at their owners."""
        # Of a table that the loss does not read there are none.
        nothing = lambda i: jnp.zeros_like(self.leaves()[i], shape=(0, *self.leaves()[i].shape[1:]))
        gradients = [
            [part.of_rows[i] if i in part.of_rows else nothing(i) for i in self.mapped.tables]
            for part in found[: len(self.asked)]
        ]
        options = self._number(found), self.mapped.axes, self.mapped.transport
        return send_gradients(self.asked, gradients, *options)

    def _sum(self, grads: dict[int, Any], value: Array) -> tuple[dict[int, Any], Array]:
        """The sums of the gradients, by their indices, and of the loss over all devices."""
        return Replicas(self.mapped.axes).sum_gradients(grads, True, value)

    def _in_rounds(
        self, arrived: Arrived, rest: dict[int, Any], extra_args: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        """The parameters and the state after all rounds.

        Args:
            arrived: the gradients of the rows of sharded tables.
            rest: the gradients of all other parameters, by their indices.
            extra_args: extra args of the update.
        """
        mapped = self.mapped
        is_round = not all(p.always_fits for p in self.parts.values())
        needed = self._check_update(extra_args, is_round)
        # Of whole gradients, those that are needed before the first of several rounds.
        squares = _squares(arrived, self.parts, sorted(needed)) if needed else {}
        specs = [P() if s is None else s.spec for s in mapped.shardings]
        specs = jax.tree.leaves((specs, mapped.state_specs))
        before, treedef = jax.tree.flatten((self.params, self.state))

        def update(rows, leaves, in_loop=False):
            """All parameters and slots, after the update of some rows."""
            rows = zip(self.parts, rows, strict=True)
            gs = rest | {i: g.with_squares(squares.get(i)) for i, g in rows}
            gs = self.treedef.unflatten(gs[i] for i in range(len(gs)))
            if mapped.max_norm is not None:
                gs = clipped_by_global_norm(gs, mapped.max_norm)
            params, state = treedef.unflatten(leaves)
            after = self._update_once(params, state, gs, extra_args, in_loop=in_loop)
            return jax.tree.leaves(after)

        # A further round changes rows alone. All else starts from the same values in each of them.
        by_rows = [k for k, spec in enumerate(specs) if any(spec)]
        with_rows = lambda leaves, changed: [
            dict(zip(by_rows, changed, strict=True)).get(k, x) for k, x in enumerate(leaves)
        ]

        def further(rows, changed):
            leaves = update(rows, with_rows(before, changed), in_loop=True)
            return [leaves[k] for k in by_rows]

        after = update(arrived.first, before)
        changed = arrived.further(further, [after[k] for k in by_rows])
        return treedef.unflatten(with_rows(after, changed))

    def _update_once(
        self,
        params: Any,
        state: Any,
        grads: Any,
        extra_args: Mapping[str, Any],
        *,
        in_loop: bool,
    ) -> tuple[Any, Any]:
        """The parameters and the state after the update of the rows of a round."""
        gs = self.treedef.flatten_up_to(grads)
        if (deferred := self.model.deferred) is not None:
            check_all_read(self.model.tx, self.model.tx.update, extra_args)
            update = lambda p, s: update_deferred(deferred, p, s, gs, extra_args)
            return self.model.run(update, params, state)
        if has_deferred(state):
            catch_up = lambda i, t: by_ids(t, gs[i].indices) if i in self.parts else t
            f = lambda params, state: self._map(params, state, catch_up)
            params, state = self.model.run(f, params, state)
        return self.model.apply(params, state, grads, extra_args, in_loop=in_loop)

    def _check_update(self, extra_args: Mapping[str, Any], is_round: bool) -> set[int]:
        """The tables whose sums of squares are needed before the first of several rounds.

        Raises ``ValueError`` unless ``tx`` can update sharded tables.
        """
        has_norm = is_round and self.mapped.max_norm is not None
        needed = set(self.parts) if has_norm else set[int]()
        merged = {i for i, p in self.parts.items() if is_round or p.sharding.num_shards > 1}
        # One shard that is filled up has more rows than its table.
        filled = {i for i, p in self.parts.items() if p.sharding.stored_rows > p.sharding.num_rows}
        shards = {i: self.parts[i].shard(is_round) for i in merged | filled}
        if self.model.deferred is not None or not shards:
            return needed
        tables = {i: self.names[i] for i in shards}
        more = deferred_leaves(self.params, self.state) & tables.keys()
        return needed | check_update(
            self.model.tx, self.params, tables, extra_args, shards, more, merged
        )


class MeanGradients(ShardedTables):
    """Replicated parameters; the devices divide the update, which follows later."""

    def __init__(self, model: Model, mapped: Mapped, params: Any, specs: Sequence[P]):
        """Divides the mean gradients over the devices by ``specs``."""
        super().__init__(model, mapped, params, ())
        self.specs = specs

    def tapped(self, traced: TracedLoss, extra_args: Mapping[str, Any]) -> Loss:
        """The loss with taps for lookups."""
        loss = traced.with_taps(frozenset(), frozenset())
        self.check(loss)
        return loss

    def update(
        self, found: Sequence[Gradients], extra_args: Mapping[str, Any]
    ) -> tuple[Any, Any, Array]:
        """The gradients in place of the parameters, no state, and the mean loss."""
        rest, value = self.means(found)
        return self.treedef.unflatten(rest[i] for i in range(len(rest))), (), value

    def _sum(self, grads: dict[int, Any], value: Array) -> tuple[dict[int, Any], Array]:
        dense = {i: g for i, g in grads.items() if not is_rows(g)}
        shares = {i: self._share(g, self.specs[i]) for i, g in dense.items() if any(self.specs[i])}
        whole = {i: g for i, g in grads.items() if i not in shares}
        sums, value = super()._sum(whole, value)
        return shares | sums, value

    def _share(self, gradient: Array, spec: P) -> Array:
        """The share of this device of a sum, which one mesh axis after the other divides."""
        total, names = upcast(gradient), [*self.mapped.axes]
        for dimension, of in enumerate(spec):
            for name in jax.tree.leaves(of):
                total = lax.psum_scatter(total, name, scatter_dimension=dimension, tiled=True)
                names.remove(name)
        return lax.psum(total, tuple(names)) if names else total


def update_deferred(
    deferred: DeferredOptimizer, params: Any, state: CaughtUpState, gs: list[Any], extra_args: Any
) -> tuple[Any, CaughtUpState]:
    """The parameters and the state after an update; the rows that it changes are current.

    Args:
        deferred: the optimizer.
        params: the parameters before; tables with dense gradients are current.
        state: the state before.
        gs: the gradients; row-sparse gradients may have repeated ids.
        extra_args: extra args of ``update``.
    """
    tables, _ = tables_of(state, params)
    parts = {i: CurrentRows.of(t, gs[i]) for i, t in tables.items() if is_rows(gs[i])}
    return deferred.apply(state, params, gs, tables, parts, extra_args)


def _squares(
    arrived: Arrived, parts: Mapping[int, Part], tables: Sequence[int]
) -> dict[int, Array]:
    """For some tables the sum of the squares of the whole gradient, on all devices."""
    which = [list(parts).index(i) for i in tables]

    def add(rows, sums):
        more = [squares_of_device(rows[k].coalesce()) for k in which]
        return [total + of_round for total, of_round in zip(sums, more, strict=True)]

    axes = [parts[i].sharding.axes for i in tables]
    zeros = [upcast(jnp.zeros([], arrived.first[k].dtype)) for k in which]
    sums = arrived.further(add, add(arrived.first, list(map(vary, zeros, axes))))
    return dict(zip(tables, map(lax.psum, sums, axes), strict=True))


def _sum_of_parts(gradients: Sequence[Any]) -> Any:
    """The sum of gradients, in float32 at least; a single gradient is returned unchanged."""
    if len(gradients) == 1:
        return gradients[0]
    wide = [g if is_rows(g) else upcast(g) for g in gradients]
    return functools.reduce(operator.add, wide)
