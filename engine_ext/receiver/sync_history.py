"""The last syncs of an engine and their outcomes, as every rank remembers them.

Only the HTTP process that took a request knows its answer and its timings. It reports them to the
ranks, so that several HTTP processes share one history.
"""

from __future__ import annotations

from collections import deque

import msgspec

from engine_ext.wire.operations import SyncRecord

_CAPACITY = 50


class SyncHistory:
    """The last syncs, the newest one last.

    Args:
        capacity: how many are remembered.
    """

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._syncs: deque[SyncRecord] = deque(maxlen=capacity)
        # The sum of the staged parts of the sync in progress; there is at most one.
        self._staged: SyncRecord | None = None

    def add(self, record: SyncRecord) -> SyncRecord:
        """Remember one request.

        Args:
            record: if it is ``staged``, it is a share of a later record of the same version and
                ``sync_id``.

        Returns:
            The record, with the shares that came before it added.
        """
        staged = self._staged
        if staged is not None and _key(staged) == _key(record):
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


def _key(record: SyncRecord) -> tuple[int | None, str | None]:
    return record.version, record.sync_id


def _sum(staged: SyncRecord, record: SyncRecord) -> SyncRecord:
    earlier, later = staged.timings_ms, record.timings_ms
    return msgspec.structs.replace(
        record,
        bytes=staged.bytes + record.bytes,
        parts=staged.parts + record.parts,
        timings_ms={
            phase: round(earlier.get(phase, 0.0) + later.get(phase, 0.0), 3)
            for phase in {**earlier, **later}
        },
    )
