"""What runs on the device between steps: rows come into a cache and others leave it."""

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
    """The size of an exchange of some rows: a power of two, or one and a half times one.

    So there are few sizes, and each is compiled once.
    """
    size = _LEAST
    while size < number:
        size = size * 3 // 2 if size & (size - 1) == 0 else size // 3 * 4
    return size


@functools.partial(jax.jit, donate_argnums=0)
def exchanged(arrays: list[Array], into: Array, rows: list[Array]) -> Any:
    """The arrays of a cache with other rows at some places, and the rows that were there."""
    return _exchanged(arrays, into, rows)


def _exchanged(arrays: list[Array], into: Array, rows: list[Array]) -> Any:
    out = [gather_rows(a, into) for a in arrays]
    return [scatter_rows(a, into, new) for a, new in zip(arrays, rows, strict=True)], out


class DeferredExchange:
    """Exchanges of a table with deferred rows, and rows of the host brought up to now.

    What leaves is as of now then, and so is what comes in.
    """

    def __init__(self, name: str, where: RowArrays):
        self.name, self.where = name, where
        self.exchanged = jax.jit(self._exchanged, donate_argnums=(0, 1))
        self.current = jax.jit(self._current)

    def _exchanged(self, params: Any, state: Any, into: Array, rows: list[Array]) -> Any:
        params, state = self._change(params, state, lambda table: by_ids(table, into))
        arrays, out = _exchanged(self.where.of(self.name, params, state), into, rows)
        params, state = self.where.replaced(params, state, {self.name: arrays})
        return *self._change(params, state, lambda table: by_ids(table, into)), out

    def _current(self, params: Any, state: Any, rows: list[Array]) -> list[Array]:
        """Rows of all arrays of the table, which need not be those of the cache, as of now."""
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
    """Rows of a cache that begin anew, as by :func:`optzoo.growing.reset_rows`."""

    def __init__(self, name: str, tx: Any, init: Any, sharding: Any):
        self.name, self.tx, self.init, self.sharding = name, tx, init, sharding
        self.reset = jax.jit(self._reset, donate_argnums=(0, 1))

    def _reset(self, params: Any, state: Any, places: Array, ids: Array) -> Any:
        """The places are in order, and then padding; the ids are theirs."""
        name, given = exactly(self.name), dict[str, Any]()
        if self.init is not None:
            given["init"] = {name: lambda _: self.init(ids)}
        if self.sharding is not None:
            given["shardings"] = {name: self.sharding}
        return reset_rows(params, state, {name: places}, tx=self.tx, **given)


@functools.partial(jax.jit, static_argnums=0)
def rows_of(init: Callable[[Array], Array], ids: Array) -> Array:
    """What an initializer gives."""
    return jnp.asarray(init(ids))
