"""Tensors that a live vLLM derives from weights, in one process: found, their weights refused.

Each engine runs in a process of its own; this file is its script too, and writes what it finds as
JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.in_process_vllm import run

# By kind, parts of the names of all tensors that are refused, and what their reasons name.
REFUSED: dict[str, dict[str, tuple[str, ...]]] = {
    # vLLM keeps views of kv_b_proj, which follow by themselves.
    "deepseek_v3": {},
    "gpt_oss": {},
    "qwen3": {},
    "llama_tied": {},
    "gemma3": {},
    "qwen3_moe": {},
    "qwen3_next": {},
    "mamba2": {"A_log": ("mixer.A",)},
}
# If the CPU computes in bf16, vLLM packs conv1d and keeps its plain values: Qwen3-Next in an
# attribute, Mamba2 in a buffer of the mixer, which has other weights too.
if torch.cpu._is_avx512_bf16_supported():
    REFUSED["qwen3_next"] = {"conv1d.weight": ("_cpu_unpacked_conv_weight",)}
    REFUSED["mamba2"] |= {"conv1d.weight": ("without data",), "conv1d.bias": ("conv_weights",)}
    mixer = ("mixer.D", "dt_bias", "in_proj", "mixer.norm", "out_proj")
    REFUSED["mamba2"] |= dict.fromkeys(mixer, ("mixer.conv_weights",))
QUICK = ("deepseek_v3", "gpt_oss")


@pytest.mark.parametrize(
    "kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.full) for k in REFUSED]
)
def test_what_is_refused(kind: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    found = run(__file__, checkpoint(kind), tmp_path / "found.json")
    parts = REFUSED[kind]
    for name, reason in found["uncertified"].items():
        [expected] = [words for part, words in parts.items() if part in name]
        assert all(word in reason for word in expected)
    for part in parts:
        assert any(part in name for name in found["uncertified"])
    assert found["certification"]["exact"] > 0


def main(model: str, out: str) -> None:
    """Load a model as a worker with the extension does, and write what it says of itself."""
    from vllm import LLM

    from engine_ext import settings
    from engine_ext.adapters.vllm import plugin

    settings.Settings().export()
    plugin.install_workers()
    llm: Any = LLM(model, dtype="bfloat16", enforce_eager=True, max_model_len=256)
    worker = llm.llm_engine.model_executor.driver_worker.worker
    Path(out).write_text(json.dumps(worker.delta_updates("status", {})["ok"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
