"""Tables of keys and values: the index files of TensorFlow's checkpoints.

The format is that of `LevelDB <https://github.com/google/leveldb/blob/main/doc/table_format.md>`_.
Checksums are not verified, since TensorFlow's reader has already opened the file.
"""

import os
from collections.abc import Iterator
from typing import BinaryIO

_FOOTER, _MAGIC = 48, bytes.fromhex("57fb808b247547db")


def entries(path: str) -> Iterator[tuple[bytes, bytes]]:
    """The keys and values of a table, in the order of the keys.

    Raises:
        IndexError: if a block is too short.
        OSError: if the file cannot be read.
        ValueError: if the file is not a table, or is compressed.
    """
    with open(path, "rb") as file:
        if file.seek(0, os.SEEK_END) < _FOOTER:
            raise ValueError("the file is too short for a table")
        file.seek(-_FOOTER, os.SEEK_END)
        footer = file.read(_FOOTER)
        if not footer.endswith(_MAGIC):
            raise ValueError("the file does not have the footer of a table")
        *_, offset, size = _numbers(footer, 4)
        for _, handle in _block(file, offset, size):
            yield from _block(file, *_numbers(handle, 2))


def _numbers(data: bytes, count: int) -> list[int]:
    found, at = [], 0
    for _ in range(count):
        number, at = _number(data, at)
        found.append(number)
    return found


def _number(data: bytes, at: int) -> tuple[int, int]:
    """A number of variable length, 7 bits in a byte, and where it ends."""
    number = shift = 0
    while True:
        byte = data[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return number, at


def _block(file: BinaryIO, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    """The keys and values of a block; each key is stored without its shared prefix."""
    file.seek(offset)
    data = file.read(size + 1)
    if data[size]:  # TensorFlow compresses no block
        raise ValueError("a block is compressed")
    end = size - 4 * (int.from_bytes(data[size - 4 : size], "little") + 1)
    key, at = b"", 0
    while at < end:
        shared, at = _number(data, at)
        own, at = _number(data, at)
        length, at = _number(data, at)
        key = key[:shared] + data[at : at + own]
        at += own
        yield key, data[at : at + length]
        at += length
