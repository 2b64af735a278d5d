"""What the tests of the wire format share."""

from __future__ import annotations

import pytest

from engine_ext.wire import differences, gaps, planes


@pytest.fixture(params=["numba", "numpy"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the compiled loops and without; the tests run with numba installed."""
    if request.param == "numpy":
        monkeypatch.setattr(gaps, "_loops", lambda width: None)
        monkeypatch.setattr(differences, "_loops", lambda width: None)
        monkeypatch.setattr(planes, "_loops", lambda: None)
