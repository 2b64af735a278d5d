"""What a live vLLM keeps beside its weights, in one process: found, and its weights refused.

Each engine runs in a process of its own; this file is its script too, and writes what it finds as
JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in (".", "server", "scripts")),
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
# By kind, parts of the names of all tensors that are refused, and what their reasons name.
REFUSED = {
    "deepseek_v3": {"kv_b_proj": ("W_UV", "W_UK_T")},
    "gpt_oss": {},
    "qwen3": {},
    "llama_tied": {},
    "gemma3": {},
    "qwen3_moe": {},
    "qwen3_next": {},
    "mamba2": {"A_log": ("mixer.A",)},
}
QUICK = ("deepseek_v3", "gpt_oss")


@pytest.mark.parametrize(
    "kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.full) for k in REFUSED]
)
def test_what_is_refused(kind: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, __file__, str(checkpoint(kind)), str(out)],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(out.read_text())
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
    from engine_ext.adapters.vllm import worker as adapter

    settings.Settings().export()
    adapter.install()
    llm: Any = LLM(model, dtype="bfloat16", enforce_eager=True, max_model_len=256)
    worker = llm.llm_engine.model_executor.driver_worker.worker
    Path(out).write_text(json.dumps(worker.delta_updates("status", {})["ok"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
