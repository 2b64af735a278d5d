"""Two engines and their sender, in any order of syncs, faults and restarts.

An engine whose sync is reported as committed holds the trainer's weights, bit by bit.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from delta_sender import MultiSender, SyncError
from delta_sender.publish.http_client import EngineClient
from engine_ext.format import ENCODINGS
from tests.support.fake_engine import (
    A,
    B,
    Engine,
    Model,
    breaks,
    client_of,
    copied,
    error,
    loses,
    sends,
)

SIZES = {"norm": 60, "bias": 8, "w": 2000}
FAULTS = {
    "refuses": sends(error(507, "SpoolFull")),
    "has other values": sends(error(409, "BaseMismatch", actual="f" * 32)),
    "breaks": breaks,
    "loses the answer": loses,
}
LASTING = 20  # requests, more than a sync has tries


class Fleet(RuleBasedStateMachine):
    """Engines that start with one checkpoint, and a sender with a state file."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(EngineClient.retrying, "sleep", lambda seconds: None)
        self.folder = tempfile.TemporaryDirectory()

    @initialize(
        encoding=st.sampled_from([*ENCODINGS, "auto"]),
        digest=st.booleans(),
        undigested=st.sets(st.sampled_from([*SIZES])),
    )
    def start(self, encoding: str, digest: bool, undigested: set[str]) -> None:
        dtypes = {"norm": torch.bfloat16, "bias": torch.float32, "w": torch.bfloat16}
        self.base: Model = {n: torch.zeros(size, dtype=dtypes[n]) for n, size in SIZES.items()}
        self.model, self.before = copied(self.base), copied(self.base)
        self.engines = [Engine.of(self.base, undigested=undigested) for _ in range(2)]
        self.options: dict[str, Any] = {"encoding": encoding, "digest": digest, "full": "allow"}
        self.options["state"] = Path(self.folder.name) / "state.json"
        self.sender = self.sender_of(self.base)

    def sender_of(self, base: Model) -> MultiSender:
        client = client_of(*self.engines)
        return MultiSender([A, B], base.items(), client=client, **self.options)

    @rule(
        name=st.sampled_from([*SIZES]),
        start=st.sampled_from([0.0, 0.1, 0.5]),
        share=st.sampled_from([0.1, 0.5, 0.8, 1.0]),
        value=st.integers(0, 2),
    )
    def step(self, name: str, start: float, share: float, value: int) -> None:
        """Give a range of a tensor one of few values, so that elements come back."""
        size = SIZES[name]
        self.model[name][int(start * size) : int((start + share) * size) or 1] = value

    @rule(engine=st.integers(0, 1), fault=st.sampled_from([*FAULTS]), lasts=st.booleans())
    def fail(self, engine: int, fault: str, lasts: bool) -> None:
        """Let the next requests of an engine fail, until the sync has ended."""
        one = self.engines[engine]
        numbers = range(len(one.requests), len(one.requests) + (LASTING if lasts else 1))
        one.faults = dict.fromkeys(numbers, FAULTS[fault])

    @rule(engine=st.integers(0, 1))
    def restart_engine(self, engine: int) -> None:
        self.engines[engine].restart(self.base)

    @rule(older=st.booleans())
    def restart_trainer(self, older: bool) -> None:
        """Resume from the trainer's weights, or from those of the last sync."""
        if older:
            self.model = copied(self.before)
        self.sender.close()
        self.sender = self.sender_of(self.model)

    @rule()
    def sync(self) -> None:
        try:
            committed = {*self.sender.sync(self.model.items())}
        except SyncError as failed:
            committed = {*getattr(failed, "reports", ())}
        self.before = copied(self.model)
        for url, engine in zip((A, B), self.engines, strict=True):
            engine.faults = {}
            assert url not in committed or engine.holds(self.model)

    @rule()
    def heal(self) -> None:
        """Without a fault, two syncs reach both engines."""
        for engine in self.engines:
            engine.faults = {}
        for _ in range(2):
            try:
                self.sender.sync(self.model.items())
                break
            except SyncError:
                pass
        self.before = copied(self.model)
        assert all(engine.holds(self.model) for engine in self.engines)

    def teardown(self) -> None:
        if hasattr(self, "sender"):
            self.sender.close()
        self.folder.cleanup()
        self.patch.undo()


TestFleet = pytest.mark.slow(Fleet.TestCase)
TestFleet.settings = settings(max_examples=100, stateful_step_count=20, deadline=None)
