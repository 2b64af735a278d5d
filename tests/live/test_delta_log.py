"""Engines that start from a base checkpoint and a delta log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from delta_sender import DeltaSender
from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from tests.live.conftest import fingerprint
from tests.support.plain_trainer import Trainer, model_digest, write_log

KINDS = ["vllm", "sglang"]


# The short tests of SGLang's patched copy have its replay too.
@pytest.mark.versions
@pytest.mark.parametrize("kind", ["vllm", pytest.param("sglang", marks=pytest.mark.full)])
def test_an_engine_starts_where_the_log_ends(
    kind: str,
    checkpoint: Callable[[str], Path],
    start: Callable[..., EngineProcess],
    tmp_path: Path,
) -> None:
    log, base = tmp_path / "log", checkpoint("qwen3")
    trainer = Trainer(tiny_models.load_tensors(base))
    write_log(log, trainer, 3)
    fresh = start(kind, tiny_models.save_checkpoint(base, tmp_path / "final", trainer.tensors))
    expected = fingerprint(fresh)
    fresh.stop()

    engine = start(kind, base, extra_args=["--delta-log", str(log)])
    status = engine.delta_status()
    assert (status["version"], engine.weight_version()) == (3, "3")
    assert status["delta_log"] == {"folder": str(log), "newest": 3, "problem": None}
    assert status["staged"] is None
    assert fingerprint(engine) == expected
    assert "3 versions replayed" in engine.log_path.read_text()

    tensors = trainer.tensors
    with DeltaSender(engine.url, tensors.items(), base_version=3, delta_log=log) as sender:
        trainer.step()
        report = sender.sync(trainer.tensors.items())
    assert (report.version, report.full) == (4, False)
    assert report.digest == model_digest(trainer.tensors).hex()
    assert engine.get("/delta_digest", params={"scan": "true"}).json()["corrupted"] == []

    # An engine that is behind catches up from the log.
    assert engine.post("/delta_rollback").json()["version"] == 3
    assert engine.post("/delta_catch_up").json()["applied"] == [4]
    assert engine.delta_status()["digest"] == model_digest(trainer.tensors).hex()
    assert (engine.delta_status()["version"], engine.weight_version()) == (4, "4")
    engine.stop()


@pytest.mark.full
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_stays_before_a_damaged_version(
    kind: str,
    tp: int,
    checkpoint: Callable[[str], Path],
    start: Callable[..., EngineProcess],
    tmp_path: Path,
) -> None:
    log, base = tmp_path / "log", checkpoint("qwen3")
    trainer = Trainer(tiny_models.load_tensors(base))
    write_log(log, trainer, 1)
    good = dict(trainer.tensors)
    write_log(log, trainer, 2)
    damaged = log / "weight_v000002" / "rank0_flush001.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)

    engine = start(kind, base, tp=tp, extra_args=["--delta-log", str(log)])
    status = engine.delta_status()
    assert (status["ranks"], status["version"], engine.weight_version()) == (tp, 1, "1")
    assert status["digest"] == model_digest(good).hex()
    # Of every rank's live memory.
    scan = engine.get("/delta_digest", params={"scan": "true"}).json()
    assert (scan["digest"], scan["corrupted"]) == (status["digest"], [])
    assert status["staged"] is None
    problem = status["delta_log"]["problem"]
    assert (problem["type"], problem["newest"]) == ("LogDamaged", 3)
    assert "weight_v000002" in problem["message"]
    assert "weight_v000002 cannot be used" in engine.log_path.read_text()
    assert engine.complete("the quick", max_tokens=4)["choices"][0]["text"] is not None
    assert engine.post("/delta_catch_up").status_code == 409
    assert engine.delta_status()["delta_log"]["problem"]["type"] == "LogDamaged"

    with DeltaSender(engine.url, good.items(), base_version=1) as sender:
        assert not sender.sync(trainer.tensors.items()).full
    assert engine.get("/delta_digest", params={"scan": "true"}).json()["corrupted"] == []
    assert engine.delta_status()["digest"] == model_digest(trainer.tensors).hex()
    engine.stop()
