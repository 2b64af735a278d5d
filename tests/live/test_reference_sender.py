"""The script that ports start from, on a live vLLM: sparse syncs, a refused base, a full sync."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import httpx

from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from tests.support.plain_trainer import Trainer, model_digest

SCRIPT = Path(__file__).parents[2] / "scripts" / "reference_sender.py"

_spec = importlib.util.spec_from_file_location("reference_sender_of_ports", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
script = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(script)


def holds(engine: EngineProcess, trainer: Trainer) -> bool:
    """Whether live memory has the trainer's bytes, and the engine the version of the sender."""
    found = engine.get("/delta_digest", params={"scan": "true"}).json()
    expected = model_digest(trainer.tensors).hex()
    return (found["digest"], found["corrupted"]) == (expected, [])


def test_reference_sender(
    checkpoint: Callable[[str], Path], start: Callable[..., EngineProcess]
) -> None:
    base = checkpoint("qwen3")
    engine = start("vllm", base)
    trainer = Trainer(tiny_models.load_tensors(base))
    client = httpx.Client(base_url=engine.url, timeout=300)
    sender = script.Sender(client, trainer.tensors)
    changes = []
    for version in (1, 2):
        changes.append(sum(len(where) for where in trainer.step().values()))
        assert sender.sync(trainer.tensors) == version
        assert engine.weight_version() == str(version)
        assert holds(engine, trainer)

    # The engine is not at version 7, so that it is sent the whole model.
    believer = script.Sender(client, trainer.tensors, version=7)
    trainer.step()
    assert believer.sync(trainer.tensors) == 9
    assert engine.weight_version() == "9"
    assert holds(engine, trainer)
    trainer.step(only="norm")
    assert believer.sync(trainer.tensors) == 10
    assert holds(engine, trainer)

    history = engine.get("/delta_status", params={"history": "true"}).json()["history"]
    assert [sync["error"] for sync in history] == [None, None, "VersionConflict", None, None]
    assert [sync["full"] for sync in history] == [False, False, False, True, False]
    assert [history[0]["nnz"], history[1]["nnz"]] == changes
