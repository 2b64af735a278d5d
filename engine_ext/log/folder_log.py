"""A delta log in a folder, local or shared."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from engine_ext.files import sync_folder
from engine_ext.log.catalog import Entry, Listing, list_log, version_of
from engine_ext.log.interface import Note

if TYPE_CHECKING:
    from engine_ext.log.writer import FolderDraft, LogWriter


class FolderLog:
    """A delta log in a folder; see `engine_ext.log.interface.DeltaLog`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def location(self) -> str:
        """The folder's path."""
        return str(self.folder)

    def listing(self, *, anew: bool = False) -> Listing:
        """List the content; see `list_log`."""
        return list_log(self.folder)

    def fetched(self, entry: Entry) -> contextlib.AbstractContextManager[None]:
        """The files are there."""
        return contextlib.nullcontext()

    def writer(self) -> LogWriter:
        """Become the only writer; see `LogWriter`."""
        from engine_ext.log.writer import LogWriter

        return LogWriter(self.folder)

    def draft(self, name: str) -> FolderDraft:
        """Begin a folded version; see `FolderDraft`."""
        from engine_ext.log.writer import FolderDraft

        return FolderDraft(self.folder, name)

    def discard(self, *names: str) -> None:
        """Delete versions' folders."""
        discard(self.folder, names)

    def tidy(self, listing: Listing) -> None:
        """Delete the marks of refused numbers below the newest version, and cut deletions."""
        for folder in listing.refused:
            if (version_of(folder.name) or 0) < (listing.newest or 0):
                discard(self.folder, [folder.name])
        for folder in self.folder.glob(".weight_v*.gone"):
            shutil.rmtree(folder, ignore_errors=True)

    def write_note(self, folder: str, name: str, content: bytes) -> None:
        """Write a small file; a reader sees the old one or the new one."""
        (self.folder / folder).mkdir(exist_ok=True)
        path = self.folder / folder / name
        draft = path.with_suffix(f".{os.getpid()}.tmp")  # another process may write it, too
        draft.write_bytes(content)
        draft.replace(path)

    def read_notes(self, folder: str, suffix: str, most: int) -> list[Note]:
        """Return the small files, with ages by the clock that stamps them.

        If the log cannot be written, ages are by this host's clock.
        """
        place = self.folder / folder
        if not place.is_dir():
            return []
        now = _now(place)
        found = []
        for path in sorted(place.glob("*" + suffix)):
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                age = max(0.0, now - os.fstat(file.fileno()).st_mtime)
                found.append(Note(path.name, file.read(most), age))
        return found

    def remove_note(self, folder: str, name: str) -> None:
        """Remove a small file."""
        (self.folder / folder / name).unlink(missing_ok=True)


def discard(log: Path, names: Iterable[str]) -> None:
    """Delete versions' folders; a reader sees the whole of each or none."""
    removed = []
    for name in names:
        removed.append(log / f".{name}.gone")
        shutil.rmtree(removed[-1], ignore_errors=True)
        os.rename(log / name, removed[-1])
    sync_folder(log)
    for folder in removed:
        shutil.rmtree(folder)


def _now(folder: Path) -> float:
    """Return the time by the clock that stamps the files of a folder."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".now-") as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        with tempfile.NamedTemporaryFile(prefix="delta-now-") as file:
            return os.fstat(file.fileno()).st_mtime
