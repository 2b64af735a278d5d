"""Several HTTP processes of one engine that follows a delta log: one looks, all know."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from delta_server import board
from delta_server.service import DeltaService
from engine_ext.log import open_log, read_heartbeats
from engine_ext.log.catalog import DONE
from tests.support.delta_bodies import VERSION, after, fresh_weights, same
from tests.support.endpoint_rig import Rig, app_of, assert_error
from tests.unit.server.delta_logs import CATCH_UP, NEWEST, STEPS, looked, until, write_steps
from tests.unit.server.test_log_follower import PIN

pytestmark = pytest.mark.slow

LONG = 1000.0  # seconds: no process looks without a request


class Processes:
    """Two processes of an engine that follows a log."""

    def __init__(self, folder: Path, log: Path, interval: float) -> None:
        self.log = log
        settings: dict[str, Any] = {"log": str(log), "follow": True, "follow_interval": interval}
        self.rig = Rig(folder / "spool", **settings)
        self.rig.engine.shared = True
        services = [self.rig.service, DeltaService(self.rig.engine, self.rig.settings)]
        self.rig.run(services[1].start())
        self.services, self.apps = services, [app_of(service) for service in services]

    def close(self) -> None:
        self.end(1)
        self.services[1].intake.close()
        self.rig.close()

    def end(self, number: int) -> None:
        """End what follows in one process."""
        following = self.services[number]._following
        assert following is not None
        following.cancel()
        self.rig.run(asyncio.wait([following]))

    def post(self, number: int, path: str, **options: Any) -> httpx.Response:
        return self.rig.run(self.rig.request("POST", path, app=self.apps[number], **options))

    def until(self, number: int, **facts: Any) -> dict[str, Any]:
        """Let the engine work until the status by one process has these facts."""
        return until(self.rig, app=self.apps[number], **facts)


@pytest.fixture
def started(tmp_path: Path, log: Path) -> Iterator[Callable[..., Processes]]:
    made: list[Processes] = []

    def start(interval: float = 0.01) -> Processes:
        made.append(Processes(tmp_path, log, interval))
        return made[-1]

    yield start
    for processes in made:
        processes.close()


class Looks(list[int]):
    """The number of the process of each look that began; `running` counts those not at an end."""

    running = 0


def looks(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> Looks:
    """Return what gets the number of the process at each look from now on."""
    seen = Looks()
    for number, service in enumerate(processes.services):
        follower = service.follower
        assert follower is not None

        async def look(number: int = number, look: Any = follower.look) -> None:
            seen.append(number)
            seen.running += 1
            try:
                await look()
            finally:
                seen.running -= 1

        monkeypatch.setattr(follower, "look", look)
    return seen


def test_one_process_looks_and_all_tell(
    log: Path, started: Callable[..., Processes], monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = started()
    seen = looks(processes, monkeypatch)
    write_steps(log)
    told = [processes.until(number, version=NEWEST, newest=NEWEST) for number in (0, 1)]
    assert same(processes.rig.engine.weights, after(fresh_weights(), *STEPS))
    looked(processes.rig)
    assert len({*seen}) == 1
    keys = ("name", "pid", "pinned", "failures", "error", "problem")
    first, second = ({key: status[key] for key in keys} for status in told)
    assert first == second
    [(heartbeat, _)] = read_heartbeats(open_log(log))
    assert (heartbeat.name, heartbeat.version) == (first["name"], NEWEST)


def test_another_process_takes_over(
    log: Path, started: Callable[..., Processes], monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = started()
    seen = looks(processes, monkeypatch)
    name = processes.until(1, failures=0)["name"]
    looked(processes.rig)
    [first] = {*seen}
    other = 1 - first
    states = [service.follower.shared for service in processes.services]  # type: ignore[union-attr]
    dead = states[first]._item.name
    hangs = asyncio.Event()

    async def hang() -> bool:
        hangs.set()
        await asyncio.sleep(LONG)
        return False

    async def last_looks_end() -> None:
        await hangs.wait()
        while other not in seen or seen.running:  # a pin lets the process that was asked look once
            await asyncio.sleep(0.005)

    processes.post(other, PIN, params={"version": VERSION + 1})
    monkeypatch.setattr(states[first], "lead", hang)
    processes.rig.run(last_looks_end())
    monkeypatch.setattr(board, "is_alive", lambda process: process != dead)
    write_steps(log)
    seen.clear()
    found = processes.until(other, version=VERSION + 1)
    looked(processes.rig)
    assert {*seen} == {other}
    assert (found["name"], found["pinned"]) == (name, VERSION + 1)
    [(heartbeat, _)] = read_heartbeats(open_log(log))
    assert (heartbeat.name, heartbeat.state) == (name, "pinned")


def test_every_process_pins_and_catches_up(log: Path, started: Callable[..., Processes]) -> None:
    processes = started(LONG)
    processes.until(0, failures=0, pinned=None)
    assert processes.post(1, PIN, params={"version": VERSION + 1}).json()["pinned"] == VERSION + 1
    write_steps(log)
    for number in (0, 1):
        assert processes.post(number, CATCH_UP).json()["version"] == VERSION + 1
        processes.until(number, version=VERSION + 1, pinned=VERSION + 1, newest=NEWEST)
    refused = processes.post(0, PIN, params={"version": VERSION})
    assert_error(refused, 409, "VersionConflict", expected=VERSION, actual=VERSION + 1)
    assert processes.post(0, PIN).json()["status"] == "released"
    for number in (0, 1):  # the process that was asked continues at once
        processes.until(number, version=NEWEST, pinned=None)
    assert same(processes.rig.engine.weights, after(fresh_weights(), *STEPS))


def test_no_version_is_applied_twice(log: Path, started: Callable[..., Processes]) -> None:
    processes = started(LONG)
    processes.until(0, failures=0)
    write_steps(log)

    async def both() -> list[httpx.Response]:
        asked = [processes.rig.request("POST", CATCH_UP, app=app) for app in processes.apps]
        return await asyncio.gather(*asked)

    applied = [answer.json()["applied"] for answer in processes.rig.run(both())]
    assert sorted(applied) == [[], [VERSION + 1, VERSION + 2, NEWEST]]
    assert processes.rig.engine.writes == [1, 1]


def test_every_process_tells_of_a_damaged_log(log: Path, started: Callable[..., Processes]) -> None:
    processes = started(LONG)
    processes.until(0, failures=0)
    folders = write_steps(log)
    (folders[1] / DONE).unlink()
    assert_error(processes.post(1, CATCH_UP), 409, "LogDamaged")
    for number in (0, 1):
        found = processes.until(number, version=VERSION + 1, failures=1, newest=NEWEST)
        assert found["error"]["type"] == found["problem"]["type"] == "LogDamaged"


def test_the_heartbeat_goes_with_the_process_that_follows(
    log: Path, started: Callable[..., Processes], monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = started()
    seen = looks(processes, monkeypatch)
    processes.until(0, failures=0)
    looked(processes.rig)
    [first] = {*seen}
    processes.end(1 - first)
    assert len(read_heartbeats(open_log(log))) == 1
    processes.end(first)
    assert read_heartbeats(open_log(log)) == []
