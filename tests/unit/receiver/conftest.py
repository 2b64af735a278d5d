from __future__ import annotations

from pathlib import Path

import pytest

from engine_ext.receiver.sync_state import SyncState
from tests.unit.receiver.recorded_ranks import Ranks
from tests.unit.receiver.sync_parts import TIMEOUT


@pytest.fixture
def state() -> SyncState:
    return SyncState(5, TIMEOUT)


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return Ranks(tmp_path)
