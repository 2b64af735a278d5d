"""What the ranks remember of the last syncs, whichever process has taken them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from delta_server.reporting import SyncHistory
from engine_ext.ranks.operations import Operation, SyncRecord
from tests.support.endpoint_rig import Rig


def record(outcome: str = "committed", version: int = 1, **changes: Any) -> SyncRecord:
    fields = {
        "at": 0.0,
        "sync_id": "s",
        "bytes": 10,
        "parts": 1,
        "timings_ms": {"receive_ms": 1.0, "stage_ms": 2.0},
    }
    return SyncRecord(outcome=outcome, version=version, **{**fields, **changes})


def test_only_the_last_ones_are_kept(rig: Rig) -> None:
    history = SyncHistory(rig.engine)
    for version in range(60):
        rig.run(history.add(record(version=version)))
    assert [sync.version for sync in rig.run(history.syncs())] == [*range(10, 60)]


@pytest.mark.slow
def test_a_sync_of_many_parts_is_one(rig: Rig) -> None:
    processes = [SyncHistory(rig.engine) for _ in range(2)]

    async def stage() -> None:
        await asyncio.gather(*(processes[n % 2].add(record("staged")) for n in range(60)))

    rig.run(stage())
    assert rig.run(processes[1].syncs()) == []
    last = record(timings_ms={"receive_ms": 1.0, "pause_ms": 5.0})
    whole = rig.run(processes[0].add(last))
    assert rig.run(processes[1].syncs()) == [whole]
    assert (whole.outcome, whole.parts, whole.bytes) == ("committed", 61, 610)
    assert whole.timings_ms == {"receive_ms": 61.0, "stage_ms": 120.0, "pause_ms": 5.0}
    repeat = record("already_applied")
    assert rig.run(processes[1].add(repeat)) == repeat


def test_syncs_of_one_request_are_one_call_each(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while several processes take them in turns."""
    processes, calls = [SyncHistory(rig.engine) for _ in range(2)], list[str]()
    for process in processes:  # each learns once what there is
        rig.run(process.add(record()))
    original = rig.engine.call

    async def counted(request: Operation[Any]) -> Any:
        calls.append(request.name)
        return await original(request)

    monkeypatch.setattr(rig.engine, "call", counted)
    for number in range(6):
        rig.run(processes[number % 2].add(record(version=number)))
    assert calls == ["put"] * 6


def test_a_dropped_sync_adds_nothing_to_another(rig: Rig) -> None:
    history = SyncHistory(rig.engine)
    for version in (1, 2):
        rig.run(history.add(record("staged", version=version)))
    assert rig.run(history.add(record(version=2))).parts == 2
    assert rig.run(history.add(record(version=1))).parts == 1
