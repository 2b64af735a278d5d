"""After each fault that ends an engine: nothing is served, and a restart has one version."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.live_engine.process import EngineProcess
from tests.faults.process_deaths import DEATHS, Death
from tests.faults.rebuilding import REBUILD_DEATHS
from tests.faults.restarts import RestartHarness
from tests.support.present import present

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def launched(
    checkpoint: Callable[[str], Path],
    start: Callable[..., EngineProcess],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str], RestartHarness]]:
    """Return a function that starts an engine of a kind, and ends the one before it."""
    running: list[RestartHarness] = []

    def launch(kind: str) -> RestartHarness:
        for harness in running:
            harness.close()
        folder = tmp_path_factory.mktemp("deaths")
        running.append(RestartHarness(start, kind, checkpoint("qwen3"), folder))
        return running[-1]

    yield launch
    for harness in running:
        harness.close()


@pytest.fixture(
    scope="module",
    params=["vllm", "sglang", "vllm-stages", "sglang-stages", "vllm-replicas", "sglang-replicas"],
)
def harness(
    request: pytest.FixtureRequest, launched: Callable[[str], RestartHarness]
) -> RestartHarness:
    return launched(request.param)


@pytest.fixture(scope="module")
def rebuilt(launched: Callable[[str], RestartHarness]) -> RestartHarness:
    return launched("vllm-rebuilt")


@pytest.mark.parametrize("death", DEATHS, ids=lambda death: death.name)
def test_death(harness: RestartHarness, death: Death) -> None:
    check(harness, death)


@pytest.mark.parametrize("death", [*REBUILD_DEATHS, *DEATHS], ids=lambda death: death.name)
def test_death_with_rebuilt_modules(rebuilt: RestartHarness, death: Death) -> None:
    check(rebuilt, death)


def check(harness: RestartHarness, death: Death) -> None:
    before = harness.prints()
    harness.step(only=death.only)
    death.do(harness)
    harness.serves_nothing()
    assert harness.ends_by_itself() == (harness.engine.name not in death.lingers)
    assert not harness.commits()
    assert harness.answers <= ({200} if death.answer == "nothing" else {200, 500})
    harness.restart()
    new = check_version(harness, before)
    assert death.ends in ("log", "new" if new else "old")
    assert not harness.next_sync().full
    # Nothing is left of the dead engine.
    assert (len(harness.spools()), harness.spooled()) == (1, [])


def check_version(harness: RestartHarness, before: object) -> bool:
    """Check that every rank holds the log's newest version, bit by bit, and the engine reports it.

    Returns:
        Whether that is the new version.
    """
    listing, status = harness.listing(), harness.engine.delta_status()
    versions = [harness.base_version, *(entry.version for entry in listing.entries)]
    assert listing.damaged == {}
    assert (status.version.number, status.health.state) == (max(versions), "certain")
    assert (status.staged, present(status.log).problem) == (None, None)
    new = status.version.number != harness.base_version
    found = harness.check_weights(before, new=new)
    if new:
        assert harness.engine.post("/delta_catch_up").json()["applied"] == [status.version.number]
        assert harness.prints() == found
    return new
