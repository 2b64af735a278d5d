"""The senders that users start from, on a live vLLM: the README's and the script for ports."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from tests.support.plain_trainer import Trainer, model_digest
from tests.unit.docs.test_pages import send_block

SCRIPT = Path(__file__).parents[2] / "scripts" / "reference_sender.py"

_spec = importlib.util.spec_from_file_location("reference_sender_of_ports", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
script = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(script)


@pytest.fixture(scope="module")
def base(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("qwen3")


@pytest.fixture(scope="module")
def engine(start: Callable[..., EngineProcess], base: Path) -> EngineProcess:
    return start("vllm", base)


@pytest.fixture(scope="module")
def trainer(base: Path) -> Trainer:
    """What the engine holds, and its version; each test moves both on."""
    return Trainer(tiny_models.load_tensors(base))


def holds(engine: EngineProcess, trainer: Trainer) -> bool:
    """Whether live memory has the trainer's bytes, and the engine the version of the sender."""
    found = engine.get("/delta_digest", params={"scan": "true"}).json()
    expected = model_digest(trainer.tensors).hex()
    return (found["digest"], found["corrupted"]) == (expected, [])


def test_the_send_block_of_the_readme(
    engine: EngineProcess,
    trainer: Trainer,
    base: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As pasted, but for the port, next to an engine that was started on the same folder."""
    monkeypatch.setenv("MODEL", str(base))
    block = send_block("README.md")
    assert block.count("http://localhost:8000") == 1
    pasted: dict[str, Any] = {}
    exec(compile(block.replace("http://localhost:8000", engine.url), "README.md", "exec"), pasted)
    printed = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert printed == [["1", "committed"], ["2", "committed"], ["3", "committed"]]
    assert pasted["weights"].keys() == trainer.tensors.keys()
    assert model_digest(pasted["weights"]) != model_digest(trainer.tensors)
    trainer.tensors, trainer.version = pasted["weights"], 3
    assert engine.weight_version() == "3"
    assert holds(engine, trainer)
    history = engine.get("/delta_status", params={"history": "true"}).json()["history"]
    assert [(sync["error"], sync["full"]) for sync in history] == [(None, False)] * 3


def test_reference_sender(engine: EngineProcess, trainer: Trainer) -> None:
    """Sparse syncs, a refused base, a full sync."""
    client = httpx.Client(base_url=engine.url, timeout=300)
    first = trainer.version
    sender = script.Sender(client, trainer.tensors, version=first)
    changes = []
    for version in (first + 1, first + 2):
        changes.append(sum(len(where) for where in trainer.step().values()))
        assert sender.sync(trainer.tensors) == version
        assert engine.weight_version() == str(version)
        assert holds(engine, trainer)

    # The engine is not at this version, so that it is sent the whole model.
    believer = script.Sender(client, trainer.tensors, version=first + 7)
    trainer.step()
    assert believer.sync(trainer.tensors) == first + 9
    assert engine.weight_version() == str(first + 9)
    assert holds(engine, trainer)
    trainer.step(only="norm")
    assert believer.sync(trainer.tensors) == first + 10
    assert holds(engine, trainer)

    history = engine.get("/delta_status", params={"history": "true"}).json()["history"][-5:]
    assert [sync["error"] for sync in history] == [None, None, "VersionConflict", None, None]
    assert [sync["full"] for sync in history] == [False, False, False, True, False]
    assert [history[0]["nnz"], history[1]["nnz"]] == changes
