"""Every rank of a trainer sends its shards to a real engine, which ends bit-identical."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from delta_sender import ShardedSender, SyncError, model_shards
from delta_sender.publish.http_client import EngineClient
from engine_ext.files import read_checkpoint
from engine_ext.format import tensor_digest
from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from tests.live.conftest import fingerprint
from tests.live.vllm_serve import VllmServe, distribution
from tests.patches.http_processes import connected
from tests.support.fake_engine import bits
from tests.support.gloo_ranks import run_ranks
from tests.support.sharded_trainers import set_step, sharded
from tests.support.trainer_models import saved

Start = Callable[..., EngineProcess]

STEPS = 3
SECONDS = 30.0  # after which the engine gives up a dead trainer's parts


def load(folder: str) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def follow(rank: int, base: str, how: str, url: str, fault: str) -> Any:
    """Sync after every step, and in the end in full; with a fault in the second step.

    "restarted": The trainer, another run now, repeats a step that the engine has: nothing is sent.
    """
    model = sharded(load(base), how)
    sizes, said = [], ""
    with ShardedSender(
        url, model_shards(model, base), base, encoding="gap8_ulp", bucket_bytes=1 << 14
    ) as sender:
        for step in range(STEPS):
            set_step(model, step)
            if step == 1 and fault == "step":
                try:
                    sender.sync(model_shards(model, base), step=step + rank)
                except SyncError as failed:
                    said = str(failed)
            if step == 1 and fault == "death":
                if rank == 1:
                    die_between_parts()
                try:
                    sender.sync(model_shards(model, base), step=step)
                except SyncError as failed:
                    return str(failed)
            report = sender.sync(model_shards(model, base), step=step)
            assert not report.full
            had = fault == "restarted" and step == 0
            assert report.status == "committed"
            assert (report.nnz == 0) == had
            assert report.version == step + 1 + (fault == "restarted")
            assert report.digest == report.engine["digest"]
            sizes.append(report.rank_bytes[rank])
        report = sender.sync_full(model_shards(model, base))
        assert report.digest == report.engine["digest"]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        print(
            f"rank {rank}: {sizes} bytes of {report.full_bytes}, {report.rank_bytes[rank]} in the "
            f"full sync; snapshot {sender.snapshot_bytes} bytes, peak {peak} MiB"
        )
    return said, report.digest


def die_between_parts() -> None:
    deliver = EngineClient.deliver
    posted: list[int] = []

    def replacement(self: EngineClient, body: bytes, *arguments: Any) -> Any:
        if posted:
            os._exit(1)
        posted.append(len(body))
        return deliver(self, body, *arguments)

    EngineClient.deliver = replacement  # type: ignore[method-assign, assignment]


def target(base: Path, folder: Path, steps: int) -> Path:
    """Write the checkpoint that a trainer saves after some steps."""
    model = load(str(base))
    for step in range(steps):
        set_step(model, step)
    return tiny_models.save_checkpoint(base, folder, saved(model))


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "model", "tp", "how", "ranks", "fault"),
    [
        ("vllm", "qwen3_moe", 1, "fsdp", 3, "step"),
        ("vllm", "qwen3", 2, "fsdp+tp", 4, "death"),
        ("vllm", "qwen3_moe", 2, "hsdp", 4, "none"),
        ("sglang", "qwen3", 1, "fsdp+tp", 4, "step"),
        ("sglang", "qwen3_moe", 1, "fsdp", 2, "death"),
    ],
)
def test_an_engine_follows_every_rank(
    kind: str,
    model: str,
    tp: int,
    how: str,
    ranks: int,
    fault: str,
    start: Start,
    tmp_path: Path,
) -> None:
    base = tiny_models.build(model, tmp_path / "base")
    flags = ["--delta-tuning", f"stage-timeout={SECONDS}"]
    engine = start(kind, base, tp=tp, extra_args=flags)
    arguments = str(base), how, engine.url
    if fault == "death":
        said = run_ranks(follow, ranks, tmp_path, *arguments, fault)
        assert said.pop(1) is None
        assert all(one.startswith("a rank has died") for one in said), said
        assert engine.delta_status().version.number == 1
        check(engine, target(base, tmp_path / "before", 1))
        (tmp_path / "again").mkdir()
        outcomes = run_ranks(follow, ranks, tmp_path / "again", *arguments, "restarted")
    else:
        outcomes = run_ranks(follow, ranks, tmp_path, *arguments, fault)
    assert all(isinstance(outcome, tuple) for outcome in outcomes), outcomes
    if fault == "step":
        [words] = {one for one, _ in outcomes}
        assert "ranks disagree about the step: 1 on rank 0, 2 on rank 1" in words
    saved_as = target(base, tmp_path / "target", STEPS)
    check(engine, saved_as)
    seen = fingerprint(engine)
    engine.stop()
    fresh = start(kind, saved_as, tp=tp)
    assert fingerprint(fresh) == seen
    fresh.stop()


@pytest.mark.full
def test_ranks_post_to_several_http_processes(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """They share a port: the kernel chooses which process accepts a rank's connection."""
    base = checkpoint("qwen3")
    path = [distribution(tmp_path / "path")]
    options: dict[str, Any] = {"tp": 2, "enable_delta": True, "python_path": path}
    two, log = ["--api-server-count", "2"], tmp_path / "engine.log"
    with VllmServe(base, extra_args=two, log_path=log, **options) as engine:
        arguments = str(base), "fsdp+tp", engine.url, "none"
        with connected(engine) as processes:
            outcomes = run_ranks(follow, 4, tmp_path, *arguments)
        assert all(isinstance(outcome, tuple) for outcome in outcomes), outcomes
        assert len(processes) == 2, processes
        saved_as = target(base, tmp_path / "target", STEPS)
        check(engine, saved_as)
        seen = fingerprint(engine)
    with VllmServe(saved_as, log_path=tmp_path / "fresh.log", **options) as fresh:
        assert fingerprint(fresh) == seen


def check(engine: EngineProcess, folder: Path) -> None:
    """Fail unless the engine's live memory has the bytes of a checkpoint."""
    scan = engine.get("/delta_digest", params={"scan": "true"}).json()
    assert scan["corrupted"] == []
    wanted = {name: tensor_digest(name, bits(t)).hex() for name, t in read_checkpoint(folder)}
    assert scan["tensors"] == wanted
