"""Write a delta log in an object store: one writer at a time, each version whole or absent.

Who writes holds the newest claim. A claim is the object of the next number, which can be created
once: so of two senders one gets it, and the other one is out. A sender that opens a log takes the
next claim, after which the one before it gets no more. What that one had begun is settled by the
version's ``DONE``, which can be created once, too: by it, and the version is in the log, or by the
new sender, as refused.
"""

from __future__ import annotations

import re
import uuid
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

import msgspec
import xxhash

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
from engine_ext.log.writer import done_of, manifest_of
from engine_ext.object_store import ObjectStore
from engine_ext.version_folders import INDEX

_CLAIMS: Final = "claims"
_SAFE: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MAX_CLAIM_BYTES: Final = 1 << 12


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a claim."""

    writer: str  # unique
    version: int | None  # that is written; None when the log was opened
    refuses: bool = False  # the version is in the log, and is marked: no engine took it


class StoreWriter(AbstractContextManager["StoreWriter"]):
    """The writer of a log in a store, until another one is made.

    Args:
        store: the log's objects.
        folder: of this host; versions' entries have theirs below it.

    Raises:
        BlockingIOError: another sender opened the log at the same moment.
        OSError: the store cannot be written, or lets two writers create one object.
    """

    def __init__(self, store: ObjectStore, folder: Path) -> None:
        self._store, self._folder, self._id = store, folder, uuid.uuid4().hex
        self._conflict = f"another sender writes into the log {store.url}"
        store.require_creates()
        before = self._claims()
        self._turn = before[-1] if before else 0
        self._claim(None)
        for turn in before:
            self._settle(turn)
        store.delete(_claim_name(turn) for turn in before)

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is held: another sender takes the next claim whenever it opens the log."""

    @property
    def last_number(self) -> int:
        """The highest version number in use, refused ones included; -1 in an empty log."""
        return max((self._used_by(found.name) for found in self._store.list()), default=-1)

    def begin(self, version: int) -> StoreDraft:
        """Claim a version's number and begin to write it.

        Raises:
            FileExistsError: its number is in use.
            BlockingIOError: another sender writes into the log.
            OSError: the store cannot be written.
        """
        name = folder_name(version)
        if any(self._used_by(found.name) == version for found in self._store.list(name)):
            raise FileExistsError(f"{self._store.url}/{name} exists")
        turn = self._turn
        self._claim(version)
        self._store.delete([_claim_name(turn)])
        return StoreDraft(self._store, name, self._folder)

    def refuse(self, version: int) -> None:
        """Mark a version that no engine took: its parts are deleted, its number stays in use.

        Raises:
            BlockingIOError: another sender writes into the log, and may have gone on from it.
            OSError: the store cannot be written.
        """
        turn = self._turn
        self._claim(version, refuses=True)  # whoever takes over now goes on from what it leaves
        self._store.delete([_claim_name(turn)])
        self._mark_refused(version)

    def _mark_refused(self, version: int) -> None:
        name = folder_name(version)
        self._store.put(f"{name}/{REFUSED}", b"{}")
        objects = [found.name for found in self._store.list(name)]
        self._store.delete(one for one in objects if one != f"{name}/{REFUSED}")

    @staticmethod
    def _used_by(name: str) -> int:
        """Return the version whose number an object shows to be in use, or -1."""
        folder, _, file = name.partition("/")
        version = version_of(folder) if file in (DONE, REFUSED, INDEX) else None
        return -1 if version is None else version

    def _claims(self) -> list[int]:
        names = (found.name.partition("/")[2] for found in self._store.list(_CLAIMS))
        return sorted(int(name) for name in names if name.isdecimal())

    def _claim(self, version: int | None, *, refuses: bool = False) -> None:
        """Take the next claim; BlockingIOError if another writer has one."""
        turn = self._turn + 1
        content = msgspec.json.encode(Claim(writer=self._id, version=version, refuses=refuses))
        try:
            self._store.create(_claim_name(turn), content)
        except FileExistsError:
            raise BlockingIOError(self._conflict) from None
        # Past claims are deleted, and then could be created again: none may be newer than this.
        if self._claims()[-1] != turn:
            raise BlockingIOError(self._conflict)
        self._turn = turn

    def _settle(self, turn: int) -> None:
        """Refuse the version that was claimed, unless it is in the log and was to stay there."""
        try:
            text = self._store.read(_claim_name(turn), _MAX_CLAIM_BYTES)
        except FileNotFoundError:  # its writer has gone on before this one came
            return
        claim = msgspec.json.decode(text, type=Claim)
        version = claim.version
        if version is None:
            return
        if claim.refuses:
            self._mark_refused(version)
            return
        refused = Done(version=version, base_version=None, files={}, refused=True)
        try:
            self._store.create(f"{folder_name(version)}/{DONE}", msgspec.json.encode(refused))
        except FileExistsError:
            return


class StoreDraft:
    """A version that is being written; readers see nothing of it before its ``DONE``.

    Args:
        store: the log's objects.
        name: of the version's folder.
        folder: of this host; the version's entry has its own below it.

    Attributes:
        may_be_visible: whether readers may see it: it is finished, or the answer to that was lost.
    """

    def __init__(self, store: ObjectStore, name: str, folder: Path) -> None:
        self._store, self._name, self._folder = store, name, folder
        self._stem = uuid.uuid4().hex
        self._files: dict[str, FileFacts] = {}
        self._written: list[str] = []
        self.may_be_visible = False
        self._manifest: Manifest | None = None

    def add(self, part: bytes, signature: str | None = None) -> None:
        """Write the next part, as it is sent, and its signature if readers require one.

        Raises:
            MalformedPart: `part` has no readable manifest.
            OSError: it cannot be written.
        """
        if self._manifest is None:
            self._manifest = manifest_of(part)
            sync_id = self._manifest.sync_id or ""
            self._stem = sync_id if _SAFE.fullmatch(sync_id) else self._stem
        name = f"{self._stem}_flush{len(self._files):04d}{PART_SUFFIX}"
        self._put(name, part)
        if signature is not None:
            self._put(name + SIGNATURE_SUFFIX, signature.encode())
        self._files[name] = FileFacts(len(part), xxhash.xxh3_128_hexdigest(part))

    def _put(self, name: str, data: bytes) -> None:
        self._written.append(f"{self._name}/{name}")
        self._store.put(self._written[-1], data)

    def finish(self) -> Path:
        """Make the version visible, and return the folder of its entry.

        Raises:
            BlockingIOError: another sender has taken over, or written this one; it is not in the
                log as it is here.
            OSError: the store cannot be written. The version may be in the log.
        """
        assert self._manifest is not None
        done = done_of(self._manifest, self._files)
        self.may_be_visible = True
        try:
            self._store.create(f"{self._name}/{DONE}", done)
        except FileExistsError:
            self.may_be_visible = False
            conflict = f"another sender has settled {self._name} in {self._store.url}"
            raise BlockingIOError(conflict) from None
        return self._folder / self._name

    def drop(self) -> None:
        """Delete everything written so far, unless readers may see it."""
        if not self.may_be_visible:
            self._store.delete(self._written)


def _claim_name(turn: int) -> str:
    return f"{_CLAIMS}/{turn:020d}"
