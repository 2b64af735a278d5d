from __future__ import annotations

import pytest

from engine_ext.receiver.sync_state import SyncState
from tests.unit.receiver.sync_parts import TIMEOUT


@pytest.fixture
def state() -> SyncState:
    return SyncState(5, TIMEOUT)
