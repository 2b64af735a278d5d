"""The spool: the folder that keeps parts between their arrival and their staging on every rank.

Its folder is locked while its process lives, so that the next server to start can distinguish the
folder of a killed server from one that is in use. Its files are private to this user.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from pathlib import Path
from threading import Lock

from delta_server.spool_files import SpoolFiles, room_in_memory
from engine_ext.files import FileLock

logger = logging.getLogger(__name__)

# Not that of the first versions, whose living servers had no lock.
_PREFIX = "delta-updates-spool-"
_SHARED_MEMORY = Path("/dev/shm")


class Spool:
    """A private folder for parts, which is locked.

    Args:
        directory: parent of the folder; None chooses shared memory, or the temporary folder if
            shared memory has no `room`.
        room: about the bytes that the largest part can need.

    Attributes:
        path: of the folder.
        files: in it.
    """

    def __init__(self, directory: str | None, room: int) -> None:
        parent = directory or _default_parent(room)
        _remove_dead(parent)
        self._making = Lock()
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            # A server that starts at this moment might take the folder for a dead one's and remove
            # it. Without locks in the file system nobody removes anything.
            with contextlib.suppress(FileNotFoundError):
                self._lock = self._locked()
                if self._lock.is_in_place():
                    break
                self._lock.close()
        self.files = SpoolFiles(self.path, self.make_again)

    def _locked(self) -> FileLock:
        return FileLock(self.path, os.O_RDONLY | os.O_DIRECTORY, None)

    def make_again(self) -> None:
        """Make and lock it again if it is gone: what cleans up shared memory removes it.

        Raises:
            OSError: it cannot be made, or is another's now.
        """
        with self._making:
            if not self._lock.is_in_place():
                logger.warning("something has removed the spool %s: it is made again", self.path)
                self.path.mkdir(mode=0o700)
                self._lock.close()
                self._lock = self._locked()

    def remove(self) -> None:
        """Remove it and everything in it."""
        self.files.close()
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _remove_dead(parent: str) -> None:
    """Remove this user's spools whose servers were killed."""
    for folder in Path(parent).glob(f"{_PREFIX}*"):
        try:
            lock = FileLock(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, "in use")
        except OSError:
            continue  # its server lives, or it is another user's, no folder, or gone
        with lock:
            mine = lock.stat().st_uid == os.geteuid()
            if mine and lock.is_enforced and lock.is_in_place():
                logger.warning("removing the spool of a server that was killed: %s", folder)
                shutil.rmtree(folder, ignore_errors=True)


def _default_parent(needed: int) -> str:
    with contextlib.suppress(OSError):
        if room_in_memory(_SHARED_MEMORY) >= needed:
            return str(_SHARED_MEMORY)
    return tempfile.gettempdir()
