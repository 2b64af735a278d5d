"""Versions in the folder format of slime (since v0.3.1), vime and miles, by disk requests."""

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

Start = Callable[..., EngineProcess]
STEPS: list[dict[str, Any]] = [
    {"encoding": "xor"},
    {"encoding": "overwrite", "checksum_format": "adler32"},
    {"encoding": "xor", "ranks": 3},
]


def ask(engine: EngineProcess, folder: Path) -> Any:
    """Send the disk request for a folder."""
    body = {"model_path": str(folder), "load_format": "delta"}
    return engine.post("/update_weights_from_disk", json=body)


def check(engine: EngineProcess, tensors: dict[str, torch.Tensor], version: int) -> None:
    """Fail unless the engine is at a version, and its memory holds these tensors."""
    status = engine.delta_status()
    assert (set(status["versions"]), engine.weight_version()) == ({version}, str(version))
    scan = engine.get("/delta_digest", params={"scan": "true"}).json()
    assert (scan["digest"], scan["corrupted"]) == (model_digest(tensors).hex(), [])


@pytest.mark.parametrize(
    ("kind", "tp"),
    [
        ("vllm", 1),
        pytest.param("vllm", 2, marks=pytest.mark.full),
        pytest.param("sglang", 1, marks=pytest.mark.full),
        pytest.param("sglang", 2, marks=pytest.mark.full),
    ],
)
def test_an_engine_takes_the_folders_of_a_trainer(
    kind: str, tp: int, checkpoint: Callable[[str], Path], start: Start, tmp_path: Path
) -> None:
    base = checkpoint("qwen3")
    trainer = Trainer(tiny_models.load_tensors(base))
    engine = start(kind, base, tp=tp, extra_args=["--delta-root", str(tmp_path)])
    for number, options in enumerate(STEPS, 1):
        trainer.step(0.05)
        folder = write_version(tmp_path, number, trainer.old, trainer.tensors, **options)
        answer = ask(engine, folder)
        assert (answer.status_code, answer.json().get("status")) == (200, "committed"), answer.text
        assert answer.json()["tensors"] == len(trainer.tensors)
        check(engine, trainer.tensors, number)
        assert ask(engine, folder).json()["status"] == "already_applied"

    # A step without changes.
    held = dict(trainer.tensors)
    assert ask(engine, write_version(tmp_path, 4, held, held)).json()["status"] == "committed"
    check(engine, held, 4)

    # One byte of the xor, or of the old values, that is not the trainer's: of a tensor that all
    # ranks share.
    trainer.step(0.05)
    for name in ("model.layers.0.mlp.down_proj.weight", "model.norm.weight"):
        wrong = {k: v.clone() for k, v in held.items()}
        wrong[name].view(torch.uint8).view(-1)[1] ^= 1
        for encoding in ("xor", "overwrite"):
            other = tmp_path / f"{name}-{encoding}"
            tensors = {**wrong, name: trainer.tensors[name]}
            wrong_base = write_version(other, 5, wrong, tensors, encoding=encoding)
            # Also where the byte is overwritten, the rest of the tensor is hashed.
            if encoding == "overwrite":
                tensors = {**wrong, name: wrong[name].clone()}
                tensors[name].view(torch.uint8).view(-1)[-1] ^= 1
                wrong_base = write_version(other / "2", 5, wrong, tensors, encoding=encoding)
            answer = ask(engine, wrong_base)
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (409, "BaseMismatch"), answer.text
            assert (error["tensor"], error["engine_state"]) == (name, "unchanged")
            check(engine, held, 4)

    folder = write_version(tmp_path, 5, held, trainer.tensors)
    assert ask(engine, folder).json()["status"] == "committed"
    trainer.step(0.3)
    full = ask(engine, write_checkpoint(tmp_path, 9, trainer.tensors))
    assert full.json()["status"] == "committed", full.text
    check(engine, trainer.tensors, 9)
    trainer.step(0.05)
    folder = write_version(tmp_path, 10, trainer.old, trainer.tensors, encoding="overwrite")
    assert ask(engine, folder).json()["status"] == "committed"
    seen = fingerprint(engine)
    engine.stop()
    final = tiny_models.save_checkpoint(base, tmp_path / "final", trainer.tensors)
    fresh = start(kind, final, tp=tp)
    assert fingerprint(fresh) == seen
    fresh.stop()
