"""Write a delta log: a version is complete and on disk, or not there at all."""

from __future__ import annotations

import os
import shutil
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
import xxhash

from engine_ext.files import FileLock, sync_folder, write_file
from engine_ext.format import SIGNATURE_SUFFIX, Manifest
from engine_ext.log.catalog import (
    DONE,
    PART_SUFFIX,
    REFUSED,
    Done,
    FileFacts,
    folder_name,
    version_of,
)
from engine_ext.log.records import read_header

_HEADER_CHUNK = 1 << 16


class LogWriter(AbstractContextManager["LogWriter"]):
    """The only writer of a log, until it is closed; a context manager. Creates the folder.

    Raises:
        BlockingIOError: another sender writes to the log.
        OSError: the folder cannot be created or read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        conflict = f"another sender writes into the log {folder}"
        self._lock = FileLock(folder, os.O_RDONLY | os.O_DIRECTORY, conflict)

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock, so that another sender can write."""
        self._lock.close()

    @property
    def last_number(self) -> int:
        """The highest version number in use, refused ones included; -1 in an empty log."""
        used = (version_of(path.name) for path in self.folder.iterdir())
        return max((version for version in used if version is not None), default=-1)

    def begin(self, version: int) -> FolderDraft:
        """Begin to write a version; FileExistsError if its number is in use, see `FolderDraft`."""
        return FolderDraft(self.folder, folder_name(version))

    def refuse(self, version: int) -> None:
        """Mark a version that no engine took: its parts are deleted, its number stays in use."""
        folder = self.folder / folder_name(version)
        os.rename(folder / DONE, folder / REFUSED)
        sync_folder(folder)
        for path in folder.iterdir():
            if path.name != REFUSED:
                path.unlink()


class FolderDraft:
    """A version that is being written, in a folder that readers ignore; later named `name`.

    Raises:
        FileExistsError: there is such a folder.
        OSError: the folder cannot be created.
    """

    def __init__(self, log: Path, name: str) -> None:
        self._final = log / name
        if self._final.exists():
            raise FileExistsError(f"{self._final} exists")
        self._partial = log / f".{name}.partial"
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)
        self._files: dict[str, FileFacts] = {}
        self._manifest: Manifest | None = None

    def add(self, part: bytes, signature: str | None = None) -> None:
        """Write the next part, as it is sent, and its signature if readers require one.

        Raises:
            MalformedPart: `part` has no readable manifest.
            OSError: it cannot be written.
        """
        self._manifest = self._manifest or manifest_of(part)
        name = f"rank0_flush{len(self._files):03d}{PART_SUFFIX}"
        write_file(self._partial / name, part)
        if signature is not None:
            write_file(self._partial / (name + SIGNATURE_SUFFIX), signature.encode())
        self._files[name] = FileFacts(len(part), xxhash.xxh3_128_hexdigest(part))

    def finish(self) -> Path:
        """Publish the version once all of it is on disk, and return its folder."""
        assert self._manifest is not None
        write_file(self._partial / DONE, done_of(self._manifest, self._files))
        sync_folder(self._partial)
        os.rename(self._partial, self._final)
        sync_folder(self._final.parent)
        return self._final

    @property
    def may_be_visible(self) -> bool:
        """Whether it has its name, and is seen."""
        return self._final.exists()

    def drop(self) -> None:
        """Delete everything written so far; what is finished stays."""
        shutil.rmtree(self._partial, ignore_errors=True)


def done_of(manifest: Manifest, files: dict[str, FileFacts]) -> bytes:
    """Return the content of ``DONE``, given the manifest of a part and the facts of all."""
    version, base = manifest.current_version, manifest.base_version
    assert version is not None
    if manifest.full:
        base = None
    elif base is None:
        base = version - 1  # the receiver's default
    done = Done(version=version, base_version=base, files=files)
    text = msgspec.json.encode(done)
    return msgspec.json.format(text) + b"\n"


def manifest_of(part: bytes) -> Manifest:
    """Return the manifest of a part as it is sent; MalformedPart if it has no valid one."""
    starts = range(0, len(part), _HEADER_CHUNK)
    return read_header(part[start : start + _HEADER_CHUNK] for start in starts).manifest
