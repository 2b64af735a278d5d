"""A folder that exists while its owner reads fetched files."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Final

from engine_ext.files import FileLock
from engine_ext.remote_parts.cache import PartCache

_PREFIX: Final = "log-"
_STALE_S: Final = 60.0  # from when a folder was made until it is locked, at most


class LocalFolder(contextlib.AbstractContextManager["LocalFolder"]):
    """A folder that is removed with its owner; a context manager.

    Args:
        cache: the folder is made on its file system, so that files can be links to its parts.
        scratch: where it is made without a cache; the temporary folder if None.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, cache: PartCache | None, scratch: str | None = None) -> None:
        if cache is not None:
            cache.prepare()
            _remove_stale(cache.folder)
        parent = scratch if cache is None else cache.folder
        self._folder = tempfile.TemporaryDirectory(prefix=_PREFIX, dir=parent)
        self.path = Path(os.path.realpath(self._folder.name))
        self._lock = FileLock(self.path, os.O_RDONLY | os.O_DIRECTORY, "a new folder is locked")

    def __exit__(self, *exc_info: object) -> None:
        self._folder.cleanup()
        self._lock.close()


def _remove_stale(parent: Path) -> None:
    """Remove the folders of processes that were killed."""
    for folder in parent.glob(_PREFIX + "*"):
        with contextlib.suppress(OSError):  # BlockingIOError: it is in use
            if time.time() - folder.stat().st_mtime > _STALE_S:
                with FileLock(folder, os.O_RDONLY | os.O_DIRECTORY, "in use") as lock:
                    if lock.is_enforced:
                        shutil.rmtree(folder, ignore_errors=True)
