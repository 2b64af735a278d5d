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
import errno
import logging
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from delta_server.upload_limits import MinimumRate, receive_body
from engine_ext.durable_files import FileLock
from engine_ext.errors import SpoolFull, TooLarge
from engine_ext.wire import (
    FrameReader,
    Header,
    Limits,
    PartGate,
    Verifier,
    part_identity,
    signing_key,
)

logger = logging.getLogger(__name__)

# Not that of the first versions, whose living servers had no lock.
_PREFIX = "delta-updates-spool-"
_READ_BYTES = 1 << 20
_SHARED_MEMORY = "/dev/shm"


@dataclass(slots=True)
class Spooled:
    """A part that has arrived completely."""

    path: Path  # the plain container
    header: Header
    identity: str  # see `engine_ext.wire.identity`
    wire_bytes: int  # size of the body as it was sent, compressed or not

    def remove(self) -> None:
        """Delete the file; ranks that have staged it keep their memory mapping."""
        self.path.unlink(missing_ok=True)


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
        self._cleaner = weakref.finalize(self, _remove, self.directory, lock)

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
            async for chunk in receive_body(chunks, minimum_rate):
                writer.feed(chunk)
            return await asyncio.to_thread(writer.finish)

    def read(self, source: BinaryIO, verifier: Verifier | None = None) -> Spooled:
        """Copy an open, unbuffered file to the spool, so that it cannot change while it is staged.

        Raises:
            MalformedPart, Unauthorized, TooLarge, SpoolFull: nothing of the file is kept.
        """
        with self._writer(verifier) as writer:
            for chunk in iter(lambda: source.read(_READ_BYTES), b""):
                writer.feed(chunk)
            return writer.finish()

    def _writer(self, verifier: Verifier | None) -> _Writer | _Unverified:
        try:
            if verifier is not None:
                raw = tempfile.TemporaryFile(dir=self.directory, buffering=0)  # noqa: SIM115
                return _Unverified(raw, verifier, self._limits.max_part_bytes, self.read)
            descriptor, name = tempfile.mkstemp(dir=self.directory, suffix=".safetensors")
        except OSError as error:
            raise _spool_error(error) from error
        return _Writer(Path(name), os.fdopen(descriptor, "wb", buffering=0), self._limits)


class _Unverified(contextlib.AbstractContextManager["_Unverified"]):
    """Keeps a part in an unnamed file, which `parse` reads once the signature is verified."""

    def __init__(
        self, file: BinaryIO, verifier: Verifier, limit: int, parse: Callable[[BinaryIO], Spooled]
    ) -> None:
        self._file, self._verifier, self._limit, self._parse = file, verifier, limit, parse
        self._bytes = 0

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def feed(self, chunk: bytes) -> None:
        self._bytes = _checked_size(self._bytes + len(chunk), self._limit)
        self._verifier.feed(chunk)
        _write_all(self._file, chunk)

    def finish(self) -> Spooled:
        self._verifier.finish()
        self._file.seek(0)
        return self._parse(self._file)


class _Writer(contextlib.AbstractContextManager["_Writer"]):
    """Writes one part; leaving the context removes the part unless it was finished."""

    def __init__(self, path: Path, file: BinaryIO, limits: Limits) -> None:
        self._path, self._file, self._limit = path, file, limits.max_part_bytes
        self._frame, self._gate = FrameReader(self._limit), PartGate(limits)
        self._wire_bytes = 0
        self._finished = False

    def __exit__(self, *exception: object) -> None:
        self._file.close()
        if not self._finished:
            self._path.unlink(missing_ok=True)

    def feed(self, chunk: bytes) -> None:
        self._wire_bytes = _checked_size(self._wire_bytes + len(chunk), self._limit)
        for piece in self._frame.feed(chunk):
            self._gate.feed(piece)
            _write_all(self._file, piece)

    def finish(self) -> Spooled:
        self._frame.finish()
        header = self._gate.finish()
        self._file.close()
        with open(self._path, "rb") as file:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                identity = part_identity(header, data)
        self._finished = True
        return Spooled(self._path, header, identity, self._wire_bytes)


def _checked_size(size: int, limit: int) -> int:
    if size > limit:
        raise TooLarge(f"the body is over the limit of {limit} bytes", limit=limit)
    return size


def _write_all(file: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[file.write(view) :]
    except OSError as error:
        raise _spool_error(error) from error


def _spool_error(error: OSError) -> Exception:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        advice = "set --delta-spool-dir to one with more room, or send smaller parts"
        return SpoolFull(f"the spool folder is full; {advice}")
    return error


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


def _remove(folder: Path, lock: FileLock) -> None:
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
