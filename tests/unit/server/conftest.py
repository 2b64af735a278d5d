from __future__ import annotations

from collections.abc import Iterator

import pytest

from delta_server import commit as commits_module
from tests.support.endpoint_rig import Rig
from tests.unit.server.other_process import Process


@pytest.fixture
def other(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    """Another HTTP process of the engine of `rig`; both ask the ranks at every request."""
    monkeypatch.setattr(commits_module, "_STATE_MAX_AGE_S", 0.0)
    rig.engine.shared = True
    process = Process(rig)
    yield process
    process.service.intake.close()
