"""Compare a delta log with what led to an engine's version, by contents: numbers are used again.

The ranks keep the records of the log's versions that have led to theirs (see
`engine_ext.log.records`), so every HTTP process of an engine finds the same. A version that
came by request has no record at first: it is that of the log if its digest or its parts are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec

from delta_server.board import Item
from delta_server.engine import Engine, unseen_parts
from engine_ext.errors import LogDamaged, LogDiverged
from engine_ext.log import (
    DeltaLog,
    Entry,
    Listing,
    listed_record,
    read_digests,
    read_identities,
    read_record,
    version_of,
)
from engine_ext.ranks import LOG_RECORDS
from engine_ext.ranks.operations import LogRecords

_MOST_COMPARED: Final = 128  # versions before the engine's; half of what the ranks keep
_MOST_READ: Final = 8  # of them, where their files must be read for that
_MOST_NAMED: Final = 8

_Read = TypeVar("_Read")
_Key = tuple[str, float, int, str | None]


@dataclass(frozen=True, slots=True)
class Comparison:
    """How a log relates to an engine's version.

    Attributes:
        other: why the log does not continue the engine's history; None if it does.
        is_gone: whether the version was in the log, and is not any more. What starts from it must
            declare the digest of the weights that it starts from then.
    """

    other: LogDiverged | None = None
    is_gone: bool = False


class LogHistory:
    """Compares one log with one engine."""

    def __init__(self, engine: Engine, log: DeltaLog) -> None:
        self._engine, self._log = engine, log
        self._item = Item(engine, LOG_RECORDS, LogRecords)
        self._read: dict[_Key, str] = {}  # records of what has none in ``DONE``
        self._contents: dict[_Key, tuple[str | None, list[str]]] = {}  # of the last one compared

    async def compare(self, listing: Listing, version: int, digest: str) -> Comparison:
        """Compare a listing with what led to the engine's version and digest.

        The ranks keep the records of versions that are new in the log, up to that version.

        Raises:
            PartUnavailable: the version cannot be read now.
            SpoolFull: the host's cache has no room for it.
        """
        led = await self._item.read()
        known = led.records
        own = [entry for entry in listing.entries if entry.version == version]
        ours = {entry.folder.name: await self.record(entry) for entry in own}
        earlier = [entry for entry in listing.entries if entry.version < version]
        records = {entry.folder.name: listed_record(entry) for entry in earlier[-_MOST_COMPARED:]}
        for entry in earlier[-_MOST_READ:]:
            if entry.folder.name in known:
                records[entry.folder.name] = await self.record(entry)
        found = {name: record for name, record in (records | ours).items() if record is not None}
        changed = [name for name, record in found.items() if known.get(name, record) != record]
        is_known = any(record is not None and known.get(n) == record for n, record in ours.items())
        if is_known:  # no two folds of the same versions have the same bytes
            changed = [name for name in changed if "_from_" not in name]
        if changed or not is_known:
            was_here = not is_known and any(version_of(name) == version for name in known)
            # The same parts lead to other weights from other ones.
            is_ours = await self._is_ours(own, version, digest, by_parts=not changed)
            if is_ours is None and was_here:  # only a folded one can be added later
                new_here = (name for name in ours if name in found and name not in known)
                changed += [name for name in new_here if "_from_" not in name]
            if is_ours is False or (is_ours is None and changed):
                return Comparison(_other(listing, version, changed or [*ours]))
            if is_ours is None and was_here:
                return Comparison(_ended(listing, version), is_gone=True)
        new = {name: record for name, record in found.items() if known.get(name) != record}
        if new and led.version == version:  # else another process has changed the weights since
            await self._item.try_put(msgspec.structs.replace(led, records=known | new))
        return Comparison()

    async def record(self, entry: Entry) -> str | None:
        """Return a version's record; None if its files are damaged.

        Raises:
            PartUnavailable: the version cannot be read now.
            SpoolFull: the host's cache has no room for it.
        """
        if (record := listed_record(entry)) is not None:
            return record
        key = _key(entry)
        if key not in self._read:
            try:
                self._read[key] = await asyncio.to_thread(self._with_files, entry, read_record)
            except LogDamaged:
                return None
        return self.keep(entry, self._read[key])

    def keep(self, entry: Entry, record: str) -> str:
        """Keep a version's record, which was read from its files; return it."""
        self._read[_key(entry)] = record
        self._read = dict([*self._read.items()][-_MOST_COMPARED:])
        return record

    async def _is_ours(
        self, own: Sequence[Entry], version: int, digest: str, *, by_parts: bool
    ) -> bool | None:
        """Return whether the engine has the content of these entries; None if nothing shows it."""
        found: set[bool] = set()
        for entry in own:
            after, parts = await self._content(entry)
            if after is not None:
                found.add(after == digest)
            elif by_parts and parts and not await unseen_parts(self._engine, version, parts):
                found.add(True)
        return max(found, default=None)

    async def _content(self, entry: Entry) -> tuple[str | None, list[str]]:
        """Return the digest that a version leads to, or else the identities of its parts."""

        def read(entry: Entry) -> tuple[str | None, list[str]]:
            after = read_digests(entry).after
            return after, [] if after is not None else read_identities(entry)

        key = _key(entry)
        if key not in self._contents:
            try:
                found = await asyncio.to_thread(self._with_files, entry, read)
            except LogDamaged:
                return None, []
            self._contents = {key: found}
        return self._contents[key]

    def _with_files(self, entry: Entry, read: Callable[[Entry], _Read]) -> _Read:
        with self._log.fetched(entry):
            return read(entry)


def _key(entry: Entry) -> _Key:
    """Return what changes with a version's files, as far as a listing shows it."""
    return entry.folder.name, entry.written_at, entry.nbytes, listed_record(entry)


def _other(listing: Listing, version: int, changed: Sequence[str]) -> LogDiverged:
    """Return the error for a log of another history."""
    return LogDiverged(
        f"the delta log holds another history than the one that led to the engine's version "
        f"{version}: {', '.join(changed[:_MOST_NAMED])} now has other content; the engine takes a "
        f"full version from {version} on, no delta",
        version=version,
        newest=listing.newest,
        changed=[*changed],
    )


def _ended(listing: Listing, version: int) -> LogDiverged | None:
    """Return the error for a log that ends before the engine's version, unless it does not."""
    refused = [folder.name for folder in listing.refused if version_of(folder.name) == version]
    if listing.newest is not None and listing.newest >= version and not refused:
        return None
    why = f"the newest that it has now is {listing.newest}"
    if refused:
        why = f"{refused[0]} is marked as refused now"
    return LogDiverged(
        f"the delta log no longer leads to the engine's version {version}, which was in it: {why}; "
        f"the engine takes a full version from {version} on, no delta",
        version=version,
        newest=listing.newest,
        changed=refused,
    )
