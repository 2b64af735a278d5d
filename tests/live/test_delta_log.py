"""Engines that start from a base checkpoint and a delta log."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from delta_sender import DeltaSender, SyncError, cli
from engine_ext.audit import read_engine_trail
from engine_ext.cli.log import main as log_command
from engine_ext.log import live_heartbeats, open_log
from engine_ext.ranks.status import EngineStatus, LogStatus
from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from tests.live.conftest import fingerprint
from tests.support.plain_trainer import (
    Trainer,
    container,
    model_digest,
    remove_versions,
    write_log,
    write_unproven,
)
from tests.support.present import following, present

KINDS = ["vllm", "sglang"]


# The short tests of SGLang's patched copy replay a folder, too.
@pytest.mark.full
@pytest.mark.versions
@pytest.mark.parametrize("where", ["store", "folder"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_starts_where_the_log_ends(
    kind: str,
    where: str,
    checkpoint: Callable[[str], Path],
    start: Callable[..., EngineProcess],
    store_url: str,
    tmp_path: Path,
) -> None:
    base = checkpoint("qwen3")
    log = store_url if where == "store" else str(tmp_path / "log")
    trainer = Trainer(tiny_models.load_tensors(base))
    write_log(log, trainer, 3)
    fresh = start(kind, tiny_models.save_checkpoint(base, tmp_path / "final", trainer.tensors))
    expected = fingerprint(fresh)
    fresh.stop()

    file = tmp_path / "audit.jsonl"
    engine = start(kind, base, extra_args=["--delta-log", log, "--delta-audit-file", str(file)])
    status = engine.delta_status()
    assert (status.version.number, engine.weight_version()) == (3, "3")
    assert status.log == LogStatus(folder=log, newest=3, problem=None)
    assert status.staged is None
    assert fingerprint(engine) == expected
    assert "3 versions replayed" in engine.log_path.read_text()

    tensors = dict(trainer.tensors)
    with DeltaSender(engine.url, tensors.items(), base_version=3, delta_log=log) as sender:
        trainer.step()
        report = sender.sync(trainer.tensors.items())
    assert (report.version, report.full) == (4, False)
    assert report.digest == model_digest(trainer.tensors).hex()
    assert engine.get("/delta_digest", params={"scan": "true"}).json()["corrupted"] == []

    # An engine that is behind catches up from the log.
    assert engine.post("/delta_rollback").json()["version"] == 3
    assert engine.post("/delta_catch_up").json()["applied"] == [4]
    assert engine.delta_status().version.digest == model_digest(trainer.tensors).hex()
    assert (engine.delta_status().version.number, engine.weight_version()) == (4, "4")
    check_trail(file, log, tiny_models.load_tensors(base), trainer.tensors)

    # A number with two contents: the version was removed, and a sender has written another one.
    remove_versions(log, 4)
    other = another_run(dict(tensors), 3)
    write_unproven(log, other, full=True)
    write_unproven(log, other)
    assert engine.post("/delta_catch_up").json()["applied"] == [4, 5]
    check_weights(engine, 5, other)
    # The log was emptied, and another run from the same base has come past the engine's version.
    remove_versions(log)
    new = another_run(tiny_models.load_tensors(base), 0)
    for _ in range(6):
        write_unproven(log, new)
    refused = engine.post("/delta_catch_up")
    check_other_history(engine, refused.json()["error"], 5)
    assert refused.status_code == 409
    check_weights(engine, 5, other)
    write_unproven(log, new, full=True)
    assert engine.post("/delta_catch_up").json()["applied"] == [7]
    check_weights(engine, 7, new)
    assert read_engine_trail(file, None).problems == []
    engine.stop()


def check_trail(
    file: Path, log: str, base: dict[str, torch.Tensor], live: dict[str, torch.Tensor]
) -> None:
    """Prove version 4 from the checkpoint's digest, by the engine's records and the log's."""
    start, end = (model_digest(tensors).hex() for tensors in (base, live))
    trail = read_engine_trail(file, None)
    assert trail.problems == []
    chain = trail.reached(4)[-1].chain
    assert (chain.start, chain.links[-1].digest) == ((0, start), end)
    assert [link.version for link in chain.links[-3:]] == [4, 3, 4]  # a rollback between
    assert log_command(["audit", str(file), log, "--to", "4", "--digest", start]) == 0
    assert log_command(["audit", str(file), log, "--to", "4", "--digest", end]) == 1


@pytest.mark.full
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_stays_before_a_damaged_version(
    kind: str,
    tp: int,
    checkpoint: Callable[[str], Path],
    start: Callable[..., EngineProcess],
    tmp_path: Path,
) -> None:
    log, base = tmp_path / "log", checkpoint("qwen3")
    trainer = Trainer(tiny_models.load_tensors(base))
    write_log(log, trainer, 1)
    good = dict(trainer.tensors)
    write_log(log, trainer, 2)
    damaged = log / "weight_v000002" / "rank0_flush001.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)

    engine = start(kind, base, tp=tp, extra_args=["--delta-log", str(log)])
    status = engine.delta_status()
    assert (status.ranks, status.version.number, engine.weight_version()) == (tp, 1, "1")
    assert status.version.digest == model_digest(good).hex()
    # The scan covers every rank's live memory.
    scan = engine.get("/delta_digest", params={"scan": "true"}).json()
    assert (scan["digest"], scan["corrupted"]) == (status.version.digest, [])
    assert status.staged is None
    problem = present(present(status.log).problem)
    assert (problem["type"], problem["newest"]) == ("LogDamaged", 3)
    assert "weight_v000002" in problem["message"]
    assert "weight_v000002 cannot be used" in engine.log_path.read_text()
    assert engine.complete("the quick", max_tokens=4)["choices"][0]["text"] is not None
    assert engine.post("/delta_catch_up").status_code == 409
    assert present(present(engine.delta_status().log).problem)["type"] == "LogDamaged"

    with DeltaSender(engine.url, good.items(), base_version=1) as sender:
        assert not sender.sync(trainer.tensors.items()).full
    assert engine.get("/delta_digest", params={"scan": "true"}).json()["corrupted"] == []
    assert engine.delta_status().version.digest == model_digest(trainer.tensors).hex()
    engine.stop()


@pytest.mark.full
@pytest.mark.parametrize(("kind", "tp"), [("vllm", 2), ("sglang", 1)])
def test_an_engine_follows_the_log(
    kind: str,
    tp: int,
    checkpoint: Callable[[str], Path],
    start: Callable[..., EngineProcess],
    tmp_path: Path,
) -> None:
    """While it generates: several versions at once, pinned and released, damage that is mended."""
    log, base = tmp_path / "log", checkpoint("qwen3")
    trainer = Trainer(tiny_models.load_tensors(base))
    write_log(log, trainer, 1)
    follow = ["--delta-log", str(log), "--delta-follow", "--delta-tuning", "follow-interval=0.2"]
    metrics = ["--enable-metrics"] if kind == "sglang" else []
    engine = start(kind, base, tp=tp, extra_args=[*follow, *metrics])
    assert engine.delta_status().version.number == 1  # before it serves
    stop, done = threading.Event(), []

    def generate() -> None:
        while not stop.is_set():
            # No prompt of `fingerprint` begins so: a cached prefix changes the last bits of its
            # log probabilities.
            done.append(engine.complete("once upon", max_tokens=8)["choices"][0]["text"])

    requests = threading.Thread(target=generate)
    requests.start()
    try:
        draft = tmp_path / "draft"
        write_log(draft, trainer, 3, ["deltas_zstd", "indices"])
        publish(draft, log)
        reach(engine, 4)
        history = engine.get("/delta_status", params={"history": "true"}).json()["history"]
        assert [history[-1][key] for key in ("base_version", "version")] == [1, 4]
        assert engine.weight_version() == "4"

        body = container(trainer.tensors, trainer.step(), metadata=trainer.metadata())
        octets = {"Content-Type": "application/octet-stream"}
        pushed = engine.post("/update_weights_delta", content=body, headers=octets)
        assert (pushed.status_code, pushed.json()["error"]["type"]) == (409, "Conflict")

        assert engine.post("/delta_pin", params={"version": "4"}).json()["status"] == "pinned"
        trainer = Trainer(tiny_models.load_tensors(base))
        write_log(tmp_path / "all", trainer, 8)
        before = seen_by(engine)
        publish(tmp_path / "all", log)
        damaged = log / "weight_v000006" / "rank0_flush000.safetensors"
        good = damaged.read_bytes()
        damaged.write_bytes(good[:-1])
        assert seen_by(engine, after=before).version.number == 4
        assert engine.post("/delta_pin").json()["status"] == "released"
        reach(engine, 5)
        assert following(seen_by(engine, after=before)).failures > 0
        damaged.write_bytes(good)
        reach(engine, 8)
        seen_by(engine)
        [heartbeat] = live_heartbeats(open_log(log))
        assert (heartbeat.version, heartbeat.state) == (8, "following")

        remove_versions(log, 8)
        trainer = another_run(dict(trainer.tensors), 7)
        write_unproven(log, trainer, full=True)
        write_unproven(log, trainer)
        reach(engine, 9)
        check_weights(engine, 9, trainer)
        remove_versions(log)
        new = another_run(tiny_models.load_tensors(base), 0)
        for _ in range(11):
            write_unproven(log, new)
        check_other_history(engine, present(following(seen_by(engine)).error), 9)
        [heartbeat] = live_heartbeats(open_log(log))
        assert (heartbeat.version, heartbeat.state) == (9, "diverged")
        check_weights(engine, 9, trainer)
        assert "delta_updates_log_diverged 1.0" in engine.get("/metrics").text
        trainer = new
        write_unproven(log, trainer, full=True)
        reach(engine, 12)
    finally:
        stop.set()
        requests.join()
    assert len(done) > 3
    scan = engine.get("/delta_digest", params={"scan": "true"}).json()
    assert (scan["digest"], scan["corrupted"]) == (model_digest(trainer.tensors).hex(), [])
    seen = fingerprint(engine)
    engine.stop()
    target = tiny_models.save_checkpoint(base, tmp_path / "target", trainer.tensors)
    fresh = start(kind, target, tp=tp)
    assert fingerprint(fresh) == seen
    fresh.stop()


@pytest.mark.full
def test_a_trainer_that_posts_to_no_engine(
    checkpoint: Callable[[str], Path], start: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    log, base = tmp_path / "log", checkpoint("qwen3_moe")
    log.mkdir()
    trainer = Trainer(tiny_models.load_tensors(base))
    follow = ["--delta-log", str(log), "--delta-follow", "--delta-tuning", "follow-interval=600"]
    # Alone in its group, it prepares a version and commits it at one look.
    engine = start("vllm", base, extra_args=[*follow, "--delta-follow-group", "rollout"])
    urls = [engine.url, "http://127.0.0.1:9"]  # the second is down
    with DeltaSender(f"file://{log}", base, notify=urls, encoding="gap8_ulp") as sender:
        for version in (1, 2, 3):
            trainer.step()
            report = sender.sync(trainer.tensors.items())
            assert (report.version, report.full) == (version, False)
            outcome = sender.wait(60)
            assert outcome[engine.url] == version, outcome
            assert isinstance(outcome[urls[1]], SyncError)
            assert report.digest == engine.delta_status().version.digest
    # By the command, from the checkpoint of the last version to the next one.
    before = tiny_models.save_checkpoint(base, tmp_path / "before", trainer.tensors)
    trainer.step()
    after = tiny_models.save_checkpoint(base, tmp_path / "after", trainer.tensors)
    arguments = ["--base", str(before), "--target", str(after), "--base-version", "3"]
    assert cli.main([*arguments, "--url", f"file://{log}", "--notify", engine.url]) == 0
    assert engine.delta_status().version.number == 4
    check_weights(engine, 4, trainer)
    seen = fingerprint(engine)
    # Another run writes into the emptied log, and asks the engine to look.
    remove_versions(log)
    with DeltaSender(f"file://{log}", base, notify=[engine.url]) as sender:
        other = another_run(tiny_models.load_tensors(base), 0)
        for _ in range(5):
            other.step()
            sender.sync(other.tensors.items())
        said = str(sender.wait(60)[engine.url])
    assert "another history" in said
    followed = engine.get("/delta_status").json()["log"]["follow"]["group"]
    assert (followed["name"], followed["prepared"]) == ("rollout", None)
    assert "damaged" not in said
    assert fingerprint(engine) == seen
    engine.stop()
    fresh = start("vllm", tiny_models.save_checkpoint(base, tmp_path / "target", trainer.tensors))
    assert fingerprint(fresh) == seen
    fresh.stop()


def another_run(tensors: dict[str, torch.Tensor], version: int) -> Trainer:
    """Return a trainer whose steps are not those of the others."""
    return Trainer(tensors, version, torch.Generator().manual_seed(8))


def check_weights(engine: EngineProcess, version: int, trainer: Trainer) -> None:
    """Check that the memory of an engine holds what a trainer has come to."""
    assert engine.delta_status().version.number == version
    scan = engine.get("/delta_digest", params={"scan": "true"}).json()
    assert (scan["digest"], scan["corrupted"]) == (model_digest(trainer.tensors).hex(), [])


def check_other_history(engine: EngineProcess, error: dict[str, Any], version: int) -> None:
    """Check that an engine names the other history of its log, and serves what it has."""
    assert (error["type"], error["version"]) == ("LogDiverged", version)
    assert "another history" in error["message"]
    assert "damaged" not in error["message"]
    assert present(engine.delta_status().log).problem == error
    assert engine.complete("the quick", max_tokens=4)["choices"][0]["text"] is not None


def publish(draft: Path, log: Path) -> None:
    """Move the versions that a log lacks there, at once for any reader."""
    for folder in sorted(draft.glob("weight_v*")):
        if not (log / folder.name).exists():
            folder.rename(log / folder.name)


def reach(engine: EngineProcess, version: int) -> None:
    """Wait until an engine is at a version."""
    end = time.monotonic() + 60
    while (status := engine.delta_status()).version.number != version:
        assert time.monotonic() < end, status
        time.sleep(0.1)


def seen_by(engine: EngineProcess, after: EngineStatus | None = None) -> EngineStatus:
    """Return the status, once the engine has looked at the log twice since another one."""
    status = after or engine.delta_status()
    before = following(status).looked_at
    for _ in range(2):
        end = time.monotonic() + 60
        while following(status := engine.delta_status()).looked_at == before:
            assert time.monotonic() < end, status
            time.sleep(0.05)
        before = following(status).looked_at
    return status
