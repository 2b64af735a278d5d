"""The log of another engine, read through its endpoints: for an engine that has none of its own.

The other engine offers the versions of its log up to the one that it holds, and its own digest. The
digest that its log declares for that version must be the same, and every rank proves it when the
version is committed. So the engine that joins has the other one's weights, or says why not.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, NoReturn

import msgspec
import xxhash

from engine_ext.errors import LogDamaged, PartUnavailable
from engine_ext.format import SIGNATURE_SUFFIX
from engine_ext.log.catalog import DONE, Done, Entry, FileFacts
from engine_ext.log.store import Files
from engine_ext.remote_parts import LocalFolder, PartCache, Peers
from engine_ext.structs import prepare

_MOST_BYTES: Final = 1 << 28


class OfferedVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A version of an engine's log; `signatures` are those of its parts, by file name."""

    folder: str
    done: Done
    signatures: dict[str, str] = {}


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of ``GET /delta_parts``: what an engine holds, and what leads there."""

    version: int
    digest: str
    versions: list[OfferedVersion]


prepare(Offer)


class PeerStore:
    """What peers offer; see `engine_ext.log.store.Store`. Nothing can be written.

    Args:
        peers: the first one that answers is taken.
        cache: keeps their parts.
    """

    drafts_are_hidden = False
    reads_at_once = 1

    def __init__(self, peers: Peers, cache: PartCache) -> None:
        self._peers, self._cache = peers, cache
        self._folder: LocalFolder | None = None
        self._offered: dict[str, OfferedVersion] = {}

    @property
    def location(self) -> str:
        """The URLs of the peers."""
        return " ".join(self._peers.urls)

    @property
    def local(self) -> Path:
        """A folder of this host; it goes with this object."""
        if self._folder is None:
            self._folder = LocalFolder(self._cache)
        return self._folder.path

    def list(self, folder: str | None = None) -> Mapping[str, Files]:
        """Return what the first peer that answers offers.

        Raises:
            LogDamaged: its log does not lead to the weights that it holds.
        """
        text = self._peers.read_offer(_MOST_BYTES)
        try:
            offer = msgspec.json.decode(text, type=Offer)
        except (ValueError, RecursionError) as error:
            raise OSError(errno.EIO, f"a peer's offer cannot be read: {error}") from error
        _require_proven(offer)
        self._offered = {one.folder: one for one in offer.versions}
        found = {name: OfferedFiles(one) for name, one in self._offered.items()}
        return found if folder is None else {k: v for k, v in found.items() if k == folder}

    def read(self, name: str, most: int) -> bytes:
        """Return the content of a version's ``DONE``."""
        folder, _, file = name.partition("/")
        if folder not in self._offered or file != DONE:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return msgspec.json.encode(self._offered[folder].done)

    @contextlib.contextmanager
    def fetched(self, entry: Entry, files: Files | None) -> Iterator[None]:
        """Fetch the parts of a version; they are removed afterwards."""
        shutil.rmtree(entry.folder, ignore_errors=True)
        signatures = self._offered[entry.folder.name].signatures
        try:
            try:
                entry.folder.mkdir(parents=True)
                for name, facts in entry.files.items():
                    assert facts is not None
                    os.link(self._fetch(facts), entry.folder / name)
                    if name in signatures:
                        # Not into a link to the cache.
                        with open(entry.folder / f"{name}{SIGNATURE_SUFFIX}", "x") as file:
                            file.write(signatures[name])
            except OSError as error:
                why = f"{entry.folder.name} cannot be kept on this host: {error.strerror}"
                raise PartUnavailable(why) from error
            yield
        finally:
            shutil.rmtree(entry.folder, ignore_errors=True)

    def part(self, name: str, facts: FileFacts, *, reads: bool) -> None:
        """Nothing is handed on by an engine without a log."""

    def _fetch(self, facts: FileFacts) -> Path:
        content, size = facts.xxh3_128, facts.bytes
        self._peers.require(self._cache, content, size)
        return self._cache.get(content, size, _gone)

    def put(self, *_: Any, **__: Any) -> NoReturn:
        """Raise OSError; so do all that write."""
        raise OSError(errno.EROFS, "a peer's log can only be read")

    draft = refuse = delete = turn = put


class OfferedFiles:
    """The files of an offered version; see `engine_ext.log.store.Files`."""

    def __init__(self, offered: OfferedVersion) -> None:
        self._done = offered.done
        self._hash = xxhash.xxh3_128_hexdigest(msgspec.json.encode(offered.done))

    @property
    def names(self) -> Collection[str]:
        """The names of its parts, and ``DONE``."""
        return [DONE, *self._done.files]

    def size(self, name: str) -> int:
        """Return a part's length."""
        return self._done.files[name].bytes

    def written_at(self, name: str) -> float:
        """Return when the sender has published it, by its clock; 0 if it did not say."""
        return 0.0 if self._done.publication is None else self._done.publication.at

    def tag(self, name: str) -> str:
        """Return a hash of what ``DONE`` says."""
        return self._hash

    def published_at(self, mark: str) -> float:
        """Return the same as `written_at`."""
        return self.written_at(mark)


def offer_of(
    entries: Iterable[Entry],
    version: int,
    digest: str,
    signature: Callable[[str], str | None],
) -> Offer:
    """Return what an engine offers of its log.

    Args:
        entries: that lead to the version, or are on the way there.
        version, digest: that it holds.
        signature: returns that of a part, given its name in the store.
    """
    offered = []
    for entry in entries:
        facts = {name: one for name, one in entry.files.items() if one is not None}
        if entry.foreign or len(facts) < len(entry.files):
            continue
        name = entry.folder.name
        signatures = {one: signature(f"{name}/{one}") for one in facts}
        offered.append(
            OfferedVersion(
                folder=name,
                done=Done(
                    version=entry.version,
                    base_version=entry.base_version,
                    files=facts,
                    publication=entry.publication,
                ),
                signatures={k: text for k, text in signatures.items() if text is not None},
            )
        )
    return Offer(version=version, digest=digest, versions=offered)


def _require_proven(offer: Offer) -> None:
    held = [one.done for one in offer.versions if one.done.version == offer.version]
    if offer.versions and not held:
        raise LogDamaged(
            f"a peer holds version {offer.version}, which its log does not have: nothing shows "
            "that one leads to the other",
            version=offer.version,
        )
    for done in held:
        declared = None if done.publication is None else done.publication.digest_after
        if declared != offer.digest:
            raise LogDamaged(
                f"a peer holds version {offer.version} with the digest {offer.digest}, and its log "
                f"declares {declared} for it: nothing shows that one leads to the other",
                version=offer.version,
            )


def _gone(file: BinaryIO) -> NoReturn:
    raise PartUnavailable("a part was removed from this host's cache before it was read")
