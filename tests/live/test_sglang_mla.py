"""DeepSeek-V3 on SGLang: what it computes from `kv_b_proj` follows every sync.

SGLang cannot generate with this model on CPU, so memory is compared: its own checksums, and every
tensor that hangs on the model, with those of a fresh server on the target.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from tests.live.sglang_memory import Server
from tests.support.plain_trainer import Trainer, container

KINDS = ("", "kv_b_proj", "q_a_proj")
DERIVED = ("w_kc", "w_vc")
FLAGS = ("--disable-shared-experts-fusion",)


@pytest.mark.full
@pytest.mark.parametrize("tp", [1, 2])
def test_what_is_derived_follows(
    tp: int,
    checkpoint: Callable[[str], Path],
    start: Callable[..., EngineProcess],
    tmp_path: Path,
) -> None:
    base = checkpoint("deepseek_v3")
    server = Server(start, base, tp, tmp_path, FLAGS)
    status = server.engine.delta_status()
    assert status.health.uncertified == {}
    trainer = Trainer(tiny_models.load_tensors(base))
    for touched in KINDS:
        before = server.memory()
        changed = trainer.step(only=touched)
        body = container(trainer.tensors, changed, metadata=trainer.metadata())
        assert server.post(body)["status"] == "committed"
        after = server.memory()
        assert after[0] != before[0]
        derived = [path for path in after[1][0] if path.endswith(DERIVED)]
        assert len(derived) == 4  # two of each layer
        moved = [path for path in derived if after[1][0][path] != before[1][0][path]]
        assert moved == ([] if touched == "q_a_proj" else derived)
        assert server.engine.post("/delta_rollback").json()["status"] == "rolled_back"
        assert server.memory() == before
        assert server.post(body)["status"] == "committed"
        assert server.memory() == after
    found = server.engine.get("/delta_digest", params={"scan": "true"}).json()
    assert found["corrupted"] == []
    updated = server.memory()
    server.engine.stop()
    target = tiny_models.save_checkpoint(base, tmp_path / "target", trainer.tensors)
    fresh = Server(start, target, tp, tmp_path, FLAGS)
    assert fresh.memory() == updated
    fresh.engine.stop()
