"""Tensors that a live vLLM derives from weights, in one process: all of them follow.

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

from tests.support.in_process_vllm import run

# What vLLM derives from weights there follows: views of kv_b_proj, packed experts, and what is
# rebuilt (Mamba's A and convolutions).
KINDS = (
    *("deepseek_v3", "gpt_oss", "qwen3", "llama_tied", "gemma3"),
    *("qwen3_moe", "qwen3_next", "mamba2"),
)
QUICK = ("deepseek_v3", "gpt_oss")


@pytest.mark.parametrize(
    "kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.full) for k in KINDS]
)
def test_nothing_is_refused(kind: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    found = run(__file__, checkpoint(kind), tmp_path / "found.json")
    assert found["uncertified"] == {}
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
