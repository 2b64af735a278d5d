"""Data parallel replicas: one engine to its sender, all replicas at one version."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.live_engine import quantised_checkpoints, tiny_models
from scripts.live_engine.process import EngineProcess
from tests.live.conftest import PROMPTS, check_steps

REPLICAS = 2
FLAGS = {"vllm": ("--data-parallel-size", "2"), "sglang": ("--dp-size", "2")}


def of_every_replica(engine: EngineProcess) -> dict[str, Any]:
    """Return everything that must be equal on two engines with the same weights."""
    found: dict[str, Any] = {"parameters": engine.checksums()}
    for replica in range(REPLICAS):
        for prompt in PROMPTS:
            choice = generate(engine, replica, prompt)
            found[f"{replica}: {prompt}"] = choice["text"], choice["logprobs"]
    return found


def generate(engine: EngineProcess, replica: int, prompt: str) -> Any:
    """Return a completion of one replica."""
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0.0, "logprobs": 5}
    answer = engine.post(
        "/v1/completions", json=body, headers={"X-data-parallel-rank": str(replica)}
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "checkpoint_of", "tp", "flags"),
    [
        ("vllm", "qwen3", 1, ()),
        ("sglang", "qwen3", 1, ()),
        ("vllm", "llama_tied", 2, ()),
        ("vllm", "qwen3", 1, ("--quantization", "fp8_per_channel")),
        ("sglang", "llama_tied", 2, ()),
        ("sglang", "qwen3_moe", 1, ()),
        ("sglang", "qwen3", 1, ("--pp-size", "2")),
    ],
    ids=[
        "vllm",
        "sglang",
        "vllm-2-ranks",
        "vllm-rebuilt",
        "sglang-2-ranks",
        "sglang-experts",
        "sglang-stages",
    ],
)
def test_every_replica_follows(
    kind: str,
    checkpoint_of: str,
    tp: int,
    flags: tuple[str, ...],
    start: Callable[..., EngineProcess],
    tmp_path: Path,
) -> None:
    base = tiny_models.build(checkpoint_of, tmp_path / "base")
    steps = [tiny_models.load_tensors(base)]
    for seed in (1, 2):
        steps.append(quantised_checkpoints.step(steps[-1], seed))
    options: dict[str, Any] = {"tp": tp, "extra_args": [*FLAGS[kind], *flags]}
    ranks = tp * (2 if "--pp-size" in flags else 1)
    if kind == "sglang":
        options["extra_env"] = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0", "1"] * ranks)}
    engine = start(kind, base, **options)
    assert engine.delta_status().ranks == REPLICAS * ranks
    last, reports = check_steps(engine, steps, of_every_replica)
    assert all(report.digest == report.engine["digest"] for report in reports)
    target = tiny_models.save_checkpoint(base, tmp_path / "target", steps[2])
    engine.stop()
    fresh = start(kind, target, **options)
    assert of_every_replica(fresh) == last
    fresh.stop()
