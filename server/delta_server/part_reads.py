"""Reads of parts from the log's store for other engines; none waits for long at once."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import BinaryIO, Final

from engine_ext.log import SharedParts, open_part

_LONGEST_WAIT_S: Final = 10.0  # who asks gives up an engine that is silent for longer


class StillReading(Exception):
    """The part is being read; who wants it is to ask again."""


class PartReads:
    """The parts of one engine's log, as it hands them on."""

    def __init__(self, parts: SharedParts) -> None:
        self._parts = parts
        self._reading: dict[str, asyncio.Task[Path | None]] = {}

    async def open(self, content: str, *, reads: bool) -> BinaryIO | None:
        """Return an open file that has a part; see `SharedParts.path`, and `open_part`.

        Raises:
            StillReading: the store has not sent it yet; it is read on.
            DeltaError, OSError: see `SharedParts.path`.
        """
        path = await self._path(content, reads=reads)
        with contextlib.suppress(FileNotFoundError):
            return None if path is None else await asyncio.to_thread(open_part, path)
        return None

    async def _path(self, content: str, *, reads: bool) -> Path | None:
        if not reads:
            return await asyncio.to_thread(self._parts.path, content, reads=False)
        task = self._reading.get(content)
        if task is None:
            work = asyncio.to_thread(self._parts.path, content, reads=True)
            task = self._reading[content] = asyncio.ensure_future(work)
            task.add_done_callback(lambda task: self._end(content, task))
        await asyncio.wait({task}, timeout=_LONGEST_WAIT_S)
        if not task.done():
            raise StillReading(content)
        return task.result()

    def _end(self, content: str, task: asyncio.Task[Path | None]) -> None:
        del self._reading[content]
        if not task.cancelled():
            task.exception()  # whoever has asked might have gone
