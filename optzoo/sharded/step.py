"""A train step of tables sharded by rows, as one device sees it."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ..core.compat import gather_invarying, vary, varying
from ..core.lines import Lines, is_lines
from ..core.norms import clipped_by_global_norm, squares_of_device
from ..core.numerics import upcast
from ..core.paths import path_name
from ..distributed.engine.collectives import Replicas, divide_gradients
from ..jaxprs.loss import Loss, trace_loss
from ..jaxprs.prove_shards import check_update
from ..jaxprs.taps import Lookup
from ..native.step import Native
from ..sparse.lookup import Sparse, lookup, report_dense, value_and_aux
from ..sparse.minimize import applied
from ..sparse.sleepers import Sleepers
from ..sparse.sleepers_step import ids_by_leaf, look_up, report_reads, update_asleep
from ..state.sleeping.tables import (
    Table,
    by_ids,
    has_sleepers,
    map_tables,
    sleeping_leaves,
    swept,
    tables_of,
    turn,
    whole,
)
from ..state.types import CaughtUpState, nodes_of
from .exchange import make_route
from .lookup import Read, clean
from .rounds import Part, read_rows, update_in_rounds
from .row_sharding import RowSharding


class Options(NamedTuple):
    """Those of :func:`optzoo.sharded_minimize`."""

    mesh: Mesh
    capacity_factor: float | None
    max_norm: float | None
    transport: Any
    has_aux: bool
    sparse: Sparse
    native: Native


class Gradients(NamedTuple):
    """The mean over the devices; that of rows has parts on each of them."""

    parts: dict[int, Part]  # by the position of each table among the parameters
    rows: list[Array]  # of the distinct places of each part
    rest: dict[int, Any]  # of all other parameters


class Step(NamedTuple):
    """One step."""

    loss_fn: Callable[..., Any]
    tx: optax.GradientTransformationExtraArgs
    sleepers: Sleepers | None  # what is in ``tx`` if it is optzoo.caught_up itself
    shardings: list[RowSharding | None]  # of the parameters
    state_specs: Any
    options: Options

    def on_device(self, params, state, batch, extra_args):
        """The parameters, the state, the loss and the auxiliary data after the step."""
        if has_sleepers(state):
            params, state = self._wake(params, state, batch)
        value, aux, gradients = self._differentiate(params, state, batch)
        params, state = self._update(params, state, extra_args, gradients)
        aux = [jax.tree.map(lambda a: jnp.asarray(a)[None], aux)] * self.options.has_aux
        return params, state, value, *aux

    @property
    def _axes(self) -> tuple[str, ...]:
        return self.options.mesh.axis_names

    @property
    def _tables(self) -> dict[int, RowSharding]:
        return {i: s for i, s in enumerate(self.shardings) if s is not None}

    def _trace(
        self, params: Any, batch: Sequence[Any], elsewhere: Iterable[int]
    ) -> tuple[Loss, list[Array]]:
        """The loss of this device, and its leaves; :func:`trace_loss` describes the arguments."""
        tables, treedef = jax.tree.flatten(params, is_leaf=is_lines)
        # In the loss a table has the shape of all its rows. This array is never made.
        stand_in = lambda x, s, of: jnp.zeros_like(x, shape=(s.num_rows, *of.shape[1:]))
        leaves = Replicas(self._axes).vary(jax.tree.leaves(params))
        flat = [
            x if s is None else stand_in(x, s, table)
            for x, s, table in zip(leaves, self.shardings, tables, strict=True)
        ]

        def call(leaves):
            out = self.loss_fn(treedef.unflatten(leaves), *batch)
            return value_and_aux(out, self.options.has_aux)

        return trace_loss(call, flat, elsewhere), flat

    def _wake(self, params: Any, state: Any, batch: Sequence[Any]) -> tuple[Any, Any]:
        """Parameters and state with the rows of replicated tables awake that the loss reads.

        Those of sharded tables are caught up by their owners, when they are read and updated.
        """
        tables, asleep = self._tables, sleeping_leaves(params, state)
        if self.sleepers is not None:
            sweep = lambda i, t: swept(t, turn(t.motion, t.clock, len(t.arrays[2])))
            params, state = self._map_tables(params, state, sweep)
        asleep -= tables.keys()
        if not asleep:
            return params, state
        loss, flat = self._trace(params, batch, {*tables, *asleep})
        report_reads(loss, params, asleep, self.options.sparse)
        reads, ids = loss.reads(), ids_by_leaf(loss, flat)
        for i in asleep:
            ids[i] = gather_invarying(vary(ids[i], self._axes), self._axes)
        wake = lambda i, t: whole(t) if reads[i] else by_ids(t, ids[i])
        return self._map_tables(params, state, lambda i, t: wake(i, t) if i in asleep else t)

    def _map_tables(
        self, params: Any, state: Any, change: Callable[[int, Table], Table]
    ) -> tuple[Any, Any]:
        """As :func:`map_tables`; the tables know over which axes they are divided."""
        axes = {i: s.axes for i, s in self._tables.items()}
        return map_tables(params, state, lambda i, t: change(i, t.divided(axes.get(i, ()))))

    def _reads(self, params: Any, state: Any, parts: Iterable[int]) -> list[Read]:
        """How to read the rows of each sharded table."""
        asleep = dict[int, Table]()
        for node in nodes_of(CaughtUpState, state):
            asleep |= tables_of(node, params)[0]
        shards = self._shards(params)
        return [
            functools.partial(look_up, asleep[i])
            if i in asleep
            else functools.partial(lookup, shards[i])
            for i in parts
        ]

    def _shards(self, params: Any) -> dict[int, Any]:
        """What this device has of each sharded table: an array, or lines."""
        leaves = jax.tree.leaves(params, is_leaf=is_lines)
        local = lambda x, s: Lines(x.value, (s.rows_per_shard, *x.shape[1:])) if is_lines(x) else x
        return {i: local(leaves[i], s) for i, s in self._tables.items()}

    def _differentiate(
        self, params: Any, state: Any, batch: Sequence[Any]
    ) -> tuple[Any, Any, Gradients]:
        """The mean loss, the auxiliary data and the gradients."""
        options, replicas, tables = self.options, Replicas(self._axes), self._tables
        loss, flat = self._trace(params, batch, tables)
        _check_loss(loss, flat, _names(params), tables, options.sparse)
        lookups = [found for found in loss.lookups if found.leaf in tables]
        ids = list(zip(lookups, loss.ids(flat), strict=True))
        of_leaf = lambda leaf: [each for found, each in ids if found.leaf == leaf]
        parts = {i: self._part(of_leaf(i), s) for i, s in tables.items()}
        shards, reads = list(self._shards(params).values()), self._reads(params, state, parts)
        rows = read_rows(list(parts.values()), shards, reads, self._axes, options.transport)
        of_ids = {i: p.route.of_ids(x) for (i, p), x in zip(parts.items(), rows, strict=True)}
        given = _rows_of_lookups(lookups, of_ids, parts)
        value, aux, grads, of_lookups = loss.differentiate(flat, given)
        if missing := set(self._axes) - varying(value):
            raise ValueError(
                f"the loss is the same along the mesh axes {sorted(missing)}: return the loss of "
                "one device's part of the batch. sharded_minimize takes the mean over the devices"
            )
        number = options.mesh.size
        rest = {i: g for i, g in enumerate(grads) if i not in tables}
        sums, value = replicas.sum_gradients(rest, True, value)
        rest = divide_gradients(sums, jnp.asarray(number), rest)
        of_rows = [
            _of_distinct(
                part, [g for g, f in zip(of_lookups, lookups, strict=True) if f.leaf == i], x
            )
            for (i, part), x in zip(parts.items(), rows, strict=True)
        ]
        return value / number, aux, Gradients(parts, [g / number for g in of_rows], rest)

    def _part(self, ids: list[Array], s: RowSharding) -> Part:
        places = [s.places_of(i).reshape(-1) for i in ids]
        joined = jnp.concatenate(places) if places else jnp.full(1, s.stored_rows, jnp.int32)
        replicas = tuple(a for a in self._axes if a not in s.axes)
        capacity = s.capacity(joined.shape[0], self.options.capacity_factor)
        return Part(s, capacity, joined, make_route(joined, s), replicas)

    def _update(
        self, params: Any, state: Any, extra_args: Mapping[str, Any], gradients: Gradients
    ) -> tuple[Any, Any]:
        """The parameters and the state after all rounds."""
        parts, options = list(gradients.parts.values()), self.options
        is_round = not all(p.always_fits for p in parts)
        needed = self._check_update(params, state, extra_args, gradients.parts, is_round)
        run = lambda f, start: update_in_rounds(
            parts, gradients.rows, f, start, self._axes, options.transport
        )[0]
        # Of whole gradients, those that are needed before the first of several rounds.
        squares = _squares(run, gradients, sorted(needed)) if needed else {}
        treedef = jax.tree.structure(params)
        specs = treedef.unflatten(P() if s is None else s.spec for s in self.shardings)
        # Everything but rows starts each round from the same values.
        before = lambda now, old, spec: now if any(spec) else old

        def one(arrived, carry):
            arrived = zip(gradients.parts, arrived, strict=True)
            gs = gradients.rest | {i: g.with_squares(squares.get(i)) for i, g in arrived}
            gs = treedef.unflatten(gs[i] for i in range(len(gs)))
            if options.max_norm is not None:
                gs = clipped_by_global_norm(gs, options.max_norm)
            params_in = jax.tree.map(before, carry[0], params, specs)
            state_in = jax.tree.map(before, carry[1], state, self.state_specs)
            if self.sleepers is not None:
                return update_asleep(self.sleepers, params_in, state_in, gs, extra_args)
            if has_sleepers(state_in):
                given = treedef.flatten_up_to(gs)
                wake = lambda i, t: by_ids(t, given[i].indices) if i in gradients.parts else t
                params_in, state_in = self._map_tables(params_in, state_in, wake)
            apply = applied(options.native)
            return apply(self.tx, params_in, state_in, gs, extra_args)

        return run(one, (params, state))

    def _check_update(
        self,
        params: Any,
        state: Any,
        extra_args: Mapping[str, Any],
        parts: Mapping[int, Part],
        is_round: bool,
    ) -> set[int]:
        """The tables whose sums of squares are needed before the first of several rounds.

        Raises ``ValueError`` unless ``tx`` may update tables that are sharded.
        """
        needed = set(parts) if is_round and self.options.max_norm is not None else set[int]()
        shards = {
            i: p.shard(is_round) for i, p in parts.items() if is_round or p.sharding.num_shards > 1
        }
        if self.sleepers is not None or not shards:
            return needed
        names = _names(params)
        tables = {i: names[i] for i in shards}
        asleep = sleeping_leaves(params, state) & tables.keys()
        return needed | check_update(self.tx, params, tables, extra_args, shards, asleep)


def _squares(run: Callable[..., Any], gradients: Gradients, tables: list[int]) -> dict[int, Array]:
    """For some tables the sum of the squares of the whole gradient, on all devices."""
    which = [list(gradients.parts).index(i) for i in tables]

    def add(arrived, sums):
        more = [squares_of_device(arrived[k].coalesce()) for k in which]
        return [total + of_round for total, of_round in zip(sums, more, strict=True)]

    axes = [gradients.parts[i].sharding.axes for i in tables]
    zeros = [upcast(jnp.zeros([], gradients.rows[k].dtype)) for k in which]
    sums = run(add, list(map(vary, zeros, axes)))
    return dict(zip(tables, map(lax.psum, sums, axes), strict=True))


def _check_loss(
    loss: Loss,
    flat: list[Array],
    names: list[str],
    tables: Mapping[int, RowSharding],
    sparse: Sparse,
) -> None:
    """Raises ``ValueError`` for what a loss cannot do with a table; reports dense gradients."""
    reasons = dict(loss.dense_tables())
    for i in tables:
        if loss.uses[i]:
            reason = reasons.get(i, "it is used in another way")
            raise ValueError(
                f"table '{names[i]}' is sharded by rows, so the loss can read it by optzoo.lookup "
                f"and optzoo.lookup_sparse only: {reason}"
            )
    if loss.ids_depend_on_rows(flat):
        raise ValueError(
            "ids depend on looked-up rows, but sharded_minimize reads all rows before it runs the "
            "loss: use optzoo.sharded_lookup in a step of your own"
        )
    for i, reason in reasons.items() if sparse != "allow" else ():
        report_dense(f"'{names[i]}'", reason, sparse)


def _names(params: Any) -> list[str]:
    return [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]


def _rows_of_lookups(
    lookups: list[Lookup], rows: Mapping[int, Array], parts: Mapping[int, Part]
) -> list[Array]:
    """For each lookup its rows, from those of all ids of its table."""
    at, out = dict.fromkeys(parts, 0), []
    for found in lookups:
        part, of_table, start = parts[found.leaf], rows[found.leaf], at[found.leaf]
        at[found.leaf] = end = start + math.prod(found.shape)
        some = clean(of_table[start:end], part.places[start:end], part.sharding)
        out.append(some.reshape(*found.shape, *of_table.shape[1:]))
    return out


def _of_distinct(part: Part, of_lookups: list[Array], rows: Array) -> Array:
    """The gradient of the rows of the distinct places, from those of the lookups of the table."""
    if not of_lookups:
        return jnp.zeros_like(rows)
    each = jnp.concatenate([g.reshape(-1, *rows.shape[1:]) for g in of_lookups])
    return part.route.of_places(each)
