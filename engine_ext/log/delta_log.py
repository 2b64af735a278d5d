"""One delta log, wherever its files are: list, fetch, write, delete."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from engine_ext.errors import DeltaError, LogDamaged
from engine_ext.files import INDEX
from engine_ext.log.catalog import (
    DONE,
    MARKS,
    MAX_DONE_BYTES,
    MAX_VERSION,
    PART_SUFFIX,
    REFUSED,
    Entry,
    FileFacts,
    Listing,
    parse_done,
    version_of,
)
from engine_ext.log.folder_store import FolderStore
from engine_ext.log.objects import STREAMS, Objects
from engine_ext.log.store import Files, Store
from engine_ext.store_urls import is_store_url, store_url

if TYPE_CHECKING:
    from engine_ext.log.writer import LogWriter
    from engine_ext.remote_parts import PartCache, Peers
    from engine_ext.resources import RateLimit

_UNFINISHED_S: Final = 86400.0
_UNMARKED: Final = "without a mark"
_UNFINISHED: Final = f"it has no {DONE}: it was not written completely"


def open_log(
    location: str | Path,
    *,
    cache: PartCache | None = None,
    scratch: str | None = None,
    streams: int = STREAMS,
    limit: RateLimit | None = None,
    peers: Peers | None = None,
) -> DeltaLog:
    """Return the log in a folder, or below the URL of an object store.

    Args:
        cache: keeps what is fetched from a store, for all engines of this host.
        scratch: folder for what is fetched from a store without a cache; the temporary folder if
            None.
        streams: requests at once for one object of a store.
        limit: of the bytes that are fetched from a store.
        peers: engines that are asked for a part before the store is.

    Raises:
        ValueError: it is a URL that is not valid.
        OSError: the configuration of the store's client is not valid.
    """
    if not is_store_url(location):
        return DeltaLog(FolderStore(Path(location)))
    from engine_ext.log.object_store import ObjectStore

    objects = Objects(store_url(str(location)), streams=streams, limit=limit)
    return DeltaLog(ObjectStore(objects, cache, scratch, peers))


class DeltaLog:
    """A delta log; `engine_ext.log.catalog` describes its files."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._texts: dict[str, tuple[str, bytes]] = {}  # by mark: its tag and content
        self._listed: Mapping[str, Files] = {}  # by version's folder, as listed last

    @property
    def location(self) -> str:
        """The folder's path, or the URL."""
        return self.store.location

    def listing(self, *, anew: bool = False) -> Listing:
        """List the content, without reading the parts.

        Args:
            anew: also read what is known from before, as after a damage, which might be repaired.

        Raises:
            LogDamaged: it cannot be read.
        """
        if anew:
            self._texts.clear()
        listing, unmarked = Listing(), set[str]()
        try:
            folders = _versions(self.store)
            local = self.store.local
            for name, found in zip(folders, self._read_all(folders), strict=True):
                if isinstance(found, Entry):
                    listing.entries.append(found)
                elif isinstance(found, LogDamaged):
                    listing.damaged[name] = found.message
                elif found == REFUSED:
                    listing.refused.append(local / name)
                elif found == _UNMARKED:
                    unmarked.add(name)
        except OSError as error:
            raise LogDamaged(f"cannot read the delta log: {error.strerror}") from error
        if self.store.drafts_are_hidden:  # other trainers write in a visible folder, one at a time
            newest = max((version_of(name) or 0 for name in {*folders} - unmarked), default=-1)
            old = (name for name in unmarked if (version_of(name) or 0) <= newest)
            listing.damaged.update(dict.fromkeys(old, _UNFINISHED))
        _refuse_skips(listing)
        self._listed = folders
        known = self._texts.items()
        self._texts = {mark: one for mark, one in known if mark.partition("/")[0] in folders}
        gone = {version_of(folder.name) for folder in listing.refused}  # also by a fold
        entries = [entry for entry in listing.entries if entry.version not in gone]
        entries.sort(key=lambda entry: (entry.version, entry.folder.name))
        return dataclasses.replace(listing, entries=entries)

    def _read_all(self, folders: Mapping[str, Files]) -> list[Entry | LogDamaged | str | None]:
        if self.store.reads_at_once == 1:
            return [self._read(*one) for one in folders.items()]
        with ThreadPoolExecutor(self.store.reads_at_once, "delta-list") as pool:
            return [*pool.map(self._read, folders.keys(), folders.values())]

    def _read(self, name: str, files: Files) -> Entry | LogDamaged | str | None:
        """Return a version's entry, its damage, `REFUSED`, or `_UNMARKED`; None if it is gone."""
        try:
            names = files.names
            if REFUSED in names:
                return REFUSED
            text = self._mark(name, DONE, files, MAX_DONE_BYTES) if DONE in names else None
            if not text and INDEX in names:
                return self._read_index(name, files)
            if text is None:
                return _UNMARKED
            return self._read_done(name, files, text)
        except FileNotFoundError:
            if not self.store.list(name):  # deleted meanwhile
                return None
            mark = DONE if DONE in files.names else INDEX
            return LogDamaged(f"its {mark} is listed, and cannot be found")
        except LogDamaged as damaged:
            return damaged

    def _mark(self, folder: str, name: str, files: Files, most: int) -> bytes:
        """Return the content of a mark, stripped; where a tag shows changes, it is read once."""
        path = f"{folder}/{name}"
        tag = files.tag(name)
        known = self._texts.get(path)
        if known is not None and known[0] == tag:
            return known[1]
        try:
            text = self.store.read(path, most).strip()
        except FileNotFoundError:  # some stores do not find at first what they list
            text = self.store.read(path, most).strip()
        if tag is not None:
            self._texts[path] = (tag, text)
        return text

    def _read_done(self, name: str, files: Files, text: bytes) -> Entry | str:
        folder, version = self.store.local / name, version_of(name)
        assert version is not None
        written_at = files.published_at(DONE)
        if not text:
            parts = sorted(one for one in files.names if one.endswith(PART_SUFFIX))
            facts: dict[str, FileFacts | None] = dict.fromkeys(parts)
            nbytes = sum(files.size(one) for one in parts)
            return Entry(folder, version, version - 1, facts, nbytes, written_at=written_at)
        done = parse_done(text)
        if done.refused:
            return REFUSED
        base = done.base_version
        wrong = done.version != version or version > MAX_VERSION
        if wrong or (base is not None and base >= version):
            raise LogDamaged(f"its {DONE} declares that it leads from {base} to {done.version}")
        if any(one in ("", "..") or "\0" in one or Path(one).name != one for one in done.files):
            raise LogDamaged(f"its {DONE} names a file outside the folder")
        if not all(one.endswith(PART_SUFFIX) for one in done.files):
            raise LogDamaged(f"its {DONE} names a file that is no {PART_SUFFIX}")
        nbytes = sum(one.bytes for one in done.files.values())
        facts = {**done.files}
        said = done.publication
        return Entry(folder, version, base, facts, nbytes, written_at=written_at, publication=said)

    def _read_index(self, name: str, files: Files) -> Entry:
        """Read a folder with an index; its files are read when it is applied or verified."""
        from engine_ext.format import Limits
        from engine_ext.version_folders import check_version, parse_index

        limits, version = Limits(), version_of(name)
        assert version is not None
        text = self._mark(name, INDEX, files, limits.max_header_bytes)
        try:
            found = check_version(name, files.names, parse_index(text, limits))
        except DeltaError as error:
            raise LogDamaged(error.message) from error
        facts: dict[str, FileFacts | None] = dict.fromkeys(found.index.files)
        nbytes = sum(files.size(one) for one in facts if one in files.names)
        return Entry(
            self.store.local / name,
            version,
            found.base_version,
            facts,
            nbytes,
            foreign=True,
            written_at=files.published_at(INDEX),
        )

    def checked(self, listing: Listing) -> Listing:
        """Return a listing of this log in which a version with a missing or short part is damaged.

        Only names and lengths are compared: those in ``DONE``, and those that the last `listing`
        found. Folders with an index are listed by it.

        Raises:
            OSError: the log cannot be read.
        """
        entries, damaged = [], dict(listing.damaged)
        for entry in listing.entries:
            name = entry.folder.name
            why = self._why_incomplete(entry, self._listed[name])
            if why is None:
                entries.append(entry)
            elif self.store.list(name):  # else it was deleted meanwhile
                damaged[name] = why
        return dataclasses.replace(listing, entries=entries, damaged=damaged)

    @staticmethod
    def _why_incomplete(entry: Entry, files: Files) -> str | None:
        if not entry.files and not entry.foreign:
            return "it has no parts"
        for name, facts in sorted(entry.files.items()):
            if name not in files.names:
                return f"its {name} is missing"
            try:
                size = files.size(name)
            except FileNotFoundError:
                return f"its {name} is missing"
            except LogDamaged as damaged:
                return damaged.message
            if facts is not None and size != facts.bytes:
                return f"its {name} has {size:,} bytes of {facts.bytes:,}"
        return None

    def fetched(self, entry: Entry) -> AbstractContextManager[None]:
        """Have the files of a version in its `folder`.

        Raises:
            LogDamaged: one of them is missing, or is not what the writer stored.
            PartUnavailable: they cannot be read now, or not be kept on this host.
            SpoolFull: the host's cache has no room.
        """
        return self.store.fetched(entry, self._listed.get(entry.folder.name))

    def writer(self) -> LogWriter:
        """Become the only writer; the log is made if it is missing.

        Raises:
            BlockingIOError: another sender writes into the log.
            OSError: it cannot be written.
        """
        from engine_ext.log.writer import LogWriter

        return LogWriter(self.store)

    def tidy(self, listing: Listing) -> None:
        """Delete what no reader sees, of versions below the newest: refused ones, and remains.

        Folds of refused versions go first, as they would be seen without the mark.

        Where drafts are not hidden, senders that were thought dead can still live. So the marks of
        refused versions stay, lest their senders finish them, and what is unfinished stays for a
        day.
        """
        refused = {folder.name for folder in listing.refused}
        numbers = {version_of(name) for name in refused}
        old = time.time() - _UNFINISHED_S
        gone, folds = list[str](), list[str]()
        for folder, files in self._listed.items():
            if (version_of(folder) or 0) >= (listing.newest or 0):
                continue
            if version_of(folder) in numbers and folder not in refused:
                folds.append(folder)
                continue
            if self.store.drafts_are_hidden:
                gone += [folder] if folder in refused else []
                continue
            marks = {*MARKS, REFUSED} & {*files.names}
            if folder in refused or not marks:
                rest = [name for name in files.names if name not in marks]
                gone += [
                    f"{folder}/{name}" for name in rest if marks or files.written_at(name) < old
                ]
        self.store.delete([*folds, *gone])


def _versions(store: Store) -> dict[str, Files]:
    """Return the files of each version, by its folder's name."""
    found = store.list()
    return {name: found[name] for name in sorted(found) if version_of(name) is not None}


def _refuse_skips(listing: Listing) -> None:
    """Take versions of other trainers that lead over versions of theirs as damaged.

    Nothing covers the base in an index, and these trainers count their versions one by one.
    """
    theirs = sorted(entry.version for entry in listing.entries if entry.foreign)
    before = dict(zip(theirs[1:], theirs, strict=False))
    for entry in [entry for entry in listing.entries if entry.foreign]:
        base = entry.base_version
        if base is not None and before.get(entry.version, base) > base:
            listing.entries.remove(entry)
            why = f"its index declares that it leads from {base}, over {before[entry.version]}"
            listing.damaged[entry.folder.name] = why
