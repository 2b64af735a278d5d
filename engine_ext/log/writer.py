"""Write a delta log: a version is complete and stored, or not there at all."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

import msgspec
import xxhash

from engine_ext.format import SIGNATURE_SUFFIX, Manifest
from engine_ext.log.catalog import (
    DONE,
    MARKS,
    REFUSED,
    Done,
    FileFacts,
    Publication,
    folder_name,
    version_of,
)
from engine_ext.log.publication import signed
from engine_ext.log.records import read_header
from engine_ext.log.store import Store

_HEADER_CHUNK: Final = 1 << 16


class LogWriter(AbstractContextManager["LogWriter"]):
    """The only writer of a log, until it is closed or another one takes its place.

    In a folder a second writer is refused; in an object store, it takes over.

    Raises:
        BlockingIOError: another sender writes into the log.
        OSError: the log cannot be made, read or written.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._turn = store, store.turn()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another sender write."""
        self._turn.close()

    @property
    def last_number(self) -> int:
        """The highest version number in use, refused ones included; -1 in an empty log."""
        return max(_used_numbers(self._store), default=-1)

    def begin(self, version: int) -> Draft:
        """Begin to write a version.

        Raises:
            FileExistsError: its number is in use.
            BlockingIOError: another sender writes into the log.
            OSError: it cannot be written.
        """
        name = folder_name(version)
        self._turn.claim(version)  # first: whoever has lost the turn does not look at numbers
        _require_unused(self._store, name)
        return Draft(self._store, name)

    def refuse(self, version: int) -> None:
        """Mark a version that no engine took: its parts are deleted, its number stays in use.

        Raises:
            BlockingIOError: another sender writes into the log, and might have continued from it.
            OSError: the log cannot be written.
        """
        self._turn.claim(version, refuses=True)  # whoever takes over starts from what it leaves
        self._store.refuse(folder_name(version))


class Draft:
    """A version that is being written; readers see nothing of it before it is finished."""

    def __init__(self, store: Store, name: str) -> None:
        self._folder, self._draft = store.local / name, store.draft(name)
        self._files: dict[str, FileFacts] = {}
        self._manifest: Manifest | None = None
        self._last = b""  # part, which has the digest that all lead to

    @property
    def may_be_visible(self) -> bool:
        """Whether readers might see it: it is finished, or that was tried without an answer."""
        return self._draft.may_be_visible

    def add(self, part: bytes, signature: str | None = None) -> None:
        """Write the next part, as it is sent, and its signature if readers require one.

        Raises:
            MalformedPart: `part` has no readable manifest.
            OSError: it cannot be written.
        """
        if self._manifest is None:
            self._manifest = manifest_of(part)
        name = self._draft.part_name(len(self._files), self._manifest.sync_id)
        self._draft.add(name, part)
        if signature is not None:
            self._draft.add(name + SIGNATURE_SUFFIX, signature.encode())
        self._files[name] = FileFacts(len(part), xxhash.xxh3_128_hexdigest(part))
        self._last = part

    def finish(self, key: str | None = None) -> Path:
        """Publish the version once all of it is stored, and return the folder of its entry.

        Args:
            key: signs what ``DONE`` says.

        Raises:
            BlockingIOError: another sender has taken over, or written this one; it is not in the
                log as it is here.
            OSError: it cannot be written. The version might be in the log, see `may_be_visible`.
        """
        assert self._manifest is not None
        done = _done(self._manifest, manifest_of(self._last), self._files, key)
        self._draft.publish(DONE, done)
        return self._folder

    def settle(self) -> Path | None:
        """Find out, after `finish` has failed, whether readers see the version.

        Returns:
            The folder of its entry; None if they do not, and never will.

        Raises:
            OSError: that is still not known.
        """
        assert self._manifest is not None
        version = self._manifest.current_version
        assert version is not None
        refused = Done(version=version, base_version=None, files={}, refused=True)
        is_seen = self._draft.settle(DONE, msgspec.json.encode(refused))
        return self._folder if is_seen else None

    def drop(self) -> None:
        """Delete everything written so far, unless readers might see it."""
        self._draft.drop()


def begin(store: Store, name: str) -> Draft:
    """Begin a version in a folder of this name.

    Raises:
        FileExistsError: it is there.
        BlockingIOError: it is being written.
    """
    _require_unused(store, name)
    return Draft(store, name)


def _used_numbers(store: Store, folder: str | None = None) -> Iterator[int]:
    """Yield the version numbers in use: of what readers see, and of refused versions."""
    for name, files in store.list(folder).items():
        version = version_of(name)
        if version is None:
            continue
        if store.drafts_are_hidden or not {*MARKS, REFUSED}.isdisjoint(files.names):
            yield version


def _require_unused(store: Store, name: str) -> None:
    if [*_used_numbers(store, name)]:
        raise FileExistsError(f"{store.location}/{name} exists")


def _done(
    manifest: Manifest, last: Manifest, files: dict[str, FileFacts], key: str | None
) -> bytes:
    """Return the content of ``DONE``, given the first and last manifest and the facts of all."""
    version, base = manifest.current_version, manifest.base_version
    assert version is not None
    if manifest.full:
        base = None
    elif base is None:
        base = version - 1  # the receiver's default
    said = Publication(
        at=round(time.time(), 3),
        run=manifest.run,
        epoch=manifest.run_epoch,
        owner=manifest.run_owner,
        digest_before=manifest.digest_before,
        digest_after=last.digest_after,
    )
    done = Done(version=version, base_version=base, files=files, publication=said)
    text = msgspec.json.encode(signed(done, key))
    return msgspec.json.format(text) + b"\n"


def manifest_of(part: bytes) -> Manifest:
    """Return the manifest of a part as it is sent; MalformedPart if it has no valid one."""
    starts = range(0, len(part), _HEADER_CHUNK)
    return read_header(part[start : start + _HEADER_CHUNK] for start in starts).manifest
