"""vLLM with pipeline stages: every rank takes what it holds, in one transaction."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from delta_sender import DeltaSender
from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from tests.live.conftest import fingerprint
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
    steps = [tiny_models.load_tensors(base)]
    for seed in (1, 2):
        steps.append(quantised_checkpoints.step(steps[-1], seed))
    options: dict[str, Any] = {"extra_args": [*STAGES, *flags], "python_path": [SHIM]}
    engine = start("vllm", base, **options)
    seen = [fingerprint(engine)]
    assert {name.split(":")[1] for name in seen[0]["parameters"]} == {"pp0", "pp1"}
    with DeltaSender(engine.url, base=steps[0].items()) as sender:
        for tensors in steps[1:]:
            report = sender.sync(tensors.items())
            assert (report.status, report.full) == ("committed", False)
            assert report.digest == report.engine["digest"]
            seen.append(fingerprint(engine))
    assert seen[0] != seen[1] != seen[2]
    assert engine.post("/delta_rollback", json={}).json()["status"] == "rolled_back"
    assert fingerprint(engine) == seen[1]
    with DeltaSender(engine.url, base=steps[0].items()) as sender:
        report = sender.sync(steps[2].items())
    assert (report.status, report.full) == ("committed", True)
    assert fingerprint(engine) == seen[2]
    scan = engine.get("/delta_digest", params={"scan": "true"}).json()
    assert scan["corrupted"] == []

    target = tiny_models.save_checkpoint(base, tmp_path / "target", steps[2])
    engine.stop()
    assert fingerprint(start("vllm", target, **options)) == seen[2]
