"""A router's bias, a buffer, follows in vLLM, and in float32 if the checkpoint has it so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from delta_sender import DeltaSender, checkpoint_names, named_tensors
from delta_sender.diff.snapshot import Snapshot
from delta_sender.models import empty_model
from scripts.live_engine.process import EngineProcess
from tests.support.shown_examples import examples

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.mark.full
def test_trained_bias_arrives_with_all_its_bits(
    checkpoint: Callable[[str], Path],
    start: Callable[..., EngineProcess],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    example = examples("sender.md")["float32"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoint").symlink_to(checkpoint("deepseek_v3"))
    exec(example, {})
    base = tmp_path / "checkpoint-float32"
    engine = start("vllm", base)
    [rows] = engine.get("/delta_status", params={"plan": "true"}).json()["plan"]
    [row] = [row for row in rows if row["name"] == BIAS]
    assert (row["dtype"], row["status"], row["digested"]) == ("float32", "exact", True)
    assert all(row["digested"] for row in rows)
    names = empty_model(base)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with DeltaSender(engine.url, base) as sender:
        for step in range(1, 3):
            model.get_buffer(BIAS).add_(1e-3 * step)
            given = checkpoint_names(model.named_parameters(), names, base, live=model)
            report = sender.sync(given)
            assert (report.full, report.nnz, report.rounded) == (False, 4, report.numel - 4)
    scan = engine.get("/delta_digest", params={"scan": "true"}).json()
    assert scan["corrupted"] == []
    wanted = Snapshot(named_tensors(model, base), "deltas")
    assert torch.equal(
        model.get_buffer(BIAS), torch.from_numpy(wanted.image(BIAS).values.view("f4"))
    )
    assert scan["digest"] == wanted.digest().hex()
