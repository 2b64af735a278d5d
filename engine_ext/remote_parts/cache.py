"""A folder of parts by content hash, shared by all engines of a host and bounded in bytes.

::

    CACHE/3f…a0.part            a part, as another host's spool or an object store has it
    CACHE/3f…a0.part.verified   names the delivery for which it was verified last
    CACHE/3f…a0.fetch           locked by the rank that fetches it, or removes it
    CACHE/3f…a0-ask.fetch       locked by the process that asks other engines for it

A part gets its name once it is whole and verified. The first rank of a host that finds it in
another delivery verifies it again: the folder might have been damaged meanwhile.
A rank maps the file within `_GRACE_S` and keeps it locked while it does, so no other rank removes
it meanwhile. The folder can outlive the engine, and several engines can share it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

from engine_ext.errors import ChecksumMismatch, SpoolFull
from engine_ext.files import FileLock, hash_of_rest, is_full

logger = logging.getLogger(__name__)

_PART: Final = ".part"
_VERIFIED: Final = ".verified"
_LOCK: Final = ".fetch"
_ASKING: Final = "-ask"
_UNFINISHED: Final = ".fetching"
_GRACE_S: Final = 60.0  # from when a rank was given a file until it has mapped it
_AGAIN_S: Final = 0.5

Fetch = Callable[[BinaryIO], None]


class PartCache:
    """The cache of one host; every rank has an object of its own for the same folder.

    Args:
        folder: made if it is missing; None is one in the temporary folder.
        limit: bytes that its files can take.

    Raises:
        PermissionError: the folder is another user's, or others can write into it.
        OSError: it cannot be made.
    """

    def __init__(self, folder: str | None, limit: int) -> None:
        default = Path(tempfile.gettempdir()) / f"delta-updates-cache-{os.geteuid()}"
        self.folder = default if folder is None else Path(folder)
        self._limit = limit
        self.prepare()

    def prepare(self) -> None:
        """Make the folder if it is missing, also when something has removed it since.

        Raises:
            PermissionError: the folder is another user's, or others can write into it.
            OSError: it cannot be made.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = os.lstat(self.folder)
        mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
        if not mine or found.st_mode & 0o022:
            raise PermissionError(
                f"{self.folder} is not a folder that only this user can write into; "
                "name another one with --delta-tuning cache-dir=DIR"
            )

    def get(self, content: str, size: int, fetch: Fetch, delivery: str | None = None) -> Path:
        """Return the file of a part, to be mapped at once; it is fetched if it is not there.

        One rank of the host fetches, and the others wait for it.

        Args:
            content: xxh3_128 of the part, in hex.
            size: its length in bytes.
            fetch: writes the part into an empty file.
            delivery: equal for the ranks of a host that get the part at once; one of them verifies
                it. None verifies it in any case.

        Raises:
            ChecksumMismatch: `fetch` has written something else.
            SpoolFull: there is no room.
            DeltaError: what `fetch` raises.
            OSError: the folder cannot be written.
        """
        path = self.folder / (content + _PART)
        self.prepare()
        with _locked(path.with_suffix(_LOCK)):
            with contextlib.suppress(FileNotFoundError):
                if _was_verified(path, delivery) or _is_whole(path, content, size):
                    _mark_read(path)
                    _mark_verified(path, delivery)
                    return path
                logger.warning("delta updates: %s was damaged, and is fetched again", path)
                _remove(path)
            self._make_room(size)
            self._fetch(path.with_suffix(_UNFINISHED), content, size, fetch)
            _mark_verified(path, delivery)
        return path

    @contextlib.contextmanager
    def asking(self, content: str) -> Iterator[None]:
        """Let one process of the host ask other engines for a part; others wait.

        It is another lock than that of `get`: an engine that is asked fetches with that one.

        Raises:
            OSError: the folder cannot be written.
        """
        self.prepare()
        with _locked(self.folder / (content + _ASKING + _LOCK)):
            yield

    def holds(self, content: str, size: int) -> bool:
        """Return whether a part is there, and whole; if so, it stays for a while."""
        path = self.folder / (content + _PART)
        with contextlib.suppress(FileNotFoundError):
            if _is_whole(path, content, size):
                _mark_read(path)
                return True
        return False

    def add(self, content: str, size: int, fetch: Fetch) -> None:
        """Fetch a part, whether or not it is there; call it while `asking`.

        Raises:
            ChecksumMismatch: `fetch` has written something else.
            SpoolFull: there is no room.
            DeltaError: what `fetch` raises.
            OSError: the folder cannot be written.
        """
        self._make_room(size)
        self._fetch(self.folder / (content + _ASKING + _UNFINISHED), content, size, fetch)

    def _fetch(self, unfinished: Path, content: str, size: int, fetch: Fetch) -> Path:
        """Fetch a part to a file, and give it its name once it is verified."""
        path = self.folder / (content + _PART)
        try:
            unfinished.unlink(missing_ok=True)  # of a process that died
            with open(unfinished, "w+b", opener=_private) as file:
                fetch(file)
            if not _is_whole(unfinished, content, size):
                raise ChecksumMismatch("a part changed on its way here")
            _mark_read(unfinished)
            unfinished.replace(path)
        except OSError as error:
            raise self._full() if is_full(error) else error from error
        finally:
            unfinished.unlink(missing_ok=True)
        return path

    def _make_room(self, size: int) -> None:
        """Remove the parts that were not read for the longest time until one more fits.

        It waits for the ranks to map what they were given: then that is unused, too.
        """
        if size > self._limit:
            raise self._full()
        end = time.monotonic() + _GRACE_S + 2 * _AGAIN_S
        while not self._has_room(size):
            if time.monotonic() > end:
                raise self._full()
            time.sleep(_AGAIN_S)

    def _has_room(self, size: int) -> bool:
        """Return whether a part fits, once unused ones are removed."""
        _remove_unfinished(self.folder)
        used = {path: _bytes_of(path) for path in self.folder.glob("*" + _PART)}
        left = self._limit - size - sum(used.values())
        for path in sorted(used, key=_read_at):
            if left < 0 and _remove_unused(path):
                left += used[path]
        return left >= 0

    def _full(self) -> SpoolFull:
        return SpoolFull(
            f"{self.folder} has no room for a part; raise --delta-tuning cache-bytes=BYTES, or "
            "name a folder with more room with --delta-tuning cache-dir=DIR"
        )


@contextlib.contextmanager
def _locked(path: Path, conflict: str | None = None) -> Iterator[FileLock]:
    """Hold the lock of a file, which is made; `conflict` is that of `FileLock`."""
    while True:
        with FileLock(path, os.O_RDWR | os.O_CREAT, conflict) as lock:
            if not lock.is_in_place():
                continue  # the rank that had it has removed it
            try:
                yield lock
            finally:
                path.unlink(missing_ok=True)
            return


def _is_whole(path: Path, content: str, size: int) -> bool:
    """Return whether a file has these bytes; FileNotFoundError if there is none."""
    if path.stat().st_size != size:
        return False
    with open(path, "rb", buffering=0) as file:
        return hash_of_rest(file) == content


def _was_verified(path: Path, delivery: str | None) -> bool:
    """Return whether a rank of this host has verified a part since its delivery began."""
    with contextlib.suppress(OSError):
        return path.exists() and _verified(path).read_text() == delivery
    return False


def _mark_verified(path: Path, delivery: str | None) -> None:
    """Spare the host's other ranks the verification; without room they verify the part, too."""
    if delivery is not None:
        with contextlib.suppress(OSError):
            _verified(path).write_text(delivery)


def _verified(path: Path) -> Path:
    return path.with_name(path.name + _VERIFIED)


def _remove_unused(path: Path) -> bool:
    """Remove a part unless a rank maps it, or will; return whether it is gone."""
    with contextlib.suppress(OSError):
        # Locked only if it is old, and no rank is given it then: a rank that finds it locked takes
        # it for removed.
        if _is_old(path):
            with _locked(path.with_suffix(_LOCK), "it is asked for"), open(path, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_old(path):
                    _remove(path)
    return not path.exists()


def _is_old(path: Path) -> bool:
    """Return whether a rank that was given a part has mapped it, if it ever will."""
    return time.time() - _read_at(path) > _GRACE_S


def _remove_unfinished(folder: Path) -> None:
    """Remove the unfinished files of ranks that died."""
    for unfinished in folder.glob("*" + _UNFINISHED):
        with contextlib.suppress(OSError):  # BlockingIOError
            with _locked(unfinished.with_suffix(_LOCK), "it is being fetched") as lock:
                if lock.is_enforced:
                    unfinished.unlink(missing_ok=True)


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    _verified(path).unlink(missing_ok=True)


def _mark_read(path: Path) -> None:
    """Set the time of the last access, which some file systems do not."""
    os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


def _read_at(path: Path) -> float:
    try:
        return path.stat().st_atime
    except FileNotFoundError:  # removed meanwhile
        return 0.0


def _bytes_of(path: Path) -> int:
    """Return the bytes of a part and of its mark."""
    total = 0
    for one in path.parent.glob(path.name + "*"):
        with contextlib.suppress(FileNotFoundError):
            total += one.stat().st_size
    return total


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_EXCL, 0o600)
