"""The audit trail of an engine: one record per change, in the file before the engine serves."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from delta_server import recent
from delta_server.audit import Audit
from engine_ext.audit import AuditFile, AuditRecord, EngineTrail, read_engine_trail, read_lines
from engine_ext.format import RunSender
from tests.support.delta_bodies import (
    BASE,
    NEXT,
    OTHER_STEP,
    RESYNCED,
    STEP,
    VERSION,
    after,
    delta_part,
    full_part,
    same,
)
from tests.support.endpoint_rig import Rig, assert_error
from tests.support.present import present
from tests.support.served_models import delta_between, one_part
from tests.support.toy_adapters import A as ADAPTER_TENSOR
from tests.support.toy_adapters import fresh_adapter, with_adapters
from tests.unit.server.delta_logs import write_steps
from tests.unit.server.other_process import Process
from tests.unit.server.test_runs import A, a_step

Start = Callable[..., Rig]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


@pytest.fixture
def start(make_rig: Callable[..., Rig], file: Path) -> Start:
    """Starts an engine that writes the file."""
    return lambda **settings: make_rig(audit_file=str(file), **settings)


def records(file: Path) -> list[AuditRecord]:
    return [present(line.record) for line in read_lines(file)]


def kinds(file: Path) -> list[tuple[str, int | None, int]]:
    return [(one.kind, one.base_version, one.version) for one in records(file)]


def sound(file: Path) -> EngineTrail:
    trail = read_engine_trail(file, None)
    assert trail.problems == []
    return trail


def test_engine_without_file_writes_nothing(rig: Rig, tmp_path: Path) -> None:
    rig.send(delta_part())
    assert rig.status().audit is None
    assert [path.name for path in tmp_path.iterdir()] == ["spool"]


def test_each_change_has_one_record(start: Start, file: Path) -> None:
    rig = start()
    body = delta_part()
    rig.assert_committed(rig.send(body), NEXT, 8)
    assert rig.send(body).json()["status"] == "already_applied"
    assert rig.post("/delta_rollback").status_code == 200
    rig.assert_committed(rig.send(full_part(RESYNCED, 9)), RESYNCED, 9)
    empty = rig.post("/update_weight_version", json={"new_version": "10"})
    assert empty.json()["success"]
    assert kinds(file) == [
        ("loaded", None, 7),
        ("committed", 7, 8),
        ("rolled_back", 8, 7),
        ("committed", 7, 9),
        ("committed", 9, 10),
    ]
    found = records(file)
    weights = (BASE, NEXT, BASE, RESYNCED, RESYNCED)
    assert [one.digest for one in found] == [rig.digest_of(one) for one in weights]
    assert [one.digest_before for one in found[1:]] == [one.digest for one in found[:-1]]
    assert [one.full for one in found] == [False, False, False, True, False]
    assert [one.origin for one in found] == [None, "sender", None, "sender", "engine"]
    assert found[1].bytes == len(body)
    assert len({one.boot for one in found}) == 1
    assert {(one.engine, one.pid) for one in found} == {("in-memory", os.getpid())}
    assert sound(file).reached(10)
    status = present(rig.status().audit)
    assert (status.file, status.records, status.pending, status.problem) == (str(file), 5, 0, None)


def test_record_names_sender_and_bytes_of_all_parts(start: Start, file: Path) -> None:
    rig = start()
    metadata: dict[str, Any] = {"base_version": 7, "num_parts": 2, "sync_id": "s", **A}
    bodies = [
        delta_part(step, part=n, **metadata)
        for n, step in enumerate(({"embed.weight": {0: 1}}, {"norm.weight": {7: 2}}))
    ]
    for body in bodies:
        rig.send(body)
    record = records(file)[-1]
    assert record.sender == RunSender(run="a", epoch=1, host="first-host", pid=11)
    assert (record.run, record.sync_id, record.parts) == ("a", "s", 2)
    assert record.bytes == sum(map(len, bodies))


def test_refused_sync_leaves_no_record(start: Start, file: Path) -> None:
    rig = start()
    assert_error(rig.send(delta_part(version=9, base_version=8)), 409, "VersionConflict")
    rig.engine.shards[0].undoes = rig.engine.shards[1].undoes = True
    rig.engine.shards[1].breaks = True
    assert_error(rig.send(delta_part()), 500, "WriteUndone")
    rig.engine.shards[1].breaks = False
    rig.assert_committed(rig.send(delta_part(sync_id="again")), NEXT, 8)
    assert kinds(file) == [("loaded", None, 7), ("committed", 7, 8)]


def test_failed_write_is_recorded_and_full_sync_follows(start: Start, file: Path) -> None:
    rig = start()
    rig.fail_commit()
    assert rig.post("/update_weights_delta").status_code == 415
    rig.assert_committed(rig.send(full_part(RESYNCED, 8)), RESYNCED, 8)
    assert kinds(file) == [("loaded", None, 7), ("uncertain", 7, 7), ("committed", 7, 8)]
    assert [one.digest is None for one in records(file)] == [False, True, False]
    sound(file)


def test_change_from_outside_is_recorded(start: Start, file: Path) -> None:
    rig = start()
    for receiver in rig.engine.receivers:
        receiver.weights_replaced("a reload")
    rig.assert_committed(rig.send(full_part(RESYNCED, 8)), RESYNCED, 8)
    assert kinds(file) == [("loaded", None, 7), ("found", 7, 7), ("committed", 7, 8)]
    assert records(file)[1].changed_by == "a reload"
    trail = sound(file)
    assert "a reload" in trail.notes[0]


def test_replayed_log_is_recorded(start: Start, file: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.mkdir()
    write_steps(log)
    rig = start(log=str(log))
    assert kinds(file)[0] == ("loaded", None, VERSION)
    assert kinds(file)[-1][-1] == VERSION + 3
    assert {one.origin for one in records(file)[1:]} == {"log"}
    sound(file)
    assert rig.status().version.number == VERSION + 3


def test_adapter_has_a_chain_of_its_own(start: Start, file: Path) -> None:
    rig = start()
    with_adapters(rig, "one")
    base = fresh_adapter()
    delta = delta_between(ADAPTER_TENSOR, base[ADAPTER_TENSOR], base[ADAPTER_TENSOR] + 1)
    body = one_part([delta], current_version=1, **A)
    assert rig.send(body, adapter="one").json()["status"] == "committed"
    rig.assert_committed(rig.send(delta_part()), NEXT, 8)
    assert [(one.adapter, one.kind, one.version) for one in records(file)] == [
        (None, "loaded", 7),
        ("one", "loaded", 0),
        ("one", "committed", 1),
        (None, "committed", 8),
    ]
    sound(file)


def test_two_starts_are_two_chains(start: Start, file: Path, tmp_path: Path) -> None:
    start().send(a_step())
    other = Rig(tmp_path / "spool2", audit_file=str(file))
    other.send(a_step())
    other.close()
    assert kinds(file) == [("loaded", None, 7), ("committed", 7, 8)] * 2
    assert len({one.boot for one in records(file)}) == 2
    sound(file)


# A file that cannot be written ---------------------------------------------------------------


def broken(file: Path) -> Callable[[], None]:
    """Make the file impossible to write; returns what ends that."""
    aside = file.with_suffix(".aside")
    if file.exists():
        file.rename(aside)
    file.mkdir()

    def mend() -> None:
        file.rmdir()
        if aside.exists():
            aside.rename(file)

    return mend


@pytest.mark.parametrize("paused", [False, True])
def test_unwritable_file_refuses_before_first_byte(start: Start, file: Path, paused: bool) -> None:
    rig = start()
    mend = broken(file)
    rig.engine.paused = paused
    rig.engine.events.clear()
    error = assert_error(rig.send(delta_part()), 507, "AuditUnavailable", file=str(file))
    assert same(rig.engine.weights, BASE)
    assert rig.engine.writes == [0, 0]
    assert rig.engine.events == []
    assert rig.is_paused() is paused
    status = rig.status()
    assert status.health.resume_owed is False
    assert present(status.audit).problem == error
    assert_error(rig.post("/delta_rollback"), 507, "AuditUnavailable")
    mend()
    rig.send(delta_part()).raise_for_status()
    assert present(rig.status().audit).problem is None
    assert kinds(file) == [("loaded", None, 7), ("committed", 7, 8)]


def test_unwritable_file_refuses_to_prepare(start: Start, file: Path) -> None:
    rig = start()
    broken(file)
    step = {"action": "prepare", "group": "g", "version": 8, "sync_id": "s", "lease": 60}
    rig.send(delta_part(sync_id="s"), commit="hold").raise_for_status()
    assert_error(rig.post("/delta_commit", json=step), 507, "AuditUnavailable", file=str(file))
    assert rig.status().staged is None
    assert same(rig.engine.weights, BASE)


def test_unwritable_at_start_is_served_and_said(start: Start, file: Path) -> None:
    mend = broken(file)
    rig = start()
    assert present(present(rig.status().audit).problem)["type"] == "AuditUnavailable"
    assert_error(rig.send(delta_part()), 507, "AuditUnavailable")
    mend()
    rig.assert_committed(rig.send(delta_part()), NEXT, 8)
    assert kinds(file) == [("loaded", None, 7), ("committed", 7, 8)]


def test_replay_waits_for_unwritable_file(start: Start, file: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.mkdir()
    write_steps(log, 1)
    mend = broken(file)
    rig = start(log=str(log))
    assert rig.status().version.number == VERSION
    mend()
    assert rig.post("/delta_catch_up").json()["applied"] == [VERSION + 1]
    assert kinds(file) == [("loaded", None, 7), ("committed", 7, 8)]


def test_record_that_fails_after_write_is_kept(
    start: Start, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = start()
    ended = broken
    check = AuditFile.check

    def check_then_break(one: AuditFile) -> None:
        check(one)
        mends.append(ended(file))

    mends: list[Callable[[], None]] = []
    with monkeypatch.context() as patched:
        patched.setattr(AuditFile, "check", check_then_break)
        answer = rig.send(delta_part())
    error = assert_error(answer, 500, "CommittedNotResumed", "committed")
    assert str(file) in error["message"]
    assert not rig.is_paused()
    audit = present(rig.status().audit)
    assert (audit.pending, present(audit.problem)["type"]) == (1, "AuditUnavailable")
    assert_error(rig.send(delta_part()), 500, "CommittedNotResumed", "committed")
    following = delta_part(OTHER_STEP, version=9, base_version=8)
    assert_error(rig.send(following), 507, "AuditUnavailable")
    mends[0]()
    assert rig.send(delta_part()).json()["status"] == "already_applied"
    rig.assert_committed(rig.send(following), after(BASE, STEP, OTHER_STEP), 9)
    assert kinds(file) == [("loaded", None, 7), ("committed", 7, 8), ("committed", 8, 9)]
    assert present(rig.status().audit).pending == 0
    sound(file)


# Several HTTP processes ----------------------------------------------------------------------


@pytest.fixture
def two(start: Start, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Rig, Process]]:
    """Two HTTP processes of one engine."""
    monkeypatch.setattr(recent, "_ASKED_EVERY_S", 0.0)
    rig = start()
    rig.engine.shared = True
    other = Process(rig)
    rig.run(other.service.start())
    yield rig, other
    other.close()


def test_processes_write_one_record_per_change(two: tuple[Rig, Process], file: Path) -> None:
    for number in range(1, 6):
        two[number % 2].send(a_step(number))
    assert kinds(file) == [("loaded", None, 7)] + [
        ("committed", version, version + 1) for version in range(7, 12)
    ]
    sound(file)


def test_other_process_records_what_a_dead_one_did_not(
    two: tuple[Rig, Process], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def dies(audit: Audit, record: AuditRecord, written: Any) -> None:
        raise asyncio.CancelledError

    two[1].send(a_step(1))
    with monkeypatch.context() as patched:
        patched.setattr(Audit, "done", dies)
        with pytest.raises(asyncio.CancelledError):
            two[0].send(a_step(2))
    two[1].send(a_step(3))
    assert kinds(file) == [("loaded", None, 7)] + [
        ("committed", version, version + 1) for version in range(7, 10)
    ]
    assert [one.late for one in records(file)] == [False, False, True, False]
    sound(file)


def test_record_of_a_process_that_dies_is_written_twice(
    two: tuple[Rig, Process], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has appended the record, and the ranks do not know: the trail stays sound."""
    append = AuditFile.append

    def dies(audited: AuditFile, added: list[AuditRecord]) -> str:
        append(audited, added)
        raise asyncio.CancelledError

    two[1].send(a_step(1))
    with monkeypatch.context() as patched:
        patched.setattr(AuditFile, "append", dies)
        with pytest.raises(asyncio.CancelledError):
            two[0].send(a_step(2))
    two[1].send(a_step(3))
    assert [(one.version, one.late) for one in records(file)] == [
        (7, False),
        (8, False),
        (9, False),
        (9, True),
        (10, False),
    ]
    assert sound(file).notes == ["audit.jsonl:4 says again what the record before it says"]
