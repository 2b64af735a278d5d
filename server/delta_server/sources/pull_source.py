"""Where a trainer publishes the versions that are pulled: a folder, or a prefix in a store."""

from __future__ import annotations

import os
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from delta_server.request_options import DiskRequest
from delta_server.sources.disk_files import list_names, marks
from delta_server.sources.published import folder_of, holds_nothing
from delta_server.sources.store_files import ResolvedFiles, StoreFiles
from engine_ext.errors import MalformedPart, PathForbidden
from engine_ext.store_urls import is_store_url


class PullSource:
    """The versions below one location.

    Args:
        location: as a request names it, or `PullSource.location`.
        folders: real paths of the allowed folders.

    Attributes:
        location: with symlinks resolved, if it is a folder; without a trailing slash.

    Raises:
        PathForbidden: no folder is allowed, or it is a URL that is not.
        MalformedPart, PartUnavailable: it is no path; see `StoreFiles.allowed`.
    """

    def __init__(self, location: str, folders: tuple[str, ...], files: StoreFiles) -> None:
        self._in_store = is_store_url(location)
        if not self._in_store and not folders:
            raise PathForbidden("pulls are refused: the engine has no --delta-root")
        if "\0" in location:
            raise MalformedPart("a path contains a NUL character")
        self.location = files.allowed(location) if self._in_store else os.path.realpath(location)
        self._folders, self._files = folders, files

    def following(self, current: int, target: int) -> list[int]:
        """Return the versions after `current` up to `target`, of those that hold something.

        Raises:
            PathForbidden, MalformedPart: one cannot be listed.
            PartUnavailable, SpoolFull: see `StoreFiles.resolved`.
        """
        if self._in_store:
            return self._following_in_store(current, target)
        found = []
        for version in range(current + 1, target + 1):
            folder = Path(os.path.realpath(folder_of(Path(self.location), version)))
            list_names(folder, self._folders)
            if not holds_nothing(folder, self._folders):
                found.append(version)
        return found

    def _following_in_store(self, current: int, target: int) -> list[int]:
        found = []
        with self._files.scratch() as scratch:
            for version in range(current + 1, target + 1):
                folder = folder_of(scratch.path, version)
                if not self._files.bring_index(f"{self.location}/{folder.name}", folder):
                    message = f"cannot read {folder.name}: there is nothing below its URL"
                    raise MalformedPart(message, file=folder.name)
                if not holds_nothing(folder, [str(scratch.path)]):
                    found.append(version)
        return found

    def marks(self, version: int) -> dict[str, str]:
        """Return a mark per file of a version, which changes when the file is written.

        Raises:
            PathForbidden, MalformedPart, PartUnavailable: see `following`.
        """
        name = folder_of(Path(), version).name
        if self._in_store:
            return self._files.marks(f"{self.location}/{name}")
        return marks(Path(os.path.realpath(Path(self.location) / name)), self._folders)

    def resolved(self, version: int) -> AbstractAsyncContextManager[ResolvedFiles]:
        """Have the files of a version; see `StoreFiles.resolved`."""
        name = folder_of(Path(), version).name
        return self._files.resolved(DiskRequest(model_path=f"{self.location}/{name}"))
