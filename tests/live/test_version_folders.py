"""Versions in the folder format of slime (since v0.3.1), vime and miles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from tests.live.conftest import fingerprint
from tests.support.folder_writer import write_checkpoint, write_version
from tests.support.plain_trainer import Trainer, model_digest
from tests.support.present import present

pytestmark = pytest.mark.full

Start = Callable[..., EngineProcess]
STEPS: list[dict[str, Any]] = [
    {"encoding": "xor"},
    {"encoding": "overwrite", "checksum_format": "adler32"},
    {"encoding": "xor", "ranks": 3},
]


def ask(engine: EngineProcess, folder: Path | str) -> Any:
    """Send the disk request for a folder, or a URL."""
    body = {"model_path": str(folder), "load_format": "delta"}
    return engine.post("/update_weights_from_disk", json=body)


def check(engine: EngineProcess, tensors: dict[str, torch.Tensor], version: int) -> None:
    """Fail unless the engine is at a version, and its memory holds these tensors."""
    status = engine.delta_status()
    assert (set(status.version.by_rank), engine.weight_version()) == ({version}, str(version))
    scan = engine.get("/delta_digest", params={"scan": "true"}).json()
    assert (scan["digest"], scan["corrupted"]) == (model_digest(tensors).hex(), [])


def committed(answer: Any) -> bool:
    """Return whether a request was answered with a commit."""
    return answer.status_code == 200 and answer.json()["status"] == "committed"


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_an_engine_follows_a_trainer(
    kind: str, tp: int, checkpoint: Callable[[str], Path], start: Start, tmp_path: Path
) -> None:
    base = checkpoint("qwen3")
    trainer = Trainer(tiny_models.load_tensors(base))
    engine = start(kind, base, tp=tp, extra_args=["--delta-root", str(tmp_path)])
    for number, options in enumerate(STEPS, 1):
        trainer.step(0.05)
        folder = write_version(tmp_path, number, trainer.old, trainer.tensors, **options)
        answer = ask(engine, folder)
        assert committed(answer), answer.text
        assert answer.json()["tensors"] == len(trainer.tensors)
        check(engine, trainer.tensors, number)
        assert ask(engine, folder).json()["status"] == "already_applied"

    # Two versions pulled, and loaded as the checkpoint that they were pulled under.
    held = dict(trainer.tensors)
    trainer.step(0.05)
    write_version(tmp_path, 4, held, trainer.tensors)
    between = dict(trainer.tensors)
    trainer.step(0.05)
    write_version(tmp_path, 5, between, trainer.tensors, encoding="overwrite")
    local = str(tmp_path / "local")
    wanted = {
        "local_checkpoint_dir": local,
        "source_dir": str(tmp_path),
        "target_version": 5,
    }
    pulled = engine.post("/pull_weights", json=wanted)
    assert (pulled.status_code, pulled.json()["success"]) == (200, True), pulled.text
    check(engine, held, 3)
    loaded = engine.post(
        "/update_weights_from_disk", json={"model_path": local, "weight_version": "5"}
    )
    assert committed(loaded), loaded.text
    check(engine, trainer.tensors, 5)

    # By the method that a branch of vime calls on all workers.
    held = dict(trainer.tensors)
    trainer.step(0.05)
    folder = write_version(tmp_path, 6, held, trainer.tensors)
    called = engine.post(
        "/collective_rpc",
        json={
            "method": "apply_delta_from_disk",
            "kwargs": {"model_path": str(folder), "weight_version": "6"},
        },
    )
    assert called.status_code == 200, called.text
    assert [one["status"] for one in called.json()["results"]] == ["committed"] * tp
    check(engine, trainer.tensors, 6)

    # A step without changes, a plain checkpoint, and on from there.
    held = dict(trainer.tensors)
    assert committed(ask(engine, write_version(tmp_path, 7, held, held)))
    check(engine, held, 7)
    trainer.step(0.3)
    full = ask(engine, write_checkpoint(tmp_path, 9, trainer.tensors))
    assert committed(full), full.text
    check(engine, trainer.tensors, 9)
    trainer.step(0.05)
    folder = write_version(tmp_path, 10, trainer.old, trainer.tensors, encoding="overwrite")
    assert committed(ask(engine, folder))
    seen = fingerprint(engine)
    engine.stop()
    fresh = start(
        kind, tiny_models.save_checkpoint(base, tmp_path / "final", trainer.tensors), tp=tp
    )
    assert fingerprint(fresh) == seen
    fresh.stop()


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_other_bytes_than_the_trainers_are_refused(
    kind: str, tp: int, checkpoint: Callable[[str], Path], start: Start, tmp_path: Path
) -> None:
    """In a tensor that the ranks share, and in one that each has; whether a step changes it or not.

    Then an engine that starts with the versions as its delta log stays before the wrong one.
    """
    base = checkpoint("qwen3")
    trainer = Trainer(tiny_models.load_tensors(base))
    engine = start(kind, base, tp=tp, extra_args=["--delta-root", str(tmp_path)])
    log = tmp_path / "log"
    trainer.step(0.05)
    assert committed(ask(engine, write_version(log, 1, trainer.old, trainer.tensors)))
    held = dict(trainer.tensors)
    trainer.step(0.05)
    for name in ("model.layers.0.mlp.down_proj.weight", "model.norm.weight"):
        for encoding, changed in (("xor", 1), ("xor", -1), ("overwrite", -1)):
            wrong = {k: v.clone() for k, v in held.items()}
            wrong[name].view(torch.uint8).view(-1)[1] ^= 1
            tensors = {**wrong, name: wrong[name].clone()}
            tensors[name].view(torch.uint8).view(-1)[changed] ^= 2
            other = tmp_path / f"{name} {encoding} {changed}"
            folder = write_version(other, 2, wrong, tensors, encoding=encoding)
            answer = ask(engine, folder)
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (409, "BaseMismatch"), answer.text
            assert (error["tensor"], error["engine_state"]) == (name, "unchanged")
            check(engine, held, 1)
    assert committed(ask(engine, write_version(log, 2, held, trainer.tensors)))
    check(engine, trainer.tensors, 2)
    engine.stop()

    wrong = {**trainer.tensors, name: trainer.tensors[name] + 1}
    write_version(log, 3, wrong, trainer.tensors)
    started = start(kind, base, tp=tp, extra_args=["--delta-log", str(log)])
    check(started, trainer.tensors, 2)
    problem = present(present(started.delta_status().log).problem)
    assert (problem["type"], problem["newest"]) == ("LogDamaged", 3)
    write_checkpoint(log, 4, wrong)
    assert started.post("/delta_catch_up").json()["applied"] == [4]
    check(started, wrong, 4)
    started.stop()
