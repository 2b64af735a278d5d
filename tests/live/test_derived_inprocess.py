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

from engine_ext.format import encode_part
from tests.support.in_process_vllm import run

# These models cover all that vLLM derives from weights: views of kv_b_proj, packed experts, and
# rebuilt tensors (Mamba's A and convolutions).
KINDS = (
    *("deepseek_v3", "gpt_oss", "qwen3", "llama_tied", "gemma3"),
    *("qwen3_moe", "qwen3_next", "mamba2"),
)
QUICK = ("gpt_oss",)


@pytest.mark.parametrize(
    "kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.full) for k in KINDS]
)
def test_nothing_is_refused(kind: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    found = run(__file__, checkpoint(kind), tmp_path / "found.json")
    generated, later = found["generated"], found["later"]
    assert generated["uncertified"] == {}
    assert generated["certification"]["exact"] > 0
    # Only what a module has kept a copy of since then is refused.
    [(name, reason)] = later["uncertified"].items()
    assert name == f"{found['copied']}.weight"
    assert f"keeps {found['copied']}.wide since it has generated" in reason


def main(model: str, out: str) -> None:
    """Load a model as a worker with the extension does, and write what it says of itself.

    The first time it has generated. Then a norm keeps a copy of its weight from the next forward
    pass on, as some models do from the first one, and a sync begins.
    """
    from vllm import LLM

    from engine_ext import settings
    from engine_ext.adapters.vllm import plugin

    settings.Settings().export()
    plugin.install_workers()
    llm: Any = LLM(model, dtype="bfloat16", enforce_eager=True, max_model_len=256)
    worker = llm.llm_engine.model_executor.driver_worker.worker
    llm.generate(["the quick brown fox"], use_tqdm=False)
    found = {"generated": worker.delta_updates("status", {})["ok"]["status"]}

    [(path, norm)] = [
        (path, module)
        for path, module in worker.get_model().named_modules()
        if path.endswith(("model.norm", "backbone.norm_f"))
    ]
    norm.register_forward_hook(lambda module, *_: setattr(module, "wide", module.weight.float()))
    llm.generate(["the quick brown fox"], use_tqdm=False)
    part = {"version": 1, "base_version": 0, "identity": "x", "full": False, "num_parts": 1}
    spooled = Path(out).with_suffix(".part")
    spooled.write_bytes(encode_part([], encoding="indices", current_version=1, base_version=0))
    begun = worker.delta_updates("begin", {"part": part, "path": str(spooled), "now": 0.0})
    assert begun["ok"]["admission"] == "new", begun
    later = worker.delta_updates("status", {})["ok"]["status"]
    found |= {"later": later, "copied": path}
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
