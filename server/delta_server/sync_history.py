"""The last syncs of an engine and their outcomes; the ranks keep them for all HTTP processes.

Only the process that took a request knows its answer and its timings. A sync of many requests is
one record, which sums up what each of its parts has cost, whichever process has taken it.
"""

from __future__ import annotations

from typing import Final

import msgspec

from delta_server.board import HISTORY, Item
from delta_server.engine import Engine

_MOST: Final = 50


class SyncRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one request for an update; see `CommittedSync` for the counts."""

    at: float  # Unix time at which the request began
    outcome: str  # committed, staged, refused, ...
    error: str | None = None  # type of the error that it was answered with
    message: str | None = None
    version: int | None = None
    base_version: int | None = None
    run: str | None = None  # the version's run
    sync_id: str | None = None
    full: bool = False
    reason: str | None = None  # why it was full
    parts: int = 0  # number of its parts
    nnz: int | None = None
    elements: int | None = None
    tensors: int | None = None
    bytes: int = 0  # of the parts
    apply: str | None = None
    rebuilt: int | None = None  # modules that the engine's own processing has computed anew
    adapter: str | None = None  # the LoRA adapter that it was for
    timings_ms: dict[str, float]  # milliseconds by phase


class _Staged(msgspec.Struct, frozen=True):
    """The sum of the staged parts of the sync in progress; there is at most one."""

    record: SyncRecord | None = None


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
