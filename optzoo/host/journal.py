"""What rows were before they were overwritten: a file to which records are appended."""

from __future__ import annotations

import os
import pathlib
import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

# Mark, number of the table, number of rows, bytes that follow, and their checksum.
_HEAD = struct.Struct("<4sIQQI")
_MARK = b"rows"


class Journal:
    """The rows of the last flush that were overwritten since.

    A process that is killed leaves whole records, and at most a part of one, whose rows were not
    overwritten yet.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path
        self._file: Any = None

    def append(self, table: int, ids: np.ndarray, rows: list[np.ndarray]) -> None:
        """Adds a record; when it returns, the rows may be overwritten."""
        if self._file is None:
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 (it stays open)
        parts = [_bytes(ids.astype(np.int64)), *map(_bytes, rows)]
        checksum = 0
        for part in parts:
            checksum = zlib.crc32(part, checksum)
        head = _HEAD.pack(_MARK, table, len(ids), sum(map(len, parts)), checksum)
        before = os.fstat(self._file.fileno()).st_size
        try:
            for part in (head, *parts):
                _write(self._file, part)
        except BaseException:  # such as a full disk; what comes later must be found
            self._file.truncate(before)
            raise

    def records(self, kinds: Mapping[int, list[Any]]) -> Iterator[tuple[int, Any, list[Any]]]:
        """Table, ids and rows of each record.

        Args:
            kinds: by the number of a table those of its arrays.
        """
        if not self.path.exists():
            return
        with open(self.path, "rb") as file:
            while len(head := file.read(_HEAD.size)) == _HEAD.size:
                mark, table, number, nbytes, checksum = _HEAD.unpack(head)
                body = file.read(nbytes) if mark == _MARK and table in kinds else b""
                if len(body) != nbytes or zlib.crc32(body) != checksum:
                    return
                ids = np.frombuffer(body, np.int64, number)
                rows, at = [], ids.nbytes
                for kind in kinds[table]:
                    flat = np.frombuffer(body, np.uint8, number * kind.nbytes, at)
                    rows.append(flat.view(kind.dtype).reshape(number, *kind.row))
                    at += number * kind.nbytes
                yield table, ids, rows

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _bytes(a: np.ndarray) -> memoryview:
    return memoryview(np.ascontiguousarray(a).reshape(-1).view(np.uint8))


def _write(file: Any, data: Any) -> None:
    """Writes all of it: a system writes at most 2 GB at once."""
    data = memoryview(data)
    while len(data):
        data = data[file.write(data) :]


def sync(path: pathlib.Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    if os.name == "nt" and path.is_dir():
        return
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
