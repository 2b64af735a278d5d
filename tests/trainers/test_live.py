"""Trainers with their plug-ins, against vLLM.

After a training an engine is one that was started on what the trainer has saved.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from delta_sender import SyncReport
from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from scripts.live_engine.quantised_checkpoints import by_compressed_tensors, quantised, rewrite
from tests.live.conftest import fingerprint
from tests.support.trainer_models import saved

Start = Callable[..., EngineProcess]
Checkpoint = Callable[[str], Path]


def arguments(folder: Path, steps: int) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "out"),
        "max_steps": steps,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-4,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
    }


def check(engine: EngineProcess, model: Any, base: Path, folder: Path, start: Start) -> None:
    """Fail unless the engine is a fresh one on the trainer's model, cast as it is saved."""
    assert engine.get("/delta_digest", params={"scan": "true"}).json()["corrupted"] == []
    seen = fingerprint(engine)
    engine.stop()
    tensors = saved(model.to(torch.bfloat16))
    target = tiny_models.save_checkpoint(base, folder / "target", tensors)
    assert fingerprint(start("vllm", target)) == seen


@pytest.mark.full
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_an_engine_follows_the_transformers_trainer(
    kind: str, checkpoint: Checkpoint, start: Start, tmp_path: Path
) -> None:
    from delta_sender.integrations.transformers_callback import DeltaSyncCallback

    base = checkpoint(kind)
    engine = start("vllm", base)
    before = fingerprint(engine)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 60, (16, 8), generator=generator)
    callback = DeltaSyncCallback(engine.url, encoding="gap8_ulp")
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(**arguments(tmp_path, 3)),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[callback],
    )
    trainer.train()
    report: SyncReport = callback.reports[engine.url]
    assert (report.version, report.full) == (4, False)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["delta/version"] for entry in logged] == [2, 3, 4]
    assert all(entry["delta/pause_ms"] > 0 for entry in logged)
    assert fingerprint(engine) != before
    check(engine, model, base, tmp_path, start)


@pytest.mark.full
def test_a_quantised_engine_follows_float32_masters(
    checkpoint: Checkpoint, start: Start, tmp_path: Path
) -> None:
    """It is a fresh one on what compressed-tensors makes of the masters, not rounded before."""
    from delta_sender.integrations.transformers_callback import DeltaSyncCallback

    plain = checkpoint("qwen3")
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    by_library = partial(by_compressed_tensors, kind="int", scale_dtype=torch.bfloat16)

    def quantised_by_library(name: str) -> Path:
        weights = {
            name: tensor if name.endswith("_proj.weight") else tensor.to(torch.bfloat16)
            for name, tensor in saved(model).items()
        }
        folder = shutil.copytree(plain, tmp_path / name)
        return rewrite("w8a8", folder, quantised(weights, by_library))

    base = quantised_by_library("base")
    engine = start("vllm", base)
    before = fingerprint(engine)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 60, (16, 8), generator=generator)
    callback = DeltaSyncCallback(engine.url, base, quantize="int8_channel")
    transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(**arguments(tmp_path, 3)),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[callback],
    ).train()
    report: SyncReport = callback.reports[engine.url]
    assert (report.version, report.full) == (4, False)
    assert engine.get("/delta_digest", params={"scan": "true"}).json()["corrupted"] == []
    seen = fingerprint(engine)
    assert seen != before
    engine.stop()
    assert fingerprint(start("vllm", quantised_by_library("target"))) == seen
