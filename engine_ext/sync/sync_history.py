"""The last syncs of an engine and their outcomes, as every rank remembers them.

Only the HTTP process that took a request knows its answer and its timings. It reports them to the
ranks, so that several HTTP processes share one history.
"""

from __future__ import annotations

from collections import deque

import msgspec

from engine_ext.ranks.operations import SyncRecord


class SyncHistory:
    """The last `capacity` syncs, the newest one last."""

    def __init__(self, capacity: int = 50) -> None:
        self._syncs: deque[SyncRecord] = deque(maxlen=capacity)
        # The sum of the staged parts of the sync in progress; there is at most one.
        self._staged: SyncRecord | None = None

    def add(self, record: SyncRecord) -> SyncRecord:
        """Remember one request, and return its record with earlier shares added.

        A ``staged`` record is a share of a later one of the same version and ``sync_id``.
        """
        staged, key = self._staged, (record.version, record.sync_id)
        if staged is not None and (staged.version, staged.sync_id) == key:
            record = _sum(staged, record)
        if record.outcome == "staged":
            self._staged = record
        else:
            self._syncs.append(record)
            if staged is not None and record.outcome == "committed":
                self._staged = None
        return record

    def syncs(self) -> list[SyncRecord]:
        """Return all that is remembered."""
        return list(self._syncs)


def _sum(staged: SyncRecord, record: SyncRecord) -> SyncRecord:
    earlier, later = staged.timings_ms, record.timings_ms
    phases = {**earlier, **later}
    timings = {p: round(earlier.get(p, 0.0) + later.get(p, 0.0), 3) for p in phases}
    parts, size = staged.parts + record.parts, staged.bytes + record.bytes
    return msgspec.structs.replace(record, bytes=size, parts=parts, timings_ms=timings)
