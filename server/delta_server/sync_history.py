"""The last syncs of an engine and their outcomes; the ranks keep them for all HTTP processes.

Only the process that took a request knows its answer and its timings. A sync of many requests is
one record, which sums up what each of its parts has cost, whichever process has taken it.
"""

from __future__ import annotations

from typing import Final

import msgspec

from delta_server.board import HISTORY, Item
from delta_server.engine import Engine
from engine_ext.ranks.operations import SyncRecord
from engine_ext.structs import prepare

_MOST: Final = 50


class _Staged(msgspec.Struct, frozen=True):
    """The sum of the staged parts of the sync in progress; there is at most one."""

    record: SyncRecord | None = None


prepare(_Staged)


class SyncHistory:
    """The last 50 syncs of the model, or of the adapter as which `engine` sees the engine."""

    def __init__(self, engine: Engine) -> None:
        self._item = Item(engine, HISTORY, _Staged)

    async def add(self, record: SyncRecord) -> SyncRecord:
        """Remember one request, and return its record with earlier shares added.

        A ``staged`` record is a share of a later one of the same version and ``sync_id``.
        """
        whole = record

        def change(staged: _Staged) -> _Staged:
            nonlocal whole
            whole = _summed(staged.record, record)
            if record.outcome == "staged":
                return _Staged(whole)
            return _Staged() if record.outcome == "committed" else staged

        def append(staged: _Staged) -> SyncRecord | None:
            return None if record.outcome == "staged" else _summed(staged.record, record)

        await self._item.update(change, append=append, most=_MOST)
        return whole

    async def syncs(self) -> list[SyncRecord]:
        """Return all that is remembered, the newest one last."""
        return msgspec.convert(await self._item.entries(), list[SyncRecord])


def _summed(staged: SyncRecord | None, record: SyncRecord) -> SyncRecord:
    """Return a record with the earlier shares of its sync, if `staged` is of that."""
    key = (record.version, record.sync_id)
    if staged is None or (staged.version, staged.sync_id) != key:
        return record
    earlier, later = staged.timings_ms, record.timings_ms
    phases = {**earlier, **later}
    timings = {p: round(earlier.get(p, 0.0) + later.get(p, 0.0), 3) for p in phases}
    parts, size = staged.parts + record.parts, staged.bytes + record.bytes
    return msgspec.structs.replace(record, bytes=size, parts=parts, timings_ms=timings)
