"""A quantised checkpoint on a live vLLM: what processing repacks is refused, never left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from delta_sender import DeltaSender, SyncError
from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from tests.support import awq_checkpoint

NORM = "model.norm.weight"
QWEIGHT = "model.layers.0.self_attn.q_proj.qweight"


def test_packed_tensors_are_refused_and_the_others_updated(
    start: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    base = awq_checkpoint.build(tmp_path / "awq")
    engine = start("vllm", base, extra_args=["--dtype", "float16"])
    (plan,) = engine.get("/delta_status", params={"plan": "true"}).json()["plan"]
    states = {row["name"]: row["status"] for row in plan}
    assert "ignored" not in states.values()
    assert states[NORM] == "exact"
    packed = [row for row in plan if row["name"].endswith(("qweight", "qzeros"))]
    assert len(packed) == 28
    assert all("post-load processing replaced" in row["reason"] for row in packed)

    tensors = {name: tensor.clone() for name, tensor in tiny_models.load_tensors(base).items()}
    before = engine.checksums()
    with DeltaSender(engine.url, base=tensors.items()) as sender:
        tensors[NORM].view(torch.int16)[:4] ^= 1
        assert sender.sync(tensors.items()).status == "committed"
        changed = engine.checksums()
        (name,) = {name for name in before if before[name] != changed[name]}
        assert name.endswith(NORM)
        tensors[QWEIGHT].view(-1)[7] ^= 1
        with pytest.raises(SyncError, match=r"q_proj\.qweight"):
            sender.sync(tensors.items())
    assert engine.checksums() == changed
    assert engine.delta_status()["version"] == 1
