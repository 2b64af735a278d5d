"""What the tests of the wire format share."""

from __future__ import annotations

import pytest

from engine_ext.format import exponent_planes, gap_streams, part, ulp_differences


@pytest.fixture(params=["numba", "numpy", "threads"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the compiled loops and without, and by several threads, as large parts are packed and
    unpacked; the tests run with numba installed."""
    if request.param == "threads":
        monkeypatch.setattr(part, "_WORTH_THREADS", 0)
    if request.param == "numpy":
        monkeypatch.setattr(gap_streams, "_loops", lambda width: None)
        monkeypatch.setattr(gap_streams, "_match", lambda width: None)
        monkeypatch.setattr(gap_streams, "_read_many", lambda: None)
        monkeypatch.setattr(ulp_differences, "_loops", lambda width: None)
        monkeypatch.setattr(exponent_planes, "_loops", lambda: None)
