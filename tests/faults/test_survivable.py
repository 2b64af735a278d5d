"""After each fault that an engine outlives: one of two versions on all ranks, and the next sync."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.live_engine.process import EngineProcess
from tests.faults.harness import Scene, launch, wait_until
from tests.faults.survivable import FAULTS, Fault

SETTLED_S = 3


@pytest.fixture(scope="module", params=["vllm", pytest.param("sglang", marks=pytest.mark.full)])
def scene(
    request: pytest.FixtureRequest,
    checkpoint: Callable[[str], Path],
    start: Callable[..., EngineProcess],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Scene]:
    scene = launch(start, request.param, checkpoint("qwen3"), tmp_path_factory.mktemp("faults"))
    yield scene
    scene.engine.stop()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault(scene: Scene, fault: Fault) -> None:
    before = scene.prints()
    scene.step()
    fault.do(scene)
    if fault.ends == "uncertain":
        assert scene.engine.delta_status()["engine_state"] == "uncertain"
        assert scene.generates() == 503
    else:
        check_one_of_two(scene, before, ends_new(scene, fault))
    scene.next_sync()
    assert scene.spooled() == []


def ends_new(scene: Scene, fault: Fault) -> bool:
    """Whether the fault has ended, as it may, with the new version."""
    there = scene.base_version + 1
    if fault.ends == "new":
        wait_until(lambda: scene.version() == there)
    if fault.ends == "either":
        with contextlib.suppress(AssertionError):
            wait_until(lambda: scene.version() == there, SETTLED_S)
    return fault.ends != "old" and scene.version() == there


def check_one_of_two(scene: Scene, before: object, new: bool) -> None:
    """Every rank holds the old or the new version, bit by bit, and the engine says which."""
    status = scene.engine.delta_status()
    assert (status["version"], status["engine_state"]) == (scene.base_version + new, "certain")
    assert scene.engine.weight_version() == str(status["version"])
    assert scene.holds(scene.trainer.tensors if new else scene.trainer.old)
    assert scene.generates() == 200
    found = scene.prints()
    assert (found == before) != new
    if new:
        # The same sync without a fault, from the same weights, leads to the same bits.
        assert scene.engine.post("/delta_rollback").json()["status"] == "rolled_back"
        assert scene.prints() == before
        for body in scene.sent[:-1]:
            scene.is_told(body, "staged")
        scene.is_told(scene.sent[-1], "committed")
        assert scene.prints() == found
