"""A lock between processes and threads."""

import contextlib
import errno
import os
import sys
import time
from collections.abc import Iterator
from typing import IO

from .warn import warn

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


@contextlib.contextmanager
def locked(path: str | os.PathLike[str]) -> Iterator[None]:
    """A context manager that waits for a lock, and holds it in the body.

    The operating system releases the lock when its process ends, also if it is killed. The file at
    ``path`` exists while the lock is held; one left by a killed process does not block.

    Raises:
        OSError: if the file cannot be created.

    Warns:
        RuntimeWarning: if the file system does not support locks; the body runs without a lock.
    """
    file = _acquire(path)
    try:
        yield
    finally:
        if sys.platform == "win32":  # which removes no open file, nor one that another has open
            file.close()
        with contextlib.suppress(OSError):
            os.unlink(path)
        file.close()


def _acquire(path: str | os.PathLike[str]) -> IO[bytes]:
    while True:
        file = open(path, "ab")  # noqa: SIM115 (it stays open)
        try:
            _lock(file)
            # The process that held the lock may have removed the file in the meantime.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    return file
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                warn(
                    f"the file system does not support a lock for {os.fspath(path)!r}: let only "
                    "one process at a time write to it",
                    RuntimeWarning,
                )
                return file
            file.close()
            raise
        except BaseException:
            file.close()
            raise
        file.close()


def _lock(file: IO[bytes]) -> None:
    if sys.platform == "win32":
        while True:
            try:
                msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
                return
            except PermissionError:
                time.sleep(0.05)
    else:
        fcntl.flock(file, fcntl.LOCK_EX)
