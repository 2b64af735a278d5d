"""A fleet: engines on two hosts follow one trainer through an object store."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from delta_sender import DeltaSender
from engine_ext.log import live_heartbeats, open_log
from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from tests.live.conftest import fingerprint
from tests.support.object_stores import StoreServer
from tests.support.plain_trainer import Trainer, model_digest
from tests.support.store_proxy import Fault, StoreProxy

VERSIONS = 200
KINDS = ["vllm", "sglang"]  # one of each on each host
HOSTS = ["a", "b"]


class Host:
    """Resources that engines of one host share: a cache, and the way to the store."""

    def __init__(self, name: str, store: StoreServer, folder: Path) -> None:
        self.proxy = StoreProxy(store)
        self.cache = folder / f"cache-{name}"
        self.cache.mkdir(mode=0o700)

    def gets_of_parts(self) -> Counter[str]:
        """Return how often each part was read from the store, by its path."""
        found: Counter[str] = Counter()
        for (method, path), count in self.proxy.requests.copy().items():
            if method == "GET" and path.endswith(".safetensors"):
                found[path] += count
        return found


class Load:
    """Requests to an engine, one after another, while it is there."""

    def __init__(self, engines: dict[tuple[str, str], EngineProcess]) -> None:
        self._engines, self._stop = engines, threading.Event()
        self.done: Counter[tuple[str, str]] = Counter()
        self._threads = [threading.Thread(target=self._run, args=(key,)) for key in engines]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, key: tuple[str, str]) -> None:
        while not self._stop.is_set():
            try:
                self._engines[key].complete("the quick", max_tokens=4)
                self.done[key] += 1
            except Exception:  # it was killed, and will be there again
                self._stop.wait(1.0)
            self._stop.wait(0.5)


@pytest.fixture
def hosts(store_server: StoreServer, store_url: str, tmp_path: Path) -> Iterator[dict[str, Host]]:
    made = {name: Host(name, store_server, tmp_path) for name in HOSTS}
    yield made
    for host in made.values():
        host.proxy.close()


def version_of(engine: EngineProcess) -> int:
    return int(engine.delta_status().version.number)


def reach(engine: EngineProcess, version: int, seconds: float = 240.0) -> None:
    """Wait until an engine is at a version."""
    end = time.monotonic() + seconds
    while version_of(engine) != version:
        assert time.monotonic() < end, engine.delta_status()
        time.sleep(0.3)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_fleet_follows_one_trainer(
    checkpoint: Callable[[str], Path],
    start: Callable[..., EngineProcess],
    hosts: dict[str, Host],
    store_url: str,
    tmp_path: Path,
) -> None:
    """With engines that are killed, start late, are pinned, and a store that fails at times."""
    base = checkpoint("qwen3")
    trainer = Trainer(tiny_models.load_tensors(base))
    rng = random.Random(7)

    def launch(kind: str, host: str) -> EngineProcess:
        arguments = [
            "--delta-log",
            store_url,
            "--delta-follow",
            "--delta-tuning",
            "follow-interval=1",
        ]
        arguments += ["--delta-tuning", f"cache-dir={hosts[host].cache}"]
        environment = hosts[host].proxy.server.environment
        return start(kind, base, extra_args=arguments, extra_env=environment)

    def faults(method: str, path: str, number: int) -> Fault | None:
        if method != "GET" or rng.random() > 0.02:
            return None
        return rng.choice([Fault(status=503), Fault(cut_after=9), Fault(flip=5), Fault(status=404)])

    keys = [(kind, host) for host in HOSTS for kind in KINDS]
    late = ("sglang", "b")
    engines = {key: launch(*key) for key in keys if key != late}
    pinned, late_starts = engines["vllm", "a"], []
    with (
        ThreadPoolExecutor(2) as starts,
        DeltaSender(store_url, base, encoding="auto") as sender,
        Load(engines) as load,
    ):
        for version in range(1, VERSIONS + 1):
            trainer.step()
            report = sender.sync(trainer.tensors.items())
            assert (report.version, report.full) == (version, False)
            if version == 20:
                for host in hosts.values():
                    host.proxy.faults = faults
            if version == 40:
                answer = pinned.post("/delta_pin", params={"version": "50"}).json()
                assert answer["status"] == "pinned"
            if version == 60:
                engines["sglang", "a"].stop(grace_s=0)
            if version == 80:
                late_starts = [starts.submit(launch, *key) for key in (late, ("sglang", "a"))]
            if version == 150:
                assert version_of(pinned) == 50
                assert pinned.post("/delta_pin").json()["status"] == "released"
            time.sleep(0.3)
        for key, started in zip((late, ("sglang", "a")), late_starts, strict=True):
            engines[key] = started.result()
            assert version_of(engines[key]) >= 80  # before it served
        for host in hosts.values():
            host.proxy.faults = lambda method, path, number: None
        for engine in engines.values():
            reach(engine, VERSIONS)
    assert all(load.done[key] for key in keys if key != late), load.done
    log, end = open_log(store_url), time.monotonic() + 60
    while sum(beat.version == VERSIONS for beat in live_heartbeats(log)) < len(keys):
        assert time.monotonic() < end, live_heartbeats(log)
        time.sleep(0.5)
    expected = model_digest(trainer.tensors).hex()
    seen: dict[tuple[str, str], Any] = {}
    for key, engine in engines.items():
        scan = engine.get("/delta_digest", params={"scan": "true"}).json()
        assert (scan["digest"], scan["corrupted"]) == (expected, []), key
        seen[key] = fingerprint(engine)
        engine.stop()
    target = tiny_models.save_checkpoint(base, tmp_path / "target", trainer.tensors)
    for kind in KINDS:
        fresh = start(kind, target)
        for place in HOSTS:
            assert fingerprint(fresh) == seen[kind, place], (kind, place)
        fresh.stop()
    for name, host in hosts.items():
        reads = host.gets_of_parts()
        again = sum(reads.values()) - len(reads)
        print(f"host {name}: {len(reads)} parts, {again} of them asked for again")


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_group_of_followers_is_at_one_version(
    checkpoint: Callable[[str], Path], start: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    """One is killed while the other has prepared a version, and starts again at that one."""
    base, log = checkpoint("qwen3"), tmp_path / "log"
    log.mkdir()
    trainer = Trainer(tiny_models.load_tensors(base))
    follow = ["--delta-log", str(log), "--delta-follow", "--delta-follow-group", "rollout"]
    follow += ["--delta-tuning", "follow-interval=1"]

    def group_of(engine: EngineProcess) -> dict[str, Any]:
        found: dict[str, Any] = engine.get("/delta_status").json()["log"]["follow"]["group"]
        return found

    engines = {kind: start(kind, base, extra_args=follow) for kind in KINDS}
    with DeltaSender(log, base, encoding="auto") as sender:
        for version in range(1, 11):
            trainer.step()
            assert sender.sync(trainer.tensors.items()).version == version
            for engine in engines.values():
                reach(engine, version)
                assert engine.get("/delta_ready").status_code == 200
        engines["sglang"].stop(grace_s=0)
        trainer.step()
        sender.sync(trainer.tensors.items())
        end = time.monotonic() + 60
        while group_of(engines["vllm"])["prepared"] != 11:
            assert time.monotonic() < end, group_of(engines["vllm"])
            time.sleep(0.3)
        assert version_of(engines["vllm"]) == 10
        assert len(group_of(engines["vllm"])["waits_for"]) == 1
        reach(engines["vllm"], 11)  # once the heartbeat of the other one does not count any more
        engines["sglang"] = start("sglang", base, extra_args=follow)
        assert version_of(engines["sglang"]) == 11  # before it served
        trainer.step()
        sender.sync(trainer.tensors.items())
        for engine in engines.values():
            reach(engine, 12)
    expected = model_digest(trainer.tensors).hex()
    for engine in engines.values():
        scan = engine.get("/delta_digest", params={"scan": "true"}).json()
        assert (scan["digest"], scan["corrupted"]) == (expected, [])
        engine.stop()
