"""What the tests of repacks share."""

from __future__ import annotations

import pytest

from engine_ext.placement import repacked
from engine_ext.startup.permuted import index_probe


@pytest.fixture(params=[1 << 20, 24], ids=["whole", "in small chunks"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything in one piece, and in pieces that end in the middle of rows and blocks."""
    for module in (index_probe, repacked):
        monkeypatch.setattr(module, "CHUNK", request.param)
