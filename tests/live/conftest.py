"""Fixtures of the live tests: small checkpoints, and servers that run for a module's tests."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi import FastAPI

from delta_sender import DeltaSender, FullSyncRefused, SyncReport
from delta_server.generation_guard import READY_PATH
from delta_server.routes import attach
from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from scripts.live_engine.registry import ENGINES

PROMPTS = ["the quick brown fox", "a reward is a number", "def add(a, b):", "In 2024 there"]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that builds a small checkpoint of one architecture once."""
    built: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in built:
            built[kind] = tiny_models.build(kind, tmp_path_factory.mktemp(kind))
        return built[kind]

    return get


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., EngineProcess]]:
    """Return a function that starts servers, which stop after the module's tests."""
    running: list[EngineProcess] = []

    def launch(engine: str, model: Path, **options: Any) -> EngineProcess:
        log = tmp_path_factory.mktemp("log") / "engine.log"
        options = {"enable_delta": True, "log_path": log, **options}
        process = ENGINES[engine](model, **options)
        process.__enter__()
        running.append(process)
        return process

    yield launch
    for process in running:
        process.stop()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Handle SIGINT even in a shell's background job, which ignores it, as do its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def delta_routes() -> list[tuple[str, str]]:
    """Return method and path of every route that the package adds to an engine's server.

    Except that for probes, which answers everybody.
    """
    app = FastAPI(openapi_url=None)
    attach(app)
    added = sorted((m, r.path) for r in app.routes for m in r.methods)  # type: ignore[attr-defined]
    return [(method, path) for method, path in added if path != READY_PATH]


def fingerprint(engine: EngineProcess) -> dict[str, Any]:
    """Return everything that must be equal on two engines with the same weights."""
    generations = [
        engine.complete(prompt, max_tokens=12, temperature=0.0, logprobs=5)["choices"][0]
        for prompt in PROMPTS
    ]
    return {
        "parameters": engine.checksums(),
        "buffers": engine.buffer_checksums(),
        "texts": [choice["text"] for choice in generations],
        "logprobs": [choice["logprobs"] for choice in generations],
    }


def check_steps(
    engine: EngineProcess,
    steps: Sequence[Mapping[str, torch.Tensor]],
    observe: Callable[[EngineProcess], Any],
    adapter: str | None = None,
) -> tuple[Any, list[SyncReport]]:
    """Sync an engine to each step's weights, roll the last one back, and send it again in full.

    Args:
        steps: from what the engine holds.
        observe: returns what must differ between any two steps, and come back.
        adapter: the LoRA adapter whose own tensors the steps are; None: the model's weights.

    Returns:
        The observation at the last step, where the engine is now, and the reports of the deltas.
    """
    named = {} if adapter is None else {"adapter": adapter}
    seen, reports = [observe(engine)], []
    with DeltaSender(engine.url, base=steps[0].items(), adapter=adapter) as sender:
        for tensors in steps[1:]:
            reports.append(sender.sync(tensors.items()))
            assert (reports[-1].status, reports[-1].full) == ("committed", False)
            seen.append(observe(engine))
    for before, after in itertools.pairwise(seen):
        assert before != after
    assert engine.post("/delta_rollback", json={}, params=named).json()["status"] == "rolled_back"
    assert observe(engine) == seen[-2]
    # A sender that knows other weights sends all of them, if it is allowed to.
    with DeltaSender(engine.url, base=steps[0].items(), adapter=adapter) as sender:
        with pytest.raises(FullSyncRefused):
            sender.sync(steps[-1].items())
    assert observe(engine) == seen[-2]
    with DeltaSender(engine.url, base=steps[0].items(), adapter=adapter, full="allow") as sender:
        report = sender.sync(steps[-1].items())
    assert (report.status, report.full) == ("committed", True)
    assert observe(engine) == seen[-1]
    scan = engine.get("/delta_digest", params={"scan": "true", **named}).json()
    assert scan["corrupted"] == []
    return seen[-1], reports
