"""Engines with several HTTP processes that follow a delta log: one process looks, all know."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine_ext.log import live_heartbeats, open_log
from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from scripts.live_engine.sglang import SglangProcess
from tests.faults.observed import PLUGIN
from tests.live.vllm_serve import VllmServe, distribution
from tests.patches.conftest import patched_copy
from tests.patches.http_processes import one_client_each, shown_by_top
from tests.support.plain_trainer import Trainer, model_digest, write_log

__all__ = ["patched_copy"]

pytestmark = pytest.mark.full

PROCESSES = 2
WAIT_S = 120.0


@pytest.fixture
def trainer(checkpoint: Callable[[str], Path]) -> Trainer:
    return Trainer(tiny_models.load_tensors(checkpoint("qwen3")))


@pytest.fixture
def log(tmp_path: Path, trainer: Trainer) -> Path:
    write_log(tmp_path / "log", trainer, 1)
    return tmp_path / "log"


def follow(log: Path) -> list[str]:
    return ["--delta-log", str(log), "--delta-follow", "--delta-tuning", "follow-interval=0.5"]


def vllm(base: Path, log: Path, folder: Path) -> VllmServe:
    folder.mkdir()
    return VllmServe(
        base,
        enable_delta=True,
        extra_args=["--api-server-count", str(PROCESSES), *follow(log)],
        python_path=[distribution(folder / "path")],
        log_path=folder / "engine.log",
    )


def until(clients: list[httpx.Client], **facts: Any) -> list[dict[str, Any]]:
    """Wait until the status by every process has these facts; return all statuses."""
    end = time.monotonic() + WAIT_S
    while True:
        found = []
        for client in clients:
            status = client.get("/delta_status").json()
            version, log = status["version"], status["log"]
            known = {
                "version": version["number"],
                "published": version["published"],
                "state": status["health"]["state"],
            }
            found.append({**known, **log, **log["follow"]})
        if all(one[name] == value for one in found for name, value in facts.items()):
            return found
        assert time.monotonic() < end, found
        time.sleep(0.1)


def heartbeat(log: Path, version: int) -> Any:
    """Wait for the heartbeat of an engine at a version; there is no other one."""
    end = time.monotonic() + WAIT_S
    while True:
        [found] = live_heartbeats(open_log(log))
        if found.version == version:
            return found
        assert time.monotonic() < end, found
        time.sleep(0.1)


def check_scan(engine: EngineProcess, trainer: Trainer) -> None:
    scan = engine.get("/delta_digest", params={"scan": "true"}).json()
    assert (scan["digest"], scan["corrupted"]) == (model_digest(trainer.tensors).hex(), [])


def follow_with_all(
    engine: EngineProcess, clients: list[httpx.Client], log: Path, trainer: Trainer
) -> int:
    """Pin, release, catch up and look at every process; return the id of the one that follows."""
    first, second = clients
    until(clients, version=1)
    pinned = second.post("/delta_pin", params={"version": "2"}).json()
    assert (pinned["status"], pinned["version"]) == ("pinned", 1)
    write_log(log, trainer, 2)
    statuses = until(clients, version=2, newest=3, pinned=2)
    assert len({(one["name"], one["pid"]) for one in statuses}) == 1
    assert heartbeat(log, 2).state == "pinned"
    refused = first.post("/delta_pin", params={"version": "1"})
    assert (refused.status_code, refused.json()["error"]["actual"]) == (409, 2)
    assert first.post("/delta_pin").json()["status"] == "released"
    until(clients, version=3, pinned=None, problem=None)
    write_log(log, trainer, 1)
    for client in clients:
        assert client.post("/delta_catch_up").json()["version"] == 4
    statuses = until(clients, version=4, newest=4, failures=0, published="4")
    found = heartbeat(log, 4)
    assert (found.name, found.state) == (statuses[0]["name"], "following")
    assert shown_by_top(engine.url)[1:] == (4, "certain")
    for client in clients:
        lines = client.get("/metrics").text.splitlines()
        assert "delta_updates_log_behind 0.0" in lines
        assert "delta_updates_version 4.0" in lines
        assert client.get("/delta_dashboard").status_code == 200
    check_scan(engine, trainer)
    text = engine.log_path.read_text()
    assert sum(text.count(f"sync outcome=committed version={v} ") for v in (2, 3, 4)) == 3
    [pid] = {one["pid"] for one in statuses}
    assert pid in engine.pids()
    return int(pid)


def test_one_of_vllms_processes_follows(
    checkpoint: Callable[[str], Path], log: Path, trainer: Trainer, tmp_path: Path
) -> None:
    """And vLLM ends if it is killed; started again, the engine follows from its checkpoint on."""
    base = checkpoint("qwen3")
    with vllm(base, log, tmp_path / "first") as engine:
        with one_client_each(engine, PROCESSES) as clients:
            process = follow_with_all(engine, clients, log, trainer)
        os.kill(process, signal.SIGKILL)
        assert engine.wait(WAIT_S)
        assert live_heartbeats(open_log(log))  # prune keeps what it needs, until that expires
    write_log(log, trainer, 1)
    with vllm(base, log, tmp_path / "second") as engine:
        with one_client_each(engine, PROCESSES) as clients:
            until(clients, version=5)
        check_scan(engine, trainer)


@pytest.fixture
def sglang(
    patched_copy: Callable[[str], Path],
    checkpoint: Callable[[str], Path],
    log: Path,
    tmp_path: Path,
) -> Iterator[EngineProcess]:
    """Its hooks are in its source: it loads no plugins in these processes."""
    (tmp_path / "faults").mkdir()
    engine = SglangProcess(
        checkpoint("qwen3"),
        enable_delta=True,
        extra_args=["--tokenizer-worker-num", str(PROCESSES), "--enable-metrics", *follow(log)],
        python_path=[PLUGIN, patched_copy("sglang")],
        extra_env={"SGLANG_PLUGINS": "delta_faults", "DELTA_FAULTS": str(tmp_path / "faults")},
        log_path=tmp_path / "engine.log",
    )
    with engine:
        yield engine


def test_another_of_sglangs_processes_takes_over(
    sglang: EngineProcess, log: Path, trainer: Trainer, tmp_path: Path
) -> None:
    """Also of one that is killed in its commit."""
    with one_client_each(sglang, PROCESSES) as clients:
        dead = follow_with_all(sglang, clients, log, trainer)
    name = heartbeat(log, 4).name
    with one_client_each(sglang, PROCESSES) as clients:
        pinned = clients[0].post("/delta_pin", params={"version": "5"}).json()
        assert pinned["status"] == "pinned"
    write_log(log, trainer, 1)
    os.kill(dead, signal.SIGKILL)
    reach(sglang, 5)
    write_log(log, trainer, 1)
    assert heartbeat(log, 5).name == name
    with one_client_each(sglang, PROCESSES) as clients:  # one of them is new
        statuses = until(clients, version=5, newest=6, pinned=5, failures=0)
        assert {one["name"] for one in statuses} == {name}
        [pid] = {one["pid"] for one in statuses}
        assert pid != dead
        assert pid in sglang.pids()
        assert clients[1].post("/delta_pin").json()["status"] == "released"
        until(clients, version=6, pinned=None)
    assert heartbeat(log, 6).name == name
    check_scan(sglang, trainer)

    (tmp_path / "faults" / "slow_write-0").touch()
    write_log(log, trainer, 1)
    end = time.monotonic() + WAIT_S
    while not (tmp_path / "faults" / "stalled-0").exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    reach(sglang, 7)
    write_log(log, trainer, 1)
    with one_client_each(sglang, PROCESSES) as clients:
        statuses = until(clients, version=8, newest=8, published="8", state="certain")
        assert {one["name"] for one in statuses} == {name}
        assert pid not in {one["pid"] for one in statuses}
    check_scan(sglang, trainer)
    assert sglang.complete("the quick", max_tokens=4)["choices"][0]["text"] is not None


def reach(engine: EngineProcess, version: int) -> None:
    """Wait until an engine is at a version, whichever process answers."""
    end, status = time.monotonic() + WAIT_S, None
    while True:
        with contextlib.suppress(httpx.HTTPError):  # its process has died just now
            status = engine.delta_status()
            if status.version.number == version:
                return
        assert time.monotonic() < end, status
        time.sleep(0.1)
