"""The spool: keeps a body between its arrival and its staging on every rank.

Its folder is locked while its process lives, so that the next server to start can distinguish the
folder of a killed server from one that is in use.

Bytes are checked while they arrive: a zstd frame is decompressed within a bound, and the
container's header and length are checked as soon as they are known. A file in the spool is always
a plain container, private to this process and removed with the `Spooled` that owns it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

from delta_server.part_writer import PartWriter, SignedPartWriter, Spooled
from delta_server.spool_files import SpoolFiles
from delta_server.upload_limits import MinimumRate, receive_body
from engine_ext.errors import TooLarge
from engine_ext.files import FileLock
from engine_ext.format import Limits, Verifier, signing_key

__all__ = ["Spool", "Spooled"]

logger = logging.getLogger(__name__)

# Not that of the first versions, whose living servers had no lock.
_PREFIX = "delta-updates-spool-"
_READ_BYTES = 1 << 20
_BATCH_BYTES = 1 << 20
_BATCH_CHUNKS = 256
_SHARED_MEMORY = "/dev/shm"


class Spool:
    """A private folder for parts.

    Args:
        directory: parent of the folder; None chooses shared memory, or the temporary folder if
            shared memory has no room for a part of the maximum size.
        limits: bounds for a part; `Limits.max_part_bytes` bounds compressed bodies too.
    """

    def __init__(self, directory: str | None, limits: Limits) -> None:
        self._limits = limits
        # There are two copies of a signed part for a moment.
        room = limits.max_part_bytes * (1 if signing_key() is None else 2)
        parent = directory or _default_parent(room)
        _remove_dead(parent)
        self.directory, lock = _make_locked(parent)
        self._files = SpoolFiles(self.directory)
        self._cleaner = weakref.finalize(self, _remove, self._files, self.directory, lock)

    def close(self) -> None:
        """Remove the folder and everything in it."""
        self._cleaner()

    async def receive(
        self,
        chunks: AsyncIterator[bytes],
        declared: int | None,
        minimum_rate: MinimumRate,
        verifier: Verifier | None = None,
    ) -> Spooled:
        """Write a streamed body to the spool.

        Args:
            declared: its Content-Length, if it has one.
            verifier: checks its signature, before anything of the body is parsed.

        Raises:
            MalformedPart, Unauthorized, TooLarge, UploadTooSlow, SpoolFull: nothing of the body is
                kept.
        """
        if declared is not None and declared > self._limits.max_part_bytes:
            limit = self._limits.max_part_bytes
            raise TooLarge(f"the body has {declared} bytes, the limit is {limit}", limit=limit)
        with self._writer(verifier) as writer:
            async with contextlib.aclosing(receive_body(chunks, minimum_rate)) as body:
                spooled = await self._feed(writer, body)
            writer.keep()
            return spooled

    def read(self, source: BinaryIO, verifier: Verifier | None = None) -> Spooled:
        """Copy an open, unbuffered file to the spool, so that it cannot change while it is staged.

        Raises:
            MalformedPart, Unauthorized, TooLarge, SpoolFull: nothing of the file is kept.
        """
        with self._writer(verifier) as writer:
            for chunk in iter(lambda: source.read(_READ_BYTES), b""):
                writer.count(len(chunk))
                writer.feed([chunk])
            spooled = writer.finish()
            writer.keep()
            return spooled

    async def _feed(self, writer: PartWriter, chunks: AsyncIterator[bytes]) -> Spooled:
        """Feed a body to a writer: in batches in threads, while the next one arrives.

        What is only copied is fed here, as soon as no batch is waiting.
        """
        loop, threads = asyncio.get_running_loop(), self._files.threads
        batch, size = list[bytes](), 0
        feeding: asyncio.Future[None] | None = None
        async for chunk in chunks:
            writer.count(len(chunk))
            if feeding is not None and feeding.done():
                feeding.result()
                feeding = None
            if not batch and feeding is None and writer.is_quick(len(chunk)):
                writer.feed([chunk])
                continue
            batch.append(chunk)
            size += len(chunk)
            if size >= _BATCH_BYTES or len(batch) == _BATCH_CHUNKS or writer.awaits_header:
                if feeding is not None:
                    await feeding
                feeding = loop.run_in_executor(threads, writer.feed, batch)
                feeding.add_done_callback(_note_error)
                batch, size = [], 0
                if writer.awaits_header:
                    await feeding
        if feeding is not None:
            await feeding
        return await loop.run_in_executor(threads, writer.finish, batch)

    def _writer(self, verifier: Verifier | None) -> PartWriter:
        if verifier is None:
            return PartWriter(self._files, self._limits)
        return SignedPartWriter(self._files, self._limits, verifier)


def _note_error(done: asyncio.Future[None]) -> None:
    """Keep asyncio from logging the error of a batch whose request has failed before."""
    if not done.cancelled():
        done.exception()


def _make_locked(parent: str) -> tuple[Path, FileLock]:
    """Make a private folder and lock it."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        # A server that starts at this moment may take the folder for a dead one's and remove it.
        # Without locks in the file system nobody removes anything.
        with contextlib.suppress(FileNotFoundError):
            lock = FileLock(folder, os.O_RDONLY | os.O_DIRECTORY, None)
            if lock.is_in_place():
                return folder, lock
            lock.close()


def _remove(files: SpoolFiles, folder: Path, lock: FileLock) -> None:
    files.close()
    shutil.rmtree(folder, ignore_errors=True)
    lock.close()


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
        if shutil.disk_usage(_SHARED_MEMORY).free >= needed:
            return _SHARED_MEMORY
    return tempfile.gettempdir()
