"""One sender updates a vLLM and an SGLang: both end with the trainer's weights."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from delta_sender import (
    FullSyncRefused,
    MultiSender,
    PartialSyncError,
    RunConflict,
    RunFenced,
    Shard,
    ShardedSender,
)
from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from scripts.live_engine.sglang import SglangProcess
from scripts.live_engine.vllm import VllmProcess
from tests.live.programs import environment
from tests.support.fake_engine import set_lag_limit
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
        return [engine.delta_status().version.number for engine in self.engines]


@pytest.fixture(scope="module")
def both(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Both]:
    base, logs = checkpoint("qwen3"), tmp_path_factory.mktemp("logs")
    engines = [
        VllmProcess(base, enable_delta=True, log_path=logs / "vllm.log"),
        SglangProcess(base, enable_delta=True, log_path=logs / "sglang.log"),
    ]
    with ExitStack() as stack:
        with ThreadPoolExecutor() as starting:
            found = list(starting.map(stack.enter_context, engines))
        yield Both(found, base)


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

        server: Any = sender._publisher.sessions[0].destination
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
    """Its requests are lost; it gets the missing versions once they arrive again."""
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
            set_lag_limit(sender, None)
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


# ---- runs: whose the engines are, and what can be replaced there ---------------------------------


def failures_of(sender: MultiSender, trainer: Trainer) -> list[type[BaseException]]:
    with pytest.raises(PartialSyncError) as caught:
        sender.sync(trainer.tensors.items())
    return [type(failed) for failed in caught.value.failures.values()]


def test_restarted_trainer_sends_ten_elements(both: Both) -> None:
    """It knows neither the version nor the run that has led there."""
    trainer, version = both.trainer, both.versions()[0]
    with MultiSender(both.urls, trainer.tensors.items()) as sender:
        name = next(iter(trainer.tensors))
        trainer.tensors[name].view(torch.int16).view(-1)[:10] ^= 1
        reports = sender.sync(trainer.tensors.items())
    for report in reports.values():
        assert (report.full, report.reason, report.nnz) == (False, None, 10)
        assert (report.base_version, report.version) == (version, version + 1)
    assert both.hold_the_trainers_bytes()
    statuses = [engine.delta_status() for engine in both.engines]
    assert [(status.version.run, status.owner) for status in statuses] == [(sender.run, None)] * 2


def test_wrong_checkpoint_replaces_nothing(both: Both, tmp_path: Path) -> None:
    """By the program, whose base and target are the same: there is nothing to send."""
    version = both.versions()
    other = Trainer({name: tensor.clone() for name, tensor in both.trainer.tensors.items()})
    other.step()
    wrong = tiny_models.save_checkpoint(both.base, tmp_path / "wrong", other.tensors)
    command = [sys.executable, "-m", "delta_sender", "--base", str(wrong), "--target", str(wrong)]
    for url in both.urls:
        command += ["--url", url]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    for url in both.urls:
        assert f"{url}: failed: {url} holds version {version[0]} (of run " in done.stderr
    assert "--allow-full" in done.stderr
    assert both.versions() == version
    assert both.hold_the_trainers_bytes()
    with MultiSender(both.urls, other.tensors.items()) as sender:
        assert failures_of(sender, other) == [FullSyncRefused] * 2
    assert [engine.delta_status().owner for engine in both.engines] == [None] * 2


def test_second_trainer_takes_over(both: Both) -> None:
    trainer = both.trainer
    with (
        MultiSender(both.urls, trainer.tensors.items()) as zombie,
        MultiSender(both.urls, trainer.tensors.items()) as second,
        MultiSender(both.urls, trainer.tensors.items(), takeover=True) as third,
    ):
        zombie.sync(trainer.tensors.items())
        version = both.versions()
        assert failures_of(second, trainer) == [RunConflict] * 2
        assert both.versions() == version
        trainer.step()
        reports = third.sync(trainer.tensors.items())
        assert [report.full for report in reports.values()] == [False, False]
        version = both.versions()
        other = Trainer({name: tensor.clone() for name, tensor in trainer.tensors.items()})
        other.step()
        assert failures_of(zombie, other) == [RunFenced] * 2
        assert both.versions() == version
        assert both.hold_the_trainers_bytes()
        trainer.step()
        third.sync(trainer.tensors.items())
        assert both.hold_the_trainers_bytes()


def test_resumed_trainer_is_of_its_run(both: Both, tmp_path: Path) -> None:
    """From its newest weights by deltas, and from older ones by a full sync: both are its own."""
    trainer, state = both.trainer, tmp_path / "state.json"
    older = {name: tensor.clone() for name, tensor in trainer.tensors.items()}
    with MultiSender(both.urls, trainer.tensors.items(), state=state) as sender:
        trainer.step()
        sender.sync(trainer.tensors.items())
    with MultiSender(both.urls, trainer.tensors.items(), state=state) as resumed:
        assert (resumed.run, resumed.epoch) == (sender.run, 2)
        trainer.step()
        reports = resumed.sync(trainer.tensors.items())
        assert [report.full for report in reports.values()] == [False, False]
    version = both.versions()
    with MultiSender(both.urls, older.items(), state=state) as resumed:
        trainer.tensors = older
        reports = resumed.sync(trainer.tensors.items())
    for report in reports.values():
        assert (report.full, report.base_version) == (True, version[0])
        assert report.version == version[0] + 1
        assert report.reason is not None
        assert report.engine["run"] == sender.run
    assert both.hold_the_trainers_bytes()
    for engine in both.engines:
        [*_, last] = engine.get("/delta_status", params={"history": "true"}).json()["history"]
        assert (last["full"], last["reason"]) == (True, reports[engine.url].reason)


# ---- commits of both, or of none -----------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    ("action", "number", "commits"),
    [("record", 2, False), ("commit", 1, True), ("commit", 2, True)],
)
def test_trainer_killed_in_the_window(
    both: Both, tmp_path: Path, action: str, number: int, commits: bool
) -> None:
    """Both engines end at the same version, without it; and the next trainer continues there."""
    trainer, before = both.trainer, both.versions()[0]
    base = tiny_models.save_checkpoint(both.base, tmp_path / "base", trainer.tensors)
    trainer.step()
    target = tiny_models.save_checkpoint(both.base, tmp_path / "target", trainer.tensors)
    program = [sys.executable, "-m", "tests.live.killed_trainer"]
    command = [*program, str(base), str(target), action, str(number), *both.urls]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    deadline = time.monotonic() + 60
    while any(engine.delta_status().staged is not None for engine in both.engines):
        assert all(engine.complete("the quick", max_tokens=4) for engine in both.engines)
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert both.versions() == [before + commits] * 2
    if not commits:
        trainer.tensors = dict(trainer.old)
    assert both.hold_the_trainers_bytes()
    options: dict[str, Any] = {"takeover": True, "commit": "all_or_none", "flush_cache": "salt"}
    with MultiSender(both.urls, trainer.tensors.items(), **options) as sender:
        trainer.step()
        reports = sender.sync(trainer.tensors.items())
        assert [report.full for report in reports.values()] == [False, False]
        assert {one.state for one in sender.outcomes.values()} == {"committed"}
    assert len({*both.versions()}) == 1
    assert both.hold_the_trainers_bytes()


@pytest.mark.full
def test_ranks_commit_on_both_or_none(both: Both) -> None:
    """A trainer that sends shards; here its only rank has all of them."""
    trainer = both.trainer

    def shards() -> list[Shard]:
        return [
            Shard(name, tensor, tuple(tensor.shape), (slice(None),) * tensor.ndim)
            for name, tensor in trainer.tensors.items()
        ]

    options: dict[str, Any] = {"takeover": True, "commit": "all_or_none"}
    with ShardedSender(both.urls, shards(), **options) as sender:
        for _ in range(2):
            trainer.step()
            report = sender.sync(shards())
            assert not any(one.full for one in sender.reports.values())
            assert {one.state for one in sender.outcomes.values()} == {"committed"}
            assert both.versions() == [report.version] * 2
            assert both.hold_the_trainers_bytes()
