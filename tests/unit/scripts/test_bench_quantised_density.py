"""The benchmark of quantised changes on little data."""

from __future__ import annotations

import json

import pytest

from delta_sender.diff.quantize import FORMS
from scripts.bench import quantised_density


def test_fewer_elements_change_than_before_quantisation(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--rows", "256", "--columns", "1024", "--density", "0.02", "--json"]
    assert quantised_density.main(arguments) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["form"] for row in found] == list(FORMS)
    for row in found:
        assert 0 < row["weight"] < row["bf16"] < 0.03
        assert 0 <= row["scale"] < 0.15
        assert 0 < row["bytes"] < 1
