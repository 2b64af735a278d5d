"""A rank's work for tensors of several sizes."""

from __future__ import annotations

import json

import pytest

from scripts.bench import rank_tensors

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("encoding", ["gap8_ulp", "gap8_exp", "deltas"])
def test_every_size_is_timed(
    encoding: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_tensors, "SIZES", (1 << 12, 1 << 9))
    arguments = ["--elements", "65536", "--most", "50", "--parts", "3", "--repeats", "1"]
    assert rank_tensors.main([*arguments, "--encoding", encoding, "--json"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    rows = json.loads(last)
    assert [(row["elements"], row["tensors"]) for row in rows] == [(4096, 16), (512, 50)]
    assert all(row[step] > 0 for row in rows for step in ("decode", "stage", "commit"))
