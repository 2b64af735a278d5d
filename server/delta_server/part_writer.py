"""Write a body to the spool and check it meanwhile; only plain and whole containers stay there."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from delta_server.spool_files import SpoolFile, SpoolFiles
from engine_ext.errors import TooLarge
from engine_ext.files import remove_beside
from engine_ext.format import (
    ZSTD_MAGIC,
    FrameReader,
    Header,
    IdentityHash,
    Limits,
    PartGate,
    Verifier,
)

_WRITE_BYTES = 1 << 20
_WRITE_PIECES = 256  # the kernel takes at most 1024
_QUICK_BYTES = 512 << 10  # to copy and hash


@dataclass(slots=True)
class Spooled:
    """A part that has arrived completely."""

    path: Path  # the plain container
    header: Header
    identity: str  # see `engine_ext.format.identity`
    wire_bytes: int  # size of the body as it was sent, compressed or not
    _file: SpoolFile

    def remove(self) -> None:
        """Remove the part and what lies beside it; ranks that use them keep their mappings."""
        self._file.release()
        remove_beside(self.path)


class PartWriter(contextlib.AbstractContextManager["PartWriter"]):
    """Writes one part; leaving the context removes it unless it was finished and kept.

    Its methods raise what `delta_server.spool.Spool.receive` raises. `feed` and `finish` may be
    called in any thread, one after the other.
    """

    def __init__(self, files: SpoolFiles, limits: Limits) -> None:
        self._limits, self._checks = limits, _Checks(limits)
        self._wire_bytes = 0
        self._kept = False
        self._file = files.take()

    def __exit__(self, *exception: object) -> None:
        if not self._kept:
            self._file.delete()

    @property
    def awaits_header(self) -> bool:
        """Whether the next bytes may show that the body is no part."""
        return self._checks.identity is None

    def is_quick(self, size: int) -> bool:
        """Return whether feeding the next so many bytes takes less time than a thread's start."""
        return size <= _QUICK_BYTES and self._checks.is_plain and self._file.is_mapped(size)

    def count(self, size: int) -> None:
        """Count bytes of the body, before they are fed."""
        self._wire_bytes += size
        limit = self._limits.max_part_bytes
        if self._wire_bytes > limit:
            raise TooLarge(f"the body is over the limit of {limit} bytes", limit=limit)

    def feed(self, chunks: Sequence[bytes]) -> None:
        """Take the next chunks of the body."""
        pieces, size = list[bytes](), 0
        for chunk in chunks:
            for piece in self._checks.feed(chunk):
                pieces.append(piece)
                size += len(piece)
                if size >= _WRITE_BYTES or len(pieces) == _WRITE_PIECES:
                    self._file.append(pieces)
                    pieces, size = [], 0
        self._file.append(pieces)

    def finish(self, chunks: Sequence[bytes] = ()) -> Spooled:
        """Take the last chunks of the body; return the part, which is to be kept then."""
        self.feed(chunks)
        return self._spooled()

    def keep(self) -> None:
        """Let the part stay until it is removed."""
        self._kept = True

    def _spooled(self) -> Spooled:
        header, identity = self._checks.finish()
        self._file.seal()
        return Spooled(self._file.path, header, identity, self._wire_bytes, self._file)


class SignedPartWriter(PartWriter):
    """Writes one part as it is sent, and parses it once its signature is verified."""

    awaits_header = False

    def __init__(self, files: SpoolFiles, limits: Limits, verifier: Verifier) -> None:
        super().__init__(files, limits)
        self._files, self._verifier = files, verifier

    def feed(self, chunks: Sequence[bytes]) -> None:
        """Take the next chunks of the body."""
        for chunk in chunks:
            self._verifier.feed(chunk)
        self._file.append(chunks)

    def finish(self, chunks: Sequence[bytes] = ()) -> Spooled:
        """Take the last chunks of the body; return the part, which is to be kept then."""
        self.feed(chunks)
        self._verifier.finish()
        if not self._file.size:
            return self._spooled()
        with self._file.map() as data:
            if data[: len(ZSTD_MAGIC)] == ZSTD_MAGIC:
                return self._unwrap(data)
            for piece in _pieces(data):
                for _ in self._checks.feed(piece):
                    pass
        return self._spooled()

    def _unwrap(self, data: mmap.mmap) -> Spooled:
        """Write the part that is in a zstd frame to another file."""
        with PartWriter(self._files, self._limits) as writer:
            for piece in _pieces(data):
                writer.feed([piece])
            spooled = writer.finish()
            spooled.wire_bytes = self._wire_bytes
            self._file.delete()
            self._file = writer._file
            writer.keep()
        return spooled


class _Checks:
    """Unwraps, checks and hashes a body while it arrives; sans-I/O."""

    def __init__(self, limits: Limits) -> None:
        self.identity: IdentityHash | None = None  # None before the header is complete
        self._frame, self._gate = FrameReader(limits.max_part_bytes), PartGate(limits)

    @property
    def is_plain(self) -> bool:
        """Whether the next bytes are of the data section, and not compressed."""
        return self.identity is not None and self._frame.is_plain

    def feed(self, chunk: bytes) -> Iterable[bytes]:
        """Take the next bytes; return them unwrapped. All of them must be used before the next."""
        if self.identity is None or not self._frame.is_plain:
            return self._unwrap(chunk)
        self._gate.feed(chunk)
        self.identity.feed(chunk)
        return (chunk,)

    def _unwrap(self, chunk: bytes) -> Iterator[bytes]:
        for piece in self._frame.feed(chunk):
            data = self._gate.feed(piece)
            if self.identity is None and self._gate.header is not None:
                self.identity = IdentityHash(self._gate.header)
            if self.identity is not None:
                self.identity.feed(data)
            yield piece

    def finish(self) -> tuple[Header, str]:
        """Return the header and the identity of the whole part."""
        self._frame.finish()
        header = self._gate.finish()
        assert self.identity is not None
        return header, self.identity.finish()


def _pieces(data: mmap.mmap) -> Iterator[bytes]:
    for start in range(0, len(data), _WRITE_BYTES):
        yield data[start : start + _WRITE_BYTES]
