"""A delta log in an object store.

::

    PREFIX/claims/00000000000000000012               the 12th turn to write: who has it, for what
    PREFIX/weight_v000012/SYNC_flush0000.safetensors a part, named by its sync
    PREFIX/weight_v000012/DONE                       makes the version visible; names the parts
    PREFIX/weight_v000013/REFUSED                    no engine took it; its number stays used
    PREFIX/followers/NAME.json                       a heartbeat
    PREFIX/groups/NAME.weight_v000012-HASH.json      version 12 is complete for a group

A claim and a mark are created, never replaced: the store refuses to create an object that is there.
So a claim has one owner, and a version one outcome; see `engine_ext.log.claims`.

A version's files come to a folder of this host while they are read: from a cache that the engines
of a host share, by the hash that ``DONE`` has of them, or from the store.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, Final

from engine_ext.errors import ChecksumMismatch, LogDamaged, PartUnavailable, TooLarge
from engine_ext.files import INDEX, hash_of_rest
from engine_ext.format import SIGNATURE_SUFFIX, Limits
from engine_ext.log.catalog import MARKS, MAX_DONE_BYTES, PART_SUFFIX, REFUSED, Entry, FileFacts
from engine_ext.log.claims import Claims
from engine_ext.log.objects import ObjectFacts, Objects
from engine_ext.log.store import Files
from engine_ext.remote_parts import LocalFolder, PartCache, Peers

_AT_ONCE: Final = 8  # small objects
_ATTEMPTS: Final = 2  # at a file that is not found, or whose bytes are not those that were written
_SAFE: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


class ObjectStore:
    """The files of a log below the prefix of a store; see `engine_ext.log.store.Store`.

    Args:
        objects: those below the prefix.
        cache: keeps parts that are fetched, for all engines of this host; None reads the store.
        peers: asked for a part before the store is; only with a cache.
        scratch: folder for fetched files without a cache; the temporary folder if None.
    """

    drafts_are_hidden = False
    reads_at_once = _AT_ONCE

    def __init__(
        self,
        objects: Objects,
        cache: PartCache | None = None,
        scratch: str | None = None,
        peers: Peers | None = None,
    ) -> None:
        self.objects, self._cache, self._scratch, self._peers = objects, cache, scratch, peers
        self._local: LocalFolder | None = None
        self._lock = threading.Lock()

    @property
    def location(self) -> str:
        """The URL."""
        return self.objects.url

    @property
    def local(self) -> Path:
        """The folder of this object on this host; it goes with it."""
        with self._lock:
            if self._local is None:
                self._local = LocalFolder(self._cache, self._scratch)
            return self._local.path

    def list(self, folder: str | None = None) -> dict[str, Files]:
        """Return the folders with all that is known about their objects."""
        folders: dict[str, dict[str, ObjectFacts]] = {}
        for found in self.objects.list(folder or ""):
            name, _, file = found.name.partition("/")
            if "/" not in file:
                folders.setdefault(name, {})[file] = found
        return {name: ObjectFiles(files) for name, files in folders.items()}

    def read(self, name: str, most: int) -> bytes:
        """Return the content of a small object."""
        try:
            return self.objects.read(name, most)
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
            raise LogDamaged(f"its {name.partition('/')[2]} has over {most} bytes") from error

    @contextlib.contextmanager
    def fetched(self, entry: Entry, files: Files | None) -> Iterator[None]:
        """Fetch the files of a version; they are removed afterwards."""
        known = files.objects if isinstance(files, ObjectFiles) else {}
        shutil.rmtree(entry.folder, ignore_errors=True)
        try:
            names = [*entry.files, *([INDEX] if entry.foreign else [])]
            names += [name + SIGNATURE_SUFFIX for name in names if name + SIGNATURE_SUFFIX in known]
            try:
                entry.folder.mkdir(parents=True)
                for name in names:
                    self._fetch(entry, name, known.get(name))
            except OSError as error:
                why = f"{entry.folder.name} cannot be kept on this host: {error.strerror}"
                raise PartUnavailable(why) from error
            yield
        finally:
            shutil.rmtree(entry.folder, ignore_errors=True)

    def _fetch(self, entry: Entry, name: str, listed: ObjectFacts | None) -> None:
        if listed is None:
            raise entry.damaged(f"{name} is not in the store", file=name)
        facts = entry.files.get(name)
        try:
            path = entry.folder / name
            fetch_object(self.objects, listed, path, facts, self._cache, self._peers)
        except FileNotFoundError as error:
            raise entry.damaged(f"{name} is not in the store", file=name) from error
        except (ChecksumMismatch, TooLarge) as error:
            raise entry.damaged(f"{name}: {error.message}", file=name) from error

    def part(self, name: str, facts: FileFacts, *, reads: bool) -> Path | None:
        """Return a part in the host's cache; without a cache there is none."""
        if self._cache is None:
            return None
        if not reads and not self._cache.holds(facts.xxh3_128, facts.bytes):
            return None
        return self._cache.get(
            facts.xxh3_128, facts.bytes, _reading(self.objects, name, facts.bytes)
        )

    def put(self, name: str, data: bytes, *, durable: bool = False) -> None:
        """Write or replace a small object; a store keeps what it has taken."""
        self.objects.put(name, data)

    def draft(self, folder: str) -> ObjectDraft:
        """Begin a version; nothing is written yet."""
        return ObjectDraft(self.objects, folder)

    def refuse(self, folder: str) -> None:
        """Add the mark, then delete the other objects."""
        mark = f"{folder}/{REFUSED}"
        self.objects.put(mark, b"{}")
        self.objects.delete(found.name for found in self.objects.list(folder) if found.name != mark)

    def delete(self, names: Iterable[str]) -> None:
        """Delete folders, in each first what makes it visible, and files."""
        names = [*names]
        folders = [name for name in names if "/" not in name]
        found = [name for name in names if "/" in name]
        if folders:
            listed = self.objects.list(folders[0] if len(folders) == 1 else "")
            found += [one.name for one in listed if one.name.partition("/")[0] in {*folders}]
        marks = [name for name in found if name.partition("/")[2] in MARKS]
        with ThreadPoolExecutor(_AT_ONCE, "delta-delete") as pool:
            for group in (marks, sorted({*found} - {*marks})):
                for _ in pool.map(lambda name: self.objects.delete([name]), group):
                    pass

    def turn(self) -> Claims:
        """Take the turn from whoever has it."""
        return Claims(self.objects, self.refuse)


class ObjectFiles:
    """The objects of one folder, as they were listed; see `engine_ext.log.store.Files`."""

    def __init__(self, objects: dict[str, ObjectFacts]) -> None:
        self.objects = objects

    @property
    def names(self) -> Collection[str]:
        """The names below that of the folder."""
        return self.objects.keys()

    def size(self, name: str) -> int:
        """Return an object's length."""
        return self.objects[name].size

    def written_at(self, name: str) -> float:
        """Return when an object was written."""
        return self.objects[name].written_at

    def tag(self, name: str) -> str:
        """Return the store's own tag."""
        return self.objects[name].tag

    def published_at(self, mark: str) -> float:
        """Return when the mark was written, by the store's clock."""
        return self.objects[mark].written_at


class ObjectDraft:
    """A version without its mark; see `engine_ext.log.store.StoreDraft`.

    Attributes:
        may_be_visible: whether it is finished, or the answer to that was lost.
    """

    def __init__(self, objects: Objects, folder: str) -> None:
        self._objects, self._folder = objects, folder
        self._own = uuid.uuid4().hex
        self._written: list[str] = []
        self._published = b""
        self.may_be_visible = False

    def part_name(self, number: int, sync_id: str | None) -> str:
        """Return a name that no other sender's parts of this version have."""
        stem = sync_id if sync_id and _SAFE.fullmatch(sync_id) else self._own
        return f"{stem}_flush{number:04d}{PART_SUFFIX}"

    def add(self, name: str, data: bytes) -> None:
        """Write an object."""
        self._written.append(f"{self._folder}/{name}")
        self._objects.put(self._written[-1], data)

    def publish(self, mark: str, data: bytes) -> None:
        """Create the mark."""
        self.may_be_visible, self._published = True, data
        try:
            self._objects.create(f"{self._folder}/{mark}", data)
        except FileExistsError:
            self.may_be_visible = False
            conflict = f"another sender has settled {self._folder} in {self._objects.url}"
            raise BlockingIOError(conflict) from None

    def settle(self, mark: str, refused: bytes) -> bool:
        """Create the mark as refused; one that is there shows what has become of the version."""
        name = f"{self._folder}/{mark}"
        try:
            self._objects.create(name, refused)
        except FileExistsError:
            self.may_be_visible = self._objects.read(name, MAX_DONE_BYTES) == self._published
        else:
            self.may_be_visible = False
        return self.may_be_visible

    def drop(self) -> None:
        """Delete what was written, unless readers might see it."""
        if not self.may_be_visible:
            self._objects.delete(self._written)


def fetch_object(
    objects: Objects,
    listed: ObjectFacts,
    path: Path,
    facts: FileFacts | None,
    cache: PartCache | None,
    peers: Peers | None = None,
) -> None:
    """Have an object as a new file.

    Args:
        facts: what the version's ``DONE`` says about it; None if that says nothing.
        cache: keeps it by its hash, for others on this host; on the file system of `path`.
        peers: asked for it first; what they have sent is not asked for again.

    Raises:
        FileNotFoundError: it is not in the store.
        ChecksumMismatch: it is not what `facts` say.
        TooLarge: no part is as large.
        PartUnavailable: the store cannot be read now.
        SpoolFull: the cache has no room.
        OSError: the file cannot be written.
    """
    if facts is not None and listed.size != facts.bytes:
        raise ChecksumMismatch(f"it has {listed.size} bytes of {facts.bytes}")
    limit = Limits().max_part_bytes
    if listed.size > limit:
        raise TooLarge(f"it has {listed.size} bytes", limit=limit)
    get = _reading(objects, listed.name, listed.size)
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            if cache is not None and facts is not None:
                if peers is not None and attempt == 1:
                    peers.bring(cache, facts.xxh3_128, facts.bytes)
                cached = cache.get(facts.xxh3_128, facts.bytes, get)
                try:
                    os.link(cached, path)
                except FileNotFoundError as error:
                    raise PartUnavailable(f"{cached} was removed from the cache") from error
            else:
                _write(path, get, facts)
            return
        except (ChecksumMismatch, FileNotFoundError):
            if attempt == _ATTEMPTS:
                raise


def _reading(objects: Objects, name: str, size: int) -> Callable[[BinaryIO], None]:
    """Return what writes an object into an empty file."""

    def get(file: BinaryIO) -> None:
        try:
            objects.fetch(name, size, file)
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.filename is None:  # of this host
                raise
            why = f"{error.filename} cannot be fetched: {error.strerror}"
            raise PartUnavailable(why) from error

    return get


def _write(path: Path, get: Callable[[BinaryIO], None], facts: FileFacts | None) -> None:
    with open(path, "w+b", buffering=0) as file:
        get(file)
        if facts is None:
            return
        file.seek(0)
        if hash_of_rest(file) != facts.xxh3_128:
            raise ChecksumMismatch("its bytes differ from those that were written")
