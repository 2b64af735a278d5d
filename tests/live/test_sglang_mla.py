"""DeepSeek-V3 on SGLang: what it computes from `kv_b_proj` follows every sync.

SGLang cannot generate with this model on CPU, so memory is compared: its own checksums, and every
tensor that hangs on the model, with those of a fresh server on the target.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from tests.support.plain_trainer import Trainer, container

SHIM = Path(__file__).parents[1] / "shims" / "faults"
OCTETS = {"Content-Type": "application/octet-stream"}
KINDS = ("", "kv_b_proj", "q_a_proj")
DERIVED = ("w_kc", "w_vc")


class Server:
    """A server whose whole model can be hashed."""

    def __init__(self, start: Callable[..., EngineProcess], model: Path, tp: int, seen: Path):
        self.seen = seen
        self.tp = tp
        self.engine = start(
            "sglang",
            model,
            tp=tp,
            python_path=[SHIM],
            extra_args=["--disable-shared-experts-fusion", "--skip-server-warmup"],
            extra_env={
                "DELTA_FAULTS": str(seen),
                "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
            },
        )

    def post(self, body: bytes) -> dict[str, Any]:
        answer: dict[str, Any] = self.engine.post(
            "/update_weights_delta", content=body, headers=OCTETS
        ).json()
        return answer

    def memory(self) -> tuple[dict[str, str], list[dict[str, str]]]:
        """SGLang's checksums, and a hash of every tensor, by rank and path."""
        for rank in range(self.tp):
            (self.seen / f"hash_model-{rank}").touch()
        self.engine.get("/delta_digest")
        hashes = []
        for rank in range(self.tp):
            file = self.seen / f"hashed-{rank}"
            give_up = time.monotonic() + 30
            while not file.exists() and time.monotonic() < give_up:
                time.sleep(0.05)
            hashes.append(json.loads(file.read_text()))
            file.unlink()
        return self.engine.checksums(), hashes


@pytest.mark.full
@pytest.mark.parametrize("tp", [1, 2])
def test_what_is_derived_follows(
    tp: int,
    checkpoint: Callable[[str], Path],
    start: Callable[..., EngineProcess],
    tmp_path: Path,
) -> None:
    base = checkpoint("deepseek_v3")
    server = Server(start, base, tp, tmp_path)
    status = server.engine.delta_status()
    assert status["uncertified"] == {}
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
    fresh = Server(start, target, tp, tmp_path)
    assert fresh.memory() == updated
    fresh.engine.stop()
