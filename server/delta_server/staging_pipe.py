"""Learn without asking when the ranks have ended staging a part.

The HTTP side makes a named pipe beside the part. Every rank opens it for writing when it begins to
stage the part, and closes it when it has ended; the system closes it for a rank that dies. A pipe
without a writer wakes the reader up.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

from engine_ext.files import staging_pipe


class StagingPipe(contextlib.AbstractContextManager["StagingPipe"]):
    """The pipe of one part, to be made before the ranks begin the part.

    Without pipes in the file system, or if a rank does not open it, `wait` returns at once.
    """

    def __init__(self, part: Path) -> None:
        self._path = staging_pipe(part)
        self._reader: int | None = None
        self._writer: int | None = None
        with contextlib.suppress(OSError):
            os.mkfifo(self._path, 0o600)
            self._reader = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            # Keeps it open while some ranks may have ended before others begin.
            self._writer = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the pipe; calling this again does nothing."""
        self._path.unlink(missing_ok=True)
        self._close_writer()
        if self._reader is not None:
            os.close(self._reader)
            self._reader = None

    async def wait(self, seconds: float) -> bool:
        """Wait until no rank that has begun the part is staging it, at most for some seconds.

        Call it when every rank has begun the part. Return whether that is so.
        """
        self._close_writer()
        if self._reader is None:
            return True
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._reader, ended.set)
        try:
            await asyncio.wait_for(ended.wait(), seconds)
        except asyncio.TimeoutError:
            return False
        finally:
            loop.remove_reader(self._reader)
        return True

    def _close_writer(self) -> None:
        if self._writer is not None:
            os.close(self._writer)
            self._writer = None
