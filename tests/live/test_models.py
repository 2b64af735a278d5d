"""Model families on a live engine: every tensor exact, or refused by name. No third outcome."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from delta_sender import DeltaSender
from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from tests.live.conftest import fingerprint
from tests.support.plain_trainer import Trainer, container

# On the second of two ranks the loader zeroes the checkpoint's tensor; a delta for it is refused.
REFUSED = {"gpt_oss": ("mlp.experts.down_proj_bias",)}


@pytest.mark.parametrize(
    ("engine_kind", "kind", "tp"),
    [
        pytest.param("vllm", "qwen3_moe", 1, marks=pytest.mark.full),
        pytest.param("vllm", "qwen3_moe", 2, marks=pytest.mark.full),
        pytest.param("vllm", "gemma3", 1, marks=pytest.mark.full),
        pytest.param("vllm", "gemma3", 2, marks=pytest.mark.full),
        *(
            pytest.param("vllm", kind, tp, marks=pytest.mark.full)
            for kind in ("qwen3_next", "mamba2", "gpt_oss", "deepseek_v3")
            for tp in (1, 2)
        ),
        pytest.param("vllm", "falcon_h1", 1, marks=pytest.mark.full),
        pytest.param("vllm", "granite_hybrid", 1, marks=pytest.mark.full),
        pytest.param("sglang", "qwen3_moe", 1, marks=pytest.mark.full),
        pytest.param("sglang", "gemma3", 1, marks=pytest.mark.full),
    ],
)
def test_exact_or_refused(
    engine_kind: str,
    kind: str,
    tp: int,
    checkpoint: Callable[[str], Path],
    start: Callable[..., EngineProcess],
    tmp_path: Path,
) -> None:
    base = checkpoint(kind)
    engine = start(engine_kind, base, tp=tp)
    base_tensors = tiny_models.load_tensors(base)
    trainer = Trainer(dict(base_tensors))
    status = engine.delta_status()
    uncertified = set(status.health.uncertified)
    assert all(any(part in name for part in REFUSED.get(kind, ())) for name in uncertified), status
    before = engine.checksums()
    for name in sorted(uncertified)[:3]:
        body = container(trainer.tensors, {name: None}, metadata={"current_version": "1"})
        answer = _post(engine, body)
        assert answer["error"]["type"] == "NotUpdatable"
        assert answer["error"]["tensor"] == name
    assert engine.checksums() == before
    seen, last = [], b""
    for _ in range(3):
        old = dict(trainer.tensors)
        changed = trainer.step()
        for name in uncertified & changed.keys():
            trainer.tensors[name] = old[name]
            del changed[name]
        last = container(trainer.tensors, changed, metadata=trainer.metadata())
        answer = _post(engine, last)
        assert answer["status"] == "committed", answer
        seen.append(fingerprint(engine))
    assert seen[0] != seen[1] != seen[2]
    assert engine.post("/delta_rollback", json={}).json()["status"] == "rolled_back"
    assert fingerprint(engine) == seen[1]
    if not uncertified:
        with DeltaSender(engine.url, base=base_tensors.items(), full="allow") as sender:
            report = sender.sync(trainer.tensors.items())
        assert (report.status, report.full) == ("committed", True)
    else:
        assert _post(engine, last)["status"] == "committed"
    assert engine.get("/delta_digest", params={"scan": "true"}).json()["corrupted"] == []
    assert fingerprint(engine) == seen[2]
    engine.stop()
    target = tiny_models.save_checkpoint(base, tmp_path / "target", trainer.tensors)
    fresh = start(engine_kind, target, tp=tp)
    assert fingerprint(fresh) == seen[2]
    fresh.stop()


def _post(engine: EngineProcess, body: bytes) -> dict[str, Any]:
    headers = {"Content-Type": "application/octet-stream"}
    answer: dict[str, Any] = engine.post(
        "/update_weights_delta", content=body, headers=headers
    ).json()
    return answer
