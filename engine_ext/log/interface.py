"""What a delta log offers, wherever its files are."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol

from engine_ext.log.catalog import Entry, Listing


class CannotFold(Exception):
    """These versions cannot be folded into one; the message says why."""


class Note(NamedTuple):
    """A small file beside the versions: its name, its content, and its age in seconds."""

    name: str
    content: bytes
    age: float


class Draft(Protocol):
    """A version that is being written; readers see nothing of it before it is finished."""

    def add(self, part: bytes, signature: str | None = None) -> None:
        """Write the next part, as it is sent, and its signature if readers require one.

        Raises:
            MalformedPart: `part` has no readable manifest.
            OSError: it cannot be written.
        """
        ...

    def finish(self) -> Path:
        """Publish the version once all of it is stored, and return the folder of its entry."""
        ...

    @property
    def may_be_visible(self) -> bool:
        """Whether readers may see it: it is finished, or that was tried without an answer."""
        ...

    def drop(self) -> None:
        """Delete everything written so far, unless readers may see it."""
        ...


class Writer(Protocol):
    """The only writer of a log, until it is closed or another one takes its place."""

    def close(self) -> None:
        """Let another sender write."""
        ...

    @property
    def last_number(self) -> int:
        """The highest version number in use, refused ones included; -1 in an empty log."""
        ...

    def begin(self, version: int) -> Draft:
        """Begin to write a version.

        Raises:
            FileExistsError: its number is in use.
            BlockingIOError: another sender writes into the log.
            OSError: it cannot be written.
        """
        ...

    def refuse(self, version: int) -> None:
        """Mark a version that no engine took: its parts are deleted, its number stays in use."""
        ...


class DeltaLog(Protocol):
    """A delta log, of which `engine_ext.log.catalog` describes the files."""

    @property
    def location(self) -> str:
        """The folder's path, or the URL."""
        ...

    def listing(self, *, anew: bool = False) -> Listing:
        """List the content, without reading the parts.

        Args:
            anew: also read what is known from before, as after a damage, which may be mended.

        Raises:
            LogDamaged: it cannot be read.
        """
        ...

    def fetched(self, entry: Entry) -> AbstractContextManager[None]:
        """Have the files of a version in its `folder`.

        Raises:
            LogDamaged: one of them is missing, or is not what the writer stored.
            PartUnavailable: they cannot be read now, or not be kept on this host.
            SpoolFull: the host's cache has no room.
        """
        ...

    def writer(self) -> Writer:
        """Become the only writer; the log is made if it is missing.

        Raises:
            BlockingIOError: another sender writes into the log.
            OSError: it cannot be written.
        """
        ...

    def draft(self, name: str) -> Draft:
        """Begin a folded version, whose folder gets this name; FileExistsError if it is there."""
        ...

    def discard(self, *names: str) -> None:
        """Delete versions by their folders' names; readers see all of each or none."""
        ...

    def tidy(self, listing: Listing) -> None:
        """Delete what no reader sees, of versions below the newest: refused ones, and remains."""
        ...

    def write_note(self, folder: str, name: str, content: bytes) -> None:
        """Write or replace a small file; OSError if the log cannot be written."""
        ...

    def read_notes(self, folder: str, suffix: str, most: int) -> list[Note]:
        """Return the small files of a folder, by name; longer ones than `most` bytes are cut."""
        ...

    def remove_note(self, folder: str, name: str) -> None:
        """Remove a small file, if it is there."""
        ...
