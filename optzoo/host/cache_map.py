"""The assignment of the rows of a table to the places of its cache, in NumPy."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

Policy = Literal["lfu", "lru"]

AGE = 1024  # steps in which every count of "lfu" is halved once
_MOST = 254  # that "lfu" counts: a row of the present batch is above it
_BLOCK = 1 << 17  # places that are looked at together


class Moves(NamedTuple):
    """The requirements of a batch: the places of its ids, and the rows to move."""

    places: np.ndarray  # of each id
    missing: np.ndarray  # the distinct ids that are not in the cache, in order
    into: np.ndarray  # the places that they get
    leaving: np.ndarray  # the ids that these have, -1 for none
    distinct: int  # of the ids


class TooManyIds(Exception):
    """A batch has more distinct ids than the cache has places."""


class CacheMap:
    """The places of ids, and which rows are evicted.

    A plan needs some operations on arrays of the length of the ids, and a pass over a part of the
    cache. Random reads from an array with an entry for each row of the table take most of the time,
    so there is only one such array, which is not written when a row is evicted: the place of an id
    is valid if the place stores this id.

    Args:
        rows: the number of rows of the table. The id ``rows`` is padding.
        places: the number of places of the cache. The place ``places`` is padding.
        policy: ``"lru"`` evicts the least recently used rows; ``"lfu"`` the least frequently used
            ones, by the number of batches since they were cached, which is halved every ``AGE``
            steps. Both are approximate: they scan the places in turn, from the last position, for
            rows that are old or rare enough, and relax the limit when a round finds too few.
    """

    def __init__(self, rows: int, places: int, policy: Policy):
        self.rows, self.num_places = rows, places
        self._place_of = np.zeros(rows + 1, np.int32)
        self._place_of[rows] = places
        # By place, with that of padding; -1 for none.
        self.id_of = np.full(places + 1, -1, np.int32 if rows < 2**31 - 1 else np.int64)
        self.id_of[places] = rows
        # Which have another value than on the host since it was written.
        self.is_dirty = np.zeros(places + 1, bool)
        self._is_lfu = policy == "lfu"
        # By place, with that of padding: the count of "lfu", the last step of "lru".
        self._score = np.zeros(places + 1, np.uint8 if self._is_lfu else np.int32)
        self._now = 0  # steps
        self._filled = 0  # places that have, or had, a row
        self._hand, self._limit = 0, 0  # where the search goes on; which scores may leave

    def plan(self, ids: np.ndarray) -> Moves:
        """Assigns a place to every id.

        Args:
            ids: integers of shape ``(n,)`` from 0 to ``rows``.

        Raises:
            TooManyIds: if the cache is too small; nothing is changed in this case.
        """
        self._now += 1
        if self._is_lfu:
            self._grow_older()
        top = _MOST + 1 if self._is_lfu else self._now
        short, ids = ids.astype(self.id_of.dtype, copy=False), ids.astype(np.intp, copy=False)
        places = self._place_of.take(ids, mode="clip")  # twice as fast as by an index
        absent = np.flatnonzero(self.id_of.take(places, mode="clip") != short)
        # In order: memory is then read and written from one end to the other.
        missing = np.sort(short[absent])
        if len(missing):
            missing = missing[np.flatnonzero(np.append(True, missing[1:] != missing[:-1]))]
        missing = missing.astype(np.intp, copy=False)
        places[absent] = self.num_places
        before = self._score.take(places, mode="clip")
        self._score[places] = top
        distinct = int(np.count_nonzero(self._score[:-1] == top)) + len(missing)
        if distinct > self.num_places:
            self._score[places] = before
            raise TooManyIds(distinct)
        into = self._free_places(len(missing), top)
        leaving = self.id_of.take(into)
        self._place_of[missing], self.id_of[into] = into, missing
        if self._is_lfu:
            self._score[into] = 1
            self._score[places] = before + (before < _MOST)
        places[absent] = self._place_of.take(ids[absent], mode="clip")
        return Moves(places, missing, into, leaving, distinct)

    def undo(self, moves: Moves) -> None:
        """Reverts the last plan, except for its counts."""
        self.id_of[moves.into] = moves.leaving
        self._score[moves.into] = 0

    def find(self, ids: np.ndarray) -> np.ndarray:
        """The places of ids; -1 for ids that are not in the cache."""
        places = self._place_of[ids]
        return np.where(self.id_of[places] == ids, places, -1)

    def grow(self, rows: int) -> None:
        """Increases the number of rows."""
        self._place_of = np.append(self._place_of, np.zeros(rows - self.rows, np.int32))
        self._place_of[rows] = self.num_places
        if rows >= 2**31 - 1:
            self.id_of = self.id_of.astype(np.int64)
        self.id_of[self.num_places] = self.rows = rows

    def held(self, *, dirty: bool = False) -> np.ndarray:
        """The places that have a row; with ``dirty`` only those that differ from the host."""
        is_held = self.id_of[:-1] >= 0
        return np.flatnonzero(is_held & self.is_dirty[:-1] if dirty else is_held)

    def empty(self) -> None:
        """Marks all places as empty."""
        self.id_of[:-1] = -1
        self.is_dirty[:] = False
        self._score[:] = 0

    def _free_places(self, number: int, top: int) -> np.ndarray:
        """Frees places for other rows, and marks them as used by this batch."""
        first = self._filled
        self._filled = min(first + number, self.num_places)
        self._score[first : self._filled] = top
        parts = [np.arange(first, self._filled)]
        number -= self._filled - first
        looked, more = 0, 1
        while number:
            if looked >= self.num_places:
                looked, more = 0, 2 * more
                self._limit = min(self._limit + more // 2, top - 1)
            end = min(self._hand + _BLOCK, self.num_places)
            found = np.flatnonzero(self._score[self._hand : end] <= self._limit)[:number]
            found += self._hand
            looked += end - self._hand
            number -= len(found)
            self._hand = (end if number else int(found[-1]) + 1) % self.num_places
            self._score[found] = top
            parts.append(found)
        if self._is_lfu and len(parts) > 1 and 4 * looked <= self.num_places:
            self._limit = max(0, self._limit - 1)  # many are as rare
        return np.concatenate(parts)

    def _grow_older(self) -> None:
        """Halves the counts of the places whose turn it is."""
        size = -(-self.num_places // AGE)
        first = self._now % AGE * size
        self._score[first : min(first + size, self.num_places)] >>= 1
