"""What the tests of the scripts share."""

from __future__ import annotations

import pytest


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Tenacity's sleeps, in seconds, recorded and not slept."""
    slept: list[float] = []
    monkeypatch.setattr("tenacity.nap.time.sleep", slept.append)
    return slept
