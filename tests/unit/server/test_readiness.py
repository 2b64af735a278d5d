"""`GET /delta_ready`: what a router or a probe of Kubernetes is answered, and what that costs."""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from delta_server import readiness, recent
from engine_ext.log import DeltaLog, Listing
from engine_ext.log.catalog import DONE
from engine_ext.ranks.operations import Operation
from engine_ext.settings import API_KEY_ENVIRONMENT
from tests.support.delta_bodies import RESYNCED, VERSION, delta_part, full_part
from tests.support.endpoint_rig import COMPLETIONS, Rig, assert_error
from tests.support.in_process_engine import Shard
from tests.unit.server.delta_logs import CATCH_UP, NEWEST, STEPS, write, write_steps
from tests.unit.server.other_process import Process
from tests.unit.server.test_scrubbing import put, scrubber

READY = "/delta_ready"


@pytest.fixture(autouse=True)
def always_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "_ASKED_EVERY_S", 0.0)
    monkeypatch.setattr(readiness, "_LOG_READ_EVERY_S", 0.0)


def ready(rig: Rig, **query: Any) -> dict[str, Any]:
    answer = rig.get(READY, params=query)
    found: dict[str, Any] = answer.json()
    assert answer.status_code == (200 if found["ready"] else 503)
    return found


def reason(rig: Rig, **query: Any) -> tuple[str | None, str]:
    found = ready(rig, **query)
    assert found["ready"] is (found["reason"] is None)
    assert bool(found["message"]) is not found["ready"]
    return found["reason"], found["state"]


def unready(rig: Rig) -> bool:
    """Whether the engine is ready, once the log was read again."""
    rig.run(asyncio.sleep(0.05))
    return not ready(rig)["ready"]


# The weights -------------------------------------------------------------------------------------


def test_an_engine_is_ready_at_its_version(rig: Rig) -> None:
    assert ready(rig) == {
        "ready": True,
        "reason": None,
        "message": None,
        "state": "certain",
        "version": VERSION,
        "wanted": None,
    }


def test_a_version_can_be_asked_for(rig: Rig) -> None:
    assert ready(rig, min_version=VERSION)["ready"]
    found = ready(rig, min_version=VERSION + 1)
    assert (found["ready"], found["reason"]) == (False, "behind")
    assert (found["version"], found["wanted"]) == (VERSION, VERSION + 1)
    rig.send(delta_part())
    assert ready(rig, min_version=VERSION + 1)["ready"]
    assert_error(rig.get(READY, params={"min_version": "x"}), 400, "MalformedPart")


def test_the_flag_asks_for_a_version(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(min_version=VERSION + 1)
    assert reason(rig) == ("behind", "certain")
    assert ready(rig, min_version=1)["wanted"] == VERSION + 1
    rig.send(delta_part())
    assert reason(rig) == (None, "certain")
    assert reason(rig, min_version=VERSION + 2) == ("behind", "certain")


def test_uncertain_weights_are_not_ready(rig: Rig) -> None:
    rig.fail_commit()
    assert reason(rig) == ("uncertain", "uncertain")
    rig.send(full_part(RESYNCED, 8))
    assert reason(rig) == (None, "certain")


def test_mismatched_weights_are_not_ready(rig: Rig) -> None:
    put(rig, scrubber(), scrubber(None, "w"))
    assert reason(rig) == ("mismatched", "mismatched")


def test_weights_of_something_else_are_not_ready(rig: Rig) -> None:
    for receiver in rig.engine.receivers:
        receiver.weights_replaced("a loader")
    assert reason(rig) == ("changed_externally", "certain")


def test_sleeping_weights_are_not_ready(rig: Rig) -> None:
    rig.engine.set_asleep(True)
    assert reason(rig) == ("asleep", "certain")
    rig.engine.set_asleep(False)
    assert reason(rig) == (None, "certain")


def awaiting(monkeypatch: pytest.MonkeyPatch, make_rig: Callable[..., Rig]) -> Rig:
    """An engine that was started without weights, until its first commit."""
    describe = Shard.describe

    def described(shard: Shard) -> dict[str, Any]:
        return describe(shard) if shard.writes else {**describe(shard), "awaits": "full sync"}

    monkeypatch.setattr(Shard, "describe", described)
    return make_rig()


def test_weights_that_await_a_sync_are_not_ready(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = awaiting(monkeypatch, make_rig)
    found = rig.get(READY).json()
    assert (found["reason"], found["version"]) == ("awaits_full_sync", None)
    assert rig.send(full_part(RESYNCED, 1)).json()["status"] == "committed"
    assert rig.get(READY).json()["version"] == 1
    assert reason(rig) == (None, "certain")


@pytest.mark.parametrize("asked_every_s", [0.0, 1000.0])
def test_weights_that_await_a_sync_are_of_no_version(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, asked_every_s: float
) -> None:
    """However seldom the ranks are asked."""
    monkeypatch.setattr(recent, "_ASKED_EVERY_S", asked_every_s)
    rig = awaiting(monkeypatch, make_rig)
    for wanted in (">=0", str(VERSION)):
        answer = rig.post(COMPLETIONS, headers={"X-Weight-Version": wanted})
        assert_error(answer, 409, "VersionNotServed", version=None)
    rig.assert_committed(rig.send(full_part(RESYNCED, 1)), RESYNCED, 1)
    assert rig.post(COMPLETIONS, headers={"X-Weight-Version": ">=0"}).status_code == 200


def test_a_caller_that_pauses_leaves_it_ready(rig: Rig) -> None:
    rig.engine.paused = True
    assert reason(rig) == (None, "certain")


# Who asks, and what it costs ---------------------------------------------------------------------


def test_a_probe_without_access_gets_no_details(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    remote: Any = {"peer": ("192.0.2.7", 4711)}
    assert rig.get(READY, **remote).json() == {"ready": True}
    asked = rig.get(f"{READY}?min_version=99", **remote)
    assert (asked.status_code, asked.json()) == (503, {"ready": False})
    monkeypatch.setenv(API_KEY_ENVIRONMENT, "secret")
    assert rig.get(READY).json() == {"ready": True}
    trusted = rig.get(READY, headers={"Authorization": "Bearer secret"}, **remote)
    assert trusted.json()["version"] == VERSION


def counted(rig: Rig) -> list[str]:
    """The operations that the ranks get from here on."""
    asked: list[str] = []
    original = rig.engine.call

    async def call(request: Operation[Any]) -> list[Any]:
        asked.append(request.name)
        return await original(request)

    rig.engine.call = call  # type: ignore[method-assign]
    return asked


def test_many_probes_are_one_call_of_the_ranks(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "_ASKED_EVERY_S", 60.0)
    monkeypatch.setattr(readiness, "_LONGEST_WAIT_S", 60.0)
    asked = counted(rig)

    async def probes() -> list[httpx.Response]:
        return list(await asyncio.gather(*(rig.request("GET", READY) for _ in range(50))))

    assert {answer.status_code for answer in rig.run(probes())} == {200}
    assert rig.send(delta_part()).json()["status"] == "committed"
    asked.clear()
    assert ready(rig)["version"] == VERSION + 1  # known without them
    assert asked == []


def test_probes_and_requests_share_one_answer(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with several processes; each asks whether a commit has failed."""
    rig.engine.shared = True
    monkeypatch.setattr(recent, "_ASKED_EVERY_S", 60.0)
    monkeypatch.setattr(readiness, "_LONGEST_WAIT_S", 60.0)
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 3600)
    monkeypatch.setattr(recent, "time", later)  # what the start has asked is old
    asked, wanted = counted(rig), {"X-Weight-Version": str(VERSION)}

    async def all_at_once() -> list[httpx.Response]:
        probes = (rig.request("GET", READY) for _ in range(20))
        sent = (rig.request("POST", COMPLETIONS, headers=wanted) for _ in range(20))
        return list(await asyncio.gather(*probes, *sent))

    assert {answer.status_code for answer in rig.run(all_at_once())} == {200}
    assert asked == ["status"]


def test_ranks_that_do_not_answer_are_not_ready(rig: Rig) -> None:
    assert reason(rig) == (None, "certain")
    rig.engine.fails["status"] = ConnectionError("lost")
    assert reason(rig) == ("no_answer", "certain")
    assert reason(rig) == (None, "certain")


def test_ranks_at_work_keep_their_last_answer(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reason(rig) == (None, "certain")
    monkeypatch.setattr(readiness, "_LONGEST_WAIT_S", 0.01)
    original, end = rig.engine.call, asyncio.Event()

    async def slow(request: Operation[Any]) -> list[Any]:
        await end.wait()
        return await original(request)

    rig.engine.call = slow  # type: ignore[method-assign]
    assert reason(rig) == (None, "certain")
    monkeypatch.setattr(recent, "_LONGEST_VALID_S", 0.0)
    assert reason(rig) == ("no_answer", "certain")
    end.set()
    rig.run(asyncio.sleep(0.01))


def test_another_process_knows_the_same(rig: Rig, other: Process) -> None:
    rig.run(rig.service.start())
    rig.run(other.service.start())
    rig.send(delta_part())

    def ask() -> dict[str, Any]:
        found: dict[str, Any] = rig.run(rig.request("GET", READY)).json()
        return found

    assert (ask()["ready"], ask()["version"]) == (True, VERSION + 1)
    rig.fail_commit(VERSION + 2)
    assert ask()["reason"] == "uncertain"


# The delta log -----------------------------------------------------------------------------------


def test_an_engine_at_its_logs_end_is_ready(log: Path, started: Callable[..., Rig]) -> None:
    write_steps(log)
    assert ready(started())["version"] == NEWEST


def test_an_empty_log_is_not_waited_for(started: Callable[..., Rig]) -> None:
    assert ready(started())["ready"]


def test_an_engine_before_a_damaged_version_is_not(log: Path, started: Callable[..., Rig]) -> None:
    """Until it once has the version that was the newest at its start; later ones do not matter."""
    folders = write_steps(log)
    done = folders[2] / DONE
    text = done.read_bytes()
    done.write_bytes(b"{")
    rig = started()
    found = ready(rig)
    assert (found["reason"], found["version"]) == ("behind_log", NEWEST - 1)
    assert found["wanted"] == NEWEST
    assert folders[2].name in found["message"]
    done.write_bytes(text)
    assert rig.post(CATCH_UP).status_code == 200
    assert reason(rig) == (None, "certain")
    write(log, delta_part(STEPS[0], NEWEST + 1, base_version=NEWEST), number=NEWEST + 1)
    assert reason(rig) == (None, "certain")
    assert reason(rig, min_version=NEWEST + 1) == ("behind", "certain")


def test_a_sender_can_bring_it_to_the_logs_end(log: Path, started: Callable[..., Rig]) -> None:
    done = write_steps(log)[2] / DONE
    done.write_bytes(b"{")
    rig = started()
    assert reason(rig) == ("behind_log", "certain")
    last = delta_part(STEPS[2], NEWEST, base_version=NEWEST - 1)
    assert rig.send(last).json()["status"] == "committed"
    assert reason(rig) == (None, "certain")


def test_an_engine_of_another_history_is_not_ready(log: Path, started: Callable[..., Rig]) -> None:
    write(log, delta_part(STEPS[0], VERSION, base_version=VERSION - 1), number=VERSION)
    body = delta_part(STEPS[1], VERSION + 1, base_version=VERSION, digest_before="0" * 32)
    write(log, body, number=VERSION + 1)
    assert reason(started()) == ("behind_log", "certain")


@pytest.mark.slow
def test_a_log_that_was_not_read_is_read_again(log: Path, started: Callable[..., Rig]) -> None:
    away = log.rename(log.with_name("away"))
    write_steps(away)
    rig = started()
    assert unready(rig)
    assert ready(rig)["wanted"] is None
    away.rename(log)

    async def until_read() -> None:
        while (await rig.request("GET", READY)).json()["wanted"] != NEWEST:
            await asyncio.sleep(0.01)

    rig.run(until_read())
    assert unready(rig)
    assert rig.post(CATCH_UP).status_code == 200
    assert ready(rig)["version"] == NEWEST


@pytest.mark.slow
def test_a_log_is_read_by_one_thread_at_a_time(
    log: Path, started: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    away = log.rename(log.with_name("away"))
    write_steps(away)
    rig = started()
    listing, reading, most = DeltaLog.listing, list[DeltaLog](), Counter[DeltaLog]()

    def slow(self: DeltaLog, **options: Any) -> Listing:
        reading.append(self)
        most[self] = max(most[self], reading.count(self))
        time.sleep(0.05)
        try:
            return listing(self, **options)
        finally:
            reading.remove(self)

    monkeypatch.setattr(DeltaLog, "listing", slow)

    async def at_once() -> None:
        for looks in (1, 2):
            asked = (rig.request("GET", READY) for _ in range(3))
            found = (rig.request("POST", CATCH_UP) for _ in range(looks - 1))
            await asyncio.gather(*asked, *found, rig.request("GET", READY))
        while reading:
            await asyncio.sleep(0.01)

    rig.run(at_once())
    assert {*most.values()} == {1}
    away.rename(log)
    assert rig.post(CATCH_UP).status_code == 200
    assert ready(rig)["version"] == NEWEST


@pytest.mark.slow
def test_a_log_that_fails_otherwise_is_read_again(
    log: Path,
    started: Callable[..., Rig],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    away = log.rename(log.with_name("away"))
    write_steps(away)
    rig = started()

    def fail(self: DeltaLog, **options: Any) -> Listing:
        raise OSError("no file descriptors")

    with monkeypatch.context() as patch:
        patch.setattr(DeltaLog, "listing", fail)
        assert unready(rig)
        assert unready(rig)
        gc.collect()
    assert "never retrieved" not in caplog.text


def test_a_follower_waits_for_its_log(log: Path, started: Callable[..., Rig]) -> None:
    away = log.rename(log.with_name("away"))
    write_steps(away)
    rig = started(follow=True, follow_interval=0.01)
    assert reason(rig) == ("waiting_for_log", "waiting_for_log")
    away.rename(log)

    async def until_ready() -> None:
        while (await rig.request("GET", READY)).status_code != 200:
            await asyncio.sleep(0.01)

    rig.run(until_ready())
    assert ready(rig)["version"] == NEWEST


def test_a_follower_that_holds_back_is_ready(log: Path, started: Callable[..., Rig]) -> None:
    write_steps(log)
    rig = started(follow=True, follow_interval=1000.0, follow_hold=1)
    assert ready(rig)["version"] == NEWEST - 1


def test_a_pin_is_all_that_is_waited_for(log: Path, started: Callable[..., Rig]) -> None:
    done = write_steps(log)[2] / DONE
    done.write_bytes(b"{")
    rig = started(follow=True, follow_interval=1000.0)
    assert reason(rig) == ("behind_log", "certain")
    assert rig.post(f"/delta_pin?version={NEWEST - 1}").status_code == 200
    assert reason(rig) == (None, "certain")
