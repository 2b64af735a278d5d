"""Experts spread over the ranks: each takes its own.

No engine can generate so on the CPU (vLLM's kernel ignores which experts a rank has, SGLang's reads
out of bounds), so all of their memory is compared with that of a fresh engine.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.live_engine import quantised_checkpoints, tiny_models
from scripts.live_engine.process import EngineProcess
from tests.live.conftest import check_steps

FLAGS = {"vllm": ["--enable-expert-parallel"], "sglang": ["--ep-size", "2", "--skip-server-warmup"]}
# SGLang's warm-up and health check would generate.
ENVIRONMENT = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"}


def memory(engine: EngineProcess) -> dict[str, Any]:
    return {"parameters": engine.checksums(), "buffers": engine.buffer_checksums()}


@pytest.mark.full
@pytest.mark.parametrize("kind", FLAGS)
def test_every_rank_takes_its_experts(
    kind: str, start: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    base = tiny_models.build("qwen3_moe", tmp_path / "base")
    steps = [tiny_models.load_tensors(base)]
    for seed in (1, 2):
        steps.append(quantised_checkpoints.step(steps[-1], seed))
    options: dict[str, Any] = {"tp": 2, "extra_args": FLAGS[kind], "extra_env": ENVIRONMENT}
    engine = start(kind, base, **options)
    plans = engine.get("/delta_status", params={"plan": "true"}).json()["plan"]
    held = [
        {row["name"] for row in plan if ".experts." in row["name"] and row["live"]}
        for plan in plans
    ]
    assert not held[0] & held[1]
    assert held[0] | held[1] == {name for name in steps[0] if ".experts." in name}
    last, reports = check_steps(engine, steps, memory)
    assert all(report.digest == report.engine["digest"] for report in reports)
    target = tiny_models.save_checkpoint(base, tmp_path / "target", steps[2])
    engine.stop()
    fresh = start(kind, target, **options)
    assert memory(fresh) == last
    fresh.stop()
