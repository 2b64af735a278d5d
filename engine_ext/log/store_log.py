"""A delta log in an object store.

::

    PREFIX/claims/00000000000000000012               the 12th turn to write: who has it, for what
    PREFIX/weight_v000012/SYNC_flush0000.safetensors a part, named by its sync
    PREFIX/weight_v000012/DONE                       makes the version visible; names the parts
    PREFIX/weight_v000013/REFUSED                    no engine took it; its number stays used
    PREFIX/followers/NAME.json                       a heartbeat

What decides is created, never replaced: the store refuses to create an object that is there. So a
claim has one owner, and a version one outcome; see `engine_ext.log.store_writer`.

A version's files come to a folder of this host while they are read: from a cache that the engines
of a host share, by the hash that ``DONE`` has of them, or from the store.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from engine_ext.errors import ChecksumMismatch, LogDamaged, PartUnavailable, TooLarge
from engine_ext.format import SIGNATURE_SUFFIX
from engine_ext.log.catalog import (
    DONE,
    MAX_DONE_BYTES,
    REFUSED,
    Entry,
    Listing,
    parse_done,
    version_of,
)
from engine_ext.log.interface import Note
from engine_ext.log.store_fetch import fetch_object
from engine_ext.log.store_writer import StoreDraft, StoreWriter
from engine_ext.object_store import ObjectFacts, ObjectStore
from engine_ext.remote_parts import LocalFolder, PartCache
from engine_ext.version_folders import INDEX

_AT_ONCE: Final = 8  # small objects
_UNFINISHED_S: Final = 86400.0
_READS: Final = 2  # of an object that is listed, and was not found

_Objects = Mapping[str, ObjectFacts]  # of one version, by file name


class StoreLog:
    """A delta log below the prefix of a store; see `engine_ext.log.interface.DeltaLog`.

    Args:
        store: its objects.
        cache: keeps parts that are fetched, for all engines of this host; None reads the store.
        scratch: folder for fetched files without a cache; the temporary folder if None.
    """

    def __init__(
        self, store: ObjectStore, cache: PartCache | None = None, scratch: str | None = None
    ) -> None:
        self.store, self._cache, self._scratch = store, cache, scratch
        self._texts: dict[str, tuple[str, bytes]] = {}  # by object: its tag and content
        self._listed: dict[str, _Objects] = {}  # by version's folder, as listed last
        self._local: LocalFolder | None = None
        self._lock = threading.Lock()

    @property
    def location(self) -> str:
        """The URL."""
        return self.store.url

    def listing(self, *, anew: bool = False) -> Listing:
        """List the content; a version without ``DONE`` is being written, and left out.

        Args:
            anew: read every ``DONE``, not only those that are new: bytes may have changed on the
                way here.

        Raises:
            LogDamaged: the store cannot be read.
        """
        if anew:
            self._texts.clear()
        try:
            versions = self._versions()
            finished = {
                folder: objects
                for folder, objects in versions.items()
                if DONE in objects or INDEX in objects or REFUSED in objects
            }
            texts = self._read_texts(finished)
            local, listing = self._folder(), Listing()
        except OSError as error:
            raise LogDamaged(f"cannot read the delta log: {error.strerror}") from error
        self._listed = versions
        for folder, objects in finished.items():
            marker = _marker(objects)
            if REFUSED in objects or _is_refused(texts.get(folder)):
                listing.refused.append(local / folder)
            elif folder in texts and marker is not None:
                files = _StoreFiles(objects, marker.name, texts[folder])
                listing.add(local / folder, files, marker.written_at)
            elif marker is not None and marker.size > MAX_DONE_BYTES:
                listing.damaged[folder] = f"its {DONE} has over {MAX_DONE_BYTES} bytes"
            elif marker is not None:  # pruned meanwhile, or the store has lost it
                file = marker.name.partition("/")[2]
                listing.damaged[folder] = f"its {file} is listed, and cannot be found"
        return listing.sorted()

    def _versions(self) -> dict[str, _Objects]:
        """Return the objects of each version, by its folder's name."""
        versions: dict[str, dict[str, ObjectFacts]] = {}
        for found in self.store.list():
            folder, _, name = found.name.partition("/")
            if version_of(folder) is not None and "/" not in name:
                versions.setdefault(folder, {})[name] = found
        return dict(versions)

    def _read_texts(self, versions: Mapping[str, _Objects]) -> dict[str, bytes]:
        """Return the content of each version's ``DONE``, or of its index; each is read once."""
        found = ((folder, _marker(objects)) for folder, objects in versions.items())
        markers = {k: one for k, one in found if one is not None and one.size <= MAX_DONE_BYTES}

        def read(marker: ObjectFacts) -> tuple[str, bytes] | None:
            known = self._texts.get(marker.name)
            if known is not None and known[0] == marker.tag:
                return known
            for _ in range(_READS):
                with contextlib.suppress(FileNotFoundError):
                    return marker.tag, self.store.read(marker.name, MAX_DONE_BYTES)
            return None

        with ThreadPoolExecutor(_AT_ONCE, "delta-list") as pool:
            texts = dict(zip(markers, pool.map(read, markers.values()), strict=True))
        self._texts = {markers[folder].name: text for folder, text in texts.items() if text}
        return {folder: text[1] for folder, text in texts.items() if text}

    @contextlib.contextmanager
    def fetched(self, entry: Entry) -> Iterator[None]:
        """Have the files of a version in its folder; they are removed afterwards.

        Raises:
            LogDamaged: one of them is missing, or is not what ``DONE`` says.
            PartUnavailable: the store cannot be read, or the files cannot be kept on this host.
            SpoolFull: the cache has no room.
        """
        objects = self._listed.get(entry.folder.name, {})
        shutil.rmtree(entry.folder, ignore_errors=True)
        try:
            names = [*entry.files, *([INDEX] if entry.foreign else [])]
            names += [
                name + SIGNATURE_SUFFIX for name in names if name + SIGNATURE_SUFFIX in objects
            ]
            try:
                entry.folder.mkdir(parents=True)
                for name in names:
                    self._fetch(entry, name, objects)
            except OSError as error:
                why = f"{entry.folder.name} cannot be kept on this host: {error.strerror}"
                raise PartUnavailable(why) from error
            yield
        finally:
            shutil.rmtree(entry.folder, ignore_errors=True)

    def _fetch(self, entry: Entry, name: str, objects: _Objects) -> None:
        listed = objects.get(name)
        if listed is None:
            raise entry.damaged(f"{name} is not in the store", file=name)
        facts = entry.files.get(name)
        try:
            fetch_object(self.store, listed, entry.folder / name, facts, self._cache)
        except FileNotFoundError as error:
            raise entry.damaged(f"{name} is not in the store", file=name) from error
        except (ChecksumMismatch, TooLarge) as error:
            raise entry.damaged(f"{name}: {error.message}", file=name) from error

    def writer(self) -> StoreWriter:
        """Take the turn to write, from whoever has it; see `StoreWriter`."""
        return StoreWriter(self.store, self._folder())

    def draft(self, name: str) -> StoreDraft:
        """Begin a folded version; FileExistsError if it is there."""
        if any(found.name == f"{name}/{DONE}" for found in self.store.list(name)):
            raise FileExistsError(f"{self.location}/{name} exists")
        return StoreDraft(self.store, name, self._folder())

    def discard(self, *names: str) -> None:
        """Delete versions, of each first what makes it visible."""
        folders = {*names}
        listed = self.store.list(names[0] if len(names) == 1 else "")
        found = [one.name for one in listed if one.name.partition("/")[0] in folders]
        visible = [name for name in found if name.partition("/")[2] in (DONE, INDEX)]
        with ThreadPoolExecutor(_AT_ONCE, "delta-discard") as pool:
            for group in (visible, sorted({*found} - {*visible})):
                for _ in pool.map(lambda name: self.store.delete([name]), group):
                    pass

    def tidy(self, listing: Listing) -> None:
        """Delete what refused versions below the newest one have, and old unfinished ones.

        The marks of refused ones stay: their senders may still live, and must not finish them.
        Unfinished ones may be of a sender or a fold that is at work, so they stay for a day.
        """
        refused = {folder.name for folder in listing.refused}
        old = time.time() - _UNFINISHED_S
        for folder, files in self._listed.items():
            if (version_of(folder) or 0) >= (listing.newest or 0):
                continue
            marks = {DONE, INDEX, REFUSED} & files.keys()
            if folder in refused or not marks:
                gone = [one for name, one in files.items() if name not in marks]
                self.store.delete(one.name for one in gone if marks or one.written_at < old)

    def write_note(self, folder: str, name: str, content: bytes) -> None:
        """Write or replace a small object."""
        self.store.put(f"{folder}/{name}", content)

    def read_notes(self, folder: str, suffix: str, most: int) -> list[Note]:
        """Return the small objects, with ages by the store's clock.

        If the log cannot be written, ages are by this host's clock.
        """
        probe = f"{folder}/.now-{uuid.uuid4().hex}"
        with contextlib.suppress(OSError):
            self.store.put(probe, b"")
        listed = self.store.list(folder)
        with contextlib.suppress(OSError):
            self.store.delete([probe])
        now = next((one.written_at for one in listed if one.name == probe), time.time())
        found = []
        for one in listed:
            name = one.name.partition("/")[2]
            if name.endswith(suffix) and one.size <= most:
                with contextlib.suppress(FileNotFoundError):
                    content = self.store.read(one.name, most)
                    found.append(Note(name, content, max(0.0, now - one.written_at)))
        return found

    def remove_note(self, folder: str, name: str) -> None:
        """Remove a small object."""
        self.store.delete([f"{folder}/{name}"])

    def _folder(self) -> Path:
        """Return the folder of this object on this host; its versions' files come there."""
        with self._lock:
            if self._local is None:
                self._local = LocalFolder(self._cache, self._scratch)
            return self._local.path


@dataclass(frozen=True, slots=True)
class _StoreFiles:
    """The files of a version in a store, of which the one that makes it visible was read."""

    files: _Objects
    marker: str
    text: bytes

    def names(self) -> list[str]:
        return [*self.files]

    def size(self, name: str) -> int:
        return self.files[name].size

    def open(self, name: str) -> BinaryIO:
        if name not in self.files or self.files[name].name != self.marker:
            raise FileNotFoundError(name)
        # Readers want a descriptor.
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        file = os.fdopen(descriptor, "w+b", buffering=0)
        file.write(self.text)
        file.seek(0)
        return file


def _marker(objects: _Objects) -> ObjectFacts | None:
    """Return the object that makes a version visible: its ``DONE``, or its index."""
    done = objects.get(DONE)
    return done if done is not None and done.size else objects.get(INDEX, done)


def _is_refused(text: bytes | None) -> bool:
    if text is None:
        return False
    with contextlib.suppress(LogDamaged):
        return bool(text.strip()) and parse_done(text).refused
    return False
