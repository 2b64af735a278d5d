"""After each fault that ends an engine: nothing is served, and the next life has a version."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.live_engine.process import EngineProcess
from tests.faults.process_deaths import DEATHS, Death
from tests.faults.restarts import Lives

pytestmark = pytest.mark.full


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def lives(
    request: pytest.FixtureRequest,
    checkpoint: Callable[[str], Path],
    start: Callable[..., EngineProcess],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Lives]:
    lives = Lives(start, request.param, checkpoint("qwen3"), tmp_path_factory.mktemp("deaths"))
    yield lives
    lives.close()


@pytest.mark.parametrize("death", DEATHS, ids=lambda death: death.name)
def test_death(lives: Lives, death: Death) -> None:
    before = lives.prints()
    lives.step(only=death.only)
    death.do(lives)
    lives.serves_nothing()
    assert lives.ends_by_itself() == (lives.engine.name not in death.lingers)
    assert not lives.commits()
    assert lives.answers <= ({200} if death.told == "nothing" else {200, 500})
    lives.restart()
    new = check_version(lives, before)
    assert death.ends in ("log", "new" if new else "old")
    assert not lives.next_sync().full
    # Nothing is left of the life before.
    assert (len(lives.spools()), lives.spooled()) == (1, [])


def check_version(lives: Lives, before: object) -> bool:
    """Every rank holds the newest version of the log, bit by bit, and the engine says so; returns
    whether that is the new one."""
    listing, status = lives.listing(), lives.engine.delta_status()
    versions = [lives.base_version, *(entry.version for entry in listing.entries)]
    assert listing.damaged == {}
    assert (status["version"], status["engine_state"]) == (max(versions), "certain")
    assert (status["staged"], status["delta_log"]["problem"]) == (None, None)
    assert lives.engine.weight_version() == str(status["version"])
    new = status["version"] != lives.base_version
    assert lives.holds(lives.trainer.tensors if new else lives.trainer.old)
    assert lives.generates() == 200
    found = lives.prints()
    assert (found == before) != new
    if new:
        assert lives.engine.post("/delta_rollback").json()["status"] == "rolled_back"
        assert lives.prints() == before
        assert lives.engine.post("/delta_catch_up").json()["applied"] == [status["version"]]
        assert lives.prints() == found
    return new
