"""Engines that follow a delta log: what they reach, what holds them, and what they survive."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from delta_server.sources.log import LogReplay
from engine_ext.log import DeltaLog, open_log, read_heartbeats
from engine_ext.log.catalog import DONE
from engine_ext.log.heartbeats import FOLDER
from tests.support.delta_bodies import VERSION, after, delta_part, fresh_weights, same
from tests.support.endpoint_rig import STATUS, Rig, assert_error
from tests.unit.server.delta_logs import (
    CATCH_UP,
    NEWEST,
    STEPS,
    looked,
    until,
    write,
    write_steps,
)

PIN = "/delta_pin"


@pytest.fixture
def log_settings() -> dict[str, Any]:
    return {"follow": True, "follow_interval": 0.01}


def test_versions_that_wait_are_one_pause(log: Path, started: Callable[..., Rig]) -> None:
    rig = started()
    until(rig, version=VERSION, failures=0)
    draft = log.parent / "draft"
    draft.mkdir()
    for folder in write_steps(draft):  # all at once
        folder.rename(log / folder.name)
    found = until(rig, version=NEWEST)
    assert same(rig.engine.weights, after(fresh_weights(), *STEPS))
    assert rig.engine.weight_version == str(NEWEST)
    assert (found["failures"], found["error"], found["pinned"]) == (0, None, None)
    committed = rig.get(f"{STATUS}?history=true").json()["history"]
    assert [(one["base_version"], one["version"]) for one in committed] == [(VERSION, NEWEST)]
    looked(rig)  # the heartbeat and the end of what was folded come after the commit
    assert rig.spooled() == []
    [(heartbeat, age)] = read_heartbeats(open_log(log))
    assert (heartbeat.version, heartbeat.state, heartbeat.behind) == (NEWEST, "following", 0)
    assert age < heartbeat.expires_s
    assert heartbeat.name == found["name"]


def test_pruning_sees_an_engine_that_starts(
    log: Path, started: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_steps(log)
    seen: list[tuple[int, str]] = []
    replay = LogReplay.at_start

    async def at_start(self: LogReplay) -> None:
        seen.extend((beat.version, beat.name) for beat, _ in read_heartbeats(open_log(log)))
        await replay(self)

    monkeypatch.setattr(LogReplay, "at_start", at_start)
    rig = started()
    assert seen == [(VERSION, until(rig, version=NEWEST)["name"])]


def test_a_hold_keeps_behind_the_newest(log: Path, started: Callable[..., Rig]) -> None:
    write_steps(log, 1)
    rig = started(follow_hold=1)
    assert looked(rig)["version"] == VERSION
    write(log, delta_part(STEPS[1], VERSION + 2, base_version=VERSION + 1), number=VERSION + 2)
    found = until(rig, version=VERSION + 1)
    assert (found["hold"], found["problem"]) == (1, None)
    assert found["newest"] == VERSION + 2
    assert rig.post(CATCH_UP).json()["version"] == VERSION + 1
    looked(rig)
    [(heartbeat, _)] = read_heartbeats(open_log(log))
    assert (heartbeat.state, heartbeat.behind) == ("held", 1)


def test_a_pin_holds_at_a_version_and_is_released(log: Path, started: Callable[..., Rig]) -> None:
    rig = started()
    answer = rig.post(PIN, params={"version": VERSION + 2}).json()
    assert (answer["status"], answer["pinned"]) == ("pinned", VERSION + 2)
    write_steps(log)
    until(rig, version=VERSION + 2, pinned=VERSION + 2)
    assert looked(rig)["version"] == VERSION + 2
    assert rig.post(CATCH_UP).json()["version"] == VERSION + 2
    assert same(rig.engine.weights, after(fresh_weights(), *STEPS[:2]))
    refused = rig.post(PIN, params={"version": VERSION + 1})
    assert_error(refused, 409, "VersionConflict", expected=VERSION + 1, actual=VERSION + 2)
    assert rig.post(PIN, params={"version": "x"}).status_code == 400
    assert until(rig)["pinned"] == VERSION + 2
    assert rig.post(PIN).json()["status"] == "released"
    until(rig, version=NEWEST, pinned=None)


def test_only_the_log_moves_an_engine_that_follows(
    log: Path, started: Callable[..., Rig], root: Path
) -> None:
    rig = started(roots=(str(root),))
    until(rig, failures=0)
    (root / "part.safetensors").write_bytes(delta_part())
    answers = [
        rig.send(delta_part()),
        rig.disk(root),
        rig.post("/delta_rollback"),
        rig.post("/update_weight_version", json={"new_version": str(VERSION + 1)}),
        rig.post(
            "/pull_weights",
            json={
                "local_checkpoint_dir": "/x",
                "source_dir": str(root),
                "target_version": VERSION + 1,
            },
        ),
    ]
    for answer in answers:
        assert_error(answer, 409, "Conflict")
        assert "--delta-follow" in answer.json()["error"]["message"]
    assert same(rig.engine.weights, fresh_weights())
    assert rig.status().version.number == VERSION


@pytest.mark.slow
def test_it_goes_on_once_the_log_is_well_again(log: Path, started: Callable[..., Rig]) -> None:
    rig = started()
    folders = write_steps(log)
    done = (folders[1] / DONE).read_bytes()
    (folders[1] / DONE).unlink()
    found = until(rig, version=VERSION + 1)
    found = looked(rig)
    assert found["version"] == VERSION + 1
    assert found["error"]["type"] == "LogDamaged"
    assert found["failures"] >= 1
    [(heartbeat, _)] = read_heartbeats(open_log(log))
    assert (heartbeat.state, heartbeat.version) == ("failing", VERSION + 1)
    assert re.match("LogDamaged: ", heartbeat.error or "")
    (folders[1] / DONE).write_bytes(done)
    until(rig, version=NEWEST, error=None)
    assert same(rig.engine.weights, after(fresh_weights(), *STEPS))


@pytest.mark.slow
def test_a_damaged_part_stops_before_it(log: Path, started: Callable[..., Rig]) -> None:
    """Nothing of the versions that wait is applied with it, though they are folded."""
    draft = log.parent / "draft"
    draft.mkdir()
    rig = started()
    until(rig, failures=0)
    folders = write_steps(draft)
    [part] = folders[2].glob("*.safetensors")
    body = bytearray(part.read_bytes())
    body[-1] ^= 1
    part.write_bytes(body)
    for folder in folders:
        folder.rename(log / folder.name)
    found = until(rig, version=VERSION + 2)
    assert looked(rig)["error"]["type"] == "LogDamaged"
    assert found["version"] == VERSION + 2
    assert same(rig.engine.weights, after(fresh_weights(), *STEPS[:2]))


def test_its_own_errors_do_not_end_it(
    log: Path, started: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = started()
    until(rig, failures=0)
    with monkeypatch.context() as patched:
        patched.setattr(DeltaLog, "listing", lambda log, **options: 1 / 0)
        until(rig, failures=2)
    write_steps(log)
    assert until(rig, version=NEWEST, error=None)["failures"] >= 2


def test_a_call_that_is_cancelled_does_not_end_it(
    log: Path, started: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = started()
    until(rig, failures=0)

    def cancelled(log: DeltaLog, **options: bool) -> None:
        raise asyncio.CancelledError

    with monkeypatch.context() as patched:
        patched.setattr(DeltaLog, "listing", cancelled)
        looked(rig)
    write_steps(log)
    until(rig, version=NEWEST, error=None)


@pytest.mark.parametrize("operation", ["lease", "get"])
def test_ranks_that_do_not_answer_do_not_end_it(
    log: Path, started: Callable[..., Rig], operation: str
) -> None:
    rig = started()
    until(rig, failures=0)
    rig.engine.fails[operation] = ConnectionError("lost")

    async def asked() -> None:
        while operation in rig.engine.fails:
            await asyncio.sleep(0.005)

    rig.run(asked())
    write_steps(log)
    until(rig, version=NEWEST, error=None)


def test_weights_that_sleep_are_no_failure(log: Path, started: Callable[..., Rig]) -> None:
    rig = started()
    until(rig, failures=0)
    rig.engine.set_asleep(True)
    write_steps(log)
    found = looked(rig)
    assert (found["version"], found["failures"], found["error"]) == (VERSION, 0, None)
    [(heartbeat, _)] = read_heartbeats(open_log(log))
    assert heartbeat.state == "asleep"
    rig.engine.set_asleep(False)
    until(rig, version=NEWEST)


def test_an_engine_whose_log_is_not_there_waits(
    log: Path, started: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    """It serves what it has loaded, and says so."""
    away = log.rename(log.with_name("away"))
    rig = started()
    assert f"waits for its log and serves what it has loaded: {log}" in caplog.text
    found = until(rig, state="waiting_for_log", version=VERSION)
    assert found["problem"]["type"] == "LogDamaged"
    write_steps(away)
    away.rename(log)
    until(rig, state="certain", version=NEWEST, error=None)


def test_an_empty_log_is_not_waited_for(started: Callable[..., Rig]) -> None:
    assert started().status().health.state == "certain"


def test_a_log_that_cannot_be_written_is_followed(log: Path, started: Callable[..., Rig]) -> None:
    (log / FOLDER).write_text("not a folder")
    rig = started()
    write_steps(log)
    assert until(rig, version=NEWEST)["failures"] == 0


def test_an_engine_that_does_not_follow_is_not_pinned(started: Callable[..., Rig]) -> None:
    rig = started(follow=False)
    assert_error(rig.post(PIN, params={"version": 9}), 409, "Conflict")
