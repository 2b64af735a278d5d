"""After each fault that an engine survives: one of two versions on all ranks, and the next sync."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.live_engine.process import EngineProcess
from tests.faults.harness import Harness, launch, wait_until
from tests.faults.survivable import FAULTS, Fault

SETTLED_S = 3


@pytest.fixture(scope="module", params=["vllm", pytest.param("sglang", marks=pytest.mark.full)])
def harness(
    request: pytest.FixtureRequest,
    checkpoint: Callable[[str], Path],
    start: Callable[..., EngineProcess],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Harness]:
    harness = launch(start, request.param, checkpoint("qwen3"), tmp_path_factory.mktemp("faults"))
    yield harness
    harness.engine.stop()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault(harness: Harness, fault: Fault) -> None:
    before = harness.prints()
    harness.step()
    fault.do(harness)
    if fault.ends == "uncertain":
        assert harness.engine.delta_status()["engine_state"] == "uncertain"
        assert harness.generates() == 503
    else:
        check_one_of_two(harness, before, ends_new(harness, fault))
    harness.next_sync()
    assert harness.spooled() == []


def ends_new(harness: Harness, fault: Fault) -> bool:
    """Return whether the engine ends at the new version, where the fault allows it."""
    there = harness.base_version + 1
    if fault.ends == "new":
        wait_until(lambda: harness.version() == there)
    if fault.ends == "either":
        with contextlib.suppress(AssertionError):
            wait_until(lambda: harness.version() == there, SETTLED_S)
    return fault.ends != "old" and harness.version() == there


def check_one_of_two(harness: Harness, before: object, new: bool) -> None:
    """Check that all ranks hold the same version, bit by bit, and the engine reports it."""
    status = harness.engine.delta_status()
    assert (status["version"], status["engine_state"]) == (harness.base_version + new, "certain")
    found = harness.check_weights(before, new=new)
    if new:
        # The same sync without a fault, from the same weights, leads to the same bits.
        for body in harness.sent[:-1]:
            harness.is_told(body, "staged")
        harness.is_told(harness.sent[-1], "committed")
        assert harness.prints() == found
