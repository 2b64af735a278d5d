"""LoRA adapters for live tests, and what an engine that serves one can be seen by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from tests.live.conftest import PROMPTS, fingerprint

ADAPTER = "tiny"
RANK = 4


def make_adapter(base: Path, folder: Path, seed: int = 5) -> Path:
    """Write a random adapter for some layers of a model, as PEFT does."""
    generator = torch.Generator().manual_seed(seed)
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


def generated(engine: EngineProcess, adapter: str = ADAPTER) -> list[Any]:
    """The completions of an adapter, with the logprobs."""
    answers = [
        engine.complete(prompt, model=adapter, max_tokens=12, temperature=0.0, logprobs=5)
        for prompt in PROMPTS
    ]
    choices = [answer["choices"][0] for answer in answers]
    return [(choice["text"], choice["logprobs"]) for choice in choices]


def seen_from(engine: EngineProcess) -> dict[str, Any]:
    """All that `fingerprint` compares, and what the adapter generates."""
    return {"adapted": generated(engine), **fingerprint(engine)}
