"""vLLM with LoRA adapters: the base model is updated under them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.live_engine import quantised_checkpoints, tiny_models
from scripts.live_engine.process import EngineProcess
from tests.live.conftest import check_steps
from tests.live.lora import ADAPTER, make_adapter, seen_from


@pytest.mark.parametrize(
    ("kind", "tp", "keep_plain"),
    [
        pytest.param("llama_tied", 1, True, marks=pytest.mark.full),
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
        own = [row for row in plan if row.get("tied_to") is None]  # the head has the embedding's
        assert {row["status"] for row in own} <= {"exact", "rebuilt"}, plan
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
