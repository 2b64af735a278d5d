"""What the ranks remember of the last syncs."""

from __future__ import annotations

from typing import Any

from engine_ext.ranks.operations import SyncRecord
from engine_ext.sync.sync_history import SyncHistory


def record(outcome: str = "committed", version: int = 1, **changes: Any) -> SyncRecord:
    fields = {
        "at": 0.0,
        "sync_id": "s",
        "bytes": 10,
        "parts": 1,
        "timings_ms": {"receive_ms": 1.0, "stage_ms": 2.0},
    }
    return SyncRecord(outcome=outcome, version=version, **{**fields, **changes})


def test_only_the_last_ones_are_kept() -> None:
    history = SyncHistory(capacity=3)
    for version in range(10):
        history.add(record(version=version))
    assert [sync.version for sync in history.syncs()] == [7, 8, 9]


def test_a_sync_of_many_parts_is_one() -> None:
    history = SyncHistory()
    for _ in range(1000):
        history.add(record("staged"))
    assert history.syncs() == []
    last = record(timings_ms={"receive_ms": 1.0, "pause_ms": 5.0})
    told = history.add(last)
    assert history.syncs() == [told]
    assert (told.outcome, told.parts, told.bytes) == ("committed", 1001, 10010)
    assert told.timings_ms == {"receive_ms": 1001.0, "stage_ms": 2000.0, "pause_ms": 5.0}
    assert history.add(record("already_applied")) == record("already_applied")


def test_another_sync_does_not_get_what_a_dropped_one_brought() -> None:
    history = SyncHistory()
    history.add(record("staged", version=1))
    history.add(record("staged", version=2))
    assert history.add(record(version=2)).parts == 2
    assert history.add(record(version=1)).parts == 1
