"""After each fault that an engine survives: one of two versions on all ranks, and the next sync."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.live_engine.process import EngineProcess
from tests.faults.hanging import HANGING
from tests.faults.harness import Harness, launch
from tests.faults.in_flight import IN_FLIGHT
from tests.faults.observed import wait_until
from tests.faults.rebuilding import REBUILD_FAULTS
from tests.faults.survivable import FAULTS, Fault
from tests.support.plain_trainer import edited

SETTLED_S = 3


FULL = ("sglang", "vllm-stages", "sglang-stages", "vllm-replicas", "sglang-replicas")
# Those that the quick tests also run on an engine with rebuilt modules.
IN_THE_WRITE = ("rank 1 cannot write", "rank 1 cannot undo")


@pytest.fixture(scope="module")
def launched(
    checkpoint: Callable[[str], Path],
    start: Callable[..., EngineProcess],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str], Harness]]:
    """Return a function that starts an engine of a kind, and ends the one before it."""
    running: list[Harness] = []

    def launch_one(kind: str) -> Harness:
        for harness in running:
            harness.engine.stop()
        running.append(launch(start, kind, checkpoint("qwen3"), tmp_path_factory.mktemp("faults")))
        return running[-1]

    yield launch_one
    for harness in running:
        harness.engine.stop()


@pytest.fixture(
    scope="module",
    params=["vllm", *(pytest.param(kind, marks=pytest.mark.full) for kind in FULL)],
)
def harness(request: pytest.FixtureRequest, launched: Callable[[str], Harness]) -> Harness:
    return launched(request.param)


@pytest.fixture(
    scope="module",
    params=[pytest.param(k, marks=pytest.mark.full) for k in ("vllm-replicas", "sglang-replicas")],
)
def replicas(request: pytest.FixtureRequest, launched: Callable[[str], Harness]) -> Harness:
    harness = launched(request.param)
    harness.next_sync()  # the sender owns the engine from here on
    return harness


@pytest.fixture(scope="module")
def rebuilt(launched: Callable[[str], Harness]) -> Harness:
    return launched("vllm-rebuilt")


@pytest.mark.parametrize("fault", [*FAULTS, *IN_FLIGHT], ids=lambda fault: fault.name)
def test_fault(harness: Harness, fault: Fault) -> None:
    check(harness, fault)


@pytest.mark.parametrize("fault", HANGING, ids=lambda fault: fault.name)
def test_a_replica_hangs(replicas: Harness, fault: Fault) -> None:
    check(replicas, fault)


@pytest.mark.parametrize(
    "fault",
    [
        *REBUILD_FAULTS,
        *(
            fault if fault.name in IN_THE_WRITE else pytest.param(fault, marks=pytest.mark.full)
            for fault in FAULTS
        ),
    ],
    ids=lambda fault: fault.name,
)
def test_fault_with_rebuilt_modules(rebuilt: Harness, fault: Fault) -> None:
    check(rebuilt, fault)


def check(harness: Harness, fault: Fault) -> None:
    before = harness.prints()
    harness.step()
    fault.do(harness)
    if fault.ends == "uncertain":
        assert harness.engine.delta_status().health.state == "uncertain"
        assert harness.generates() == 503
    else:
        check_one_of_two(harness, before, ends_new(harness, fault))
    harness.next_sync()
    assert harness.spooled() == []


def ends_new(harness: Harness, fault: Fault) -> bool:
    """Return whether the engine ends at the new version, where the fault allows it."""
    there = harness.trainer.version
    if fault.ends == "new":
        wait_until(lambda: harness.version() == there)
    if fault.ends == "either":
        with contextlib.suppress(AssertionError):
            wait_until(lambda: harness.version() == there, SETTLED_S)
    return fault.ends != "old" and harness.version() == there


def check_one_of_two(harness: Harness, before: object, new: bool) -> None:
    """Check that all ranks hold the same version, bit by bit, and the engine reports it."""
    status = harness.engine.delta_status()
    version = harness.trainer.version if new else harness.base_version
    assert (status.version.number, status.health.state) == (version, "certain")
    found = harness.check_weights(before, new=new)
    if new:
        # The same sync without a fault, from the same weights, leads to the same bits. Its number
        # was used, and a run does not use one twice.
        again = {"current_version": str(version + 1), "manifest_checksum": None}
        *others, last = [edited(body, **again) for body in harness.sent]
        for body in others:
            harness.expect(body, "staged")
        harness.expect(last, "committed")
        assert harness.prints() == found
