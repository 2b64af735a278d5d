"""Engines that replay and follow a delta log in a real object store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from delta_server.sources import log as log_replay
from delta_server.sources import log_follower
from engine_ext.log import DeltaLog, live_heartbeats, open_log
from tests.support.delta_bodies import VERSION, after, delta_part, fresh_weights, same
from tests.support.endpoint_rig import Rig, assert_error
from tests.support.object_stores import StoreServer
from tests.support.present import present
from tests.support.store_proxy import Fault, StoreProxy
from tests.unit.server.delta_logs import CATCH_UP, NEWEST, STEPS, looked, until

pytestmark = pytest.mark.slow


@pytest.fixture
def log(store_url: str, tmp_path: Path) -> DeltaLog:
    """An empty log, past any proxy."""
    opened = open_log(store_url, scratch=str(tmp_path))
    return opened


@pytest.fixture
def proxy(
    store_server: StoreServer, log: DeltaLog, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StoreProxy]:
    """A proxy between the store and the engines."""
    with StoreProxy(store_server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.server.endpoint)
        yield proxy


@pytest.fixture
def log_settings(proxy: StoreProxy) -> dict[str, Any]:
    """Engines reach the store by the proxy."""
    return {}


def write_steps(log: DeltaLog, first: int = 0, last: int = len(STEPS)) -> None:
    writer = log.writer()
    for k in range(first, last):
        draft = writer.begin(VERSION + k + 1)
        draft.add(delta_part(STEPS[k], VERSION + k + 1, base_version=VERSION + k))
        draft.finish()


@pytest.mark.parametrize("follow", [False, True])
def test_start_up_reads_failing_store_again(
    log: DeltaLog,
    proxy: StoreProxy,
    started: Callable[..., Rig],
    monkeypatch: pytest.MonkeyPatch,
    follow: bool,
) -> None:
    monkeypatch.setattr(log_replay, "_WAITS_S", (0.01, 0.01))
    write_steps(log)
    flipped: list[str] = []

    def faults(method: str, path: str, number: int) -> Fault | None:
        if "flush" not in path or len(flipped) == 4:
            return None
        flipped.append(path)
        return Fault(flip=7)

    proxy.faults = faults
    rig = started(follow=follow, follow_interval=60.0)
    assert (rig.status().version.number, len(flipped)) == (NEWEST, 4)
    assert present(rig.status().log).problem is None


def test_an_engine_starts_at_the_newest_version(log: DeltaLog, started: Callable[..., Rig]) -> None:
    write_steps(log, last=2)
    rig = started()
    assert rig.status().version.number == VERSION + 2
    assert present(rig.status().log).folder == log.location
    write_steps(log, first=2)
    assert rig.post(CATCH_UP).json()["applied"] == [NEWEST]
    assert same(rig.engine.weights, after(fresh_weights(), *STEPS))
    assert rig.spooled() == []


@pytest.mark.parametrize("last", [1, len(STEPS)], ids=["one", "folded"])
def test_event_loop_does_not_remove_log_files(
    log: DeltaLog, started: Callable[..., Rig], removes_in_threads: list[str], last: int
) -> None:
    write_steps(log, last=last)
    rig = started(follow=last > 1, follow_interval=60.0)
    assert rig.status().version.number == VERSION + last


def test_an_engine_whose_store_is_down_waits(
    log: DeltaLog,
    proxy: StoreProxy,
    started: Callable[..., Rig],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It serves what it has loaded, and says so, until the store is well."""
    monkeypatch.setattr(log_replay, "_WAITS_S", (0.01,))
    write_steps(log)
    proxy.faults = lambda method, path, number: Fault(status=403)
    rig = started(follow=True, follow_interval=0.01)
    assert f"waits for its log and serves what it has loaded: {log.location}" in caplog.text
    until(rig, state="waiting_for_log", version=VERSION)
    proxy.faults = lambda method, path, number: None
    until(rig, state="certain", version=NEWEST, error=None)


def test_engines_of_a_host_fetch_each_part_once(
    log: DeltaLog, started: Callable[..., Rig], proxy: StoreProxy
) -> None:
    write_steps(log)
    for _ in range(3):
        assert started().status().version.number == NEWEST
    parts = {path: n for (_, path), n in proxy.requests.items() if path.endswith(".safetensors")}
    assert [*parts.values()] == [1] * len(STEPS)


def test_an_engine_follows(log: DeltaLog, started: Callable[..., Rig]) -> None:
    rig = started(follow=True, follow_interval=0.01)
    until(rig, version=VERSION, failures=0)
    write_steps(log)
    until(rig, version=NEWEST, error=None)
    looked(rig)
    assert same(rig.engine.weights, after(fresh_weights(), *STEPS))
    [heartbeat] = live_heartbeats(log)
    assert (heartbeat.version, heartbeat.state) == (NEWEST, "following")


@pytest.mark.parametrize(
    "fault", [Fault(status=403), Fault(status=404), Fault(flip=3)], ids=["denied", "gone", "bits"]
)
def test_what_cannot_be_fetched_leaves_the_engine_where_it_is(
    log: DeltaLog, started: Callable[..., Rig], proxy: StoreProxy, fault: Fault
) -> None:
    rig = started()
    write_steps(log)
    proxy.faults = lambda method, path, number: fault if "flush" in path else None
    answer = rig.post(CATCH_UP)
    kind = "PartUnavailable" if fault.status == 403 else "LogDamaged"
    assert_error(answer, {"PartUnavailable": 502, "LogDamaged": 409}[kind], kind)
    assert rig.status().version.number == VERSION
    assert same(rig.engine.weights, fresh_weights())
    proxy.faults = lambda method, path, number: None
    assert rig.post(CATCH_UP).json()["version"] == NEWEST


def test_a_store_that_is_away_at_the_start(
    log: DeltaLog, started: Callable[..., Rig], proxy: StoreProxy
) -> None:
    write_steps(log)
    proxy.faults = lambda method, path, number: Fault(status=403)
    rig = started()
    assert rig.status().version.number == VERSION
    assert present(present(rig.status().log).problem)["type"] == "LogDamaged"
    proxy.faults = lambda method, path, number: None
    assert rig.post(CATCH_UP).json()["version"] == NEWEST


def test_a_done_that_changed_on_the_way_is_read_again(
    log: DeltaLog, started: Callable[..., Rig], proxy: StoreProxy
) -> None:
    write_steps(log, last=1)
    rig = started()
    write_steps(log, first=1)
    proxy.faults = lambda method, path, number: Fault(flip=12) if path.endswith("DONE") else None
    assert_error(rig.post(CATCH_UP), 409, "LogDamaged")
    proxy.faults = lambda method, path, number: None
    assert rig.post(CATCH_UP).json()["version"] == NEWEST


def test_a_done_that_the_store_has_lost(
    log: DeltaLog, started: Callable[..., Rig], proxy: StoreProxy
) -> None:
    """It is listed and not found, which is not as if there were no newer version."""
    rig = started()
    write_steps(log)
    proxy.faults = lambda method, path, number: (
        Fault(status=404) if path.endswith("DONE") and method == "GET" else None
    )
    assert_error(rig.post(CATCH_UP), 409, "LogDamaged")
    status = rig.status()
    assert (status.version.number, present(status.log).newest) == (VERSION, NEWEST)
    assert "weight_v" in present(present(status.log).problem)["message"]
    proxy.faults = lambda method, path, number: None
    assert rig.post(CATCH_UP).json()["version"] == NEWEST


def test_heartbeats_go_on_while_a_store_is_slow(
    log: DeltaLog,
    started: Callable[..., Rig],
    proxy: StoreProxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else what the engine reads could be pruned meanwhile."""
    monkeypatch.setattr(log_follower, "_SHORTEST_EXPIRY_S", 2.0)
    rig = started(follow=True, follow_interval=0.01)
    until(rig, version=VERSION, failures=0)
    asked, released = threading.Event(), threading.Event()

    def hold(method: str, path: str, number: int) -> None:
        if "flush" in path:
            asked.set()
            released.wait(25)

    proxy.faults = hold
    write_steps(log)
    beats: set[Any] = set()
    while len(beats) < 4:
        assert rig.status().version.number == VERSION
        if asked.is_set():
            beats |= {beat.at for beat in live_heartbeats(log)}
    released.set()
    until(rig, version=NEWEST, error=None)


def test_a_cache_without_room(log: DeltaLog, started: Callable[..., Rig], tmp_path: Path) -> None:
    """It continues without a request once there is some."""
    rig = started(follow=True, follow_interval=0.01, cache_bytes=10)
    write_steps(log)
    until(rig, version=VERSION)
    while (found := looked(rig))["error"] is None:
        assert found["version"] == VERSION
    assert found["error"]["type"] == "SpoolFull"
    replay: Any = rig.service.log_replay
    replay.log.store._cache._limit = 1 << 20
    until(rig, version=NEWEST, error=None)
    assert same(rig.engine.weights, after(fresh_weights(), *STEPS))


def test_clocks_that_jump(
    log: DeltaLog, started: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ages of heartbeats, and of what is in the cache, are no reason to stop or to delete."""
    rig = started(follow=True, follow_interval=0.01)
    until(rig, version=VERSION, failures=0)
    real = time.time
    for k, jump in enumerate((1e6, -1e6, 1e8)):
        monkeypatch.setattr(time, "time", lambda jump=jump: real() + jump)
        write_steps(log, first=k, last=k + 1)
        until(rig, version=VERSION + k + 1, error=None)
        looked(rig)
        assert [beat.version for beat in live_heartbeats(log)] == [VERSION + k + 1]
    assert same(rig.engine.weights, after(fresh_weights(), *STEPS))
