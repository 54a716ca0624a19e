"""Programs on the device between steps: rows enter a cache and others leave it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..core.marked_rows import gather_rows, scatter_rows
from ..core.paths import leaves_with_path, path_name
from ..deferred.tables import Table, by_ids, map_tables
from ..growing.reset_rows import reset_rows
from .arguments import exactly
from .row_arrays import RowArrays

_LEAST = 256  # rows of an exchange


def size_of(number: int) -> int:
    """The size of an exchange of some rows: ``2**k`` or ``1.5 * 2**k``.

    This limits the number of compiled programs.
    """
    size = _LEAST
    while size < number:
        size = size * 3 // 2 if size & (size - 1) == 0 else size // 3 * 4
    return size


# Two programs: in one that reads rows and then writes them, XLA copies the arrays.
@jax.jit
def rows_at(arrays: list[Array], places: Array) -> list[Array]:
    """The rows of the arrays of a cache at some places."""
    return [gather_rows(a, places) for a in arrays]


@functools.partial(jax.jit, donate_argnums=0)
def with_rows(arrays: list[Array], places: Array, rows: list[Array]) -> list[Array]:
    """The arrays of a cache with other rows at some places."""
    return [scatter_rows(a, places, new) for a, new in zip(arrays, rows, strict=True)]


class DeferredExchange:
    """Exchanges of a table with deferred rows, and catching up of rows of the host.

    Rows that enter and rows that leave are current.
    """

    def __init__(self, name: str, where: RowArrays):
        self.name, self.where = name, where
        self._brought_up = jax.jit(self._bring_up, donate_argnums=(0, 1))
        self._with_rows = jax.jit(self._put_rows, donate_argnums=(0, 1))
        self.current = jax.jit(self._current)

    def exchanged(self, params: Any, state: Any, places: Array, rows: list[Array]) -> Any:
        """Parameters and state with other rows at some places, and the rows that were there."""
        params, state = self._brought_up(params, state, places)
        out = rows_at(self.where.of(self.name, params, state), places)
        return *self._with_rows(params, state, places, rows), out

    def _bring_up(self, params: Any, state: Any, places: Array) -> Any:
        return self._change(params, state, lambda table: by_ids(table, places))

    def _put_rows(self, params: Any, state: Any, places: Array, rows: list[Array]) -> Any:
        arrays = with_rows(self.where.of(self.name, params, state), places, rows)
        params, state = self.where.replaced(params, state, {self.name: arrays})
        return self._bring_up(params, state, places)

    def _current(self, params: Any, state: Any, rows: list[Array]) -> list[Array]:
        """Current rows of all arrays of the table, which may be rows outside of the cache."""
        params, state = self.where.replaced(params, state, {self.name: rows})
        current = lambda table: table.with_arrays(table.current(lambda a: a))
        params, state = self._change(params, state, current)
        return self.where.of(self.name, params, state)

    def _change(self, params: Any, state: Any, change: Callable[[Table], Table]) -> Any:
        """Parameters and state with the table changed."""
        names = [path_name(path) for path, _ in leaves_with_path(params)]
        place = names.index(self.name)
        return map_tables(params, state, lambda i, t: change(t) if i == place else t)


class Reset:
    """Resets rows of a cache, as by :func:`optzoo.growing.reset_rows`."""

    def __init__(self, name: str, tx: Any, init: Any, sharding: Any):
        self.name, self.tx, self.init, self.sharding = name, tx, init, sharding
        self.reset = jax.jit(self._reset, donate_argnums=(0, 1))

    def _reset(self, params: Any, state: Any, places: Array, ids: Array) -> Any:
        """The places are sorted, followed by padding; the ids are their ids."""
        name, given = exactly(self.name), dict[str, Any]()
        if self.init is not None:
            given["init"] = {name: lambda _: self.init(ids)}
        if self.sharding is not None:
            given["shardings"] = {name: self.sharding}
        return reset_rows(params, state, {name: places}, tx=self.tx, **given)


@functools.partial(jax.jit, static_argnums=0)
def rows_of(init: Callable[[Array], Array], ids: Array) -> Array:
    """The rows that an initializer returns."""
    return jnp.asarray(init(ids))
