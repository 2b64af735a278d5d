"""vLLM with LoRA adapters: the base model is updated under them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from tests.live.conftest import PROMPTS, check_steps, fingerprint
from tests.support import quantised_checkpoints

ADAPTER = "tiny"
RANK = 4


def make_adapter(base: Path, folder: Path) -> Path:
    """Write a random adapter for some layers of a model, as PEFT does."""
    generator = torch.Generator().manual_seed(5)
    layers = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
    tensors = {}
    for name, weight in tiny_models.load_tensors(base).items():
        path, _, attribute = name.rpartition(".")
        if attribute == "weight" and path.endswith(layers):
            rows, columns = weight.shape
            for part, shape in (("lora_A", (RANK, columns)), ("lora_B", (rows, RANK))):
                values = torch.randn(shape, generator=generator).bfloat16() * 0.2
                tensors[f"base_model.model.{path}.{part}.weight"] = values
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(base),
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 8,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(layers),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def seen_from(engine: EngineProcess) -> dict[str, Any]:
    """All that `fingerprint` compares, and what the adapter generates."""
    adapted = [
        engine.complete(prompt, model=ADAPTER, max_tokens=12, temperature=0.0, logprobs=5)
        for prompt in PROMPTS
    ]
    choices = [answer["choices"][0] for answer in adapted]
    return fingerprint(engine) | {
        "adapted": [(choice["text"], choice["logprobs"]) for choice in choices]
    }


@pytest.mark.parametrize(
    ("kind", "tp", "keep_plain"),
    [
        ("llama_tied", 1, True),
        pytest.param("qwen3", 2, True, marks=pytest.mark.full),
        pytest.param("qwen3", 1, False, marks=pytest.mark.full),
    ],
)
def test_the_base_model_follows_beneath_an_adapter(
    kind: str, tp: int, keep_plain: bool, start: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    base = tiny_models.build(kind, tmp_path / "base")
    adapter = make_adapter(base, tmp_path / "adapter")
    lora = ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"{ADAPTER}={adapter}"]
    options = {"tp": tp, "keep_plain": keep_plain, "extra_args": lora}
    steps = [tiny_models.load_tensors(base)]
    for seed in (1, 2):
        steps.append(quantised_checkpoints.step(steps[-1], seed))
    engine = start("vllm", base, **options)
    for plan in engine.get("/delta_status", params={"plan": "true"}).json()["plan"]:
        assert {row["status"] for row in plan} <= {"exact", "rebuilt"}, plan
    first = seen_from(engine)
    assert [logprobs for _, logprobs in first["adapted"]] != first["logprobs"]
    last, _ = check_steps(engine, steps, seen_from)
    for key in ("logprobs", "adapted"):
        assert first[key] != last[key]
    target = tiny_models.save_checkpoint(base, tmp_path / "target", steps[2])
    engine.stop()
    fresh = start("vllm", target, **options)
    assert seen_from(fresh) == last
    fresh.stop()
