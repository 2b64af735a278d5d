"""What the tests of the wire format share."""

from __future__ import annotations

import pytest

from engine_ext.wire import differences, gaps, part, planes


@pytest.fixture(params=["numba", "numpy", "threads"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the compiled loops and without, and by several threads, as large parts are packed and
    unpacked; the tests run with numba installed."""
    if request.param == "threads":
        monkeypatch.setattr(part, "_WORTH_THREADS", 0)
    if request.param == "numpy":
        monkeypatch.setattr(gaps, "_loops", lambda width: None)
        monkeypatch.setattr(gaps, "_match", lambda width: None)
        monkeypatch.setattr(differences, "_loops", lambda width: None)
        monkeypatch.setattr(planes, "_loops", lambda: None)
