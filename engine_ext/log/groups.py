"""Groups of followers that take the versions of a log together.

::

    LOG/groups/NAME.weight_v000012-9f2c….json    version 12 is complete for the group NAME

A follower of a group prepares a version and says so in its heartbeat. Whoever sees that all live
members have prepared it writes the mark, and each member commits once it has read the mark. So a
mark is never taken back, and it does not matter how many members write it. It names the content:
one of a log that was emptied and written again is another one.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
import xxhash

from engine_ext.errors import LogDamaged
from engine_ext.log.catalog import Listing, folder_name, version_of
from engine_ext.log.delta_log import DeltaLog
from engine_ext.log.heartbeats import Heartbeat

FOLDER: Final = "groups"
HOLDER_PREFIX: Final = "log:"
"""How each `GroupMarks.holder` begins."""
_SUFFIX: Final = ".json"
_FILE: Final = re.compile(r"([A-Za-z0-9_-]{1,64})\.((weight_v[0-9]{1,19})-[0-9a-f]{32})\.json")
_KEPT: Final = 4  # marks of a group


class GroupMarks:
    """The marks of one group in a log. Thread-safe.

    Attributes:
        holder: what names the group where a prepared version is held.
        keys: of the versions that are complete, as they were read last; see `content_key`.
    """

    def __init__(self, log: DeltaLog, group: str) -> None:
        self._log, self._group = log, group
        self.holder = f"{HOLDER_PREFIX}{group}"
        self.keys: frozenset[str] = frozenset()
        self._lock = threading.Lock()  # an older reading does not replace a later one

    def read(self) -> None:
        """Read which versions are complete.

        Raises:
            LogDamaged: the log cannot be read.
        """
        with self._lock:
            try:
                self.keys = frozenset(_read(self._log).get(self._group, ()))
            except OSError as error:
                raise LogDamaged(f"cannot read the delta log: {error.strerror}") from error

    def newest(self, listing: Listing) -> int | None:
        """Return the newest version of a listing that is complete; None without one."""
        found = [version for key in self.keys if (version := version_of_key(key)) is not None]
        return max((v for v in found if content_key(listing, v) in self.keys), default=None)

    def write(self, key: str, members: Sequence[str]) -> None:
        """Mark a version as complete; marks of much older ones are deleted.

        Those of newer ones are of a log that was emptied and written again.

        Raises:
            OSError: the log cannot be written. The mark might be there.
        """
        # For people: when, by this host's clock, and which members had prepared it.
        content = msgspec.json.encode({"at": round(time.time(), 3), "members": [*members]})
        with self._lock:
            self._log.store.put(self._path(key), content, durable=True)
            self.keys |= {key}
        older = [one for one in self.keys if _number(one) < _number(key)]
        old = sorted(older, key=_number)[: 1 - _KEPT]
        with contextlib.suppress(OSError):
            self._log.store.delete([self._path(one) for one in old])

    def _path(self, key: str) -> str:
        return f"{FOLDER}/{self._group}.{key}{_SUFFIX}"


def complete_versions(log: DeltaLog, listing: Listing) -> dict[str, int]:
    """Return the newest complete version of every group of a log.

    Raises:
        OSError, LogDamaged: the log cannot be read.
    """
    found = {}
    for group, keys in _read(log).items():
        marks = GroupMarks(log, group)
        marks.keys = frozenset(keys)
        if (newest := marks.newest(listing)) is not None:
            found[group] = newest
    return found


def content_key(listing: Listing, version: int) -> str | None:
    """Return what names a version of a log and its content; None if it is not listed.

    That is the digest that it leads to, whatever the route, or else a hash of its own parts. A
    version without either is known by the names and the length of its files, and when it was
    written.
    """
    entries = [entry for entry in listing.entries if entry.version == version]
    said = [one.publication for one in entries if one.publication is not None]
    known: object = next((one.digest_after for one in said if one.digest_after is not None), None)
    if known is None:
        if not entries:
            return None
        first = entries[0]  # a folded delta has a longer name, and comes after the version's own
        hashes = sorted(one.xxh3_128 for one in first.files.values() if one is not None)
        are_known = bool(hashes) and len(hashes) == len(first.files)
        known = hashes if are_known else [sorted(first.files), first.nbytes, first.written_at]
    content = xxhash.xxh3_128_hexdigest(msgspec.json.encode(known))
    return f"{folder_name(version)}-{content}"


def next_target(
    own: Heartbeat, others: Iterable[Heartbeat], listing: Listing
) -> tuple[int, str] | None:
    """Return the version that the group prepares now, with its `content_key`; None without one.

    The oldest that a member has prepared, if the log has it as it was prepared and no member
    cannot take it; else the oldest of those that the members can prepare next, as far as known.

    Args:
        own: the member that asks.
        others: the other members.
        listing: of the log, as the member can take it.
    """
    members = [own, *others]
    refused = {version for one in members for version in one.cannot}
    keys = {one.prepared for one in members if one.prepared is not None}
    prepared = {version: key for key in keys if (version := version_of_key(key)) is not None}
    good = [v for v, key in prepared.items() if content_key(listing, v) == key]
    found = [version for version in good if version > own.version and version not in refused]
    if not found:  # a member that has not looked since has no part in it
        reach = [one.reach for one in members if one.reach is not None]
        found = [version for version in reach if version > own.version and version not in refused]
    if not found:
        return None
    key = content_key(listing, min(found))
    return None if key is None else (min(found), key)


def has_prepared(member: Heartbeat, version: int, key: str) -> bool:
    """Return whether a member has a version, or has prepared it."""
    return member.version >= version or member.prepared == key


def _read(log: DeltaLog) -> dict[str, list[str]]:
    """Return the keys of the marks in a log, by group."""
    files = log.store.list(FOLDER).get(FOLDER)
    found: dict[str, list[str]] = {}
    with contextlib.suppress(FileNotFoundError):
        for name in () if files is None else files.names:
            if (match := _FILE.fullmatch(name)) is not None:
                found.setdefault(match[1], []).append(match[2])
    return found


def _number(key: str) -> int:
    return version_of_key(key) or 0


def version_of_key(key: str) -> int | None:
    """Return the version of a `content_key`; None if it is none."""
    return version_of(key.partition("-")[0])
