"""One table: its arrays on the host, its cache, and the rows that move between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..core.meshes import as_typed
from .arrays import CHUNK, Kind, Table, chunks
from .batch import check_ids
from .cache_map import CacheMap, Moves, Policy, TooManyIds
from .exchange import DeferredExchange, Reset, rows_at, rows_of, size_of, with_rows
from .folder import Folder
from .row_arrays import RowArrays, with_tables


class Part(NamedTuple):
    """The part of a plan for one table."""

    number: int  # of ids
    moves: Moves
    arriving: list[Any]  # on the device, places and rows of all arrays; empty if no row comes in
    reset: list[Any]  # on the device, places and ids of rows that begin anew; or empty
    # Rows of the host that are brought up to now: ids, and arrays on the device.
    swept: tuple[np.ndarray, list[Any]] | None
    hand: int  # where the sweep was before


class Cached:
    """A table on the host and its cache."""

    def __init__(
        self,
        name: str,
        like: Any,
        places: int,
        policy: Policy,
        *,
        init: Any,
        vocabulary: Any,
        sharding: Any,
        mesh: Any,
    ):
        self.name, self.row, self.dtype = name, tuple(like.shape[1:]), np.dtype(like.dtype)
        self.init, self.vocabulary, self.sharding, self.mesh = init, vocabulary, sharding, mesh
        self.map = CacheMap(like.shape[0], places, policy)
        self.host = Table([])
        self.hand = 0  # the next deferred row of the host to bring up to now
        # Rows that the last swap has sent to the host: their ids, -1 for none, and arrays.
        self._leaving = list[tuple[np.ndarray, list[Any]]]()

    def know(self, tx: Any, where: RowArrays, params: Any, state: Any, folder: Folder | None):
        """Sets what depends on the state."""
        self._tx, self._where = tx, where
        arrays = where.of(self.name, params, state)
        kinds = [Kind(tuple(a.shape[1:]), np.dtype(a.dtype)) for a in arrays]
        if folder is None:
            self.host.kinds = kinds
        elif not self.host.kinds:
            self.host = folder.add(self.name, kinds)
        self._deferred = DeferredExchange(self.name, where) if self.name in where.ages else None
        self._reset = Reset(self.name, tx, self.init, self.sharding)
        self._horizon = 0
        if self._deferred is not None:
            self._horizon = len(jax.tree.leaves(state)[where.ages[self.name].ring])

    @property
    def rows(self) -> int:
        """The number of rows on the host."""
        return self.map.rows

    @property
    def like(self) -> Any:
        """The shape and dtype of the table."""
        return jax.ShapeDtypeStruct((self.rows, *self.row), self.dtype)

    @property
    def cache(self) -> Any:
        """The shape and dtype of the cache."""
        number = self.map.num_places if self.sharding is None else self.sharding.stored_rows
        return jax.ShapeDtypeStruct((number, *self.row), self.dtype)

    @property
    def place(self) -> Any:
        """The sharding of the cache; None on one device."""
        if self.mesh is None:
            return None
        spec = PartitionSpec() if self.sharding is None else self.sharding.spec
        return as_typed(NamedSharding(self.mesh, spec), 1 + len(self.row))

    def _stored(self, places: np.ndarray) -> np.ndarray:
        """The indices of places in the array of the cache; padding is after its end."""
        if self.sharding is None:
            return places.astype(np.int32, copy=False)
        return np.asarray(self.sharding.places_of(places.astype(np.int32)))

    def _put(self, arrays: list[np.ndarray]) -> list[Any]:
        """Puts arrays on the device; on all devices if there are several."""
        if self.mesh is None:
            return jax.device_put(arrays)
        return jax.device_put(arrays, NamedSharding(self.mesh, PartitionSpec()))

    # A step

    def plan(self, ids: np.ndarray, reset: np.ndarray) -> Part:
        """Assigns places to ids, and starts to send missing rows to the device.

        Args:
            ids: the ids of a batch.
            reset: the ids among them whose rows are reset.

        Raises:
            ValueError: if the cache is too small; nothing is changed in this case.
        """
        hand, turn = self.hand, self._turn()
        try:
            moves = self.map.plan(ids)
        except TooManyIds as error:
            self.hand = hand
            raise ValueError(
                f"ids: a batch has {error.args[0]} distinct ids of '{self.name}', more than "
                f"cache_rows={self.map.num_places}: give a larger cache, or smaller batches"
            ) from None
        try:
            return self._part(ids, reset, moves, turn, hand)
        except BaseException:  # such as no memory
            self.map.undo(moves)
            self.hand = hand
            raise

    def _part(
        self, ids: np.ndarray, reset: np.ndarray, moves: Moves, turn: np.ndarray, hand: int
    ) -> Part:
        """Reads the rows that a plan moves, and starts to send them."""
        arriving, anew, swept = list[Any](), list[Any](), None
        if number := len(moves.missing):
            size = size_of(number)
            into = np.full(size, self.cache.shape[0], np.int32)
            into[:number] = self._stored(moves.into)
            arriving = self._put([into, *self.host.read(moves.missing, size)])
        if number := len(reset):
            places, size = self.map.find(reset), size_of(number)
            order = np.argsort(places)
            both = np.full((2, size), [[self.map.num_places], [self.rows]], np.int32)
            both[:, :number] = places[order], reset[order]
            anew = self._put([*both])
        if len(turn):
            swept = turn, self._put(self.host.read(turn, size_of(len(turn))))
        return Part(len(ids), moves, arriving, anew, swept, hand)

    def _turn(self) -> np.ndarray:
        """The deferred rows of the host to catch up: all of them within half the horizon.

        This is twice as often as for rows that never leave the host.
        """
        if not self._horizon:
            return np.zeros(0, np.intp)
        number = -(-self.rows // max(1, (self._horizon - 2) // 2))
        ids = np.arange(self.hand, min(self.hand + number, self.rows))
        self.hand = (self.hand + len(ids)) % self.rows
        # A row that is in the cache may leave in this plan: then the host gets that one.
        return ids[self.map.find(ids) < 0]

    def undo(self, part: Part) -> None:
        """Reverts the last plan."""
        self.map.undo(part.moves)
        self.hand = part.hand

    def swap(self, part: Part, params: Any, state: Any) -> tuple[Any, Any]:
        """Parameters and state with the rows of a plan; starts to send evicted rows to the host."""
        if part.arriving:
            into, *rows = part.arriving
            if self._deferred is not None:
                params, state, out = self._deferred.exchanged(params, state, into, rows)
            else:
                arrays = self._where.of(self.name, params, state)
                out = rows_at(arrays, into)
                arrays = with_rows(arrays, into, rows)
                params, state = self._where.replaced(params, state, {self.name: arrays})
            self._leave(part.moves.leaving, out)
        if part.reset:
            params, state = self._reset.reset(params, state, *part.reset)
        if part.swept is not None and self._deferred is not None:
            ids, rows = part.swept
            self._leave(ids, self._deferred.current(params, state, rows))
        self.map.is_dirty[part.moves.places] = True
        return params, state

    def _leave(self, ids: np.ndarray, rows: list[Any]) -> None:
        if (ids >= 0).any():
            for a in rows:
                a.copy_to_host_async()
            self._leaving.append((ids, rows))

    def write_back(self) -> None:
        """Writes evicted rows to the host, when they have arrived."""
        for ids, rows in self._leaving:
            real = np.flatnonzero(ids >= 0)
            self.host.write(ids[real], [np.asarray(a)[real] for a in rows])
        self._leaving.clear()

    # All rows

    def begin(self, given: Any, params: Any) -> None:
        """Writes the initial values of all rows and slots to the host.

        Args:
            given: an array, or a shape.
            params: the parameters, with empty caches.
        """
        is_array = not isinstance(given, jax.ShapeDtypeStruct)
        arrays = self.host.new(self.rows)
        if is_array and type(self.host) is Table:
            arrays[0] = given
        self.host.arrays = arrays
        make = self._maker(params, None)
        for ids in chunks(self.rows):
            part = slice(int(ids[0]), int(ids[-1]) + 1)
            for a, new in zip(arrays, make(ids, given[part] if is_array else None), strict=True):
                if a is not given and new.view(np.uint8).any():  # zeros are there already
                    a[part] = new

    def take(self, arrays: list[Any], given: Any) -> None:
        """Writes all rows and slots of an ordinary table to the host.

        Args:
            arrays: NumPy or JAX arrays.
            given: an array whose memory may be used, or any other object.
        """
        if not self.host.arrays:
            new = self.host.new(self.rows)
            if isinstance(given, np.ndarray) and type(self.host) is Table:
                new[0] = given
            self.host.arrays = new
        for ids in chunks(self.rows):
            part = slice(int(ids[0]), int(ids[-1]) + 1)
            self.host.write(ids, [np.asarray(a[part]) for a in arrays])
        self.map.empty()
        self._leaving.clear()

    def write_cache(self, params: Any, state: Any) -> None:
        """Writes the rows of the cache to the host."""
        places = self.map.held(dirty=self._deferred is None)
        if len(places):
            at = self._stored(places)
            rows = [np.asarray(a)[at] for a in self._where.of(self.name, params, state)]
            self.host.write(self.map.id_of[places], rows)
        self.map.is_dirty[:] = False

    def bring_up(self, params: Any, state: Any) -> None:
        """Catches up all deferred rows of the host."""
        if self._deferred is None:
            return
        size = min(CHUNK, size_of(self.rows))
        for ids in chunks(self.rows):
            now = self._deferred.current(params, state, self._put(self.host.read(ids, size)))
            self.host.write(ids, [np.asarray(a)[: len(ids)] for a in now])

    def grow(self, rows: int, params: Any, state: Any) -> None:
        """Adds new rows."""
        before = self.rows
        self.host.grow(rows)
        self.map.grow(rows)
        make = self._maker(params, state)
        for first in range(before, rows, CHUNK):
            ids = np.arange(first, min(first + CHUNK, rows))
            self.host.write(ids, make(ids, None))

    def _maker(self, params: Any, state: Any) -> Callable[[np.ndarray, Any], list[np.ndarray]]:
        """A function of ids, and of their rows or None, that returns all arrays of new rows."""
        name, where, shape = self.name, self._where, self.row

        @jax.jit
        def slots(params, rows):
            fresh = with_tables(params, {name: rows})
            return where.of(name, fresh, self._tx.init(fresh))[1:]

        def first(ids):
            if self.init is None:
                return np.zeros((len(ids), *shape), self.dtype)
            rows = np.asarray(rows_of(self.init, ids.astype(_dtype_of(self.rows))))
            if rows.shape != (len(ids), *shape):
                raise ValueError(
                    f"init must return rows of shape {(len(ids), *shape)} for {len(ids)} ids of "
                    f"'{name}', got {rows.shape}"
                )
            return rows

        def make(ids, rows):
            rows = first(ids) if rows is None else np.asarray(rows)
            rows = np.ascontiguousarray(rows.astype(self.dtype, copy=False))
            found = [np.asarray(a) for a in slots(params, rows)]
            if name in where.ages and state is not None:  # new rows are as of now
                at, ages = where.slots[name], where.ages[name]
                now = np.asarray(jax.tree.leaves(state)[ages.count])
                found[at.index(ages.last)] = np.full(len(ids), now)
            return [rows, *found]

        return make

    def read(self, params: Any, state: Any, ids: Any) -> np.ndarray:
        """Current rows; padding reads zeros."""
        ids = np.asarray(ids)
        flat = check_ids(ids.reshape(-1), self.rows, self.name)
        places, is_real = self.map.find(flat), flat < self.rows
        rows = self.host.read(np.minimum(flat, self.rows - 1), size_of(len(flat)))
        held = np.flatnonzero((places >= 0) & is_real)
        at = np.full(len(rows[0]), self.cache.shape[0], np.int32)
        at[held] = self._stored(places[held])
        in_cache = rows_at(self._where.of(self.name, params, state), *self._put([at]))
        for a, found in zip(rows, in_cache, strict=True):
            a[held] = np.asarray(found)[held]
        if self._deferred is not None:
            rows = self._deferred.current(params, state, self._put(rows))
        found = np.array(rows[0])[: len(flat)]
        found[~is_real] = 0
        return found.reshape(*ids.shape, *self.row)


def _dtype_of(rows: int) -> type:
    return np.int32 if rows < 2**31 - 1 else np.int64
