"""Files that survive a crash, and locks that end with their process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import weakref
from pathlib import Path
from typing import BinaryIO, Final

import xxhash

_READ_BYTES: Final = 1 << 20


def hash_of_rest(file: BinaryIO) -> str:
    """Return the xxh3_128 of what is left to read of a file, in hex."""
    digest = xxhash.xxh3_128()
    for chunk in iter(lambda: file.read(_READ_BYTES), b""):
        digest.update(chunk)
    return digest.hexdigest()


def write_file(path: Path, data: bytes) -> None:
    """Write a file's bytes to disk; `sync_folder` makes its name durable too."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Write the names in a folder to disk, if its file system can."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Some network file systems cannot fsync a folder.
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_full(error: OSError) -> bool:
    """Return whether a file system has no room."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


class FileLock(contextlib.AbstractContextManager["FileLock"]):
    """Lock a file or folder against every other process, and every other lock of this process.

    The lock is released by `close`, when this object is collected, or when the process ends.

    Args:
        flags: `os.open`'s; they decide whether a missing file is created.
        conflict: the message if another process has the lock; None waits for it instead.

    `is_enforced` is False if the file system has no locks, so that others can have one too.

    Raises:
        BlockingIOError: another process has the lock.
        OSError: the path cannot be opened.
    """

    def __init__(self, path: Path, flags: int, conflict: str | None) -> None:
        self._path, self._pid = path, os.getpid()
        self._descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self._close.atexit = False  # threads might still write then; the process's end releases it
        self.is_enforced = True
        wait = 0 if conflict is None else fcntl.LOCK_NB
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | wait)
        except OSError as error:
            if conflict is not None and error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                self.close()
                raise BlockingIOError(conflict) from None
            self.is_enforced = False

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock; calling this again does nothing.

        It is released even if a forked child still has the descriptor; in a forked child, this
        closes only the child's descriptor.
        """
        if self._close.alive and os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self._close()

    def stat(self) -> os.stat_result:
        """Return the status of the locked file, wherever it is now."""
        return os.fstat(self._descriptor)

    def is_in_place(self) -> bool:
        """Return whether the locked file is still what its path names."""
        try:
            found = os.lstat(self._path)
        except OSError:
            return False
        return os.path.samestat(found, self.stat())
