"""The benchmark of receiving with little data: what it prints, and that it stops its servers."""

from __future__ import annotations

import json

import psutil
import pytest

from scripts.bench import receive

pytestmark = pytest.mark.slow


def test_every_row_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    before = set(psutil.Process().children())
    arguments = ["--part-mb", "1", "--parts", "2", "--runs", "1", "--json"]
    assert receive.main(arguments) == 0
    *table, line = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert list(found) == ["discard", "this tree"]
    for way, figures in found.items():
        assert figures["rate"] > 0
        assert figures["cpu"] == pytest.approx(figures["user"] + figures["system"])
        assert figures["p50"] <= figures["p99"] <= figures["max"]
        assert any(way in row for row in table)
    assert set(psutil.Process().children()) <= before
