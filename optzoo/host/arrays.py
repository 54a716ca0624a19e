"""Arrays of rows on the host, in NumPy: in memory, or in memory-mapped files."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from .journal import Journal

CHUNK = 1 << 16  # rows that are read or written together


class Kind(NamedTuple):
    """The shape of a row, and the dtype, of an array."""

    row: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of a row."""
        return int(np.prod(self.row, dtype=np.int64)) * self.dtype.itemsize


class Table:
    """The arrays of a table: its rows and their slots."""

    def __init__(self, kinds: list[Kind]):
        self.kinds = kinds
        self.arrays = list[np.ndarray]()

    def __len__(self) -> int:
        return len(self.arrays[0])

    def new(self, rows: int) -> list[np.ndarray]:
        """Arrays of zeros with this number of rows; memory is allocated when they are written."""
        return [np.zeros((rows, *kind.row), kind.dtype) for kind in self.kinds]

    def read(self, ids: np.ndarray, size: int) -> list[np.ndarray]:
        """Copies of some rows of all arrays, padded with zeros to ``size``."""
        found = []
        for a in self.arrays:
            rows = np.empty((size, *a.shape[1:]), a.dtype)
            a.take(ids, axis=0, out=rows[: len(ids)], mode="clip")
            rows[len(ids) :] = 0
            found.append(rows)
        return found

    def write(self, ids: np.ndarray, rows: list[np.ndarray]) -> None:
        """Replaces rows of all arrays, at distinct ids."""
        for a, new in zip(self.arrays, rows, strict=True):
            a[ids] = new

    def grow(self, rows: int) -> None:
        """Appends rows of zeros."""
        longer = self.new(rows)
        for a, new in zip(self.arrays, longer, strict=True):
            new[: len(a)] = a
        self.arrays = longer

    def views(self) -> list[np.ndarray]:
        """Read-only views of the arrays."""
        views = [a.view() for a in self.arrays]
        for view in views:
            view.flags.writeable = False
        return views


class MappedTable(Table):
    """The arrays of a table in files; a journal keeps their rows as of the last flush."""

    def __init__(self, kinds: list[Kind], folder: pathlib.Path, number: int, journal: Journal):
        super().__init__(kinds)
        self.number = number  # of the table
        self.journal = journal
        self.paths = [folder / f"table{number}.{k}" for k in range(len(kinds))]
        self.is_saved = np.zeros(0, bool)  # by row: as it was before, in the journal
        self._maps = list[np.memmap]()

    def new(self, rows: int) -> list[np.ndarray]:
        """New files of zeros, in place of existing ones."""
        for path in self.paths:
            path.unlink(missing_ok=True)
        return self._mapped(rows)

    def open(self, rows: int) -> None:
        """Maps the existing files, with this number of rows."""
        self.arrays = self._mapped(rows)

    def _mapped(self, rows: int) -> list[np.ndarray]:
        self.is_saved, found = np.zeros(rows, bool), list[np.ndarray]()
        self._maps.clear()
        for path, kind in zip(self.paths, self.kinds, strict=True):
            with open(path, "ab") as file:
                file.truncate(rows * kind.nbytes)
            if kind.nbytes == 0:  # nothing can be mapped
                found.append(np.zeros((rows, *kind.row), kind.dtype))
                continue
            # As bytes: a mapped file takes no dtype that NumPy does not know by its name.
            self._maps.append(np.memmap(path, np.uint8, "r+"))
            found.append(np.asarray(self._maps[-1]).view(kind.dtype).reshape(rows, *kind.row))
        return found

    def write(self, ids: np.ndarray, rows: list[np.ndarray]) -> None:
        """Like :meth:`Table.write`; the journal saves rows of a flush before the first change."""
        old = ids[~self.is_saved[ids]]
        if len(old):
            self.journal.append(self.number, old, [a[old] for a in self.arrays])
            self.is_saved[old] = True
        super().write(ids, rows)

    def grow(self, rows: int) -> None:
        """Extends the files; rows beyond those of the last flush are dropped at a restart."""
        before = self.is_saved
        self.sync()
        self.arrays = self._mapped(rows)
        self.is_saved[:] = True
        self.is_saved[: len(before)] = before

    def sync(self) -> None:
        """Waits until the files are on disk."""
        for mapped in self._maps:
            mapped.flush()


def chunks(rows: int) -> Iterator[np.ndarray]:
    """All ids in chunks of ``CHUNK``."""
    for first in range(0, rows, CHUNK):
        yield np.arange(first, min(first + CHUNK, rows))


def roll_back(journal: Journal, tables: Mapping[int, MappedTable]) -> None:
    """Writes the rows of a journal back, which restores the last flush."""
    for number, ids, rows in journal.records({n: t.kinds for n, t in tables.items()}):
        Table.write(tables[number], ids, rows)
