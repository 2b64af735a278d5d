"""A delta log in a folder, local or shared.

::

    LOG/.weight_v000012.partial/                    being written; gets its name once all is on disk
    LOG/weight_v000012/rank0_flush000.safetensors   a part
    LOG/weight_v000012/DONE                         written last
    LOG/.weight_v000011.gone/                       being deleted
    LOG/.lock                                       locked by the writer; a killed one loses it

A file is locked, not the folder: NFS grants the lock of a folder to each host.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, Final

from engine_ext.errors import LogDamaged
from engine_ext.files import FileLock, sync_folder, write_file
from engine_ext.log.catalog import DONE, PART_SUFFIX, REFUSED, Entry, FileFacts
from engine_ext.log.store import Files

logger = logging.getLogger(__name__)

_LOCK: Final = ".lock"
_GONE: Final = (errno.ENOENT, errno.ESTALE)  # deleted meanwhile, by another host too


class FolderStore:
    """The files of a log in a folder; see `engine_ext.log.store.Store`."""

    drafts_are_hidden = True
    reads_at_once = 1

    def __init__(self, folder: Path) -> None:
        self.local = folder

    @property
    def location(self) -> str:
        """The folder's path."""
        return str(self.local)

    def list(self, folder: str | None = None) -> dict[str, Files]:
        """Return the folders; each is read when its names are asked for."""
        if folder is None:
            return {name: FolderFiles(self.local, name) for name in os.listdir(self.local)}
        found = FolderFiles(self.local, folder)
        try:
            is_folder = stat.S_ISDIR(os.stat(found.path).st_mode)
        except OSError as error:
            if error.errno not in (*_GONE, errno.ENOTDIR):
                raise
            is_folder = False
        return {folder: found} if is_folder else {}

    def read(self, name: str, most: int) -> bytes:
        """Return the content of a regular file."""
        path = self.local / name
        with _damages(f"its {path.name} cannot be read"), open_regular(path) as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise LogDamaged(f"its {path.name} has over {most} bytes")
        return data

    def fetched(self, entry: Entry, files: Files | None) -> contextlib.AbstractContextManager[None]:
        """Nothing is copied: the files are there."""
        return contextlib.nullcontext()

    def part(self, name: str, facts: FileFacts, *, reads: bool) -> Path | None:
        """Return the file itself, if it has its length."""
        path = self.local / name
        try:
            found = os.lstat(path)
        except OSError:
            return None
        return path if stat.S_ISREG(found.st_mode) and found.st_size == facts.bytes else None

    def put(self, name: str, data: bytes, *, durable: bool = False) -> None:
        """Write a small file, and rename it to its name."""
        path = self.local / name
        path.parent.mkdir(exist_ok=True)
        # Another process can write it, too, and have the same number in a container.
        draft = path.with_suffix(f".{uuid.uuid4().hex}.tmp")
        try:
            if durable:
                write_file(draft, data)
            else:
                draft.write_bytes(data)
            draft.replace(path)
        except OSError:  # a full disk keeps the empty file
            draft.unlink(missing_ok=True)
            raise
        if durable:
            sync_folder(path.parent)
            sync_folder(self.local)

    def draft(self, folder: str) -> FolderDraft:
        """Begin a version in a hidden folder."""
        return FolderDraft(self.local, folder)

    def refuse(self, folder: str) -> None:
        """Rename the mark, which needs no space, and delete the rest."""
        path = self.local / folder
        os.rename(path / DONE, path / REFUSED)
        sync_folder(path)
        for file in path.iterdir():
            if file.name != REFUSED:
                file.unlink()

    def delete(self, names: Iterable[str]) -> None:
        """Hide folders and delete them, with one sync for all; delete files."""
        names = [*names]
        folders = [name for name in names if "/" not in name]
        for name in names:
            if "/" in name:
                (self.local / name).unlink(missing_ok=True)
        hidden = [self.local / f".{name}.gone" for name in folders]
        for name, target in zip(folders, hidden, strict=True):
            shutil.rmtree(target, ignore_errors=True)
            os.rename(self.local / name, target)
        if folders:
            sync_folder(self.local)
            for target in hidden:
                with contextlib.suppress(FileNotFoundError):  # another process deletes remains
                    shutil.rmtree(target)
        if folders or not names:
            for remains in self.local.glob(".weight_v*.gone"):
                shutil.rmtree(remains, ignore_errors=True)
            for remains in self.local.glob(".weight_v*_from_v*.partial"):
                with contextlib.suppress(BlockingIOError, FileNotFoundError):
                    with _lock_of(remains) as lock:
                        if lock.is_enforced:  # else it might be being written
                            shutil.rmtree(remains, ignore_errors=True)

    def turn(self) -> FolderTurn:
        """Lock the log, whose folder is made if it is missing."""
        return FolderTurn(self.local)


class FolderFiles:
    """The files in a folder, read when they are asked for; see `engine_ext.log.store.Files`."""

    def __init__(self, log: Path, name: str) -> None:
        self._log, self._name = log, name

    @property
    def path(self) -> str:
        """The folder's path."""
        return os.path.join(self._log, self._name)

    @cached_property
    def names(self) -> frozenset[str]:
        """The names in the folder."""
        with _damages("it cannot be read"):
            return frozenset(os.listdir(self.path))

    def size(self, name: str) -> int:
        """Return a file's length."""
        return self._stat(name).st_size

    def written_at(self, name: str) -> float:
        """Return when a file was changed."""
        return self._stat(name).st_mtime

    def tag(self, name: str) -> None:
        """Nothing shows a change for certain."""

    def _stat(self, name: str) -> os.stat_result:
        with _damages(f"its {name} cannot be read"):
            return os.stat(os.path.join(self.path, name))

    def published_at(self, mark: str) -> float:
        """Return when the last file was added to the folder, or was replaced."""
        with _damages("it cannot be read"):
            return os.stat(self.path).st_mtime


class FolderDraft:
    """A version in a folder that readers ignore; see `engine_ext.log.store.StoreDraft`.

    Raises:
        BlockingIOError: another one writes this version.
    """

    def __init__(self, log: Path, name: str) -> None:
        self._final, self._partial = log / name, log / f".{name}.partial"
        self._lock = self._begin()

    def _begin(self) -> FileLock:
        """Have the empty folder for this object alone; a killed writer can have left one."""
        while True:
            self._partial.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                lock = _lock_of(self._partial)
                if lock.is_in_place():
                    break
                lock.close()
        for file in self._partial.iterdir():
            file.unlink()
        return lock

    @property
    def may_be_visible(self) -> bool:
        """Whether it has its name, and is seen."""
        return self._final.exists()

    def part_name(self, number: int, sync_id: str | None) -> str:
        """Return the name that other tools know."""
        return f"rank0_flush{number:03d}{PART_SUFFIX}"

    def add(self, name: str, data: bytes) -> None:
        """Write a file to disk."""
        write_file(self._partial / name, data)

    def publish(self, mark: str, data: bytes) -> None:
        """Give the folder its name once all of it is on disk."""
        write_file(self._partial / mark, data)
        sync_folder(self._partial)
        os.rename(self._partial, self._final)
        self._lock.close()
        sync_folder(self._final.parent)

    def settle(self, mark: str, refused: bytes) -> bool:
        """Return whether it has its name; nothing gives it one later."""
        return self.may_be_visible

    def drop(self) -> None:
        """Delete everything written so far; what is published has another name."""
        if self._lock.is_in_place():
            shutil.rmtree(self._partial, ignore_errors=True)
        self._lock.close()


class FolderTurn:
    """The lock of a log in a folder; see `engine_ext.log.store.Turn`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = self._locked()
        if not self._lock.is_enforced:
            logger.warning(
                "the file system of %s has no locks: make sure that no other sender writes there",
                folder,
            )

    def claim(self, version: int, *, refuses: bool = False) -> None:
        """Nobody else writes while the lock is held; it is taken again if the log was emptied."""
        if not self._lock.is_in_place():
            self._lock.close()
            self._lock = self._locked()

    def close(self) -> None:
        """Release the lock, so that another sender can write."""
        self._lock.close()

    def _locked(self) -> FileLock:
        self._folder.mkdir(parents=True, exist_ok=True)
        conflict = f"another sender writes into the log {self._folder}"
        lock = FileLock(self._folder / _LOCK, os.O_RDWR | os.O_CREAT, conflict)
        with contextlib.suppress(OSError):  # whoever can write into the log can lock it
            (self._folder / _LOCK).chmod(self._folder.stat().st_mode & 0o666)
        return lock


def _lock_of(partial: Path) -> FileLock:
    conflict = f"another process writes {partial}"
    return FileLock(partial, os.O_RDONLY | os.O_DIRECTORY, conflict)


def open_part(path: Path) -> BinaryIO:
    """Open a part that others are sent, unbuffered; LogDamaged if it or its folder is a link.

    Raises:
        FileNotFoundError: it is gone.
        LogDamaged: it is a link or another thing, or cannot be read.
    """
    with _damages(f"{path.parent.name}/{path.name} cannot be read"):
        flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        folder = os.open(path.parent, flags)
        try:
            return open_regular(path, folder)
        finally:
            os.close(folder)


def open_regular(path: Path, folder: int | None = None) -> BinaryIO:
    """Open a regular file of a log, unbuffered; LogDamaged if it is another thing.

    Args:
        folder: descriptor of the folder that it is in; None opens it by its path.
    """
    # A FIFO that nobody writes to must not block the reader; links are not followed.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path if folder is None else path.name, flags, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise LogDamaged(f"its {path.name} is not a regular file")
    return os.fdopen(descriptor, "rb", buffering=0)


@contextlib.contextmanager
def _damages(what: str) -> Iterator[None]:
    """Raise what one file or folder of a readable log raises as LogDamaged, unless it is gone."""
    try:
        yield
    except OSError as error:
        if error.errno in _GONE:
            raise FileNotFoundError(error.errno, error.strerror, error.filename) from error
        raise LogDamaged(f"{what}: {error.strerror}") from error
