"""Fetch one file of a version from an object store, through a cache if its hash is known."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final

import xxhash

from engine_ext.errors import ChecksumMismatch, PartUnavailable, TooLarge
from engine_ext.format import Limits
from engine_ext.log.catalog import MAX_DONE_BYTES, Done, FileFacts, parse_done
from engine_ext.object_store import ObjectFacts, ObjectStore
from engine_ext.remote_parts import PartCache

_ATTEMPTS: Final = 2  # at a file that is not found, or whose bytes are not those that were written
_READ_BYTES: Final = 1 << 20


def fetch_object(
    store: ObjectStore,
    listed: ObjectFacts,
    path: Path,
    facts: FileFacts | None,
    cache: PartCache | None,
) -> None:
    """Have an object as a new file.

    Args:
        facts: what the version's ``DONE`` says about it; None if that says nothing.
        cache: keeps it by its hash, for others on this host; on the file system of `path`.

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

    def get(file: BinaryIO) -> None:
        try:
            store.fetch(listed.name, listed.size, file)
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.filename is None:  # of this host
                raise
            why = f"{error.filename} cannot be fetched: {error.strerror}"
            raise PartUnavailable(why) from error

    for attempt in range(1, _ATTEMPTS + 1):
        try:
            if cache is not None and facts is not None:
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


def read_done(store: ObjectStore, name: str) -> Done:
    """Return the content of a ``DONE``.

    Raises:
        LogDamaged: it is not valid.
        OSError: it cannot be read.
    """
    return parse_done(store.read(name, MAX_DONE_BYTES))


def _write(path: Path, get: Callable[[BinaryIO], None], facts: FileFacts | None) -> None:
    with open(path, "w+b", buffering=0) as file:
        get(file)
        if facts is None:
            return
        digest = xxhash.xxh3_128()
        file.seek(0)
        for chunk in iter(lambda: file.read(_READ_BYTES), b""):
            digest.update(chunk)
    if digest.hexdigest() != facts.xxh3_128:
        raise ChecksumMismatch("its bytes differ from those that were written")
