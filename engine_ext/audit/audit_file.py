"""The file that an engine appends its records to, each on disk before `append` returns.

The HTTP processes of an engine, and engines of one host, can share a file: a lock lets one append
at a time, and each reads what the one before has written. The file can be renamed at any time; a
new one is begun then.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine_ext.audit.record import FIRST, START, AuditRecord, decode_line, encode_line, hash_of
from engine_ext.errors import AuditUnavailable
from engine_ext.files import FileLock, sync_folder

_FLAGS: Final = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_LONGEST_WAIT_S: Final = 5.0  # for the lock
_POLL_S: Final = 0.01
_TAIL_BYTES: Final = 1 << 16  # a record is shorter
_ROOM_BYTES: Final = 1 << 16  # that must be free before a version is taken


@dataclass(frozen=True, slots=True)
class Line:
    """A line of an audit file; `record` is None if it is none."""

    number: int
    text: bytes
    record: AuditRecord | None
    is_whole: bool  # it has an end; only the last line might not


class AuditFile:
    """Appends to one file; made by the first record, readable by its owner alone.

    Args:
        path: the file's folder must exist.
        key: signs the records.
    """

    def __init__(self, path: Path, key: str | None) -> None:
        self.path, self._key = path, key

    def check(self) -> None:
        """Check that a record can be appended now.

        Raises:
            AuditUnavailable: it cannot; the file is as it was.
        """
        with self._locked() as file:
            self._last_hash(file)
            free = os.fstatvfs(file)
            if free.f_bavail * free.f_frsize < _ROOM_BYTES:
                raise self._unavailable("its file system is full")

    def append(self, records: Sequence[AuditRecord]) -> str:
        """Append records, and return the hash of the last one's line.

        Raises:
            AuditUnavailable: they are not all in the file. None is, unless the file cannot be cut.
        """
        with self._locked() as file:
            size = os.fstat(file).st_size
            previous, is_torn = self._last_hash(file)
            data = b"\n" if is_torn else b""
            for record in records:
                line = encode_line(record, previous, self._key)
                previous, data = hash_of(line), data + line + b"\n"
            try:
                _write(file, data)
                os.fsync(file)
            except OSError:
                with contextlib.suppress(OSError):  # not of a file that can only be appended to
                    os.ftruncate(file, size)
                raise
            return previous

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """Have the file open, which no other process appends to meanwhile."""
        try:
            is_new = not self.path.exists()
            descriptor, lock = self._open()
            with lock:
                try:
                    if is_new:
                        sync_folder(self.path.parent)
                    yield descriptor
                finally:
                    os.close(descriptor)
        except OSError as error:
            why = "it is a link" if error.errno == errno.ELOOP else error.strerror or str(error)
            raise self._unavailable(why) from error

    def _open(self) -> tuple[int, FileLock]:
        end = time.monotonic() + _LONGEST_WAIT_S
        while True:
            descriptor = os.open(self.path, _FLAGS | os.O_CREAT, 0o600)
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise self._unavailable("it is no regular file")
                lock = FileLock(self.path, os.O_RDONLY, "another process has locked it")
                if os.path.samestat(lock.stat(), os.fstat(descriptor)) and lock.is_in_place():
                    return descriptor, lock
                lock.close()  # it was renamed meanwhile
            except (BlockingIOError, FileNotFoundError):  # locked, or renamed since
                if time.monotonic() > end:
                    os.close(descriptor)
                    raise
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
            time.sleep(_POLL_S)

    def _last_hash(self, file: int) -> tuple[str, bool]:
        """Return the hash of the last record's line, and whether a line without an end follows."""
        size = os.fstat(file).st_size
        if not size:
            return FIRST, False
        if os.pread(file, len(START), 0) != START[:size]:
            raise self._unavailable("it has something else than audit records")
        begin = max(0, size - _TAIL_BYTES)
        lines = os.pread(file, size - begin, begin).split(b"\n")
        is_torn = lines[-1] != b""
        for line in reversed(lines):  # the last one can be whole but for its end
            if decode_line(line) is not None:
                return hash_of(line), is_torn
        if begin:
            raise self._unavailable("it ends with something else than audit records")
        return FIRST, is_torn

    def _unavailable(self, why: str) -> AuditUnavailable:
        return AuditUnavailable(
            f"no record can be written to the audit file {self.path}: {why}; no version is taken "
            "until that is possible",
            file=str(self.path),
        )


def read_lines(path: Path) -> Iterator[Line]:
    """Yield the lines of an audit file; OSError if it cannot be read."""
    with open(path, "rb") as file:
        for number, text in enumerate(file, 1):
            line = text.removesuffix(b"\n")
            is_whole = len(line) < len(text)
            yield Line(number, line, decode_line(line) if is_whole else None, is_whole)


def _write(file: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]
