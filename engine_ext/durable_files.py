"""Files that outlive a crash, and locks that do not outlive their process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path


def write_file(path: Path, data: bytes) -> None:
    """Write a file; its bytes are on disk when this returns, its name is with `sync_folder`."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to disk, where its file system can."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Some network file systems know no fsync of a folder.
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock(path: Path, flags: int, taken: str) -> int:
    """Keep every other process, and every other caller in this one, from locking the same.

    Args:
        path, flags: as `os.open` takes them.
        taken: says what is wrong if somebody else has it.

    Returns:
        The descriptor that holds the lock until it is closed.

    Raises:
        BlockingIOError: somebody else has it.
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # A file system that knows no locks lets everybody in.
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            os.close(descriptor)
            raise BlockingIOError(taken) from None
    return descriptor
