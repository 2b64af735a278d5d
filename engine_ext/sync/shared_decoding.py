"""Read a part from the spool, and decode it once for all ranks of the host.

The rank that first takes the part's lock verifies and decodes it, and leaves the result beside it.
The others wait for the lock, which the system releases if that rank dies: whoever gets it next and
finds no result decodes. What one rank has verified is what all use, as they map the same memory: a
result tells of which file it was made, and a rank that has another one decodes and verifies that.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from collections.abc import Iterator
from typing import BinaryIO

import xxhash

from engine_ext.errors import MalformedPart
from engine_ext.files import FileLock, decoded_path, lock_path, remove_beside, unfinished_path
from engine_ext.format import (
    Limits,
    Part,
    decode_part,
    is_decoded,
    part_identity,
    read_decoded,
    write_decoded,
)
from engine_ext.sync.mapped_part import map_part

logger = logging.getLogger(__name__)


def read_part(path: str, identity: str, limits: Limits, *, shared: bool) -> Part:
    """Read and decode a part of this identity.

    Args:
        shared: whether other ranks on this host read the part, too.

    Raises:
        DeltaError: it cannot be decoded, or is another part now. Every rank raises the same.
    """
    data = map_part(path)
    if not shared:
        return _decode(data, identity, limits)
    key = _key(identity, os.stat(path))
    with _locked(path) as is_enforced:
        found = _find(path, key)
        part = None
        if found is None:
            part = _decode(data, identity, limits)
            if is_enforced:
                found = _publish(path, part, key)
    if found is None:
        assert part is not None
        return part
    return read_decoded(data, found, limits)


@contextlib.contextmanager
def _locked(path: str) -> Iterator[bool]:
    """Hold the lock of a part; yield whether no other rank can have it."""
    try:
        with contextlib.ExitStack() as stack:
            is_enforced = False
            with contextlib.suppress(OSError):  # no room for another file
                lock = FileLock(lock_path(path), os.O_RDWR | os.O_CREAT, None)
                stack.enter_context(lock)
                is_enforced = lock.is_enforced and lock.is_in_place()
            yield is_enforced
    finally:
        # Nobody else removes what is made after the part was removed.
        if not os.path.exists(path):
            remove_beside(path)


def _decode(data: mmap.mmap, identity: str, limits: Limits) -> Part:
    part = decode_part(data, limits)
    if part_identity(part.header, data) != identity:
        raise MalformedPart("the part changed between its arrival and its staging")
    return part


def _key(identity: str, status: os.stat_result) -> str:
    """Return what tells a part in a file from other parts, and from the same one changed."""
    file = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    return xxhash.xxh3_128_hexdigest(f"{identity} {file}".encode())


def _find(path: str, key: str) -> mmap.mmap | None:
    """Return what another rank has decoded, or None."""
    try:
        with open(decoded_path(path), "rb") as file:
            found = _mapping(file)
    except (OSError, ValueError):  # none, or an empty one
        return None
    return found if is_decoded(found, key) else None


def _publish(path: str, part: Part, key: str) -> mmap.mmap | None:
    """Leave a decoded part to the other ranks and return it as they find it; None if it cannot.

    Another rank may write at the same time if the part and its lock are removed meanwhile. Each
    writes a file of its own, and maps that before it has a name that others look for.
    """
    unfinished, decoded = unfinished_path(path), decoded_path(path)
    try:
        unfinished.unlink(missing_ok=True)  # of a rank that died
        with open(unfinished, "w+b", opener=_private) as file:
            write_decoded(file, part, key)
            file.flush()
            found = _mapping(file)
        unfinished.replace(decoded)
        return found
    except OSError as error:
        logger.warning("delta updates: every rank decodes a part for itself: %s", error)
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        return None


def _mapping(file: BinaryIO) -> mmap.mmap:
    # Nothing writes into the mapping, but torch makes no tensor of read-only memory.
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_EXCL, 0o600)
