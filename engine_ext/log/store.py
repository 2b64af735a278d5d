"""The port of a delta log: the files from which `DeltaLog` makes versions.

`FolderStore` keeps them in a folder, `ObjectStore` in an object store. Both list, get (`read`,
`fetched`), put (`put`, `draft`, `refuse`), delete, and let one writer at a time have the turn. A
name is ``FOLDER/FILE``; the folder is a version's, or that of heartbeats or marks.

Each implementation guarantees:

- `StoreDraft.publish` publishes a version at once and once. Before, readers see no entry.
- A published version is refused, or deleted, at once: readers see the whole version or none.
- At most one of two writers publishes a version, and the other one gets BlockingIOError.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from engine_ext.log.catalog import Entry, FileFacts


class Files(Protocol):
    """The files in one folder of a log.

    Every method raises FileNotFoundError if they were deleted meanwhile, and LogDamaged if they
    cannot be read.
    """

    @property
    def names(self) -> Collection[str]:
        """The names of the files."""

    def size(self, name: str) -> int:
        """Return a file's length in bytes."""

    def written_at(self, name: str) -> float:
        """Return the Unix time at which a file was written, by the store's clock."""

    def tag(self, name: str) -> str | None:
        """Return what changes with a file's content; None if only reading shows that."""

    def published_at(self, mark: str) -> float:
        """Return the Unix time at which the version with this mark was published."""


class StoreDraft(Protocol):
    """The files of a version that is not published."""

    @property
    def may_be_visible(self) -> bool:
        """Whether readers might see it: it is published, or that was tried without an answer."""

    def part_name(self, number: int, sync_id: str | None) -> str:
        """Return the name for part `number` of a sync."""

    def add(self, name: str, data: bytes) -> None:
        """Write a file; OSError if that fails."""

    def publish(self, mark: str, data: bytes) -> None:
        """Write the file that makes the version visible, after all others are stored.

        Raises:
            BlockingIOError: another sender has published or refused the version.
            OSError: it cannot be written; see `may_be_visible`.
        """

    def settle(self, mark: str, refused: bytes) -> bool:
        """Find out, after `publish` has failed, whether the version is published.

        Args:
            mark: as `publish` was given it.
            refused: its content for a version that is refused. It is written where the version
                could be published later otherwise.

        Returns:
            Whether readers see the version; if not, they never will.

        Raises:
            OSError: that is still not known.
        """

    def drop(self) -> None:
        """Delete everything written so far, unless readers might see it."""


class Turn(Protocol):
    """The turn to write, until it is closed or another writer has taken it."""

    def claim(self, version: int, *, refuses: bool = False) -> None:
        """Announce the version that is written next, or refused.

        Raises:
            BlockingIOError: another writer has the turn. Nothing is written.
            OSError: the store cannot be written.
        """

    def close(self) -> None:
        """Let another writer have it; calling this again does nothing."""


class Store(Protocol):
    """The files of one log. Thread-safe.

    Attributes:
        drafts_are_hidden: whether only published versions are listed, but for those of other
            trainers. If not, a version without a mark is being written; if so, it is damaged once
            another one is as new.
        reads_at_once: small files that are worth reading at the same time.
    """

    drafts_are_hidden: bool
    reads_at_once: int

    @property
    def location(self) -> str:
        """The folder's path, or the URL."""

    @property
    def local(self) -> Path:
        """The folder of this host that has a version's files while they are `fetched`.

        Raises:
            OSError: it cannot be made.
        """

    def list(self, folder: str | None = None) -> Mapping[str, Files]:
        """Return all folders, or the one of this name if it is there, by their names.

        Raises:
            OSError: the store cannot be read.
        """

    def read(self, name: str, most: int) -> bytes:
        """Return the content of a small file.

        Raises:
            FileNotFoundError: it is gone.
            LogDamaged: it is no file, has over `most` bytes, or cannot be read in a store that can.
            OSError: the store cannot be read.
        """

    def fetched(self, entry: Entry, files: Files | None) -> AbstractContextManager[None]:
        """Have the files of a version in its `Entry.folder`, with their signatures.

        Args:
            files: as they were listed; None if they were not.

        Raises:
            LogDamaged: one of them is missing, or is not what the writer stored.
            PartUnavailable: they cannot be read now, or not be kept on this host.
            SpoolFull: the host's cache has no room.
        """

    def part(self, name: str, facts: FileFacts, *, reads: bool) -> Path | None:
        """Return a file of this host that has a part, to be opened at once; None if there is none.

        Args:
            facts: what ``DONE`` says about it.
            reads: whether it is read from the store if it is not on this host.

        Raises:
            DeltaError: it cannot be read now, or not be kept on this host.
            OSError: likewise.
        """

    def put(self, name: str, data: bytes, *, durable: bool = False) -> None:
        """Write or replace a small file; readers see the old one or the new one.

        Unless it is `durable`, it need not survive a crash of the host.

        Raises:
            OSError: it cannot be written.
        """

    def draft(self, folder: str) -> StoreDraft:
        """Begin a version that is not there; OSError if it cannot be written."""

    def refuse(self, folder: str) -> None:
        """Replace the files of a published version by the mark that no engine took it.

        Raises:
            OSError: it cannot be written. The version is marked, or as it was.
        """

    def delete(self, names: Iterable[str]) -> None:
        """Delete folders, each as a whole, and files; without any, the remains of a cut deletion.

        Raises:
            OSError: they cannot be deleted. None is visible in part.
        """

    def turn(self) -> Turn:
        """Take the turn to write; the log is made if it is missing.

        What earlier writers have begun without publishing it can never be published.

        Raises:
            BlockingIOError: another writer has the turn.
            OSError: the store cannot be written, or does not keep two writers apart.
        """
