"""One sender updates a vLLM and an SGLang: both end with the trainer's weights."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from delta_sender import MultiSender, PartialSyncError
from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from scripts.live_engine.sglang import SglangProcess
from scripts.live_engine.vllm import VllmProcess
from tests.live.programs import environment
from tests.support.lossy_proxy import LossyProxy
from tests.support.plain_trainer import Trainer, model_digest


class Both:
    """The two engines and the trainer that they follow."""

    def __init__(self, engines: list[EngineProcess], base: Path) -> None:
        self.engines = engines
        self.base = base
        self.urls = [engine.url for engine in engines]
        self.trainer = Trainer(tiny_models.load_tensors(base))

    def hold_the_trainers_bytes(self) -> bool:
        """Whether the live memory of every rank of both is the trainer's."""
        expected = model_digest(self.trainer.tensors).hex()
        scans = [e.get("/delta_digest", params={"scan": "true"}).json() for e in self.engines]
        return [(scan["digest"], scan["corrupted"]) for scan in scans] == [(expected, [])] * 2

    def versions(self) -> list[int]:
        return [engine.delta_status()["version"] for engine in self.engines]


@pytest.fixture(scope="module")
def both(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Both]:
    base, logs = checkpoint("qwen3"), tmp_path_factory.mktemp("logs")
    with (
        VllmProcess(base, enable_delta=True, log_path=logs / "vllm.log") as vllm,
        SglangProcess(base, enable_delta=True, log_path=logs / "sglang.log") as sglang,
    ):
        yield Both([vllm, sglang], base)


def test_one_sender_two_engines(both: Both) -> None:
    """Also if one of them leaves the sender's version, or is unreachable for a while."""
    trainer = both.trainer
    with MultiSender(both.urls, trainer.tensors.items()) as sender:
        for version in (1, 2):
            trainer.step()
            reports = sender.sync(trainer.tensors.items())
            assert [report.full for report in reports.values()] == [False, False]
            assert both.versions() == [version, version]
            assert both.hold_the_trainers_bytes()

        assert both.engines[1].post("/delta_rollback").json()["status"] == "rolled_back"
        trainer.step()
        reports = sender.sync(trainer.tensors.items())
        assert [report.full for report in reports.values()] == [False, True]
        assert both.versions() == [3, 3]
        assert both.hold_the_trainers_bytes()

        server = sender._sessions[0].destination
        address, server._url = server._url, f"{server._url}/nowhere"
        trainer.step()
        with pytest.raises(PartialSyncError) as caught:
            sender.sync(trainer.tensors.items())
        server._url = address
        assert list(caught.value.failures) == both.urls[:1]
        assert both.versions() == [3, 4]
        trainer.step()
        reports = sender.sync(trainer.tensors.items())
        assert [report.full for report in reports.values()] == [False, False]
        assert both.versions() == [5, 5]
        assert both.hold_the_trainers_bytes()
    trainer.version = 5


def test_one_that_lags_holds_up_nobody(both: Both) -> None:
    """What it is sent is lost on the way; it is brought up once there is a way again."""
    trainer = both.trainer
    version = trainer.version
    vllm, sglang = both.engines
    with LossyProxy(sglang.port) as proxy:
        urls = [vllm.url, proxy.url]
        base = trainer.tensors.items()
        with MultiSender(urls, base, base_version=version, lag_limit=5.0) as sender:
            proxy.lose("requests", 1)
            for step in (1, 2):
                trainer.step()
                assert list(sender.sync(trainer.tensors.items())) == [vllm.url]
                assert sender.lagging == [proxy.url]
                assert both.versions() == [version + step, version]
            proxy.recover()
            deadline = time.monotonic() + 60
            while sender.lagging:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert both.versions() == [version + 2, version + 1]
            sender._options["lag_limit"] = None
            trainer.step()
            reports = sender.sync(trainer.tensors.items())
            assert [report.full for report in reports.values()] == [False, False]
            assert both.versions() == [version + 3] * 2
            assert both.hold_the_trainers_bytes()
    trainer.version = version + 3


def test_the_program_sends_to_both(both: Both, tmp_path: Path) -> None:
    trainer = both.trainer
    version = trainer.version
    base = tiny_models.save_checkpoint(both.base, tmp_path / "base", trainer.tensors)
    trainer.step()
    target = tiny_models.save_checkpoint(both.base, tmp_path / "target", trainer.tensors)
    command = [sys.executable, "-m", "delta_sender", "--base", str(base), "--target", str(target)]
    command += ["--base-version", str(version)]
    for url in both.urls:
        command += ["--url", url]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    said = f"version {version} -> {version + 1}: committed; "
    for url, line in zip(both.urls, lines, strict=True):
        assert line.startswith(f"{url}: {said}")
    assert both.versions() == [version + 1] * 2
    assert both.hold_the_trainers_bytes()
