"""Properties that stay stable in a long run: memory, addresses, cache, sleep, metrics and status.

Configurations that are not served at all (LoRA, data parallel replicas) are refused before the
engine loads anything; ``test_startup.py`` shows it for every option, and here a whole server does.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine_ext.cli import top
from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineError, EngineProcess
from scripts.process_memory import unmapped_bytes
from tests.live.conftest import fingerprint
from tests.support.plain_trainer import Trainer, container, split

OCTETS = {"Content-Type": "application/octet-stream"}
SHIM = Path(__file__).parents[1] / "shims" / "faults"
PROMPT = [3 + number % 250 for number in range(200)]  # longer than a block of vLLM's on CPU
# What the allocator can hold back; a sync's old values and its part take 0.7 MB.
SLACK = 12 << 20
ARGUMENTS = {
    "vllm": ["--enable-prompt-tokens-details"],
    "sglang": ["--enable-cache-report", "--enable-metrics"],
}


class Server:
    """A live engine, its trainer, and the memory that its rank uses."""

    def __init__(self, kind: str, engine: EngineProcess, base: Path, faults: Path) -> None:
        self.kind = kind
        self.engine = engine
        self.base = base
        self.spool = faults / "spool"
        self.trainer = Trainer(tiny_models.load_tensors(base))
        self._faults = faults

    def post(self, body: bytes, **params: str) -> dict[str, Any]:
        answer: dict[str, Any] = self.engine.post(
            "/update_weights_delta", content=body, headers=OCTETS, params=params
        ).json()
        return answer

    def sync(self, parts: int = 1, density: float = 0.02, **params: str) -> None:
        changed, metadata = self.trainer.step(density), self.trainer.metadata()
        answer: dict[str, Any] = {}
        for part, some in enumerate(split(changed, parts)):
            numbers = {"part": str(part), "num_parts": str(parts)}
            body = container(self.trainer.tensors, some, metadata={**metadata, **numbers})
            answer = self.post(body, **params)
        assert answer["status"] == "committed", answer

    def refused_sync(self) -> None:
        """Send a sync that is staged but refused at the commit, as its old bits are wrong."""
        tensors = dict(self.trainer.tensors)
        changed = self.trainer.step()
        metadata = {**self.trainer.metadata(), "digest_part": "0" * 32}
        answer = self.post(container(self.trainer.tensors, changed, metadata=metadata))
        assert answer["error"]["type"] == "BaseMismatch", answer
        self.trainer.tensors, self.trainer.version = tensors, self.trainer.version - 1

    def memory(self) -> dict[str, Any]:
        """See ``tests/shims/faults``."""
        shown = self._faults / "memory-0"
        shown.unlink(missing_ok=True)
        (self._faults / "show_memory-0").touch()
        self.engine.delta_status()
        deadline = time.monotonic() + 10
        while not shown.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        found: dict[str, Any] = json.loads(shown.read_text())
        assert self.engine._process is not None
        for process, pid in (("rank", found["pid"]), ("http", self.engine._process.pid)):
            found[process] = unmapped_bytes(pid)
        return found

    def wait_until_idle(self) -> None:
        """Wait until the HTTP process has compiled its loops, which a thread does at its start."""
        assert self.engine._process is not None
        process = psutil.Process(self.engine._process.pid)
        deadline = time.monotonic() + 60
        while process.cpu_percent(interval=1) > 20:
            assert time.monotonic() < deadline, "the HTTP process does not get idle"

    def metrics(self) -> dict[str, float]:
        """This project's, from the engine's own route."""
        lines = self.engine.get("/metrics").text.splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if line.startswith("delta_updates_")]
        return {name: float(value) for name, value in pairs}

    def ask(self) -> tuple[list[Any], int]:
        """The log probabilities of one answer, and how many tokens came from the cache."""
        answer = self.engine.complete(PROMPT, max_tokens=2, temperature=0.0, logprobs=5)
        details = answer["usage"].get("prompt_tokens_details") or {}
        logprobs = answer["choices"][0]["logprobs"]["token_logprobs"]
        return logprobs, details.get("cached_tokens") or 0

    def flush(self) -> None:
        """By the engine's own route."""
        path = {"vllm": "/reset_prefix_cache", "sglang": "/flush_cache"}[self.kind]
        self.engine.post(path).raise_for_status()

    def sleep_and_wake(self) -> None:
        if self.kind == "vllm":
            self.engine.post("/sleep", params={"level": "1"}).raise_for_status()
            self.engine.post("/wake_up").raise_for_status()
            return
        body = {"tags": ["weights"]}
        self.engine.post("/release_memory_occupation", json=body).raise_for_status()
        self.engine.post("/resume_memory_occupation", json=body).raise_for_status()


@pytest.fixture(scope="module", params=["vllm", pytest.param("sglang", marks=pytest.mark.full)])
def server(
    request: pytest.FixtureRequest,
    checkpoint: Callable[[str], Path],
    start: Callable[..., EngineProcess],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    base = checkpoint("qwen3")
    faults = tmp_path_factory.mktemp("faults")
    (faults / "spool").mkdir()
    engine = start(
        request.param,
        base,
        python_path=[SHIM],
        extra_env={"DELTA_FAULTS": str(faults)},
        extra_args=["--delta-tuning", f"spool-dir={faults / 'spool'}", *ARGUMENTS[request.param]],
    )
    yield Server(request.param, engine, base, faults)
    engine.stop()


@pytest.mark.parametrize("syncs", [40, pytest.param(400, marks=pytest.mark.full)])
def test_memory_does_not_grow_and_nothing_moves(server: Server, syncs: int) -> None:
    for _ in range(15):
        server.sync()
    server.sync(parts=3)
    server.refused_sync()
    server.wait_until_idle()
    before = server.memory()
    for number in range(syncs):
        server.sync(parts=3 if number % 10 == 0 else 1)
        if number % 10 == 5:
            server.refused_sync()
    after = server.memory()
    assert after["addresses"] == before["addresses"]
    assert after["rank"] - before["rank"] < SLACK
    assert after["http"] - before["http"] < SLACK
    assert (after["undo"], after["staged"]) == (before["undo"], 0)
    assert after["mapped"] <= before["mapped"]
    assert after["threads"] == before["threads"]
    assert [f for f in server.spool.rglob("*") if f.is_file() and f.stat().st_size] == []
    history = server.engine.get("/delta_status", params={"history": "true"}).json()["history"]
    assert len(history) == min(50, 15 + 2 + syncs + syncs // 10)


def test_an_operator_sees_every_sync(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.sync()
    server.refused_sync()
    counted = server.metrics()
    server.sync(parts=3)
    server.refused_sync()
    version = server.trainer.version
    found = {name: value - counted.get(name, 0) for name, value in server.metrics().items()}
    assert found['delta_updates_syncs_total{error="",outcome="committed"}'] == 1
    assert found['delta_updates_syncs_total{error="",outcome="staged"}'] == 2
    assert found['delta_updates_syncs_total{error="BaseMismatch",outcome="refused"}'] == 1
    assert found["delta_updates_digest_mismatches_total"] == 1
    assert found['delta_updates_phase_seconds_count{phase="receive"}'] == 4
    assert found['delta_updates_phase_seconds_count{phase="pause"}'] == 1
    assert server.metrics()["delta_updates_version"] == version

    assert top.main([server.engine.url, "--json"]) == 0
    [seen] = json.loads(capsys.readouterr().out)
    committed, refused = seen["status"]["history"][-2:]
    assert (committed["outcome"], committed["version"], committed["parts"]) == (
        "committed", version, 3,
    )  # fmt: skip
    assert (refused["outcome"], refused["error"]) == ("refused", "BaseMismatch")
    assert top.main([server.engine.url, "http://127.0.0.1:9", "--once"]) == 1
    assert "committed" in capsys.readouterr().out

    log = server.engine.log_path.read_text()
    versions = f"version={version} base_version={version - 1}"
    line = rf"delta sync outcome=committed {versions} run=[\w-]+ sync_id="
    assert len(re.findall(line, log)) == 1
    assert "delta sync outcome=refused error=BaseMismatch" in log


def test_a_cached_prompt_is_answered_with_the_new_weights(server: Server) -> None:
    server.flush()
    _, cached = server.ask()
    assert cached == 0
    old, cached = server.ask()
    assert cached >= 100
    server.sync(density=0.5)
    new, cached = server.ask()
    assert cached == 0
    server.flush()
    assert server.ask() == (new, 0)
    assert new != old
    # The cache is kept if the caller asks for it, and a later sync drops it.
    server.sync(density=0.5, flush_cache="false")
    assert server.ask()[1] >= 100
    server.sync(density=0.5)
    newest, cached = server.ask()
    assert cached == 0
    server.flush()
    assert server.ask() == (newest, 0)


def test_nothing_moves_while_the_engine_sleeps(server: Server) -> None:
    before = server.memory()
    server.sleep_and_wake()
    server.sync()
    assert server.memory()["addresses"] == before["addresses"]
    scan = server.engine.get("/delta_digest", params={"scan": "true"}).json()
    assert scan["corrupted"] == []


@pytest.mark.full
def test_a_fresh_engine_answers_alike(
    server: Server, start: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    """After all that, with what it has cached meanwhile."""
    server.sync(density=0.5)
    lived = server.ask(), fingerprint(server.engine)
    target = tiny_models.save_checkpoint(server.base, tmp_path / "target", server.trainer.tensors)
    fresh = start(server.kind, target, extra_args=ARGUMENTS[server.kind])
    other = Server(server.kind, fresh, target, tmp_path)
    assert (other.ask(), fingerprint(fresh)) == lived
    fresh.stop()


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (
            "vllm",
            ["--data-parallel-size", "2", "--data-parallel-external-lb"],
            "does not work with --data-parallel-external-lb",
        ),
        ("sglang", ["--enable-lora"], "does not work with --enable-lora"),
        ("sglang", ["--enable-dp-attention", "--dp-size", "2"], "does not work with DP attention"),
    ],
    ids=["vllm-replicas", "sglang-lora", "sglang-attention"],
)
def test_what_is_not_served_is_refused_at_start_up(
    kind: str,
    arguments: list[str],
    message: str,
    checkpoint: Callable[[str], Path],
    start: Callable[..., EngineProcess],
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    with pytest.raises(EngineError, match="exited with code"):
        start(kind, checkpoint("qwen3"), extra_args=arguments, log_path=log)
    assert message in log.read_text()
