"""Engines that follow a delta log in a real store: one version at a time, and the newest after."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.live_engine.process import EngineProcess
from tests.faults.following import FollowHarness
from tests.faults.store import STORE
from tests.faults.store_fault import StoreFault
from tests.support.object_stores import BUCKET, StoreServer

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def harness(
    request: pytest.FixtureRequest,
    checkpoint: Callable[[str], Path],
    start: Callable[..., EngineProcess],
    store_server: StoreServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[FollowHarness]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in store_server.environment.items():
            patch.setenv(name, value)
        folder, url = tmp_path_factory.mktemp("followed"), f"s3://{BUCKET}/{uuid.uuid4().hex}"
        made = FollowHarness(start, request.param, checkpoint("qwen3"), folder, store_server, url)
        yield made
        made.close()


@pytest.mark.parametrize("fault", STORE, ids=lambda fault: fault.name)
def test_fault(harness: FollowHarness, fault: StoreFault) -> None:
    before = harness.newest
    with fault.lasts(harness):
        if fault.meanwhile == "old":
            harness.stays(before, fault.error, fault.about, heard=fault.heard)
        else:
            harness.reaches(harness.newest, heard=fault.heard)
    harness.reaches(harness.newest)
    assert harness.newest > before
    harness.publish()
    harness.reaches(harness.newest)
