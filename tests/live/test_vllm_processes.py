"""vLLM with several HTTP processes and two ranks: every process gives the same answers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from delta_sender import DeltaSender
from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from tests.faults.harness import OCTETS
from tests.faults.observed import PLUGIN
from tests.live.conftest import fingerprint
from tests.live.vllm_serve import VllmServe, distribution
from tests.patches.http_processes import committed, one_client_each, shown_by_top
from tests.support.plain_trainer import (
    Trainer,
    container,
    edited,
    model_digest,
    split,
    write_log,
)

pytestmark = pytest.mark.full

PROCESSES = 2
LOGGED = 2
RANKS = 2


class Live:
    """A vLLM with several HTTP processes, a client of each, and the trainer that it follows."""

    def __init__(
        self, engine: EngineProcess, base: Path, trainer: Trainer, clients: list[httpx.Client]
    ) -> None:
        self.engine = engine
        self.base = base
        self.trainer = trainer
        self.clients = clients

    def next(self) -> bytes:
        """A part that is all of the sync to the trainer's next weights."""
        changed = self.trainer.step()
        return container(self.trainer.tensors, changed, metadata=self.trainer.metadata())

    def full(self) -> bytes:
        """A part with all that the trainer has."""
        metadata = {"current_version": str(self.trainer.version), "full": "true"}
        dense = dict.fromkeys(self.trainer.tensors)
        return container(self.trainer.tensors, dense, metadata=metadata)

    def generate(
        self, client: httpx.Client, *, headers: dict[str, str] | None = None, **options: Any
    ) -> httpx.Response:
        body = {"model": str(self.base), "prompt": "count", "max_tokens": 2, **options}
        return client.post("/v1/completions", json=body, headers=headers)

    def at_one_version(self) -> None:
        """Every process reports the trainer's version, and that the ranks hold its weights."""
        version = self.trainer.version
        held: dict[str, Any] = {}
        for client in self.clients:
            status = client.get("/delta_status").json()
            held = status["version"]
            assert (held["number"], held["published"]) == (version, str(version))
            assert (status["ranks"], status["health"]["state"]) == (RANKS, "certain")
            assert held["digest"] == model_digest(self.trainer.tensors).hex()
            assert client.get("/weight_info").json()["weight_version"] == str(version)
            assert self.generate(client).status_code == 200
        found = self.clients[0].get("/delta_digest", params={"scan": "true"}).json()
        assert (found["digest"], found["corrupted"]) == (held["digest"], [])


@pytest.fixture(scope="module")
def live(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Live]:
    folder, base = tmp_path_factory.mktemp("live"), checkpoint("qwen3")
    trainer = Trainer(tiny_models.load_tensors(base))
    write_log(folder / "log", trainer, LOGGED)
    (folder / "faults").mkdir()
    engine = VllmServe(
        base,
        tp=RANKS,
        enable_delta=True,
        extra_args=["--api-server-count", str(PROCESSES), "--delta-log", str(folder / "log")],
        python_path=[distribution(folder / "path"), PLUGIN],
        extra_env={"DELTA_FAULTS": str(folder / "faults")},
        log_path=folder / "engine.log",
    )
    with engine, one_client_each(engine, PROCESSES) as clients:
        yield Live(engine, base, trainer, clients)


@pytest.fixture
def arm(live: Live) -> Callable[[str, int], None]:
    """Lets something happen in a rank; see ``tests/shims/faults``."""

    def one(fault: str, rank: int) -> None:
        (live.engine.log_path.parent / "faults" / f"{fault}-{rank}").touch()

    return one


def test_one_process_replays_and_all_know_it(live: Live) -> None:
    live.at_one_version()
    assert live.trainer.version == LOGGED
    assert live.engine.log_path.read_text().count("versions replayed") == 1
    for client in live.clients:
        log = client.get("/delta_status").json()["log"]
        assert (log["newest"], log["problem"]) == (LOGGED, None)


def test_every_process_commits(live: Live) -> None:
    for client in [*live.clients, *live.clients]:
        answer = client.post("/update_weights_delta", content=live.next(), headers=OCTETS)
        assert (answer.status_code, answer.json()["status"]) == (200, "committed"), answer.text
        live.at_one_version()


def test_the_parts_of_one_sync_come_to_several_processes(live: Live) -> None:
    groups = split(live.trainer.step(), 4)
    metadata = {**live.trainer.metadata(), "num_parts": "4"}
    statuses = []
    for part, changed in enumerate(groups):
        body = container(live.trainer.tensors, changed, metadata={**metadata, "part": str(part)})
        client = live.clients[part % PROCESSES]
        answer = client.post("/update_weights_delta", content=body, headers=OCTETS)
        statuses.append(answer.json()["status"])
    assert statuses == ["staged"] * 3 + ["committed"]
    live.at_one_version()


def test_one_part_comes_to_all_processes_at_once(live: Live) -> None:
    body = live.next()

    def post(client: httpx.Client) -> Any:
        return client.post("/update_weights_delta", content=body, headers=OCTETS).json()["status"]

    with ThreadPoolExecutor(PROCESSES) as threads:
        statuses = sorted(threads.map(post, live.clients))
    assert statuses == ["already_applied"] * (PROCESSES - 1) + ["committed"]
    live.at_one_version()


def test_two_senders(live: Live) -> None:
    """Another sync to the same version, by another process: one of the two."""
    mine = live.next()
    theirs = edited(
        live.full(), full=None, sync_id="theirs", base_version=str(live.trainer.version - 1)
    )

    def post(client: httpx.Client, body: bytes) -> int:
        return client.post("/update_weights_delta", content=body, headers=OCTETS).status_code

    with ThreadPoolExecutor(PROCESSES) as threads:
        statuses = sorted(threads.map(post, live.clients, [mine, theirs]))
    assert statuses == [200, 409]
    live.at_one_version()


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_requests_of_another_process_in_flight(live: Live, mode: str) -> None:
    """They end as the pause mode says, whichever process has them; there is always one."""
    first, second = live.clients
    begun, over, ends = threading.Event(), threading.Event(), []

    def generate(tokens: int) -> None:
        body = {"model": str(live.base), "prompt": "count", "max_tokens": tokens, "stream": True}
        options = {"ignore_eos": True, "temperature": 0}
        reason = None
        while not over.is_set():
            with second.stream("POST", "/v1/completions", json={**body, **options}) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        reason = json.loads(line[6:])["choices"][0]["finish_reason"]
                        begun.set()
            ends.append(reason)

    threads = [threading.Thread(target=generate, args=(tokens,)) for tokens in (130, 170, 200)]
    for thread in threads:  # they do not all end at once
        thread.start()
    assert begun.wait(60)
    query = {"pause_mode": mode}
    answer = first.post("/update_weights_delta", content=live.next(), headers=OCTETS, params=query)
    ended = len(ends)
    over.set()
    for thread in threads:
        thread.join(60)
    assert answer.json()["status"] == "committed", answer.text
    assert ended > 0 or mode != "wait"
    assert ("abort" in ends) == (mode == "abort")
    assert {*ends} <= {"abort", "length"}
    live.at_one_version()


def test_a_version_is_kept_across_processes(live: Live) -> None:
    """A request of one process for a version ends when another one commits."""
    first, second = live.clients
    before = live.trainer.version
    options = {"max_tokens": 240, "n": 8, "ignore_eos": True, "temperature": 1}

    def ask() -> httpx.Response:
        """Ask for the version until it is refused: one request is in flight at the commit."""
        while True:
            wanted = {"X-Weight-Version": str(before)}
            answer = live.generate(second, **options, headers=wanted)
            if answer.status_code != 200:
                return answer
            spans = [choice["weight_spans"] for choice in answer.json()["choices"]]
            assert spans == 8 * [[[0, before]]]

    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(ask)
        time.sleep(0.3)
        done = first.post("/update_weights_delta", content=live.next(), headers=OCTETS)
        answer = asking.result(60)
    assert done.json()["status"] == "committed", done.text
    assert answer.status_code == 409, answer.text
    assert answer.json()["error"]["version"] == live.trainer.version
    for client in live.clients:
        ready = client.get("/delta_ready", params={"min_version": live.trainer.version})
        assert (ready.status_code, ready.json()["version"]) == (200, live.trainer.version)
        now = {"X-Weight-Version": str(live.trainer.version)}
        assert live.generate(client, headers=now).status_code == 200
    live.at_one_version()


def test_weights_that_one_process_left_uncertain(
    live: Live, arm: Callable[[str, int], None]
) -> None:
    """No process generates from them, and any other one heals them."""
    first, second = live.clients
    arm("fail_write", 1)
    arm("fail_undo", 1)
    answer = first.post("/update_weights_delta", content=live.next(), headers=OCTETS)
    assert answer.json()["error"]["type"] == "CommitFailed", answer.text
    for client in live.clients:
        assert client.get("/delta_status").json()["health"]["state"] == "uncertain"
        assert live.generate(client).json()["error"]["type"] == "EngineUncertain"
    assert shown_by_top(live.engine.url) == (3, live.trainer.version - 1, "uncertain")
    healed = second.post("/update_weights_delta", content=live.full(), headers=OCTETS)
    assert healed.json()["status"] == "committed", healed.text
    live.at_one_version()


def paused(live: Live) -> list[Any]:
    return [client.get("/delta_status").json()["health"]["paused"] for client in live.clients]


def test_every_process_knows_of_a_pause(live: Live) -> None:
    """Also a process that was not asked for it, and of its end by another one."""
    first, second = live.clients
    assert first.post("/pause", params={"mode": "keep"}).status_code == 200
    seen = paused(live)
    assert [one["by"] for one in seen] == ["127.0.0.1"] * PROCESSES
    assert seen[0]["since"] == seen[1]["since"]
    assert second.post("/resume").status_code == 200
    assert paused(live) == [None] * PROCESSES
    live.at_one_version()


def test_every_process_tells_of_all_syncs(live: Live) -> None:
    query = {"history": "true"}
    before = committed(live.clients[0])
    for client in live.clients:
        client.post("/update_weights_delta", content=live.next(), headers=OCTETS)
    versions = [live.trainer.version - 1, live.trainer.version]
    for client in live.clients:
        history = client.get("/delta_status", params=query).json()["history"]
        assert [sync["version"] for sync in history[-2:]] == versions
        assert committed(client) == before + 2
        lines = client.get("/metrics").text.splitlines()
        assert f"delta_updates_version {float(live.trainer.version)}" in lines
    assert shown_by_top(live.engine.url) == (0, live.trainer.version, "certain")
    logged = live.engine.log_path.read_text().count("delta sync outcome=committed")
    assert logged == committed(live.clients[0])


def test_a_rollback_by_one_process_and_the_sender_after_it(live: Live) -> None:
    first, second = live.clients
    before = dict(live.trainer.tensors)
    first.post("/update_weights_delta", content=live.next(), headers=OCTETS)
    assert second.post("/delta_rollback").json()["status"] == "rolled_back"
    live.trainer.tensors, live.trainer.version = before, live.trainer.version - 1
    live.at_one_version()
    url, version = live.engine.url, live.trainer.version
    with DeltaSender(url, live.trainer.tensors.items(), base_version=version) as sender:
        for _ in range(4):
            live.trainer.step()
            assert not sender.sync(live.trainer.tensors.items()).full
            live.at_one_version()


def test_equals_a_fresh_engine(live: Live, tmp_path: Path) -> None:
    """Last, because the fresh one takes its place."""
    updated = fingerprint(live.engine)
    live.engine.stop()
    target = tiny_models.save_checkpoint(live.base, tmp_path / "target", live.trainer.tensors)
    options: dict[str, Any] = {"tp": RANKS, "enable_delta": True}
    with VllmServe(
        target,
        python_path=[distribution(tmp_path / "path")],
        log_path=tmp_path / "fresh.log",
        **options,
    ) as fresh:
        assert fingerprint(fresh) == updated
