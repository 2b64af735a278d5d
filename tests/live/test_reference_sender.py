"""The senders that users start from, on a live vLLM: the README's and the script for ports."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from tests.support.plain_trainer import Trainer, model_digest
from tests.support.shown_examples import examples

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
    """The engine's tensors and version; each test moves both on."""
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
    block = examples("README.md")["send"]
    assert block.count("http://localhost:8000") == 1
    for _ in range(2):
        exec(compile(block.replace("http://localhost:8000", engine.url), "README.md", "exec"), {})
    printed = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert printed == [[str(version), "committed"] for version in range(1, 7)]
    trainer.version = 6
    assert engine.weight_version() == "6"
    assert holds(engine, trainer)
    history = engine.get("/delta_status", params={"history": "true"}).json()["history"]
    assert [(sync["error"], sync["full"]) for sync in history] == [(None, False)] * 6
    assert all(sync["nnz"] for sync in history)
    assert len({sync["run"] for sync in history}) == 2


def test_reference_sender(engine: EngineProcess, trainer: Trainer) -> None:
    """Sparse syncs; a base of another version, and another run; a full sync over its own."""
    client = httpx.Client(base_url=engine.url, timeout=300)
    first = trainer.version
    sender = script.Sender(client, trainer.tensors, version=first)
    changes = []
    for version in (first + 1, first + 2):
        changes.append(sum(len(where) for where in trainer.step().values()))
        assert sender.sync(trainer.tensors) == version
        assert engine.weight_version() == str(version)
        assert holds(engine, trainer)

    with pytest.raises(script.SyncError, match="RunConflict"):
        script.Sender(client, trainer.tensors, version=first + 2).sync(trainer.tensors)
    sender.close()
    with pytest.raises(script.BaseError, match=f"the engine is at {first + 2}, the base at 0"):
        script.Sender(client, trainer.tensors).sync(trainer.tensors)
    assert holds(engine, trainer)

    # A sender of the next process. The engine goes back by a version, so that it is sent all.
    sender = script.Sender(client, trainer.tensors, version=first + 2)
    for version in (first + 3, first + 4):
        trainer.step()
        assert sender.sync(trainer.tensors) == version
    assert engine.post("/delta_rollback").json()["version"] == first + 3
    trainer.step(only="norm")
    assert sender.sync(trainer.tensors) == first + 6
    assert engine.weight_version() == str(first + 6)
    assert holds(engine, trainer)
    sender.close()

    history = engine.get("/delta_status", params={"history": "true"}).json()["history"]
    assert [sync["error"] for sync in history[-2:]] == ["VersionConflict", None]
    assert [sync["full"] for sync in history[-2:]] == [False, True]
    sent = {sync["version"]: sync["nnz"] for sync in history if sync["error"] is None}
    assert [sent[first + 1], sent[first + 2]] == changes
