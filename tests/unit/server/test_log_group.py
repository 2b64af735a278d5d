"""Followers of one group: all have prepared a version before any of them takes it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from delta_server import recent
from delta_server.follow_state import FollowState
from delta_server.sources import log_follower, log_group
from delta_server.sources.log import LogReplay
from engine_ext.errors import LogDamaged, NotUpdatable
from engine_ext.log import (
    DeltaLog,
    GroupMarks,
    Heartbeat,
    content_key,
    live_heartbeats,
    open_log,
    read_heartbeats,
    write_heartbeat,
)
from engine_ext.log.groups import complete_versions
from tests.support.delta_bodies import VERSION, after, delta_part, fresh_weights, full_part, same
from tests.support.endpoint_rig import STATUS, Rig
from tests.support.present import present
from tests.unit.server.delta_logs import (
    CATCH_UP,
    NEWEST,
    STEPS,
    looked,
    until,
    write,
    write_steps,
)
from tests.unit.server.other_process import Process

pytestmark = pytest.mark.slow

LONG = 1000.0  # seconds: no engine looks without a request
READY = "/delta_ready"


@pytest.fixture(autouse=True)
def always_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "_ASKED_EVERY_S", 0.0)
    monkeypatch.setattr(log_group, "_MARKED_IN_S", 0.0)


# `tests/unit/log` has the marks, heartbeats and listings of each kind of store.
IN_A_STORE_TOO = pytest.mark.parametrize("log", ["folder", "store"], indirect=True)


@pytest.fixture
def log(request: pytest.FixtureRequest, tmp_path: Path) -> DeltaLog:
    """An empty log."""
    if getattr(request, "param", "folder") == "store":
        return open_log(request.getfixturevalue("store_url"), scratch=str(tmp_path))
    (tmp_path / "log").mkdir()
    return open_log(tmp_path / "log")


@pytest.fixture
def log_settings() -> dict[str, Any]:
    return {"follow": True, "follow_group": "rollout", "follow_interval": LONG}


@pytest.fixture
def pair(started: Callable[..., Rig]) -> list[Rig]:
    """Two engines that have looked at the empty log."""
    rigs = [started(), started()]
    for rig in rigs:
        look(rig)
    return rigs


def look(rig: Rig) -> dict[str, Any]:
    """Let an engine look at the log; return its answer."""
    answer: dict[str, Any] = rig.post(CATCH_UP).json()
    return answer


def group_of(rig: Rig) -> dict[str, Any]:
    found: dict[str, Any] = rig.get(STATUS).json()["log"]["follow"]["group"]
    return found


def reason(rig: Rig) -> str | None:
    found: dict[str, Any] = rig.get(READY).json()
    return found["reason"]


def beats(log: DeltaLog) -> dict[str, Heartbeat]:
    return {beat.name: beat for beat, _ in read_heartbeats(log)}


def name_of(rig: Rig) -> str:
    name: str = rig.get(STATUS).json()["log"]["follow"]["name"]
    return name


@IN_A_STORE_TOO
def test_a_version_is_taken_once_all_have_it(log: DeltaLog, pair: list[Rig]) -> None:
    first, last = pair
    write_steps(log, 1)
    answer = look(first)
    assert (answer["version"], answer["applied"]) == (VERSION, [])
    assert answer["waits_for"] == [f"{name_of(last)}: at version {VERSION}"]
    assert same(first.engine.weights, fresh_weights())
    assert not first.engine.paused
    assert group_of(first) == {
        "name": "rollout",
        "complete": None,
        "prepared": VERSION + 1,
        "waits_for": answer["waits_for"],
    }
    assert complete_versions(log, log.listing()) == {}
    assert look(last)["version"] == VERSION + 1
    assert complete_versions(log, log.listing()) == {"rollout": VERSION + 1}
    assert look(first)["version"] == VERSION + 1
    for rig in pair:
        assert same(rig.engine.weights, after(fresh_weights(), STEPS[0]))
        found = group_of(rig)
        assert (found["complete"], found["prepared"]) == (VERSION + 1, None)
        assert found["waits_for"] == []
        assert rig.spooled() == []


def test_what_waits_is_one_commit(log: DeltaLog, pair: list[Rig]) -> None:
    first, last = pair
    write_steps(log)
    look(first)
    assert look(last)["version"] == NEWEST
    assert look(first)["version"] == NEWEST
    history = first.get(f"{STATUS}?history=true").json()["history"]
    committed = [one for one in history if one["outcome"] == "committed"]
    assert [(one["base_version"], one["version"]) for one in committed] == [(VERSION, NEWEST)]
    assert same(first.engine.weights, after(fresh_weights(), *STEPS))


def test_newer_versions_wait_for_the_prepared_one(log: DeltaLog, pair: list[Rig]) -> None:
    first, last = pair
    write_steps(log, 1)
    look(first)
    for k in (1, 2):
        body = delta_part(STEPS[k], VERSION + k + 1, base_version=VERSION + k)
        write(log, body, number=VERSION + k + 1)
    assert look(last)["version"] == VERSION + 1
    assert group_of(last)["prepared"] == NEWEST
    assert look(first)["version"] == NEWEST
    assert look(last)["version"] == NEWEST


def test_marks_are_read_while_a_version_is_prepared(
    log: DeltaLog, pair: list[Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asks the engine again."""
    monkeypatch.setattr(log_follower, "_MARKS_READ_EVERY_S", 0.01)
    first, last = pair
    write_steps(log, 1)
    look(first)
    look(last)
    until(first, version=VERSION + 1)


@pytest.mark.parametrize("asked", ["the one that follows", "another"])
def test_a_process_that_was_asked_reads_the_marks(
    log: DeltaLog, pair: list[Rig], monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    monkeypatch.setattr(log_follower, "_MARKS_READ_EVERY_S", 0.01)
    first, last = pair
    first.engine.shared = True
    other = Process(first)
    first.run(other.service.start())
    write_steps(log, 1)
    app = other.app if asked == "another" else first.app
    assert first.run(first.request("POST", CATCH_UP, app=app)).json()["applied"] == []
    look(last)
    until(first, version=VERSION + 1)
    other.close()


def test_a_held_version_is_not_watched(log: DeltaLog, pair: list[Rig]) -> None:
    """The group decides, and not when a lease ends."""
    first, _ = pair
    write_steps(log, 1)
    look(first)
    staged = present(first.status().staged)
    assert (staged.version, present(staged.prepared).recorded) == (VERSION + 1, False)
    assert first.service.fleet.watches == set()


def test_a_member_that_cannot_take_it_keeps_all(
    log: DeltaLog, pair: list[Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, last = pair
    write_steps(log, 1)
    look(first)
    last.engine.fails["hold"] = ConnectionError("lost")
    assert last.post(CATCH_UP).status_code == 500
    waits = look(first)["waits_for"]
    assert [one.startswith(name_of(last)) for one in waits] == [True]
    assert same(first.engine.weights, fresh_weights())
    monkeypatch.setattr(log_group, "_TRY_AGAIN_S", 0.0)
    assert look(last)["version"] == VERSION + 1
    assert look(first)["version"] == VERSION + 1


@pytest.fixture
def given_up(log: DeltaLog, pair: list[Rig]) -> list[Rig]:
    """One engine has prepared a version that the other one cannot take; there is a newer one."""
    first, last = pair
    write_steps(log, 1)
    look(first)
    last.engine.fails["hold"] = NotUpdatable("of another model")
    assert last.post(CATCH_UP).status_code == 422
    write(log, full_part(fresh_weights(), VERSION + 2), number=VERSION + 2)
    return pair


def test_the_others_know_before_a_version_is_dropped(
    log: DeltaLog, given_up: list[Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or they would complete it, by a heartbeat that says that it is prepared."""
    first, last = given_up
    name, hold, seen = name_of(first), LogReplay.hold, []

    async def held(replay: LogReplay, target: int, cannot: Collection[int]) -> None:
        seen.append((target, beats(log)[name].prepared))
        await hold(replay, target, cannot)

    monkeypatch.setattr(LogReplay, "hold", held)
    assert beats(log)[name].prepared is not None
    look(first)
    assert seen == [(VERSION + 2, None)]
    assert look(last)["version"] == look(first)["version"] == VERSION + 2


def test_what_is_complete_meanwhile_is_not_dropped(
    log: DeltaLog, given_up: list[Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = given_up
    name, key = name_of(first), beats(log)[name_of(first)].prepared
    assert key is not None

    def written(log: DeltaLog, heartbeat: Heartbeat) -> None:
        if heartbeat.name == name and heartbeat.prepared is None:
            GroupMarks(log, "rollout").write(key, [])
        write_heartbeat(log, heartbeat)

    monkeypatch.setattr(log_follower, "write_heartbeat", written)
    assert look(first)["applied"][:1] == [VERSION + 1]


def test_what_is_prepared_stays_without_a_heartbeat(
    log: DeltaLog, given_up: list[Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = given_up

    def fail(log: DeltaLog, heartbeat: Heartbeat) -> None:
        if heartbeat.prepared is None:
            raise OSError(28, "no space")
        write_heartbeat(log, heartbeat)

    monkeypatch.setattr(log_follower, "write_heartbeat", fail)
    look(first)
    assert group_of(first)["prepared"] == VERSION + 1


def test_a_pinned_member_keeps_all(log: DeltaLog, pair: list[Rig]) -> None:
    first, last = pair
    assert last.post("/delta_pin", params={"version": VERSION}).status_code == 200
    look(last)
    write_steps(log, 1)
    waits = look(first)["waits_for"]
    assert waits == [f"{name_of(last)}: at version {VERSION}, pinned"]
    assert "pinned" in look(last)["waits_for"][0]
    assert last.post("/delta_pin").status_code == 200
    look(last)
    assert look(first)["version"] == VERSION + 1
    assert look(last)["version"] == VERSION + 1


def test_a_pin_drops_what_is_prepared(log: DeltaLog, pair: list[Rig]) -> None:
    first, last = pair
    write_steps(log, 1)
    look(last)
    assert last.post("/delta_pin", params={"version": VERSION + 1}).status_code == 200
    assert beats(log)[name_of(last)].prepared is not None
    assert last.post("/delta_pin", params={"version": VERSION}).status_code == 200
    assert beats(log)[name_of(last)].prepared is None
    assert last.spooled() == []
    waits = [f"{name_of(last)}: at version {VERSION}, pinned"]
    assert look(first)["waits_for"] == waits
    assert look(last)["version"] == look(first)["version"] == VERSION
    assert reason(first) is reason(last) is None
    assert last.post("/delta_pin").status_code == 200
    assert look(last)["version"] == look(first)["version"] == VERSION + 1


def test_a_pin_during_a_look_drops_what_it_prepares(
    log: DeltaLog, pair: list[Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process is asked, once the ranks hold the version."""
    first, last = pair
    write_steps(log, 1)
    hold = LogReplay.hold
    other = FollowState(last.engine, 0)

    async def held(replay: LogReplay, target: int, cannot: Collection[int]) -> None:
        await hold(replay, target, cannot)
        await other.record(pin=VERSION)

    with monkeypatch.context() as patch:
        patch.setattr(LogReplay, "hold", held)
        look(last)
    assert (group_of(last)["prepared"], last.spooled()) == (None, [])
    assert look(first)["version"] == VERSION


def test_a_version_that_a_pin_gives_up_is_not_marked(
    log: DeltaLog, pair: list[Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process is asked, once this one has seen that all members have prepared it."""
    first, last = pair
    write_steps(log, 1)
    look(first)
    last.engine.shared = True
    other = Process(last)
    pins: list[Any] = []

    async def running_loop() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    loop = last.run(running_loop())

    def found(log: DeltaLog, *, strict: bool = False) -> list[Heartbeat]:
        beats = live_heartbeats(log, strict=strict)
        follower = present(other.service.follower)
        if strict and all(one.prepared is not None for one in beats) and not pins:
            pins.append(asyncio.run_coroutine_threadsafe(follower.pin(VERSION), loop))
            pins[0].result(10)
        return beats

    monkeypatch.setattr(log_group, "live_heartbeats", found)
    assert look(last)["version"] == VERSION
    assert len(pins) == 1
    assert complete_versions(log, log.listing()) == {}
    assert look(first)["version"] == VERSION
    assert reason(first) is reason(last) is None
    other.service.intake.close()


def test_a_look_that_fails_forgets_what_it_has_dropped(
    log: DeltaLog, pair: list[Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log has become that of another history, for example."""
    first, last = pair
    write_steps(log, 1)
    look(first)

    async def run(replay: LogReplay, options: Any, *, fold: bool = False) -> dict[str, Any]:
        await replay.held.drop()
        raise LogDamaged("lost")

    with monkeypatch.context() as patch:
        patch.setattr(LogReplay, "run", run)
        assert first.post(CATCH_UP).status_code == 409
    assert beats(log)[name_of(first)].prepared is None
    assert look(last)["waits_for"] != []
    assert look(last)["version"] == VERSION


def test_a_dead_member_is_waited_for_by_its_lease(log: DeltaLog, pair: list[Rig]) -> None:
    first, last = pair
    write_steps(log, 1)
    path = Path(log.location, "followers", f"{name_of(last)}.json")
    assert look(first)["waits_for"] != []
    ago = time.time() - 20 * LONG
    os.utime(path, (ago, ago))
    assert look(first)["version"] == VERSION + 1


@IN_A_STORE_TOO
def test_no_member_is_taken_for_dead_by_a_fast_clock(
    log: DeltaLog, pair: list[Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log takes heartbeats, but not the file that shows what time it is there."""
    first, _ = pair
    write_steps(log, 1)
    put, now = type(log.store).put, time.time()

    def fail(store: Any, name: str, data: bytes, *, durable: bool = False) -> None:
        if "/.now-" in name:
            raise OSError(28, "no space")
        put(store, name, data, durable=durable)

    with monkeypatch.context() as patch:
        patch.setattr(type(log.store), "put", fail)
        patch.setattr(time, "time", lambda: now + 20 * LONG)
        assert first.post(CATCH_UP).json()["error"]["type"] == "LogDamaged"
    assert complete_versions(log, log.listing()) == {}
    assert look(first)["version"] == VERSION


@IN_A_STORE_TOO
def test_one_that_starts_takes_what_is_complete(
    log: DeltaLog, pair: list[Rig], started: Callable[..., Rig]
) -> None:
    """And nothing newer, so that it is at the version of the others when it serves."""
    first, last = pair
    write_steps(log, 1)
    look(first)
    look(last)
    write(log, delta_part(STEPS[1], VERSION + 2, base_version=VERSION + 1), number=VERSION + 2)
    late = started()
    assert same(late.engine.weights, after(fresh_weights(), STEPS[0]))
    assert look(late)["version"] == VERSION + 1
    assert reason(late) is None
    assert look(first)["waits_for"] == [f"{name_of(last)}: at version {VERSION + 1}"]
    assert look(last)["version"] == VERSION + 2
    assert look(late)["version"] == look(first)["version"] == VERSION + 2


def test_the_first_of_a_group_is_not_ready_before_it(
    log: DeltaLog, started: Callable[..., Rig]
) -> None:
    write_steps(log, 1)
    rig = started()
    assert rig.get(READY).json()["reason"] == "behind_log"
    assert look(rig)["version"] == VERSION + 1  # alone
    assert reason(rig) is None


def test_one_that_is_behind_is_not_ready(log: DeltaLog, pair: list[Rig]) -> None:
    first, last = pair
    write_steps(log, 1)
    look(first)
    look(last)
    assert reason(first) is None  # it has not read the mark; it will within a second
    assert first.post("/delta_pin", params={"version": VERSION}).status_code == 200
    assert look(first)["version"] == VERSION
    assert reason(first) == "behind_group"
    assert reason(last) is None


def test_one_cut_off_from_the_log_is_not_ready(
    log: DeltaLog, started: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_follower, "_BEATS_TO_EXPIRE", 0)
    monkeypatch.setattr(log_follower, "_SHORTEST_EXPIRY_S", 0.5)
    rig = started()
    look(rig)
    assert reason(rig) is None
    time.sleep(0.6)
    assert reason(rig) == "behind_group"
    look(rig)
    assert reason(rig) is None


def test_a_long_look_is_ready_until_it_is_behind(
    log: DeltaLog, started: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group waits for the engine, as its heartbeat counts; the marks are read on the way."""
    monkeypatch.setattr(log_follower, "_BEATS_TO_EXPIRE", 0)
    monkeypatch.setattr(log_follower, "_SHORTEST_EXPIRY_S", 1.6)
    hold, begins, ends = LogReplay.hold, asyncio.Event(), asyncio.Event()

    async def held(replay: LogReplay, target: int, cannot: Collection[int]) -> None:
        begins.set()
        await ends.wait()
        await hold(replay, target, cannot)

    monkeypatch.setattr(LogReplay, "hold", held)
    rig = started(follow_interval=0.05)
    until(rig, version=VERSION)
    looked(rig)
    write_steps(log, 1)
    rig.run(begins.wait())

    async def reasons(seconds: float) -> set[str | None]:
        found, end = set(), time.monotonic() + seconds
        while time.monotonic() < end:
            found.add((await rig.request("GET", READY)).json()["reason"])
            await asyncio.sleep(0.05)
        return found

    assert rig.run(reasons(2.4)) == {None}
    key = content_key(log.listing(), VERSION + 1)
    assert key is not None
    GroupMarks(log, "rollout").write(key, [])
    rig.run(reasons(0.8))
    assert rig.run(reasons(0.1)) == {"behind_group"}
    ends.set()
    until(rig, version=VERSION + 1)
    looked(rig)
    assert reason(rig) is None


def test_a_member_stays_one_in_every_process(
    log: DeltaLog, pair: list[Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has never looked at the log is asked, and cannot read it."""
    first, last = pair
    write_steps(log, 1)
    for rig in (first, last, first):
        look(rig)
    write(log, delta_part(STEPS[1], VERSION + 2, base_version=VERSION + 1), number=VERSION + 2)
    look(first)
    first.engine.shared = True
    other, before = Process(first), group_of(first)
    key = beats(log)[name_of(first)].prepared

    def fail(marks: GroupMarks) -> None:
        raise LogDamaged("lost")

    with monkeypatch.context() as patch:
        patch.setattr(GroupMarks, "read", fail)
        answer = first.run(first.request("POST", CATCH_UP, app=other.app))
        assert answer.json()["error"]["type"] == "LogDamaged"
    other.service.intake.close()
    heartbeat = beats(log)[name_of(first)]
    assert (heartbeat.group, heartbeat.prepared) == ("rollout", key)
    found = group_of(first)
    assert (found["complete"], found["prepared"]) == (before["complete"], before["prepared"])
    assert found["complete"] == VERSION + 1


@IN_A_STORE_TOO
def test_a_refused_version_is_not_taken(log: DeltaLog, pair: list[Rig]) -> None:
    first, last = pair
    write_steps(log, 1)
    look(first)
    with log.writer() as writer:
        writer.refuse(VERSION + 1)
    assert look(last)["version"] == VERSION
    assert look(first)["version"] == VERSION
    write(log, full_part(fresh_weights(), VERSION + 2), number=VERSION + 2)
    look(first)
    assert look(last)["version"] == VERSION + 2
    assert look(first)["version"] == VERSION + 2
    assert complete_versions(log, log.listing()) == {"rollout": VERSION + 2}


def test_a_mark_is_of_one_content(log: DeltaLog, pair: list[Rig]) -> None:
    """The log is written again, with the number that one of the members has prepared."""
    first, last = pair
    [folder] = write_steps(log, 1)
    look(first)
    log.store.delete([folder.name])
    body = delta_part(STEPS[1], VERSION + 1, base_version=VERSION)
    write(log, body, number=VERSION + 1)
    assert look(last)["version"] == VERSION  # the other one has prepared something else
    assert look(first)["version"] == VERSION + 1
    assert look(last)["version"] == VERSION + 1
    for rig in pair:
        assert same(rig.engine.weights, after(fresh_weights(), STEPS[1]))


def test_groups_and_lone_followers_are_apart(
    log: DeltaLog, pair: list[Rig], started: Callable[..., Rig]
) -> None:
    write_steps(log, 1)
    alone, other = started(follow_group=None), started(follow_group="other")
    assert look(alone)["version"] == look(other)["version"] == VERSION + 1
    assert look(pair[0])["version"] == VERSION
    assert group_of(pair[0])["waits_for"] == [f"{name_of(pair[1])}: at version {VERSION}"]
    assert complete_versions(log, log.listing()) == {"other": VERSION + 1}
    assert alone.get(STATUS).json()["log"]["follow"]["group"] is None
