"""The spool's files. In shared memory, large ones are written again once their parts are removed.

Fresh pages of shared memory cost more than the bytes that are written into them, and freeing them
costs, too. Ranks hold a shared lock on a part's file while they map it, see
`engine_ext.sync.background_staging`; a file is written again only if it can be locked exclusively,
and in a file system without locks never.

Engines map shared memory sparsely, and get SIGBUS if there is none left when they first touch a
page. So parts leave some of it free.

A file's name is used for one part only, so that the path of a removed part leads nowhere. Files
without a part keep their memory, so there are few of them, and not for long.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine_ext.errors import SpoolFull
from engine_ext.files import is_full
from engine_ext.ranks.operations import FileStamp

if TYPE_CHECKING:
    from typing_extensions import Buffer

SUFFIX = ".safetensors"
UNUSED_SUFFIX = ".unused"

_THREADS = 4
_LARGE = 1 << 20  # bytes from which a file is worth keeping, and a thread to free it
_MOST_FILES = 16
_MOST_BYTES = 1 << 30
_UNMAPPED_SHARE = 8  # of a file, one part in so many can be written without a mapping
_KEPT_BYTES = 1 << 30  # of shared memory, that parts leave free; less of a small one
_KEPT_SHARE = 8  # then one part in so many
_ROOM_SHARE = 4  # of the file system's free room, unused files take one in so many at most
_UNUSED_FOR_S = 30.0
_MOUNTS = Path("/proc/self/mountinfo")


@dataclass(slots=True)
class _Unused:
    """A file without a part."""

    path: Path
    descriptor: int
    size: int = 0
    mapping: mmap.mmap | None = None  # of its first bytes; made once, as are their page tables

    def lock(self) -> bool:
        """Lock the file, so that no rank can map it; returns False if one does."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def rename(self, path: Path) -> bool:
        """Give it another name; returns whether there was such a file."""
        with contextlib.suppress(OSError):
            os.rename(self.path, path)
            self.path = path
        return self.path == path

    def close(self) -> None:
        """Free the file's memory, unless a rank maps it."""
        self.unmap()
        os.close(self.descriptor)

    def unmap(self) -> None:
        """Forget the mapping; it is gone once no view of it is left."""
        if self.mapping is not None:
            with contextlib.suppress(BufferError):
                self.mapping.close()
            self.mapping = None


class SpoolFile:
    """A file of the spool while it has a part. It is locked until it is sealed."""

    def __init__(self, files: SpoolFiles, file: _Unused) -> None:
        self.path = file.path
        self.size = 0  # bytes written
        self._files = files
        self._file: _Unused | None = file  # None once it was given up or has another part
        self._room = file.size  # bytes that it has from its last part
        self._has_room = file.size  # bytes that it has, or that were free
        mapping = file.mapping
        self._mapped = 0 if mapping is None else min(len(mapping), file.size)
        self._writing = threading.Lock()

    def is_mapped(self, size: int) -> bool:
        """Return whether the next so many bytes need only be copied."""
        return self.size + size <= self._mapped

    def append(self, pieces: Sequence[Buffer]) -> None:
        """Write some pieces behind what was written; does nothing once the file was given up.

        Raises:
            SpoolFull: the file system is full, even without unused files; of shared memory, some
                stays free.
            OSError: it has failed.
        """
        views = [view for piece in pieces if (view := memoryview(piece))]
        with self._writing:
            while views and (file := self._file) is not None:
                if file.mapping is not None and self.is_mapped(len(views[0])):
                    end = self.size + len(views[0])
                    file.mapping[self.size : end] = views.pop(0)
                    self.size = end
                    continue
                if (end := self.size + sum(map(len, views))) > self._has_room:
                    room = self._files.require_room(end - self.size)
                    # The next small pieces ask again after that.
                    self._has_room = min(self.size + room, end + _LARGE)
                try:
                    written = os.pwritev(file.descriptor, views, self.size)
                except OSError as error:
                    if is_full(error) and self._files.delete_unused():
                        continue
                    raise spool_error(error, self.path.parent) from error
                self.size += written
                while views and written >= len(views[0]):
                    written -= len(views.pop(0))
                if written:
                    views[0] = views[0][written:]

    def rewind(self) -> None:
        """Let the next pieces be written over the first ones."""
        with self._writing:
            self._room = max(self._room, self.size)
            self.size = 0

    def seal(self) -> FileStamp:
        """End the file behind what was written, and let ranks map it; return its stamp."""
        with self._writing:
            if (file := self._file) is None:
                raise OSError(errno.EBADF, "the file was given up")
            if self._room > self.size:
                os.ftruncate(file.descriptor, self.size)
            if self._files.in_memory and self.size >= _LARGE:
                # The few bytes that are written after the mapped ones need no other mapping.
                _map(file, self.size, unmapped=self.size // _UNMAPPED_SHARE)
            stamp = FileStamp.of(os.fstat(file.descriptor))
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file.descriptor, fcntl.LOCK_UN)
            return stamp

    def view(self) -> memoryview:
        """Return what was written, to read it before the file is sealed."""
        with self._writing:
            if (file := self._file) is None:
                raise OSError(errno.EBADF, "the file was given up")
            if self._files.in_memory and self.size >= _LARGE:
                _map(file, self.size)
            if file.mapping is not None and len(file.mapping) >= self.size:
                return memoryview(file.mapping)[: self.size]
            # Nothing writes into it, but torch makes no tensor of read-only memory.
            return memoryview(mmap.mmap(file.descriptor, self.size, access=mmap.ACCESS_COPY))

    def release(self) -> None:
        """Remove the part, and perhaps keep the file for another; again, this does nothing."""
        file, self._file = self._file, None
        if file is not None:
            file.size = self.size
            self._files.release(file)

    def delete(self) -> None:
        """Delete the incomplete file; a second call does nothing."""
        if self._file is not None:
            self.path.unlink(missing_ok=True)
            self._files.run(self._close, max(self.size, self._room))

    def _close(self) -> None:
        with self._writing:  # a thread might be
            if self._file is not None:
                self._file.close()
                self._file = None


class SpoolFiles:
    """The files in the folder of one spool; `make_again` makes the folder if it is gone."""

    def __init__(self, folder: Path, make_again: Callable[[], None]) -> None:
        self._folder, self._make_again = folder, make_again
        self.in_memory = _is_in_memory(folder)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._unused: list[_Unused] = []
        self._released_at = 0.0
        self._timer: tuple[asyncio.AbstractEventLoop, asyncio.TimerHandle] | None = None
        self._closed = False
        self.threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="delta-spool")

    def take(self) -> SpoolFile:
        """Return an empty, locked file.

        Raises:
            SpoolFull: the file system has no room for another file.
            OSError: it has failed.
        """
        path = self._new_path(SUFFIX)
        while True:
            with self._lock:
                unused = self._unused.pop() if self._unused else None
            if unused is None:
                break
            if unused.lock() and unused.rename(path):
                return SpoolFile(self, unused)
            self._delete(unused)  # a rank maps it still: its memory is freed when none does
        try:
            try:
                made = _Unused(path, _created(path))
            except FileNotFoundError:
                self._make_again()
                made = _Unused(path, _created(path))
        except OSError as error:
            raise spool_error(error, path.parent) from error
        made.lock()
        return SpoolFile(self, made)

    def scratch(self, prefix: str, size: int) -> tempfile.TemporaryDirectory[str]:
        """Make a folder for what is no part yet; the next start removes it if this one dies.

        Raises:
            SpoolFull: there is no room for so many bytes.
        """
        try:
            self.require_room(size)
            return self._scratch(prefix)
        except FileNotFoundError:
            self._make_again()
            return self._scratch(prefix)

    def _scratch(self, prefix: str) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(
            prefix=prefix, dir=self._folder, ignore_cleanup_errors=True
        )

    def require_room(self, size: int) -> int:
        """Return the bytes that there is room for in shared memory, so many at least.

        A disk shows that it has none when it is full.

        Raises:
            SpoolFull: it has less, even without unused files.
        """
        if not self.in_memory:
            return sys.maxsize
        while (room := room_in_memory(self._folder)) < size:
            if not self.delete_unused():
                raise _full(self._folder)
        return room

    def release(self, file: _Unused) -> None:
        """Keep a file for another part if that is worth it; else delete it."""
        with self._lock:
            keep = self._is_worth_keeping(file) and file.rename(self._new_path(UNUSED_SUFFIX))
            if keep:
                self._unused.append(file)
                self._released_at = time.monotonic()
        if keep:
            self._delete_later(asyncio.get_running_loop())
        else:
            self._delete(file)

    def delete_unused(self) -> bool:
        """Delete the files without a part; returns whether there were any."""
        with self._lock:
            unused, self._unused = self._unused, []
        for file in unused:
            file.path.unlink(missing_ok=True)
            file.close()
        return bool(unused)

    def run(self, work: Callable[[], object], size: int) -> None:
        """Run what takes long for a file of this many bytes, in a thread if it does."""
        if size >= _LARGE:
            with contextlib.suppress(RuntimeError):  # closed
                self.threads.submit(work)
                return
        work()

    def close(self) -> None:
        """Delete the unused files; keep none from now on."""
        self._closed = True
        self.delete_unused()
        self.threads.shutdown(wait=False)

    def _new_path(self, suffix: str) -> Path:
        return self._folder / f"{next(self._numbers)}{suffix}"

    def _is_worth_keeping(self, file: _Unused) -> bool:
        if self._closed or not self.in_memory or file.size < _LARGE or _running_loop() is None:
            return False
        total = file.size + sum(one.size for one in self._unused)
        with contextlib.suppress(OSError):
            room = shutil.disk_usage(self._folder).free
            few = len(self._unused) < _MOST_FILES
            return few and total <= min(_MOST_BYTES, room // _ROOM_SHARE)
        return False

    def _delete(self, file: _Unused) -> None:
        file.path.unlink(missing_ok=True)
        self.run(file.close, file.size)

    def _delete_later(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is None or self._timer[0] is not loop:
            left = self._released_at + _UNUSED_FOR_S - time.monotonic()
            self._timer = loop, loop.call_later(max(left, 0.0), self._expire, loop)

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if time.monotonic() - self._released_at < _UNUSED_FOR_S:
            self._delete_later(loop)
        else:
            self.run(self.delete_unused, _LARGE)


def _created(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def _map(file: _Unused, size: int, unmapped: int = 0) -> None:
    """Map a file's first bytes to write them again; the kernel fills the page tables at once.

    Args:
        unmapped: bytes of them that can stay so.
    """
    if file.mapping is not None:
        if len(file.mapping) >= size - unmapped:
            return
        file.unmap()
    with contextlib.suppress(OSError, ValueError):  # they can be written without
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        file.mapping = mmap.mmap(file.descriptor, size, flags)


def room_in_memory(folder: Path) -> int:
    """Return the bytes of a folder's shared memory that parts can take."""
    found = shutil.disk_usage(folder)
    if not found.total:  # it has no limit
        return sys.maxsize
    return found.free - min(_KEPT_BYTES, found.total // _KEPT_SHARE)


def spool_error(error: OSError, folder: Path) -> Exception:
    """Return what to raise for an error of the file system that the spool's folder is on."""
    return _full(folder) if is_full(error) else error


def _full(folder: Path) -> SpoolFull:
    return SpoolFull(
        f"the spool folder {folder} is full; set --delta-tuning spool-dir=DIR to one with more "
        "room, or let the sender send smaller parts (bucket_bytes=, delta-send --bucket-bytes)"
    )


def _running_loop() -> asyncio.AbstractEventLoop | None:
    with contextlib.suppress(RuntimeError):
        return asyncio.get_running_loop()
    return None


def _is_in_memory(folder: Path) -> bool:
    """Return whether a folder is in shared memory: on a disk, unused files would be written."""
    with contextlib.suppress(OSError):
        device = os.stat(folder).st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        for line in _MOUNTS.read_text().splitlines():
            mount, _, source = line.partition(" - ")
            if mount.split()[2] == number:
                return source.split()[0] == "tmpfs"
    return False
