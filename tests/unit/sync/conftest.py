from __future__ import annotations

from pathlib import Path

import pytest

from engine_ext.sync.sync_state import SyncState
from tests.unit.sync.recorded_ranks import Ranks
from tests.unit.sync.sync_parts import TIMEOUT


@pytest.fixture
def state() -> SyncState:
    return SyncState(5, TIMEOUT)


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return Ranks(tmp_path)
