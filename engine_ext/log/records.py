"""Read the record of a version in a delta log, and the digests that its parts declare.

A record is a hash of the contents of all files, whatever these are called. So a number that was
used twice, by two runs, has two records.

With a key, a part's signature is verified before anything of it is parsed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
import xxhash

from engine_ext.errors import ChecksumMismatch
from engine_ext.files import hash_of_rest
from engine_ext.format import (
    SIGNATURE_SUFFIX,
    FrameReader,
    Header,
    Limits,
    Manifest,
    PartGate,
    Verifier,
    part_identity,
    signing_key,
)
from engine_ext.log.catalog import Entry, FileFacts
from engine_ext.log.folder_store import open_regular
from engine_ext.log.publication import done_of, is_signed
from engine_ext.version_folders import INDEX

if TYPE_CHECKING:
    from typing_extensions import Buffer

_Read = TypeVar("_Read")

_CHUNK: Final = 1 << 16
_MOST_SIGNATURE: Final = 1 << 12  # bytes


@dataclass(frozen=True, slots=True)
class Digests:
    """Digests of the model at a version's base and at the version; None if no part has them."""

    before: str | None
    after: str | None


def listed_record(entry: Entry) -> str | None:
    """Return a version's record from its ``DONE`` alone; None if that has no hashes."""
    facts = [one for one in entry.files.values() if one is not None]
    if entry.foreign or len(facts) < len(entry.files):
        return None
    return _record(facts)


def read_record(entry: Entry) -> str:
    """Return a version's record from its files, which must be on this host.

    Raises:
        LogDamaged: a file is missing, or is not what ``DONE`` says.
    """
    entry.require_files()
    found = []
    for name in [*entry.files, *([INDEX] if entry.foreign else [])]:
        with entry.reading(name):
            with open_regular(entry.folder / name) as file:
                content = hash_of_rest(file)
                hashed = FileFacts(file.tell(), content)
        if entry.files.get(name) not in (None, hashed):
            why = "its bytes differ from those that were written"
            raise entry.damaged(f"{name}: {why}", file=name)
        found.append(hashed)
    return _record(found)


def read_digests(entry: Entry) -> Digests:
    """Return the digests that a version's parts declare, from the beginnings of its files.

    A folder with an index declares none. With a key, a signed ``DONE`` has them already; the files
    are read whole if it is not signed.

    Raises:
        LogDamaged: a file is missing, is not signed, or begins with no valid manifest.
    """
    done, key = done_of(entry), signing_key()
    if key is not None and done is not None and is_signed(done, key):
        said = done.publication
        assert said is not None
        return Digests(said.digest_before, said.digest_after)
    parts = [] if entry.foreign else _read_parts(entry, read_header)
    return declared_digests(part.manifest for part in parts)


def declared_digests(manifests: Iterable[Manifest]) -> Digests:
    """Return the digests of the whole model that the manifests of one version declare."""
    before, after = None, None
    for manifest in manifests:
        before, after = manifest.digest_before or before, manifest.digest_after or after
    return Digests(before, after)


def read_identities(entry: Entry) -> list[str]:
    """Return the identities of a version's parts, as ranks know them; none of a foreign one.

    Raises:
        LogDamaged: a file is missing, is not signed, or is no part.
    """
    return [] if entry.foreign else _read_parts(entry, _read_identity)


def read_header(pieces: Iterable[Buffer]) -> Header:
    """Return the header of a part as it is sent, from its first bytes.

    Raises:
        MalformedPart: it has no valid one.
    """
    limits = Limits()
    frame, gate = FrameReader(limits.max_part_bytes), PartGate(limits)
    for sent in pieces:
        for piece in frame.feed(memoryview(sent)):
            gate.feed(piece)
        if gate.header is not None:
            return gate.header
    return gate.finish()


def _read_identity(pieces: Iterable[Buffer]) -> str:
    frame = FrameReader(Limits().max_part_bytes)
    container = b"".join(piece for sent in pieces for piece in frame.feed(memoryview(sent)))
    frame.finish()
    return part_identity(read_header([container]), container)


def read_part(entry: Entry, path: Path) -> bytes:
    """Return a part's bytes as they were sent, once signature and hash are verified.

    Raises:
        Unauthorized: a key is set, and the part is not signed with it.
        ChecksumMismatch: ``DONE`` has another hash.
        LogDamaged: it is no regular file.
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        data = file.read()
    key = signing_key()
    if key is not None:
        verifier = Verifier(key, _signature(path.with_name(path.name + SIGNATURE_SUFFIX)))
        verifier.feed(data)
        verifier.finish()
    facts = entry.files[path.name]
    if facts is not None and xxhash.xxh3_128_hexdigest(data) != facts.xxh3_128:
        raise ChecksumMismatch("its bytes differ from those that were written")
    return data


def _signature(path: Path) -> str | None:
    with contextlib.suppress(FileNotFoundError), open_regular(path) as file:
        return file.read(_MOST_SIGNATURE).decode("ascii", "replace")
    return None


def _read_parts(entry: Entry, read: Callable[[Iterable[Buffer]], _Read]) -> list[_Read]:
    found, is_signed = [], signing_key() is not None
    for path in entry.paths:
        with entry.reading(path.name):
            if is_signed:
                found.append(read([read_part(entry, path)]))
                continue
            with open_regular(path) as file:
                found.append(read(iter(functools.partial(file.read, _CHUNK), b"")))
    return found


def _record(facts: list[FileFacts]) -> str:
    content = sorted((one.xxh3_128, one.bytes) for one in facts)
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(content))
