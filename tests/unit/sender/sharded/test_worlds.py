"""Worlds of several ranks, against an engine in the test's process, reached over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from delta_sender import ShardedSender, model_shards, named_tensors
from tests.support.fake_engine import Engine
from tests.support.gloo_ranks import run_ranks
from tests.support.sharded_trainers import served, set_step, sharded
from tests.support.trainer_models import make_model

pytestmark = pytest.mark.slow

STEPS = 3


def wanted(kind: str, steps: int) -> dict[str, torch.Tensor]:
    model = make_model(kind)
    for step in range(steps):
        set_step(model, step)
    return dict(named_tensors(model))


def follow(rank: int, kind: str, how: str, url: str, encoding: str) -> Any:
    """Sync after every step, the last one in full."""
    model = sharded(make_model(kind), how)
    reports = []
    with ShardedSender(
        url, model_shards(model), rank_timeout=60, encoding=encoding, bucket_bytes=4000
    ) as sender:
        for step in range(STEPS):
            set_step(model, step)
            sync = sender.sync_full if step == STEPS - 1 else sender.sync
            reports.append(sync(model_shards(model), step=step))
        assert sender.version == STEPS
        held = sender.snapshot_bytes
        assert held <= sum(shard.tensor.nbytes for shard in model_shards(model))
    return [(r.version, r.full, r.nnz, r.rank_nnz, r.rank_bytes, r.digest) for r in reports], held


WORLDS = [
    ("dense", "fsdp", 3, "gap8_exp"),
    ("qwen3_moe", "fsdp+tp", 4, "gap8_ulp"),
]
MORE = [
    ("qwen3_moe", "hsdp", 4, "gap8_ulp"),
    ("dense", "fsdp+tp", 4, "auto"),
    ("qwen3_moe", "fsdp", 2, "deltas_zstd"),
    ("qwen3_moe", "fsdp", 3, "deltas"),
    ("mixtral", "fsdp", 3, "indices"),
    ("dense", "tp", 2, "gap8_exp"),
    ("tied", "hsdp", 4, "deltas_zstd"),
    ("deepseek_v3", "fsdp", 2, "gap8_ulp"),
]


@pytest.mark.parametrize(
    ("kind", "how", "ranks", "encoding"),
    [*WORLDS, *(pytest.param(*world, marks=pytest.mark.full) for world in MORE)],
)
def test_an_engine_follows_all_ranks(
    kind: str, how: str, ranks: int, encoding: str, tmp_path: Path
) -> None:
    base = wanted(kind, 0)
    engine = Engine.of(base)
    with served(engine) as url:
        outcomes = run_ranks(follow, ranks, tmp_path, kind, how, url, encoding)
    assert all(isinstance(outcome, tuple) for outcome in outcomes), outcomes
    reports, held = zip(*outcomes, strict=True)
    assert all(report == reports[0] for report in reports)
    assert [(version, full) for version, full, *_ in reports[0]] == [
        (1, False),
        (2, False),
        (3, True),
    ]
    assert engine.holds(wanted(kind, STEPS))
    assert sum(held) == sum(tensor.nbytes for tensor in base.values())  # nothing is kept twice
    _, _, nnz, rank_nnz, rank_bytes, _ = reports[0][0]
    assert (sum(rank_nnz), min(rank_nnz) > 0, min(rank_bytes) > 0) == (nnz, True, True)
