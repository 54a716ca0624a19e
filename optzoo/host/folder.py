"""A folder with the last flush of a table on the host, and later changes."""

from __future__ import annotations

import json
import os
import pathlib
import sys
import weakref
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from .arrays import Kind, MappedTable, roll_back
from .journal import Journal, sync

if sys.platform != "win32":
    import fcntl

FORMAT = 1


class Folder:
    """A folder with files of rows, a journal, and ``flush.json``, which describes the last flush.

    Rows change in the files between flushes; the journal keeps their previous values. A flush
    writes the other arrays to a new file, waits until all data are on disk, and then atomically
    replaces ``flush.json``, which names this file and the new journal. If a process is killed at
    any moment, the next one restores the last flush by writing the rows of the journal back.

    Args:
        path: the path of the folder, which is created.

    Raises:
        RuntimeError: if another process has opened the folder.
    """

    def __init__(self, path: Any):
        self.path = pathlib.Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT)
        self._release = weakref.finalize(self, os.close, lock)
        if sys.platform != "win32":
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                self._release()
                raise RuntimeError(
                    f"folder {str(path)!r} is open in another HostTable, of this or another "
                    "process: close it, or give another folder"
                ) from error
        self.flushed: dict[str, Any] = {}  # what the last flush says
        if (self.path / "flush.json").exists():
            self.flushed = json.loads((self.path / "flush.json").read_text())
            if self.flushed["format"] != FORMAT:
                raise ValueError(
                    f"folder {str(path)!r} has the format {self.flushed['format']} of another "
                    f"version of optzoo, not {FORMAT}"
                )
        self.journal = Journal(self._journal_of(self.number))
        self.tables = dict[str, MappedTable]()

    @property
    def number(self) -> int:
        """The number of the last flush; 0 if there is none."""
        return self.flushed.get("number", 0)

    def add(self, name: str, kinds: list[Kind]) -> MappedTable:
        """Adds a table, whose files :meth:`roll_back` opens or ``new`` creates."""
        table = MappedTable(kinds, self.path, len(self.tables), self.journal)
        self.tables[name] = table
        return table

    def roll_back(self) -> None:
        """Opens the tables as of the last flush."""
        for name, table in self.tables.items():
            table.open(self.flushed["rows"][name])
        roll_back(self.journal, {table.number: table for table in self.tables.values()})
        self._sync_tables()
        self._clean()
        self.journal.path.unlink(missing_ok=True)

    def others(self) -> list[np.ndarray]:
        """The other arrays of the last flush."""
        return _load(self._others_of(self.number), self.flushed["others"])

    def commit(self, others: list[np.ndarray], about: Mapping[str, Any]) -> None:
        """Commits all written data as the last flush.

        Args:
            others: the arrays without rows.
            about: further data of the flush, for JSON.
        """
        number = self.number + 1
        self._sync_tables()
        kinds = _save(self._others_of(number), others)
        found = {
            "format": FORMAT,
            "number": number,
            "rows": {name: len(table) for name, table in self.tables.items()},
            "others": kinds,
            **about,
        }
        new = self.path / "flush.json.new"
        new.write_text(json.dumps(found))
        sync(new)
        sync(self.path)
        os.replace(new, self.path / "flush.json")
        sync(self.path)
        self.flushed = found
        self.journal.path = self._journal_of(number)
        for table in self.tables.values():
            table.is_saved[:] = False
        self._clean()

    def close(self) -> None:
        """Closes the folder, so that it can be opened again."""
        self._release()

    def _sync_tables(self) -> None:
        for table in self.tables.values():
            table.sync()

    def _clean(self) -> None:
        """Removes the files of other flushes."""
        keep = {self._others_of(self.number), self.journal.path}
        for pattern in ("others.*", "journal.*", "flush.json.new"):
            for path in self.path.glob(pattern):
                if path not in keep:
                    path.unlink(missing_ok=True)

    def _others_of(self, number: int) -> pathlib.Path:
        return self.path / f"others.{number}"

    def _journal_of(self, number: int) -> pathlib.Path:
        return self.path / f"journal.{number}"


def _save(path: pathlib.Path, arrays: list[np.ndarray]) -> list[Any]:
    """Writes arrays consecutively, and returns their shapes and dtypes."""
    with open(path, "wb") as file:
        for a in arrays:
            file.write(np.ascontiguousarray(a).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
    return [[list(a.shape), a.dtype.name] for a in arrays]


def _load(path: pathlib.Path, kinds: list[Any]) -> list[np.ndarray]:
    data, at, found = np.fromfile(path, np.uint8), 0, []
    for shape, name in kinds:
        dtype = np.dtype(getattr(jnp, name, name))
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        found.append(data[at : at + nbytes].copy().view(dtype).reshape(shape))
        at += nbytes
    return found
