"""Intake: from the bytes of a part, as they arrive, to a `VerifiedPart` that every rank can map.

A body is received under limits; its header and its length are checked as soon as they are known.
Once it is whole its data is hashed, which verifies the sender's checksum and gives the part's
identity, and decompressed, for all ranks of the host. A part that fails here never reaches a
rank: the file is removed, and the engine is unchanged. Ranks believe what is verified here.

Hashing, decompressing and writing run in threads without the GIL, so that the event loop
continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from delta_server.spool import Spool
from delta_server.spool_files import SpoolFile, SpoolFiles
from delta_server.upload_limits import MinimumRate, receive_body
from engine_ext.errors import TooLarge
from engine_ext.format import (
    ZSTD_MAGIC,
    FrameReader,
    Limits,
    Manifest,
    PartGate,
    Verifier,
    signing_key,
    verify_container,
    warm_up_unpacking,
)
from engine_ext.ranks.operations import FileStamp

if TYPE_CHECKING:
    from typing_extensions import Buffer

_READ_BYTES = 1 << 20
_BATCH_BYTES = 1 << 20
_BATCH_CHUNKS = 256
_WRITE_BYTES = 1 << 20
_WRITE_PIECES = 256  # the kernel takes at most 1024
_QUICK_BYTES = 512 << 10  # to copy


@dataclass(slots=True)
class VerifiedPart:
    """A part that has arrived completely and was verified, in a file that ranks map."""

    path: Path  # see `engine_ext.format.verified_part`
    manifest: Manifest
    identity: str  # see `engine_ext.format.identity`
    wire_bytes: int  # size of the body as it was sent, compressed or not
    stamp: FileStamp  # of the file
    _file: SpoolFile

    def remove(self) -> None:
        """Remove the part; ranks that use it keep their mappings."""
        self._file.release()


class Intake:
    """Takes parts in, to files of a spool.

    Args:
        directory: parent of the spool's folder; None chooses shared memory, or the temporary folder
            if shared memory has no room for a part of the maximum size.
        limits: bounds for a part; `Limits.max_part_bytes` bounds compressed bodies too.

    Attributes:
        directory: the spool's folder.
        scratch: makes a folder in it, see `SpoolFiles.scratch`.
        close: removes the spool and everything in it.
    """

    def __init__(self, directory: str | None, limits: Limits) -> None:
        self._limits = limits
        # There are two copies of a signed part for a moment.
        spool = Spool(directory, limits.max_part_bytes * (1 if signing_key() is None else 2))
        self._files, self.directory = spool.files, spool.path
        self.scratch = spool.files.scratch
        self.close = weakref.finalize(self, spool.remove)

    def warm_up(self) -> None:
        """Compile what decompresses, in a thread, so that the first part does not wait for it."""
        self._files.threads.submit(warm_up_unpacking)

    async def receive(
        self,
        chunks: AsyncIterator[bytes],
        declared: int | None,
        minimum_rate: MinimumRate,
        verifier: Verifier | None = None,
    ) -> VerifiedPart:
        """Take a streamed body in.

        Args:
            declared: its Content-Length, if it has one.
            verifier: checks its signature, before anything of the body is parsed.

        Raises:
            MalformedPart, ChecksumMismatch, Unauthorized, TooLarge, UploadTooSlow, SpoolFull:
                nothing of the body is kept.
        """
        if declared is not None and declared > self._limits.max_part_bytes:
            raise TooLarge.of_part(f"the body has {declared} bytes", self._limits.max_part_bytes)
        with self._writer(verifier) as writer:
            async with contextlib.aclosing(receive_body(chunks, minimum_rate)) as body:
                return await self._feed(writer, body)

    def read(self, source: BinaryIO, verifier: Verifier | None = None) -> VerifiedPart:
        """Take an open, unbuffered file in.

        Raises:
            MalformedPart, ChecksumMismatch, Unauthorized, TooLarge, SpoolFull: nothing of the file
                is kept.
        """
        with self._writer(verifier) as writer:
            for chunk in iter(lambda: source.read(_READ_BYTES), b""):
                writer.count(len(chunk))
                writer.feed([chunk])
            return writer.finish()

    async def _feed(self, writer: _PartWriter, chunks: AsyncIterator[bytes]) -> VerifiedPart:
        """Feed a body to a writer: in batches in threads, while the next one arrives.

        Chunks that are only copied are fed in the event loop, as soon as no batch is waiting.
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

    def _writer(self, verifier: Verifier | None) -> _PartWriter:
        if verifier is None:
            return _PartWriter(self._files, self._limits)
        return _SignedPartWriter(self._files, self._limits, verifier)


class _PartWriter(contextlib.AbstractContextManager["_PartWriter"]):
    """Writes one part; leaving the context with an error removes it.

    Its methods raise what `Intake.receive` raises. `feed` and `finish` can be called in any thread,
    one after the other.
    """

    def __init__(self, files: SpoolFiles, limits: Limits) -> None:
        self._limits = limits
        self._frame, self._gate = FrameReader(limits.max_part_bytes), PartGate(limits)
        self._wire_bytes = 0
        self._failed = False
        self._file = files.take()

    def __exit__(self, *exception: object) -> None:
        if exception[0] is not None:
            self._failed = True  # a thread might still be at work
            self._file.delete()

    @property
    def awaits_header(self) -> bool:
        """Whether the next bytes can show that the body is no part."""
        return self._gate.header is None

    def is_quick(self, size: int) -> bool:
        """Return whether feeding the next so many bytes takes less time than a thread's start."""
        return size <= _QUICK_BYTES and self._is_plain and self._file.is_mapped(size)

    def count(self, size: int) -> None:
        """Count bytes of the body, before they are fed."""
        self._wire_bytes += size
        limit = self._limits.max_part_bytes
        if self._wire_bytes > limit:
            raise TooLarge.of_part(f"the body has over {limit} bytes", limit)

    def feed(self, chunks: Sequence[bytes | memoryview]) -> None:
        """Take the next chunks of the body."""
        self._append(self._checked(chunks))

    def finish(self, chunks: Sequence[bytes | memoryview] = ()) -> VerifiedPart:
        """Take the last chunks of the body; return the part."""
        self.feed(chunks)
        return self._verified()

    @property
    def _is_plain(self) -> bool:
        """Whether the next bytes are of the data section, and not compressed."""
        return self._gate.header is not None and self._frame.is_plain

    def _checked(self, chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        """Check the next bytes; yield them unwrapped."""
        for chunk in chunks:
            if self._is_plain:
                self._gate.feed(chunk)
                yield chunk
                continue
            for piece in self._frame.feed(chunk):
                self._gate.feed(piece)
                yield piece

    def _append(self, pieces: Iterable[Buffer]) -> None:
        """Write pieces, some at a time."""
        some, size = list[memoryview](), 0
        for piece in pieces:
            view = memoryview(piece)
            for start in range(0, len(view), _WRITE_BYTES):
                some.append(view[start : start + _WRITE_BYTES])
                size += len(some[-1])
                if size >= _WRITE_BYTES or len(some) == _WRITE_PIECES:
                    self._file.append(some)
                    some, size = [], 0
        self._file.append(some)

    def _verified(self) -> VerifiedPart:
        """Verify what was written, and write what ranks map."""
        self._frame.finish()
        header = self._gate.finish()
        contents = verify_container(header, self._file.view())
        if contents.replaces:
            self._file.rewind()
        self._append(contents.pieces)
        stamp = self._file.seal()
        return VerifiedPart(
            self._file.path, header.manifest, contents.identity, self._wire_bytes, stamp, self._file
        )


class _SignedPartWriter(_PartWriter):
    """Writes one part as it is sent, and parses it once its signature is verified."""

    awaits_header = False

    def __init__(self, files: SpoolFiles, limits: Limits, verifier: Verifier) -> None:
        super().__init__(files, limits)
        self._files, self._verifier = files, verifier

    def feed(self, chunks: Sequence[bytes | memoryview]) -> None:
        """Take the next chunks of the body."""
        for chunk in chunks:
            self._verifier.feed(chunk)
        self._file.append(chunks)

    def finish(self, chunks: Sequence[bytes | memoryview] = ()) -> VerifiedPart:
        """Take the last chunks of the body; return the part."""
        self.feed(chunks)
        self._verifier.finish()
        if not self._file.size:
            return self._verified()
        with self._file.view() as data:
            if bytes(data[: len(ZSTD_MAGIC)]) == ZSTD_MAGIC:
                return self._unwrap(data)
            for _ in self._checked(_pieces(data)):
                pass
        return self._verified()

    def _unwrap(self, data: memoryview) -> VerifiedPart:
        """Write the part that is in a zstd frame to another file."""
        with _PartWriter(self._files, self._limits) as writer:
            for piece in _pieces(data):
                writer.feed([piece])
            verified = writer.finish()
        verified.wire_bytes = self._wire_bytes
        self._file.delete()
        self._file = writer._file
        if self._failed:
            self._file.delete()
        return verified


def _note_error(done: asyncio.Future[None]) -> None:
    """Keep asyncio from logging the error of a batch whose request has failed before."""
    if not done.cancelled():
        done.exception()


def _pieces(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), _WRITE_BYTES):
        yield data[start : start + _WRITE_BYTES]
