"""A file of records with the previous values of overwritten rows."""

from __future__ import annotations

import os
import pathlib
import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

# The number of a table, how many rows, and how many bytes follow; then the checksum of all.
_HEAD, _CHECKSUM = struct.Struct("<QQQ"), struct.Struct("<I")


class Journal:
    """The rows of the last flush that have been overwritten since.

    A killed process leaves complete records and at most one partial record, whose rows are not
    overwritten yet.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path

    def append(self, table: int, ids: np.ndarray, rows: list[np.ndarray]) -> None:
        """Appends a record; after it returns, the rows may be overwritten."""
        parts = [_bytes(ids.astype(np.int64)), *map(_bytes, rows)]
        head = _HEAD.pack(table, len(ids), sum(map(len, parts)))
        checksum = zlib.crc32(head)
        for part in parts:
            checksum = zlib.crc32(part, checksum)
        with open(self.path, "ab", buffering=0) as file:
            before = os.fstat(file.fileno()).st_size
            try:
                for part in (head + _CHECKSUM.pack(checksum), *parts):
                    _write(file, part)
            except BaseException:  # such as a full disk; what comes later must be found
                file.truncate(before)
                raise

    def records(self, kinds: Mapping[int, list[Any]]) -> Iterator[tuple[int, Any, list[Any]]]:
        """The table, ids and rows of each record.

        Args:
            kinds: the kinds of the arrays of each table, by its number.
        """
        if not self.path.exists():
            return
        left = self.path.stat().st_size
        with open(self.path, "rb") as file:
            while (left := left - _HEAD.size - _CHECKSUM.size) >= 0:
                head = file.read(_HEAD.size)
                [checksum] = _CHECKSUM.unpack(file.read(_CHECKSUM.size))
                table, number, nbytes = _HEAD.unpack(head)
                left -= nbytes
                if left < 0 or zlib.crc32(body := file.read(nbytes), zlib.crc32(head)) != checksum:
                    return
                ids = np.frombuffer(body, np.int64, number)
                rows, at = [], ids.nbytes
                for kind in kinds[table]:
                    flat = np.frombuffer(body, np.uint8, number * kind.nbytes, at)
                    rows.append(flat.view(kind.dtype).reshape(number, *kind.row))
                    at += number * kind.nbytes
                yield table, ids, rows


def _bytes(a: np.ndarray) -> memoryview:
    return np.ascontiguousarray(a).reshape(-1).view(np.uint8).data


def _write(file: Any, data: Any) -> None:
    """Writes all bytes: an operating system writes at most 2 GB at once."""
    data = memoryview(data)
    while len(data):
        data = data[file.write(data) :]


def sync(path: pathlib.Path) -> None:
    """Waits until a file, or the names in a folder, are on disk."""
    if os.name == "nt" and path.is_dir():
        return
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
