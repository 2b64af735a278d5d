"""What scrubbing finds, in the status and in the metrics."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from delta_server import metrics, scrubbing
from engine_ext.errors import DeltaError
from engine_ext.wire.operations import ScrubFindings, ScrubState
from tests.support.endpoint_rig import Rig


def state(**facts: Any) -> ScrubState:
    return ScrubState(**{"passes": 1, "passed_at": 5.0, "mismatched": [], "error": None, **facts})


def test_the_status_is_of_all_ranks(rig: Rig) -> None:
    assert rig.status()["scrub"] is None
    states = [state(passes=3, mismatched=["b"]), state(passed_at=4.0, mismatched=["a", "b"])]
    for receiver, one in zip(rig.engine.receivers, states, strict=True):
        receiver._scrubber = type("Scrubber", (), {"state": one})()
    found = {"passes": 1, "passed_at": 4.0, "mismatched": ["a", "b"], "error": None}
    assert rig.status()["scrub"] == found


def test_a_rank_that_has_not_passed_or_fails_shows(rig: Rig) -> None:
    states = [state(), state(passes=0, passed_at=None, error="OSError: no")]
    for receiver, one in zip(rig.engine.receivers, states, strict=True):
        receiver._scrubber = type("Scrubber", (), {"state": one})()
    found = {"passes": 0, "passed_at": None, "mismatched": [], "error": "OSError: no"}
    assert rig.status()["scrub"] == found


def test_findings_are_counted_and_a_failure_ends_nothing() -> None:
    answers: list[Any] = [
        [ScrubFindings(mismatched=["a"]), ScrubFindings(mismatched=["a", "b"])],
        RuntimeError("the engine is gone"),
        [DeltaError("one rank fails"), ScrubFindings(mismatched=[])],
        [ScrubFindings(mismatched=["c"]), ScrubFindings(mismatched=[])],
    ]

    class Engine:
        async def call(self, request: Any) -> Any:
            assert request.name == "take_scrub_findings"
            if not answers:
                raise asyncio.CancelledError
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    before = metrics.SCRUB_MISMATCHES._value.get()
    engine: Any = Engine()
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(scrubbing.count_findings(engine, 1e-4))
    assert metrics.SCRUB_MISMATCHES._value.get() - before == 4
