"""Parts of syncs, and what a sync state makes of them."""

from __future__ import annotations

from typing import Any

import pytest

from engine_ext.errors import DeltaError
from engine_ext.format.identity import PartId
from engine_ext.sync.sync_state import SyncState

TIMEOUT = 60.0


def part(version: int = 6, base: int | None = 5, **changes: Any) -> PartId:
    values = {"identity": f"v{version}", "num_parts": 1, "base_version": base, **changes}
    return PartId(version=version, **values)


def full(version: int, **changes: Any) -> PartId:
    return part(version, None, full=True, **changes)


def commit(state: SyncState, *parts: PartId, uncertain: bool = False, now: float = 0.0) -> None:
    """Bring a whole sync in, and write it."""
    for one in parts:
        assert state.admit(one, now) == "new"
        state.settle(one.part, staged=True)
    assert state.sync is not None
    assert state.sync.complete
    state.fail() if uncertain else state.commit()


def refused(state: SyncState, one: PartId, error: type[DeltaError], now: float = 0.0) -> DeltaError:
    """The error that a part is answered with; it must not change what is staged."""
    before = state.describe()
    with pytest.raises(error) as caught:
        state.admit(one, now)
    assert type(caught.value) is error
    assert state.describe() == before
    return caught.value
