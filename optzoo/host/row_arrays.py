"""The arrays of parameters and of a state that have the rows of tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import optax

from ..core.optimizer import about_of
from ..core.paths import leaves_with_path, path_name
from ..deferred.state import CaughtUpState
from ..growing.row_leaves import row_axes, without_ages
from ..jaxprs.prove_shards import NotAlone, prove_in_cache
from ..state.types import AccumulateState, RowsOfCycle, needs_loss, nodes_of


class Ages(NamedTuple):
    """The indices of the leaves of a state with the ages of the deferred rows of a table."""

    last: int  # the step that each row is as of
    count: int  # the present step
    ring: int  # a row may rest for as many steps as this array is long


class RowArrays(NamedTuple):
    """For each table, the positions of its arrays."""

    slots: Mapping[str, list[int]]  # by the name of a table, among the leaves of the state
    # Of tables whose rows may rest (optzoo.caught_up), where the state has their ages.
    ages: Mapping[str, Ages]

    def of(self, name: str, params: Any, state: Any) -> list[Any]:
        """The table and the arrays of the state for its rows."""
        leaves = jax.tree.leaves(state)
        return [table_of(params, name), *(leaves[i] for i in self.slots[name])]

    def replaced(self, params: Any, state: Any, arrays: Mapping[str, list[Any]]) -> tuple[Any, Any]:
        """Parameters and state with other arrays for some tables."""
        leaves, treedef = jax.tree.flatten(state)
        for name, (_, *of_state) in arrays.items():
            for i, a in zip(self.slots[name], of_state, strict=True):
                leaves[i] = a
        tables = {name: first for name, (first, *_) in arrays.items()}
        return with_tables(params, tables), treedef.unflatten(leaves)

    def others(self, params: Any, state: Any) -> list[Any]:
        """All other arrays: parameters that are not tables, then those of the state."""
        tables = {id(table_of(params, name)) for name in self.slots}
        mine = {i for positions in self.slots.values() for i in positions}
        rest = [x for x in jax.tree.leaves(params) if id(x) not in tables]
        return rest + [a for i, a in enumerate(jax.tree.leaves(state)) if i not in mine]

    def with_others(self, params: Any, state: Any, others: list[Any]) -> tuple[Any, Any]:
        """Parameters and state with other arrays in place of :meth:`others`."""
        new = iter(others)
        tables = {id(table_of(params, name)) for name in self.slots}
        mine = {i for positions in self.slots.values() for i in positions}
        params = jax.tree.map(lambda x: x if id(x) in tables else next(new), params)
        leaves, treedef = jax.tree.flatten(state)
        leaves = [a if i in mine else next(new) for i, a in enumerate(leaves)]
        return params, treedef.unflatten(leaves)


def table_of(params: Any, name: str) -> Any:
    """The table of this name, a path of dict keys."""
    for key in name.split("/"):
        params = params[key]
    return params


def with_tables(params: Any, tables: Mapping[str, Any]) -> Any:
    """The parameters with tables at their names; dicts on these paths are copied."""
    for name, table in tables.items():
        first, _, rest = name.partition("/")
        inside = with_tables(params.get(first, {}), {rest: table}) if rest else table
        params = {**params, first: inside}
    return params


def find_rows(tx: optax.GradientTransformation, params: Any, rows: Mapping[str, int]) -> RowArrays:
    """Finds the arrays of the rows of some tables, in the state of ``tx``.

    Args:
        tx: the transformation.
        params: the shapes of the parameters, with caches in place of the tables.
        rows: the rows on the host, by the names of the tables.

    Raises:
        ValueError: if the state of a table cannot be divided into rows, or if ``tx`` changes rows
            that are not in the batch or stores row indices.
    """
    state = jax.eval_shape(tx.init, params)
    numbered = jax.tree.structure(state).unflatten(range(len(jax.tree.leaves(state))))
    ages = _ages(numbered, rows)
    _refuse(tx, params, state, rows, frozenset(ages))
    kept = jax.tree.leaves(without_ages(numbered))
    slots = dict[str, list[int]]()
    for name, number in rows.items():
        try:
            axes = row_axes(tx, params, state, {name: number})
        except ValueError as error:
            raise ValueError(
                f"tx cannot train a cache of '{name}', because its state cannot be divided into "
                f"rows: {error}"
            ) from error
        if any(axes):
            raise ValueError(
                f"tx keeps slots of '{name}' in a stack with those of other parameters: keep the "
                "table out of optzoo.stacked"
            )
        of_table = [i for i, axis in zip(kept, axes, strict=True) if axis is not None]
        slots[name] = sorted([*of_table, *([ages[name].last] if name in ages else [])])
    return RowArrays(slots, ages)


def _ages(numbered: Any, rows: Mapping[str, int]) -> dict[str, Ages]:
    """The positions of the ages of the rows of tables, in a state of the indices of its leaves."""
    found = dict[str, Ages]()
    for node in nodes_of(CaughtUpState, numbered):
        [clock] = node.clock.values()
        for path, i in leaves_with_path(node.last):
            if path_name(path) in rows:
                found[path_name(path)] = Ages(i, clock.count, clock.ring)
    return found


_CURE = (
    "A cache has only some rows, so use an optimizer that updates each touched row by itself, "
    "such as optzoo.lazy_adam or optzoo.row_wise_adagrad, or optzoo.on_rows(tx); for dense "
    "semantics use optzoo.caught_up(tx, mask=...), whose mask matches the tables"
)


def _refuse(
    tx: optax.GradientTransformation,
    params: Any,
    state: Any,
    rows: Mapping[str, int],
    deferred: frozenset[str],
) -> None:
    """Raises ``ValueError`` unless a cache can be trained in place of a table."""
    for node in nodes_of(AccumulateState, state):
        is_rows = lambda x: isinstance(x, RowsOfCycle)
        if any(map(is_rows, jax.tree.leaves(node.sums, is_leaf=is_rows))):
            raise ValueError(
                "tx has optzoo.accumulate(max_rows=...), which stores places of rows for a later "
                "step, when they may belong to other rows: use larger batches instead"
            )
    if about_of(tx).deferred is not None and deferred == rows.keys():
        return
    names = {path_name(path): i for i, (path, _) in enumerate(leaves_with_path(params))}
    given = {"value": 0.0} if needs_loss(state) else {}
    try:
        prove_in_cache(
            optax.with_extra_args_support(tx),
            params,
            {names[name]: name for name in rows},
            {"global_step": 0, **given},
            deferred,
        )
    except NotAlone as error:
        policy = getattr(about_of(tx).rows, "__name__", "")
        kind = f'it is "{policy}", ' if policy in ("dense", "touched") else ""
        raise ValueError(
            f"tx cannot train a cache of a table on the host: {kind}{error}. {_CURE}"
        ) from error
