"""Live engines whose weights are quantised, packed, or computed from the checkpoint as they load.

After several syncs, a rollback and a full sync, an engine has the same parameters, buffers, texts
and log probabilities as one that was started on the target checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from tests.live.conftest import check_steps, fingerprint
from tests.support import quantised_checkpoints

FULL = pytest.mark.full
CHANNEL = ("--quantization", "fp8_per_channel")
TENSOR = ("--quantization", "fp8_per_tensor")
# vLLM has no kernels for fp8 with one scale per tensor on CPU.
SHIM = Path(__file__).parents[1] / "shims" / "vllm_cpu_fp8"


@dataclass(frozen=True)
class Case:
    """A checkpoint, how it is served, and how many tensors have which status in the plan."""

    checkpoint: str  # a format of `quantised_checkpoints`, or an architecture of `tiny_models`
    states: dict[str, int]
    tp: int = 1
    flags: tuple[str, ...] = ()
    int4: bool = False  # generates on AVX512 only
    packed: bool = False  # linear weights are in oneDNN's handles, which no checksum sees
    shim: bool = False


CASES = {
    "online-fp8-2-ranks": Case("qwen3", {"rebuilt": 14, "exact": 11}, 2, CHANNEL),
    "w8a8": Case("w8a8", {"rebuilt": 14, "cast": 14, "exact": 11}),
    "online-fp8": Case("qwen3", {"rebuilt": 14, "exact": 11}, 1, CHANNEL),
    "w8a8-2-ranks": Case("w8a8", {"rebuilt": 14, "cast": 14, "exact": 11}, 2),
    "fp8-channel": Case("fp8_channel", {"exact": 25, "cast": 14}),
    "online-fp8-tensor": Case("qwen3", {"rebuilt": 14, "exact": 11}, 1, TENSOR, shim=True),
    # The largest magnitude is that of the shards of both ranks.
    "online-fp8-tensor-2-ranks": Case("qwen3", {"rebuilt": 14, "exact": 11}, 2, TENSOR, shim=True),
    "fp8-tensor": Case("fp8_tensor", {"rebuilt": 28, "exact": 11}, shim=True),
    "fp8-tensor-static-2-ranks": Case(
        "fp8_tensor_static", {"rebuilt": 42, "exact": 11}, 2, shim=True
    ),
    "compressed-fp8-tensor": Case("compressed_fp8_tensor", {"rebuilt": 28, "exact": 11}, shim=True),
    "awq": Case("awq", {"rebuilt": 42, "exact": 11}, int4=True),
    "gptq": Case("gptq", {"rebuilt": 42, "ignored": 14, "exact": 11}, int4=True),
    "packed": Case("llama_tied", {"rebuilt": 15, "exact": 5}, packed=True),
    "packed-2-ranks": Case("qwen3_moe", {"rebuilt": 12, "exact": 33}, 2, packed=True),
    "packed-hybrid": Case("qwen3_next", {"rebuilt": 20, "exact": 33, "cast": 1}, packed=True),
    "w4a16": Case("w4a16", {"rebuilt": 36, "ignored": 6, "exact": 11}, int4=True),
}
QUICK = ("online-fp8-2-ranks", "w8a8", "packed")


def base_of(case: Case, folder: Path) -> Path:
    if case.checkpoint in quantised_checkpoints.FORMATS:
        return quantised_checkpoints.build(case.checkpoint, folder)
    return tiny_models.build(case.checkpoint, folder)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=FULL) for name in CASES]
)
def test_every_weight_follows(
    name: str, start: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    case = CASES[name]
    base = base_of(case, tmp_path / "base")
    dtype = quantised_checkpoints.serving_dtype(case.checkpoint)
    options = {
        "tp": case.tp,
        "extra_args": ["--dtype", dtype, *case.flags],
        "keep_plain": not case.packed,
        "python_path": [SHIM] if case.shim else [],
    }
    steps = [tiny_models.load_tensors(base)]
    for seed in (1, 2):
        steps.append(quantised_checkpoints.step(steps[-1], seed))
    engine = start("vllm", base, **options)

    def observed(of: EngineProcess) -> dict[str, Any]:
        if case.int4 and not torch.cpu._is_avx512_supported():
            return {"parameters": of.checksums(), "buffers": of.buffer_checksums()}
        return fingerprint(of)

    for plan in engine.get("/delta_status", params={"plan": "true"}).json()["plan"]:
        states = [row["status"] for row in plan]
        assert {state: states.count(state) for state in states} == case.states, plan
    last, reports = check_steps(engine, steps, observed)
    for report in reports:
        assert ("rebuild_ms" in report.engine["timings_ms"]) == ("rebuilt" in case.states)
    target = tiny_models.save_checkpoint(base, tmp_path / "target", steps[2])
    engine.stop()
    fresh = start("vllm", target, **options)
    assert observed(fresh) == last
    fresh.stop()
