"""Pipeline stages: every rank takes what it holds, in one transaction."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.live_engine import quantised_checkpoints, tiny_models
from scripts.live_engine.process import EngineProcess
from tests.live.conftest import check_steps, fingerprint
from tests.live.sglang_memory import Server
from tests.support.plain_trainer import Trainer, container

# vLLM does not generate so on the CPU without this shim.
SHIM = Path(__file__).parents[1] / "shims" / "vllm_cpu_pp"
STAGES = ("--pipeline-parallel-size", "2")


@pytest.mark.full
@pytest.mark.parametrize(
    ("checkpoint_of", "flags"),
    [
        # Both stages hold the embedding, the last one as its head.
        ("llama_tied", ()),
        ("qwen3", ("--quantization", "fp8_per_channel")),
        ("qwen3_moe", ()),
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
        pytest.param("qwen3", True, 1, marks=pytest.mark.full),
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
    assert len(last["memory"]) == 2 * tp
    target = tiny_models.save_checkpoint(base, tmp_path / "target", steps[-1])
    server.engine.stop()
    server = Server(start, target, tp, seen, stages=2)
    assert observe(server.engine) == last
    server.engine.stop()


@pytest.mark.full
def test_sglang_syncs_while_every_microbatch_generates(
    start: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    """Prompts are prefilled in chunks, which are in several micro-batches at once."""
    base = tiny_models.build("qwen3", tmp_path / "base", tie_word_embeddings=True)
    seen = tmp_path / "seen"
    seen.mkdir()
    flags = ("--chunked-prefill-size", "16")
    server = Server(start, base, 1, seen, flags, stages=2)
    trainer = Trainer(tiny_models.load_tensors(base))
    ended, reasons = threading.Event(), set()

    def generate(number: int) -> None:
        for size in itertools.cycle(range(1 + number, 60, 7)):
            if ended.is_set():
                return
            body = {"prompt": "a word " * size, "max_tokens": 100 - size, "temperature": 0}
            answer = server.engine.post("/v1/completions", json={**body, "ignore_eos": True})
            found = answer.json()
            reasons.add(found["choices"][0]["finish_reason"] if "choices" in found else str(found))

    threads = [threading.Thread(target=generate, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    try:
        for mode in ("keep", "keep", "wait", "abort"):
            for flush in ("true", "false"):
                changed = trainer.step()
                body = container(trainer.tensors, changed, metadata=trainer.metadata())
                url = f"/update_weights_delta?pause_mode={mode}&flush_cache={flush}"
                headers = {"Content-Type": "application/octet-stream"}
                answer = server.engine.post(url, content=body, headers=headers).json()
                assert answer.get("status") == "committed", answer
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert "length" in reasons <= {"length", "abort"}

    def observe() -> dict[str, Any]:
        assert server.engine.post("/flush_cache").status_code == 200
        return {**fingerprint(server.engine), "memory": server.memory()[1]}

    last = observe()
    target = tiny_models.save_checkpoint(base, tmp_path / "target", trainer.tensors)
    server.engine.stop()
    server = Server(start, target, 1, seen, flags, stages=2)
    assert observe() == last
    server.engine.stop()


def steps_from(base: Path) -> list[dict[str, Any]]:
    """Return the weights of a checkpoint, and those after each of two steps."""
    steps = [tiny_models.load_tensors(base)]
    for seed in (1, 2):
        steps.append(quantised_checkpoints.step(steps[-1], seed))
    return steps
