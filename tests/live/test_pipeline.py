"""Pipeline stages: every rank takes what it holds, in one transaction."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from tests.live.conftest import check_steps, fingerprint
from tests.live.sglang_memory import Server
from tests.support import quantised_checkpoints

# vLLM does not generate so on the CPU by itself.
SHIM = Path(__file__).parents[1] / "shims" / "vllm_cpu_pp"
STAGES = ("--pipeline-parallel-size", "2")


@pytest.mark.parametrize(
    ("checkpoint_of", "flags"),
    [
        # Both stages hold the embedding, the last one as its head.
        ("llama_tied", ()),
        pytest.param("qwen3", ("--quantization", "fp8_per_channel"), marks=pytest.mark.full),
        pytest.param("qwen3_moe", (), marks=pytest.mark.full),
    ],
    ids=["tied", "rebuilt", "experts"],
)
def test_every_stage_follows(
    checkpoint_of: str,
    flags: tuple[str, ...],
    start: Callable[..., EngineProcess],
    tmp_path: Path,
) -> None:
    base = tiny_models.build(checkpoint_of, tmp_path / "base")
    options: dict[str, Any] = {"extra_args": [*STAGES, *flags], "python_path": [SHIM]}
    engine = start("vllm", base, **options)
    assert {name.split(":")[1] for name in engine.checksums()} == {"pp0", "pp1"}
    steps = steps_from(base)
    last, reports = check_steps(engine, steps, fingerprint)
    assert all(report.digest == report.engine["digest"] for report in reports)
    target = tiny_models.save_checkpoint(base, tmp_path / "target", steps[-1])
    engine.stop()
    fresh = start("vllm", target, **options)
    assert fingerprint(fresh) == last
    fresh.stop()


@pytest.mark.parametrize(
    ("checkpoint_of", "tied", "tp"),
    [
        # SGLang's Llama gives no stage but the first a tied embedding.
        ("qwen3", True, 1),
        pytest.param("qwen3_moe", False, 1, marks=pytest.mark.full),
        pytest.param("qwen3", False, 2, marks=pytest.mark.full),
    ],
    ids=["tied", "experts", "2-ranks"],
)
def test_every_stage_of_sglang_follows(
    checkpoint_of: str,
    tied: bool,
    tp: int,
    start: Callable[..., EngineProcess],
    tmp_path: Path,
) -> None:
    base = tiny_models.build(checkpoint_of, tmp_path / "base", tie_word_embeddings=tied)
    seen = tmp_path / "seen"
    seen.mkdir()
    server = Server(start, base, tp, seen, stages=2)

    def observe(engine: EngineProcess) -> dict[str, Any]:
        return {**fingerprint(engine), "memory": server.memory()[1]}

    steps = steps_from(base)
    last, reports = check_steps(server.engine, steps, observe)
    assert all(report.digest == report.engine["digest"] for report in reports)
    for hashes in zip(*(hashed for hashed in (last["memory"],)), strict=True):
        assert hashes
    target = tiny_models.save_checkpoint(base, tmp_path / "target", steps[-1])
    server.engine.stop()
    server = Server(start, target, tp, seen, stages=2)
    assert observe(server.engine) == last
    server.engine.stop()


def steps_from(base: Path) -> list[dict[str, Any]]:
    """Return the weights of a checkpoint, and those after each of two steps."""
    steps = [tiny_models.load_tensors(base)]
    for seed in (1, 2):
        steps.append(quantised_checkpoints.step(steps[-1], seed))
    return steps
