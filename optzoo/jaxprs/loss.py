"""The loss of a train step as a program, with a tap for each lookup (``taps.py``)."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ..core.meshes import mesh_of, placed
from ..core.rows import SparseRows
from . import taps as taps_of
from .dense_uses import first_use, why_dense, without_stop_gradient
from .equations import evaluate, needed_part, used_inputs
from .gathers import row_gather
from .graph import Graph
from .primitives import Kind
from .wide_sums import with_wide_sums


class Gradients(NamedTuple):
    """A loss, the auxiliary data and the gradients."""

    value: Any
    aux: Any
    of_leaves: list[Any]
    of_rows: dict[int, Array]  # by leaf, of the rows that were given


class Loss(NamedTuple):
    """A loss as a jaxpr, whose inputs are the leaves, their copies and the taps."""

    closed: Any  # its outputs are the value, the arrays of the auxiliary data, and the ids
    of_value: Graph  # gives the value alone, without what a stop_gradient hides
    # For each leaf whether it has a gradient in another way than by taps: integers have none.
    uses: list[bool]
    has_gradient: bool  # whether the value depends on any leaf
    lookups: list[taps_of.Lookup]
    given: frozenset[int]  # the leaves whose rows are the taps
    gathers: frozenset[int]  # those of which gathers of rows are lookups
    rebuild: Callable[[Sequence[Any]], tuple[Any, Any]]  # of arrays the value and auxiliary data

    def dense_tables(self) -> list[tuple[int, str]]:
        """The leaves whose rows are read but whose gradient is dense, with the reasons."""
        has_taps, inputs = {found.leaf for found in self.lookups}, self.of_value.inputs
        reasons = [
            (i, why_dense(self.of_value, inputs[i], i in has_taps, i in self.gathers))
            for i, is_used in enumerate(self.uses)
            if is_used
        ]
        return [(i, reason) for i, reason in reasons if reason]

    def use_of(self, leaf: int) -> str:
        """An operation that uses a leaf other than by taps, with its line."""
        return first_use(self.of_value, self.of_value.inputs[leaf])

    def reads(self) -> list[bool]:
        """For each leaf, whether it is read other than by taps."""
        return used_inputs(self.closed.jaxpr)[: len(self.uses)]

    def ids(self, flat: Sequence[Array]) -> dict[int, Array]:
        """For each leaf whose rows are given, the concatenated ids of all its lookups."""
        found = self._ids(flat, _zeros(flat, self.lookups))
        ids = {i: [jnp.zeros(0, jnp.int32)] for i in sorted(self.given)}
        for lookup, each in zip(self.lookups, found, strict=True):
            if lookup.leaf in ids:
                ids[lookup.leaf].append(each.reshape(-1))
        return {i: jnp.concatenate(parts[len(parts) > 1 :]) for i, parts in ids.items()}

    def ids_depend_on_rows(self, flat: Sequence[Array]) -> bool:
        """Whether the ids of lookups whose rows are given depend on rows."""

        def ids(taps):
            pairs = zip(self.lookups, self._ids(flat, taps), strict=True)
            return [each for lookup, each in pairs if lookup.leaf in self.given]

        return any(used_inputs(jax.make_jaxpr(ids)(_zeros(flat, self.lookups)).jaxpr))

    def _ids(self, flat: Sequence[Array], taps: Sequence[Array]) -> list[Array]:
        outputs = self._outputs(flat, flat, taps)
        return outputs[len(outputs) - len(taps) :]

    def differentiate(
        self, flat: Sequence[Array], rows: Mapping[int, Array] | None = None
    ) -> Gradients:
        """The loss and its gradients, also with respect to the given rows.

        Args:
            flat: the leaves.
            rows: for each leaf whose rows are given, the rows of the ids of :meth:`ids`.
        """

        def tapped(leaves, taps):
            # What the value does not depend on is not differentiated, nor are the copies.
            leaves = [
                x if is_used else copy
                for x, copy, is_used in zip(leaves, flat, self.uses, strict=True)
            ]
            outputs = self._outputs(leaves, flat, taps)
            first = len(outputs) - len(taps)
            value, aux = self.rebuild(outputs[:first])
            return value, (aux, outputs[first:])

        # Who calls this decides whether integers are accepted.
        gradients_of = jax.value_and_grad(tapped, argnums=(0, 1), has_aux=True, allow_int=True)
        taps = self._taps(flat, rows or {})
        (value, (aux, ids)), (of_leaves, of_taps) = gradients_of(flat, taps)
        of_given = {}
        for i in sorted({lookup.leaf for lookup in self.lookups}):
            mine = [k for k, lookup in enumerate(self.lookups) if lookup.leaf == i]
            num_rows, *of_row = self.lookups[mine[0]].table
            of_ids = [ids[k].reshape(-1) for k in mine if i not in self.given]
            of_ids = jnp.concatenate(of_ids) if of_ids else None
            sizes = {k: math.prod(self.lookups[k].shape) for k in mine}
            of_rows = jnp.concatenate([of_taps[k].reshape(sizes[k], *of_row) for k in mine])
            if of_ids is None:
                of_given[i] = of_rows
                continue
            first = self.lookups[mine[0]]
            gradient = SparseRows(of_ids, of_rows, num_rows, shard=first.shard, lines=first.lines)
            # Rows added to the gradient of the other uses: the correct dense gradient.
            of_leaves[i] = of_leaves[i] + gradient if self.uses[i] else gradient
        return Gradients(value, aux, of_leaves, of_given)

    def _taps(self, flat: Sequence[Array], rows: Mapping[int, Array]) -> list[Array]:
        """For each lookup, its rows among those of all lookups of its leaf; or zeros."""
        taps, start = _zeros(flat, self.lookups), dict.fromkeys(rows, 0)
        for k, lookup in enumerate(self.lookups):
            if lookup.leaf in rows:
                first = start[lookup.leaf]
                start[lookup.leaf] = end = first + math.prod(lookup.shape)
                taps[k] = rows[lookup.leaf][first:end].reshape(lookup.rows)
        return taps

    def _copies(self, flat: Sequence[Array]) -> dict[int, Array]:
        return _copies(flat, self.lookups, self.given)

    def _outputs(self, leaves: Sequence[Array], flat: Sequence[Array], taps: Sequence[Array]):
        copies = self._copies(flat).values()
        return evaluate(self.closed.jaxpr, self.closed.consts, [*leaves, *copies, *taps])


class TracedLoss(NamedTuple):
    """A loss as a jaxpr of the leaves of the parameters."""

    closed: Any  # its outputs are the value and the arrays of the auxiliary data
    graph: Graph  # of it
    flat: Sequence[Array]  # the leaves
    looked_up: frozenset[int]  # those that a lookup reads
    num_values: int  # how many of the outputs are the value
    rebuild: Callable[[Sequence[Any]], tuple[Any, Any]]

    def gathered(self) -> set[int]:
        """The leaves that may be read by gathers of whole rows.

        This is an upper bound: the read array may be another one of this shape.
        """
        ops = (visit.operation for visit in self.graph.walk({*Kind}))
        shapes = {op.ins[0].shape for op in ops if row_gather(op) is not None}
        return {i for i, x in enumerate(self.flat) if jnp.shape(x) in shapes}

    def with_taps(self, given: Iterable[int] = (), gathers: Iterable[int] = ()) -> "Loss":
        """The loss with taps for its lookups.

        Args:
            given: the indices of leaves that are not read: their rows are given later.
            gathers: the indices of leaves whose gathers of rows are lookups, too.
        """
        given, gathers = frozenset(given), frozenset(gathers)
        closed, flat, plan = self.closed, self.flat, _plan(self.graph, self.flat, gathers)
        lookups = plan.lookups
        if lookups:
            tapped = lambda flat, *others: taps_of.evaluate(plan, flat, *others)
            copies = _copies(flat, lookups, given)
            closed = jax.make_jaxpr(tapped)(flat, copies, _zeros(flat, lookups))
        of_value = closed.jaxpr.replace(outvars=closed.jaxpr.outvars[: self.num_values])
        of_value = needed_part(without_stop_gradient(of_value))
        used = used_inputs(of_value)
        graph = Graph.of(of_value, closed.consts)
        closed = with_wide_sums(closed, {jnp.shape(x) for x in flat})
        uses = [is_used and _is_inexact(x) for is_used, x in zip(used, flat, strict=False)]
        return Loss(closed, graph, uses, any(used), lookups, given, gathers, self.rebuild)


def trace_loss(
    call: Callable[[Sequence[Array]], tuple[Any, Any]], flat: Sequence[Array]
) -> TracedLoss:
    """Traces a loss.

    Args:
        call: a function of the leaves that returns the value and the auxiliary data.
        flat: the leaves.
    """
    structure: list[Any] = []

    def arrays_of(leaves):
        value, aux = call(leaves)
        values, of_value = jax.tree.flatten(value)
        parts, of_aux = jax.tree.flatten(aux)
        # What is no tracer, such as a string, is the same in every evaluation.
        traced = [k for k, x in enumerate(parts) if isinstance(x, jax.core.Tracer)]
        fixed = {k: x for k, x in enumerate(parts) if k not in traced}
        many, of_both = len(values), range(len(parts))  # it must keep no tracer

        def rebuild(arrays):
            known = fixed | dict(zip(traced, arrays[many:], strict=True))
            aux = of_aux.unflatten([known[k] for k in of_both])
            return of_value.unflatten(arrays[:many]), aux

        structure[:] = many, rebuild
        return [*values, *(parts[k] for k in traced)]

    closed = jax.make_jaxpr(arrays_of)(flat)
    graph = Graph.of(closed.jaxpr, closed.consts)
    looked_up = frozenset(found.leaf for found in _plan(graph, flat, ()).lookups)
    return TracedLoss(closed, graph, flat, looked_up, *structure)


def _plan(graph: Graph, flat: Sequence[Any], gathers: Collection[int]) -> taps_of.TapPlan:
    """The taps of a loss of the leaves; leaves without a gradient have none."""
    of_leaf = lambda i, x: taps_of.FromLeaf(i, i in gathers) if _is_inexact(x) else None
    return taps_of.plan_taps(graph, list(map(of_leaf, range(len(flat)), flat)))


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _copies(
    flat: Sequence[Array], lookups: Sequence[taps_of.Lookup], given: frozenset[int]
) -> dict[int, Array]:
    """The leaves that are looked up and read, by their indices."""
    return {i: flat[i] for i in sorted({found.leaf for found in lookups} - given)}


def _zeros(flat: Sequence[Array], lookups: Sequence[taps_of.Lookup]) -> list[Array]:
    """Taps of zeros."""
    # zeros_like keeps the type inside shard_map: along which axes the table varies.
    zeros = lambda table, found: jnp.zeros_like(table, shape=found.rows)
    tap = lambda table, found: placed(zeros(table, found), mesh_of(table), found.spec)
    return [tap(flat[found.leaf], found) for found in lookups]
