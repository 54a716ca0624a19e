"""Train steps of tables with deferred rows: a row is caught up when it is read."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from ..core.marked_rows import distinct, merge_rows_in_place
from ..core.numerics import upcast
from ..core.rows import SparseRows, is_rows
from ..deferred.optimizer import CurrentRows, DeferredOptimizer
from ..deferred.state import deferred_leaves
from ..deferred.tables import Table, by_ids, map_tables, swept, tables_of, whole, with_tables
from ..jaxprs.loss import Gradients, Loss
from ..jaxprs.reads import check_all_read
from ..state.deferred import has_deferred
from .step import Model, Tables, report_reads


def look_up(table: Table, ids: Array) -> Array:
    """Current values of rows, as :func:`optzoo.lookup` reads them; does not change the table."""
    return as_looked_up(table.read(ids)[0], ids, table.num_rows)


def as_looked_up(x: Array, ids: Array, num_rows: int) -> Array:
    """Rows as :func:`optzoo.lookup` reads them: zeros for padding, NaN for ids out of range."""
    wide = ids.reshape(ids.shape + (1,) * (x.ndim - 1))
    x = jnp.where((wide < 0) | (wide > num_rows), jnp.nan, x)
    return jnp.where(wide == num_rows, 0, x)


class DeferredTables(Tables):
    """With :func:`optzoo.caught_up` inside the optimizer: rows are caught up in place."""

    def __init__(self, model: Model, params: Any, state: Any):
        super().__init__(model, params, state)
        self.read_first = frozenset(deferred_leaves(params, state))
        self._ids: Sequence[Mapping[int, Array]] = []  # for each part of the batch

    def catch_up(self, loss: Loss) -> frozenset[int]:
        """Catches up the tables that the loss reads other than by lookups."""
        reads = loss.reads()
        whole_tables = frozenset(i for i in self.read_first if reads[i])
        looked_up = {lookup.leaf for lookup in loss.lookups}
        for i in sorted(whole_tables & looked_up):
            if not loss.uses[i]:
                report_reads(self.names[i], self.wanted.levels[i])
        self._change({i: whole for i in whole_tables})
        return whole_tables

    def _change(self, changes: Mapping[int, Callable[[Table], Table]]) -> None:
        if changes:
            change = lambda i, table: changes[i](table) if i in changes else table
            f = lambda params, state: self._map(params, state, change)
            self.params, self.state = self.model.run(f, self.params, self.state)

    def _map(
        self, params: Any, state: Any, change: Callable[[int, Table], Table]
    ) -> tuple[Any, Any]:
        return map_tables(params, state, change)

    def read(self, ids: Sequence[Mapping[int, Array]]) -> list[dict[int, Array]]:
        """For each part of the batch, the rows of its ids, by the index of the table."""
        self._ids, [of_batch] = ids, ids
        self._change({i: lambda table, of=of: by_ids(table, of) for i, of in of_batch.items()})
        return [self._looked_up(of_batch)]

    def _looked_up(self, ids: Mapping[int, Array]) -> dict[int, Array]:
        """The rows of ids, which are current."""
        leaves = self.leaves()
        rows = {i: jnp.take(leaves[i], of, axis=0, mode="clip") for i, of in ids.items()}
        return {i: as_looked_up(x, ids[i], len(leaves[i])) for i, x in rows.items()}

    def update(
        self, found: Sequence[Gradients], extra_args: Mapping[str, Any]
    ) -> tuple[Any, Any, Array]:
        """The parameters, the state and the loss after the update."""
        return super().update(self._with_rows(found), extra_args)

    def _with_rows(self, found: Sequence[Gradients]) -> list[Gradients]:
        """The gradients, with gradients of rows as row-sparse gradients of their tables."""
        leaves, all_found = self.leaves(), list(found)
        for k, of_part in enumerate(self._ids):
            of_leaves, of_rows = list(found[k].of_leaves), found[k].of_rows
            for i, ids in of_part.items():
                if i in of_rows:
                    of_leaves[i] = SparseRows(ids, of_rows[i], len(leaves[i]))
            all_found[k] = found[k]._replace(of_leaves=of_leaves)
        return all_found


class CaughtUpTables(DeferredTables):
    """With :func:`optzoo.caught_up` as the optimizer: each row is read once and written once."""

    def __init__(self, model: Model, deferred: DeferredOptimizer, params: Any, state: Any):
        deferred.check(state)
        super().__init__(model, params, state)
        self.deferred = deferred
        self.rows = dict[int, Any]()

    def read(self, ids: Sequence[Mapping[int, Array]]) -> list[dict[int, Array]]:
        """For each part of the batch, the rows of its ids, by the index of the table."""
        self._ids, [of_batch] = ids, ids

        def sweep_and_read(params, state):
            tables = {i: swept(t) for i, t in tables_of(state, params)[0].items()}
            rows = {i: tables[i].read(of) for i, of in of_batch.items()}
            return with_tables(state, params, tables), rows

        after, self.rows = self.model.run_and_read(sweep_and_read, self.params, self.state)
        self.params, self.state = after
        leaves, found = self.leaves(), self.rows
        return [{i: as_looked_up(found[i][0], of, len(leaves[i])) for i, of in of_batch.items()}]

    def update(
        self, found: Sequence[Gradients], extra_args: Mapping[str, Any]
    ) -> tuple[Any, Any, Array]:
        """The parameters, the state and the loss after the update."""
        check_all_read(self.model.tx, self.model.tx.update, extra_args)
        [of_batch] = found
        gs = of_batch.of_leaves

        def apply(params, state):
            tables, parts = tables_of(state, params)[0], {}
            for i, table in tables.items():
                if i in self.rows:
                    g = of_batch.of_rows.get(i)
                    parts[i] = _merged(table, self._ids[0][i], self.rows[i], g)
                elif is_rows(gs[i]):  # of a table that is current as a whole
                    parts[i] = CurrentRows.of(table, gs[i], is_current=True)
            return self.deferred.apply(state, params, gs, tables, parts, extra_args)

        return *self.model.run(apply, self.params, self.state), of_batch.value


def tables_for(model: Model, params: Any, state: Any) -> Tables:
    """The tables of a step on one device."""
    if model.deferred is not None:
        return CaughtUpTables(model, model.deferred, params, state)
    return (DeferredTables if has_deferred(state) else Tables)(model, params, state)


def _merged(table: Table, ids: Array, rows: Any, g: Array | None) -> CurrentRows:
    """Merges the rows of repeated ids."""
    if g is None:  # no lookup reads them
        return CurrentRows(table, distinct(ids), rows, jnp.zeros_like(rows[0]))
    places, sums = merge_rows_in_place(ids, upcast(g), num_rows=table.num_rows)
    return CurrentRows(table, places, rows, sums.astype(rows[0].dtype))
