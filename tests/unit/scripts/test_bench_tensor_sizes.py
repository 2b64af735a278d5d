"""Syncs of the same weights as tensors of other sizes."""

from __future__ import annotations

import json

import pytest

from scripts.bench import tensor_sizes

pytestmark = pytest.mark.slow


def test_every_size_is_timed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_sizes, "SIZES", (1 << 12, 1 << 9, 1 << 20))
    arguments = ["--elements", "65536", "--most", "50", "--repeats", "1", "--json"]
    assert tensor_sizes.main(arguments) == 0
    *_, last = capsys.readouterr().out.splitlines()
    rows = json.loads(last)
    assert [(row["elements"], row["tensors"]) for row in rows] == [
        (4096, 16),
        (512, 50),
        (1 << 20, 1),
    ]
    assert all(row["sync_ms"] > 0 for row in rows)
