"""Map a part's file so that the HTTP process does not write into it while it is mapped.

The HTTP process reuses its files, see `delta_server.spool_files`. It writes only into a file that
it has locked exclusively, so a shared lock is held for as long as the mapping lives: the mapping
has a descriptor of the open file, and the kernel releases the lock with the last one.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from typing import BinaryIO


def map_part(path: str) -> mmap.mmap:
    """Map the spool file of a part; its bytes stay as they are while the mapping lives.

    They may be another part's if this one was removed meanwhile, so the identity must be checked.

    Raises:
        FileNotFoundError: the part was removed.
    """
    with open(path, "rb", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:  # the file is being written again
            raise FileNotFoundError(errno.ENOENT, "the part was removed", path) from None
        except OSError:  # a file system without locks
            return _copy(file)
        if not os.path.samestat(os.stat(path), os.fstat(file.fileno())):
            raise FileNotFoundError(errno.ENOENT, "the part was removed", path)
        # Nothing writes into the mapping, but torch makes no tensor of read-only memory.
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _copy(file: BinaryIO) -> mmap.mmap:
    """Return the file's bytes in memory of their own."""
    memory = mmap.mmap(-1, os.fstat(file.fileno()).st_size)
    view, at = memoryview(memory), 0
    while at < len(view) and (read := os.readv(file.fileno(), [view[at:]])):
        at += read
    return memory
