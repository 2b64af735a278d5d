"""SGLang with several HTTP processes: it restarts those that die, and continues."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.live_engine.process import EngineProcess
from tests.faults.observed import wait_until
from tests.faults.process_deaths import HTTP, RESPAWNS, Death
from tests.faults.restarts import RestartHarness
from tests.faults.test_process_deaths import check_version
from tests.patches.conftest import patched_copy

__all__ = ["patched_copy"]

pytestmark = pytest.mark.full

PROCESSES = 2


@pytest.fixture(scope="module")
def harness(
    patched_copy: Callable[[str], Path],
    checkpoint: Callable[[str], Path],
    start: Callable[..., EngineProcess],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[RestartHarness]:
    """Its hooks are in its source: it loads no plugins in these processes."""
    harness = RestartHarness(
        start,
        "sglang",
        checkpoint("qwen3"),
        tmp_path_factory.mktemp("processes"),
        arguments=["--tokenizer-worker-num", str(PROCESSES)],
        environment={"SGLANG_PLUGINS": "delta_faults"},
        python_path=[patched_copy("sglang")],
        encoding="deltas_zstd",
    )
    yield harness
    harness.close()


@pytest.mark.parametrize("death", RESPAWNS, ids=lambda death: death.name)
def test_respawn(harness: RestartHarness, death: Death) -> None:
    """The ranks live, keep staged parts, and know that generation must continue."""
    before, dead = harness.prints(), harness.titled(HTTP)
    harness.step()
    death.do(harness)
    assert harness.commits()
    assert harness.answers == {200}
    wait_until(lambda: len({*harness.titled(HTTP)} - {*dead}) == PROCESSES)
    assert check_version(harness, before)
    assert not harness.next_sync().full
    assert harness.spooled() == []
